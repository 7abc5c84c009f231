"""Reduce-scatter + LAMB + all-gather as one kernel (CoCoNet, sections 4.3 and 5.2; LAMB: You et al., algorithm 2).

LAMB scales a step by the norm of the parameters over that of the step, so what a device works on its shard needs a sum
over all shards first. Each block keeps the squares of its tiles, stores their sums to every device, and waits until all
blocks of all devices have: then it goes through its tiles once more, of which only the parameters still travel. So all
blocks must run at once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from disco_hlo.kernels.adam import Adam, check_step
from disco_hlo.kernels.peers import Ref, meet, peers_of
from disco_hlo.kernels.refusals import require
from disco_hlo.kernels.tiles import LANES, UpdateTiles
from disco_hlo.kernels.update import VECTOR, update_shard

NAME = "reduce-scatter + LAMB + all-gather"
RANGE: tuple[UpdateTiles, ...] = tuple(UpdateTiles(size=size, blocks_each=1) for size in (2048, 4096, 1024))
"""What it is tuned over, the likeliest first."""

_SLOTS = VECTOR * LANES
"""Places for the sums of a device's blocks: a row that its threads load at once."""


@dataclasses.dataclass(frozen=True)
class Lamb:
    """The numbers of LAMB that do not change from step to step."""

    adam: Adam = dataclasses.field(default_factory=lambda: Adam(rate=1.0, epsilon=1e-6))
    rate: float = 1e-3
    decay: float = 0.01

    def direction(
        self,
        gradient: jax.Array,
        parameters: jax.Array,
        moments: tuple[jax.Array, jax.Array],
        corrections: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Where the parameters go, before it is scaled, and the new moments."""
        step, mean, square = self.adam.update(gradient, moments, corrections)
        return step + self.decay * parameters, mean, square

    def scale(self, of_parameters: jax.Array, of_direction: jax.Array) -> jax.Array:
        """By which the direction is multiplied, from the sums of both squares."""
        known = jnp.logical_and(of_parameters > 0, of_direction > 0)
        ratio = jnp.sqrt(of_parameters / jnp.where(known, of_direction, 1.0))
        return self.rate * jnp.where(known, ratio, 1.0)


def lamb_update(
    gradients: jax.Array,
    parameters: jax.Array,
    moments: tuple[jax.Array, jax.Array],
    corrections: jax.Array,
    axis_name: str,
    tiles: UpdateTiles = RANGE[0],
    lamb: Lamb = Lamb(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum the gradients over the devices and step all parameters, which are one layer's, with LAMB.

    Args and results are those of `adam_update`.

    Raises:
        KernelRefusedError: see `check_step`; more blocks than run at once.
    """
    devices = check_step(NAME, gradients, parameters, moments, corrections, axis_name, tiles)
    mean, square = moments
    there = int(getattr(jax.devices()[0], "core_count", None) or _SLOTS)
    blocks = tiles.blocks or tiles.blocks_each * there
    require(
        1 <= blocks <= min(there, _SLOTS), NAME, f"runs in 1 to {min(there, _SLOTS)} blocks, got {blocks}"
    )
    results: list[jax.Array] = plgpu.kernel(
        functools.partial(_kernel, axis_name, devices, tiles.size, blocks, lamb),
        out_type=[
            jax.ShapeDtypeStruct((2 * devices, _SLOTS), jnp.float32),
            *(jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (parameters, mean, square)),
        ],
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(gradients, parameters, mean, square, corrections)
    return results[1], results[2], results[3]


def reference(
    gradients: jax.Array,
    parameters: jax.Array,
    moments: tuple[jax.Array, jax.Array],
    corrections: jax.Array,
    axis_name: str,
    lamb: Lamb = Lamb(),
) -> tuple[jax.Array, ...]:
    """The same by XLA's separate operations."""

    def work(total: jax.Array, own: jax.Array) -> tuple[jax.Array, ...]:
        direction, mean, square = lamb.direction(total, own, moments, (corrections[0], corrections[1]))
        sums = lax.psum(jnp.stack([jnp.sum(own * own), jnp.sum(direction * direction)]), axis_name)
        return own - lamb.scale(sums[0], sums[1]) * direction, mean, square

    return update_shard(gradients, parameters, axis_name, work)


def _kernel(axis: str, devices: int, size: int, blocks: int, lamb: Lamb, *refs: Ref) -> None:
    """One block's tiles of this device's shard, twice."""
    gradients, parameters, mean, square, corrections, sums, new_parameters, new_mean, new_square = refs
    here, block = lax.axis_index(axis), lax.axis_index("block")
    peers = peers_of(axis, devices)
    shard, factors = mean.shape[0], (corrections[0], corrections[1])
    flags = pl.get_global(plgpu.SemaphoreType.REGULAR((blocks + 1,)))
    own_tiles = lax.div(jnp.int32(shard // size) - block + blocks - 1, jnp.int32(blocks))

    def load(ref: Ref, part: Any, count: int = size) -> jax.Array:
        loaded: jax.Array = plgpu.layout_cast(ref[part], plgpu.Layout.WG_STRIDED((count,), vec_size=VECTOR))
        return loaded

    def places(turn: jax.Array) -> tuple[Any, Any]:
        """Where a tile is in the shard and in the whole."""
        start = (block + blocks * turn) * size
        return pl.ds(start, size), pl.ds(here * shard + start, size)

    def measure(turn: jax.Array, squares: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_shard, of_all = places(turn)
        there = [load(plgpu.remote_ref(gradients, {axis: peer}), of_all) for peer in peers]
        total = functools.reduce(jnp.add, there, load(gradients, of_all))
        own = load(parameters, of_all)
        moments = load(mean, of_shard), load(square, of_shard)
        direction, new_mean[of_shard], new_square[of_shard] = lamb.direction(total, own, moments, factors)
        return squares[0] + jnp.sum(own * own), squares[1] + jnp.sum(direction * direction)

    squares = lax.fori_loop(0, own_tiles, measure, (jnp.float32(0), jnp.float32(0)))
    everywhere = [sums, *(plgpu.remote_ref(sums, {axis: peer}) for peer in peers)]

    def tell(turn: jax.Array, _: None) -> None:
        """The block's sums in its own place; zeros in those that no block has."""
        place = block + blocks * turn
        for ref in everywhere:
            for which, value in enumerate(squares):
                ref[2 * here + which, place] = jnp.where(turn == 0, value, 0.0)

    lax.fori_loop(0, lax.div(jnp.int32(_SLOTS) - block + blocks - 1, jnp.int32(blocks)), tell, None)
    pl.semaphore_signal(flags.at[blocks])
    meet(flags.at[blocks], axis, peers, devices * blocks)
    of_parameters, of_direction = (
        functools.reduce(
            jnp.add, [jnp.sum(load(sums, 2 * device + which, _SLOTS)) for device in range(devices)]
        )
        for which in range(2)
    )
    scale = lamb.scale(of_parameters, of_direction)

    def step(turn: jax.Array, _: None) -> None:
        of_shard, of_all = places(turn)
        own = load(parameters, of_all)
        moments = load(new_mean, of_shard), load(new_square, of_shard)
        new = own - scale * (lamb.adam.step(moments, factors) + lamb.decay * own)
        for ref in (new_parameters, *(plgpu.remote_ref(new_parameters, {axis: peer}) for peer in peers)):
            ref[of_all] = new

    lax.fori_loop(0, own_tiles, step, None)
    # The others have read this device's gradients, and written its parameters, when all have come here.
    meet(flags.at[block], axis, peers, devices - 1)
