"""Matrix × vector + all-reduce: every multiprocessor streams its part of the matrix and sends its sums at once.

Punniyamurthy et al., figure 7, for a link on which a vector's way costs more than its bytes: the sums are exchanged in
one phase, not in two. Each device stores its partial sums into every device's memory, and each adds all of them up.

What bounds the time is reading the matrix once. So a block's copies run ahead of its sums through a ring in shared
memory, from one tile of rows into the next, and the sums are those of plain multiplications: a tensor core would need
eight columns. A block's warpgroups have a part of the depth each, and send their sums as other devices do. Sums are
float32 throughout, added in one order on all devices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from disco_hlo.kernels.peers import Ref, launch, meet, peers_of
from disco_hlo.kernels.refusals import devices_along, multiple, one_dtype, require
from disco_hlo.kernels.tiles import (
    HALF_TYPES,
    LARGEST_TILE,
    MOST_STEPS,
    VECTOR_PIECE,
    VECTOR_RANGE,
    VECTOR_ROWS,
    WARPGROUPS,
    MatmulTiles,
    blocks_of,
    within,
)

NAME = "matrix × vector + all-reduce"
RANGE = VECTOR_RANGE


def matvec_all_reduce(
    matrix: jax.Array, vector: jax.Array, axis_name: str, tiles: MatmulTiles = RANGE[0]
) -> jax.Array:
    """Multiply a matrix by a vector and sum over the devices.

    Args:
        matrix: (M, K / devices), bfloat16 or float16: this device's part of K.
        vector: (K / devices,), of the same dtype.
        axis_name: the only axis of the mesh.
        tiles: `tile_k`, `steps` and `blocks`; the others are not used. RANGE holds those worth trying.

    Returns:
        (M,), in the dtype of the operands.

    Raises:
        KernelRefusedError: see `devices_along`; other dtypes than bfloat16 and float16; shapes that do not fit each
            other or the tiles.
    """
    devices = devices_along(axis_name, NAME)
    one_dtype(NAME, {"matrix": matrix, "vector": vector}, HALF_TYPES)
    fits = matrix.ndim == 2 and vector.shape == matrix.shape[1:]
    require(fits, NAME, f"needs an (M, K) and a (K,) array, got {matrix.shape} and {vector.shape}")
    rows, depth = matrix.shape
    multiple(NAME, "M", rows, VECTOR_ROWS, "rows of a tile")
    multiple(NAME, "tiles.tile_k", tiles.tile_k, WARPGROUPS * VECTOR_PIECE, "64 columns a warpgroup")
    multiple(NAME, "K of one device", depth, tiles.tile_k, "tiles.tile_k")
    within(NAME, tiles, steps=(1, MOST_STEPS), tile_k=(1, LARGEST_TILE))
    part_k = tiles.tile_k // WARPGROUPS
    blocks = min(blocks_of(NAME, tiles), rows // VECTOR_ROWS)
    arrives = jax.ShapeDtypeStruct((devices * WARPGROUPS, rows), jnp.float32)
    _, result = launch(
        functools.partial(_kernel, axis_name, devices, blocks, tiles),
        blocks,
        [arrives, jax.ShapeDtypeStruct((rows,), matrix.dtype)],
        matrix,
        vector,
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM(
                (WARPGROUPS * tiles.steps, VECTOR_ROWS, part_k),
                matrix.dtype,
                # The checker takes both for abstract: their base has a method without a body.
                transforms=(
                    plgpu.TilingTransform((8, VECTOR_PIECE)),  # type: ignore[abstract]
                    plgpu.SwizzleTransform(128),  # type: ignore[abstract]
                ),
            ),
            plgpu.SMEM((WARPGROUPS * tiles.steps, part_k), matrix.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS * tiles.steps),
        ],
    )
    return result


def reference(matrix: jax.Array, vector: jax.Array, axis_name: str) -> jax.Array:
    """The same by XLA's separate operations."""
    result: jax.Array = lax.psum(jnp.dot(matrix, vector, preferred_element_type=matrix.dtype), axis_name)
    return result


def _kernel(axis: str, devices: int, blocks: int, tiles: MatmulTiles, *refs: Ref) -> None:
    """One warpgroup's part of K, for a block's tiles of rows."""
    matrix, vector, arrived, result, of_matrix, of_vector, landed = refs
    here, block, split = (lax.axis_index(name) for name in (axis, "block", "warpgroup"))
    peers = peers_of(axis, devices)
    part_k = tiles.tile_k // WARPGROUPS
    steps_each = vector.shape[0] // tiles.tile_k
    own_tiles = lax.div(matrix.shape[0] // VECTOR_ROWS - block + blocks - 1, jnp.int32(blocks))

    def rows_of(tile: jax.Array) -> Any:
        return pl.ds((block + blocks * tile) * VECTOR_ROWS, VECTOR_ROWS)

    def slot_of(step: jax.Array) -> jax.Array:
        return split * tiles.steps + lax.rem(step, jnp.int32(tiles.steps))

    def fetch(step: jax.Array) -> None:
        slot = slot_of(step)
        tile, k = lax.div(step, jnp.int32(steps_each)), lax.rem(step, jnp.int32(steps_each))
        columns = pl.ds(k * tiles.tile_k + split * part_k, part_k)
        plgpu.copy_gmem_to_smem(matrix.at[rows_of(tile), columns], of_matrix.at[slot], landed.at[slot])
        plgpu.copy_gmem_to_smem(vector.at[columns], of_vector.at[slot], landed.at[slot])

    def fetch_if_any(step: jax.Array) -> None:
        pl.when(step < own_tiles * steps_each)(lambda: fetch(step))

    for step in range(tiles.steps):
        fetch_if_any(jnp.int32(step))

    def multiply(step: jax.Array, total: jax.Array) -> jax.Array:
        slot = slot_of(step)
        plgpu.barrier_wait(landed.at[slot])
        for first in range(0, part_k, VECTOR_PIECE):
            piece = pl.ds(first, VECTOR_PIECE)
            factors = of_vector[slot, piece].astype(jnp.float32)
            columns = plgpu.layout_cast(of_matrix[slot, :, piece], plgpu.Layout.WGMMA).astype(jnp.float32)
            total = total + columns * lax.broadcast_in_dim(factors, (VECTOR_ROWS, VECTOR_PIECE), (1,))
        plgpu.commit_smem()  # all have read the slot before the next copy overwrites it
        fetch_if_any(step + tiles.steps)
        return total

    def tile_of(tile: jax.Array, _: None) -> None:
        zeros = plgpu.layout_cast(jnp.zeros((VECTOR_ROWS, VECTOR_PIECE), jnp.float32), plgpu.Layout.WGMMA)
        total = lax.fori_loop(tile * steps_each, (tile + 1) * steps_each, multiply, zeros)
        sums = jnp.sum(total, axis=1)
        place = here * WARPGROUPS + split
        for ref in (arrived, *(plgpu.remote_ref(arrived, {axis: peer}) for peer in peers)):
            ref[place, rows_of(tile)] = sums

    lax.fori_loop(0, own_tiles, tile_of, None)

    # All sums of a block's rows are here when the warpgroups of this block on all devices have come here.
    finished = pl.get_global(plgpu.SemaphoreType.REGULAR((blocks,))).at[block]
    pl.semaphore_signal(finished)
    meet(finished, axis, peers, devices * WARPGROUPS)

    load = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def add(turn: jax.Array, _: None) -> None:
        rows = rows_of(split + WARPGROUPS * turn)
        sums = [load(arrived.at[part, rows]) for part in range(devices * WARPGROUPS)]
        _store(result.at[rows], functools.reduce(jnp.add, sums).astype(result.dtype))

    lax.fori_loop(0, lax.div(own_tiles - split + WARPGROUPS - 1, jnp.int32(WARPGROUPS)), add, None)


def _store(ref: Ref, value: jax.Array) -> None:
    """Store two bytes a thread, which a jax newer than 0.11 takes for a mistake unless told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
