"""As `update`, with sums over the whole array in the work, such as the norms of LAMB (CoCoNet, sections 3.4 and 5.3).

LAMB scales a step by the norm of the parameters over that of the step, so what a device works on its shard needs a sum
over all shards first. Each block adds up the terms of its tiles, stores their sums to every device, and waits until all
blocks of all devices have: then it goes through its tiles once more, of which only the results still travel. So all
blocks must run at once. What the second turn needs of the first lies in this device's part of the result until then.
Terms are added in another order than XLA's: results are equal up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from disco_hlo.kernels.peers import Ref, launch, load, meet, peers_of
from disco_hlo.kernels.refusals import require
from disco_hlo.kernels.tiles import LANES, NORMED_RANGE, VECTOR, UpdateTiles
from disco_hlo.kernels.update import by_recipe, check_arrays, scatter_update, value_of
from disco_hlo.kernels.update_pattern import Recipe, halves

NAME = "reduce-scatter + update with sums + all-gather"
_SLOTS = VECTOR * LANES
"""Places for the sums of a device's blocks: a row that its threads load at once."""

Values = Sequence[jax.Array]
Measure = Callable[[jax.Array, Values, Values], tuple[jax.Array, Values, Values]]
"""The sum, tiles of arrays and scalars -> what `Step` needs, what this device keeps, and terms to add up."""
Step = Callable[[jax.Array, Values, Values, Values], jax.Array]
"""What `Measure` gave, tiles of arrays and of what was kept, scalars and sums of all terms -> what all devices get."""


def by_halves(recipe: Recipe) -> tuple[Measure, Step, int, tuple[int, ...]]:
    """What a recipe with sums says: both turns, how many sums, and what the second reads of arrays and kept results."""
    two = halves(recipe)
    numbers = 1 + len(recipe.whole)
    places = (*range(1, numbers), *recipe.kept)

    def measure(total: jax.Array, arrays: Values, scalars: Values) -> tuple[jax.Array, Values, Values]:
        known = dict(enumerate((total, *arrays, *scalars)))
        give = functools.partial(value_of, recipe, known)
        return give(two.carried), [give(one) for one in recipe.kept], [give(one) for one in two.terms]

    def step(carried: jax.Array, again: Values, scalars: Values, sums: Values) -> jax.Array:
        known = dict(enumerate(scalars, numbers)) | {two.carried: carried}
        known |= dict(zip(two.sums, sums, strict=True)) | dict(zip(two.again, again, strict=True))
        new: jax.Array = value_of(recipe, known, recipe.gathered)
        return new

    return measure, step, len(two.sums), tuple(places.index(one) for one in two.again)


def recipe_update(
    summands: jax.Array, *others: jax.Array, axis_name: str, tiles: UpdateTiles, recipe: Recipe
) -> tuple[jax.Array, ...]:
    """As `scatter_update`, the arrays before the scalars; as :func:`normed_update` where the recipe has sums."""
    arrays, scalars = others[: len(recipe.whole)], others[len(recipe.whole) :]
    kept = len(recipe.kept)
    if recipe.sums:
        return normed_update(summands, arrays, scalars, axis_name, by_halves(recipe), kept, tiles)
    return scatter_update(summands, arrays, scalars, axis_name, by_recipe(recipe), kept, tiles)


def normed_update(
    summands: jax.Array,
    arrays: Values,
    scalars: Values,
    axis_name: str,
    work: tuple[Measure, Step, int, tuple[int, ...]],
    kept: int,
    tiles: UpdateTiles = NORMED_RANGE[0],
) -> tuple[jax.Array, ...]:
    """Sum over the devices, work on this device's shard twice, give one result to all.

    Args:
        summands, arrays, scalars, axis_name, kept, tiles: as for `scatter_update`.
        work: both turns, the number of terms, and which of arrays and kept results the second turn reads.

    Returns:
        As `scatter_update`.

    Raises:
        KernelRefusedError: as `scatter_update`; more blocks than run at once.
    """
    devices = check_arrays(NAME, summands, arrays, scalars, axis_name, tiles)
    shard = summands.size // devices
    there = int(getattr(jax.devices()[0], "core_count", None) or _SLOTS)
    blocks = tiles.blocks or tiles.blocks_each * there
    require(
        1 <= blocks <= min(there, _SLOTS), NAME, f"runs in 1 to {min(there, _SLOTS)} blocks, got {blocks}"
    )
    counts = len(arrays), len(scalars)
    sizes = [(work[2] * devices, _SLOTS), summands.shape, *kept * [(shard,)]]
    kernel = functools.partial(_kernel, axis_name, devices, tiles.size, blocks, work, counts)
    outputs = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    return tuple(launch(kernel, blocks, outputs, summands, *arrays, *scalars)[1:])


def _kernel(
    axis: str,
    devices: int,
    size: int,
    blocks: int,
    work: tuple[Measure, Step, int, tuple[int, ...]],
    counts: tuple[int, int],
    *refs: Ref,
) -> None:
    """One block's tiles of this device's shard, twice."""
    measure, step, terms, again = work
    summands, arrays, rest = refs[0], refs[1 : 1 + counts[0]], refs[1 + counts[0] :]
    scalars, (sums, gathered, *kept) = rest[: counts[1]], rest[counts[1] :]
    here, block = lax.axis_index(axis), lax.axis_index("block")
    peers = peers_of(axis, devices)
    shard = summands.shape[0] // devices
    factors = [ref[at] for ref in scalars for at in range(ref.shape[0])]
    flags = pl.get_global(plgpu.SemaphoreType.REGULAR((blocks + 1,)))
    own_tiles = lax.div(jnp.int32(shard // size) - block + blocks - 1, jnp.int32(blocks))

    def places(turn: jax.Array) -> tuple[Any, Any]:
        """Where a tile is in the shard and in the whole."""
        start = (block + blocks * turn) * size
        return pl.ds(start, size), pl.ds(here * shard + start, size)

    def own(ref: Ref, turn: jax.Array) -> jax.Array:
        """This device's tile of an array."""
        of_shard, of_all = places(turn)
        return load(ref, of_shard if ref.shape[0] == shard else of_all, size)

    def first(turn: jax.Array, before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        of_shard, of_all = places(turn)
        there = [load(plgpu.remote_ref(summands, {axis: peer}), of_all, size) for peer in peers]
        total = functools.reduce(jnp.add, there, load(summands, of_all, size))
        gathered[of_all], new, added = measure(total, [own(ref, turn) for ref in arrays], factors)
        for ref, value in zip(kept, new, strict=True):
            ref[of_shard] = value
        return tuple(one + jnp.sum(term) for one, term in zip(before, added, strict=True))

    of_block = lax.fori_loop(0, own_tiles, first, terms * (jnp.float32(0),))
    of_all_blocks = _added(axis, here, peers, (block, blocks), of_block, sums, flags.at[blocks])

    def second(turn: jax.Array, _: None) -> None:
        of_all = places(turn)[1]
        known = [own((*arrays, *kept)[one], turn) for one in again]
        new = step(load(gathered, of_all, size), known, factors, of_all_blocks)
        for ref in (gathered, *(plgpu.remote_ref(gathered, {axis: peer}) for peer in peers)):
            ref[of_all] = new

    lax.fori_loop(0, own_tiles, second, None)
    # The others have read this device's summands, and written its results, when all have come here.
    meet(flags.at[block], axis, peers, devices - 1)


def _added(
    axis: str,
    here: jax.Array,
    peers: Sequence[jax.Array],
    block_of: tuple[jax.Array, int],
    of_block: Values,
    sums: Ref,
    flag: Ref,
) -> list[jax.Array]:
    """The sums of all blocks on all devices, added up in one order everywhere, when all have told theirs.

    Args:
        axis, here, peers: the devices.
        block_of: which block of how many this is.
        of_block: its sums.
        sums: (len(of_block) * devices, _SLOTS) on each device, where they are told.
        flag: signalled by every block of every device.
    """
    (block, blocks), terms, devices = block_of, len(of_block), 1 + len(peers)
    everywhere = [sums, *(plgpu.remote_ref(sums, {axis: peer}) for peer in peers)]

    def tell(turn: jax.Array, _: None) -> None:
        """The block's sums in its own place; zeros in those that no block has."""
        place = block + blocks * turn
        for ref in everywhere:
            for which, value in enumerate(of_block):
                ref[terms * here + which, place] = jnp.where(turn == 0, value, 0.0)

    lax.fori_loop(0, lax.div(jnp.int32(_SLOTS) - block + blocks - 1, jnp.int32(blocks)), tell, None)
    pl.semaphore_signal(flag)
    meet(flag, axis, peers, devices * blocks)
    rows = [range(which, terms * devices, terms) for which in range(terms)]
    return [
        functools.reduce(jnp.add, [jnp.sum(load(sums, row, _SLOTS, _SLOTS // LANES)) for row in of_term])
        for of_term in rows
    ]
