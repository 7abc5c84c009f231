"""Reduce-scatter + pointwise work + all-gather as one kernel: each device updates its shard while the rest travels.

CoCoNet's fused collective (section 3.4; measured in 6.1): what stands between the two halves of an all-reduce is
computed on the shard, in registers, so that the sum is never written to memory and read again. A device reads its
shard of the summands from every device's memory, adds, works, and stores one result to every device and the others,
such as moments, to its own. The work is a function: Adam's (`adam`), or what a step has there, as a recipe.
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

from disco_hlo.kernels.peers import Ref, launch, load, meet_at_the_end, peers_of
from disco_hlo.kernels.refusals import devices_along, multiple, one_dtype, require
from disco_hlo.kernels.tiles import LANES, UPDATE_RANGE, VECTOR, UpdateTiles
from disco_hlo.kernels.update_pattern import Recipe

NAME = "reduce-scatter + update + all-gather"

Work = Callable[[jax.Array, Sequence[jax.Array], Sequence[jax.Array]], tuple[jax.Array, Sequence[jax.Array]]]
"""The sum, tiles of arrays and scalars -> what all devices get, and what this one keeps."""

_OPS: dict[str, Callable[..., jax.Array]] = {
    "add": jnp.add,
    "and": jnp.logical_and,
    "compare.EQ": jnp.equal,
    "compare.GE": jnp.greater_equal,
    "compare.GT": jnp.greater,
    "compare.LE": jnp.less_equal,
    "compare.LT": jnp.less,
    "compare.NE": jnp.not_equal,
    "divide": jnp.divide,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "multiply": jnp.multiply,
    "negate": jnp.negative,
    "not": jnp.logical_not,
    "or": jnp.logical_or,
    "rsqrt": lax.rsqrt,
    "select": jnp.where,
    "sqrt": jnp.sqrt,
    "subtract": jnp.subtract,
}


def value_of(recipe: Recipe, known: dict[int, Any], number: int) -> Any:
    """A value of a recipe by its number; what had to be worked out for it becomes known."""
    if number not in known:
        opcode, operands = recipe.steps[number - 1 - len(recipe.whole) - recipe.scalars]
        read = [
            value_of(recipe, known, one) if isinstance(one, int) else jnp.float32(float.fromhex(one))
            for one in operands
        ]
        known[number] = _OPS[opcode](*read)
    return known[number]


def by_recipe(recipe: Recipe) -> Work:
    """What a recipe without sums says."""

    def work(
        total: jax.Array, arrays: Sequence[jax.Array], scalars: Sequence[jax.Array]
    ) -> tuple[jax.Array, Sequence[jax.Array]]:
        known = dict(enumerate((total, *arrays, *scalars)))
        gathered, *kept = (value_of(recipe, known, one) for one in (recipe.gathered, *recipe.kept))
        return gathered, kept

    return work


def check_update(kernel: str, named: dict[str, jax.Array], axis_name: str, tiles: UpdateTiles) -> int:
    """How many devices share arrays by name, (n,) summands first; raises KernelRefusedError for other dtypes than
    float32, an n that devices and tiles do not divide, and as `devices_along` does."""
    devices = devices_along(axis_name, kernel)
    one_dtype(kernel, named, (jnp.dtype(jnp.float32),))
    size = next(iter(named.values())).size
    multiple(kernel, "n", size, devices, "devices")
    multiple(kernel, "tiles.size", tiles.size, VECTOR * LANES, "16 bytes a thread")
    multiple(kernel, "n / devices", size // devices, tiles.size, "tiles.size")
    return devices


def check_arrays(
    kernel: str,
    summands: jax.Array,
    arrays: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    axis_name: str,
    tiles: UpdateTiles,
) -> int:
    """How many devices share the arrays of `scatter_update`; raises KernelRefusedError for other shapes, and as
    `check_update` does."""
    named = {"summands": summands}
    named |= {f"array {at}": one for at, one in enumerate((*arrays, *scalars), 1)}
    devices = check_update(kernel, named, axis_name, tiles)
    whole, shard = (summands.size,), (summands.size // devices,)
    fit = [summands.shape == whole, *(one.shape in (whole, shard) for one in arrays)]
    fit += [one.ndim == 1 for one in scalars]
    require(
        all(fit), kernel, f"needs arrays of n or n / devices, got {[one.shape for one in named.values()]}"
    )
    return devices


def update_shard(
    summands: jax.Array,
    parameters: jax.Array,
    axis_name: str,
    work: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
    """By XLA's separate operations: what `work` makes of this device's shard (n / devices,) of the sum and of the
    parameters, both (n,); its first result is gathered."""
    total = lax.psum_scatter(summands, axis_name, tiled=True)
    own = lax.dynamic_slice(parameters, (lax.axis_index(axis_name) * total.size,), total.shape)
    new, *kept = work(total, own)
    return lax.all_gather(new, axis_name, tiled=True), *kept


def scatter_update(
    summands: jax.Array,
    arrays: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    axis_name: str,
    work: Work,
    kept: int,
    tiles: UpdateTiles = UPDATE_RANGE[0],
) -> tuple[jax.Array, ...]:
    """Sum over the devices, work on this device's shard, give one result to all.

    Args:
        summands: (n,) float32, this device's.
        arrays: (n,) or (n / devices,) float32; of whole ones this device's shard is read.
        scalars: one or more numbers each, float32, equal on all devices.
        axis_name: the only axis of the mesh.
        work: pointwise; it is traced.
        kept: how many results this device keeps.
        tiles: UPDATE_RANGE holds those worth trying.

    Returns:
        The first result (n,), equal on all devices, and the others (n / devices,).

    Raises:
        KernelRefusedError: see `devices_along`; other dtypes than float32; other shapes; n that devices and tiles do
            not divide.
    """
    devices = check_arrays(NAME, summands, arrays, scalars, axis_name, tiles)
    shard = summands.size // devices
    blocks = tiles.blocks or tiles.blocks_each * int(jax.devices()[0].core_count)
    sizes = [summands.size] + kept * [shard]
    kernel = functools.partial(
        _kernel, axis_name, devices, tiles.size, blocks, work, len(arrays), len(scalars)
    )
    outputs = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
    return tuple(launch(kernel, blocks, outputs, summands, *arrays, *scalars))


def _kernel(
    axis: str, devices: int, size: int, blocks: int, work: Work, count: int, numbers: int, *refs: Ref
) -> None:
    """One block's tiles of this device's shard."""
    summands, arrays = refs[0], refs[1 : 1 + count]
    scalars, (gathered, *kept) = refs[1 + count : 1 + count + numbers], refs[1 + count + numbers :]
    here = lax.axis_index(axis)
    peers = peers_of(axis, devices)
    shard = summands.shape[0] // devices
    factors = [ref[at] for ref in scalars for at in range(ref.shape[0])]

    @plgpu.nd_loop((shard // size,), collective_axes="block")
    def _(loop: plgpu.NDLoopInfo) -> None:
        of_shard = pl.ds(loop.index[0] * size, size)
        of_all = pl.ds(here * shard + loop.index[0] * size, size)
        there = [load(plgpu.remote_ref(summands, {axis: peer}), of_all, size) for peer in peers]
        total = functools.reduce(jnp.add, there, load(summands, of_all, size))
        own = [load(ref, of_shard if ref.shape[0] == shard else of_all, size) for ref in arrays]
        new, rest = work(total, own, factors)
        for ref, value in zip(kept, rest, strict=True):
            ref[of_shard] = value
        gathered[of_all] = new
        for peer in peers:
            plgpu.remote_ref(gathered, {axis: peer})[of_all] = new

    # The others have read this device's summands, and written its results, when all have come here.
    meet_at_the_end(axis, peers, blocks)
