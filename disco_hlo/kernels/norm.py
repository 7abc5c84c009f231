"""All-reduce + bias + residual + RMS norm as one kernel: each device finishes its rows while the rest travels.

CoCoNet's fused collective (section 3.4) for what follows a tensor-parallel layer: a device reads its rows of the
partial sums from every device's memory, adds them up with bias and residual, normalizes them in registers, and stores
them to every device. The sum is never written to memory and read again.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from disco_hlo.kernels.peers import Ref, launch, load, meet_at_the_end, peers_of
from disco_hlo.kernels.refusals import devices_along, multiple, one_dtype, require
from disco_hlo.kernels.tiles import HALF_TYPES, LANES, VECTOR

NAME = "all-reduce + bias + residual + norm"
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """How rows are spread.

    Attributes:
        blocks_each: blocks that share a multiprocessor, a row each at once.
        blocks: thread blocks; all multiprocessors, `blocks_each` times, where None.
    """

    blocks_each: int = 4
    blocks: int | None = None


RANGE: tuple[RowTiles, ...] = tuple(RowTiles(blocks_each=each) for each in (4, 8, 2))
"""What it is tuned over, the likeliest first."""


def all_reduce_norm(
    partial: jax.Array,
    residual: jax.Array,
    bias: jax.Array,
    scale: jax.Array,
    axis_name: str,
    tiles: RowTiles = RANGE[0],
) -> jax.Array:
    """Sum over the devices, add bias and residual, and normalize each row by its root mean square.

    Args:
        partial: (M, N), bfloat16 or float16: this device's part of the sum.
        residual: (M, N), of the same dtype, equal on all devices; of those, this device's rows are read.
        bias, scale: (N,), of the same dtype.
        axis_name: the only axis of the mesh.
        tiles: RANGE holds those worth trying.

    Returns:
        (M, N), equal on all devices, computed in float32.

    Raises:
        KernelRefusedError: see `devices_along`; other dtypes; M that the devices do not divide, N that is not a
            multiple of 512.
    """
    devices = devices_along(axis_name, NAME)
    named = {"partial": partial, "residual": residual, "bias": bias, "scale": scale}
    one_dtype(NAME, named, HALF_TYPES)
    shapes = [array.shape for array in named.values()]
    fits = partial.ndim == 2 and shapes == [partial.shape] * 2 + [partial.shape[1:]] * 2
    require(fits, NAME, f"needs two (M, N) and two (N,) arrays, got {shapes}")
    multiple(NAME, "M", partial.shape[0], devices, "devices")
    multiple(NAME, "N", partial.shape[1], VECTOR * LANES, "8 bytes a thread")
    blocks = tiles.blocks or tiles.blocks_each * int(jax.devices()[0].core_count)
    kernel = functools.partial(_kernel, axis_name, devices, blocks)
    output = jax.ShapeDtypeStruct(partial.shape, partial.dtype)
    return launch(kernel, blocks, [output], partial, residual, bias, scale)[0]


def reference(
    partial: jax.Array, residual: jax.Array, bias: jax.Array, scale: jax.Array, axis_name: str
) -> jax.Array:
    """The same by XLA's separate operations."""
    return pointwise(lax.psum(partial, axis_name), residual, bias, scale)


def pointwise(total: jax.Array, residual: jax.Array, bias: jax.Array, scale: jax.Array) -> jax.Array:
    """What follows the sum, computed in float32; the sum may be (M, N), or one row of it."""
    exact: jax.Array = total.astype(jnp.float32) + bias.astype(jnp.float32) + residual.astype(jnp.float32)
    mean_square = jnp.sum(exact * exact, axis=-1, keepdims=exact.ndim > 1) * (1 / exact.shape[-1])
    normalized = exact * lax.rsqrt(mean_square + EPSILON) * scale.astype(jnp.float32)
    return normalized.astype(residual.dtype)


def _kernel(axis: str, devices: int, blocks: int, *refs: Ref) -> None:
    """One block's rows of this device's."""
    partial, residual, bias, scale, result = refs
    here = lax.axis_index(axis)
    peers = peers_of(axis, devices)
    rows, columns = partial.shape[0] // devices, partial.shape[1]

    @plgpu.nd_loop((rows,), collective_axes="block")
    def _rows(loop: plgpu.NDLoopInfo) -> None:
        row = here * rows + loop.index[0]
        sums = [partial, *(plgpu.remote_ref(partial, {axis: peer}) for peer in peers)]
        total = functools.reduce(jnp.add, [load(ref, row, columns).astype(jnp.float32) for ref in sums])
        others = (load(ref, part, columns) for ref, part in ((residual, row), (bias, ...), (scale, ...)))
        new = pointwise(total, *others)
        for ref in (result, *(plgpu.remote_ref(result, {axis: peer}) for peer in peers)):
            ref[row] = new

    # The others have read this device's sums, and written its rows, when all have come here.
    meet_at_the_end(axis, peers, blocks)
