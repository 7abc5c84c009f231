"""All-gather + matmul: JAX's own kernel for Hopper, behind this package's tiles and refusals.

Each device multiplies the rows it has while it passes them on to its neighbour (a ring), and so on with the rows that
arrive. `jax.experimental.pallas.ops.gpu.collective_matmul_mgpu` needs neither multicast nor NVSHMEM in one process.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from disco_hlo.kernels.refusals import devices_along, require
from disco_hlo.kernels.tiles import MATMUL_RANGE, MatmulTiles, check_matmul

NAME = "all-gather + matmul"
RANGE = MATMUL_RANGE


def all_gather_matmul(
    lhs: jax.Array, rhs: jax.Array, axis_name: str, tiles: MatmulTiles = RANGE[0]
) -> jax.Array:
    """Gather the rows of `lhs` from all devices and multiply them by this device's `rhs`.

    Args:
        lhs: (M / devices, K), bfloat16 or float16.
        rhs: (K, N), of the same dtype.
        axis_name: the axis of the mesh that holds all devices of the process.
        tiles: `remote_first` and `blocks` are not used.

    Returns:
        (M, N), in the dtype of the operands, summed in float32.

    Raises:
        KernelRefusedError: see `devices_along` and `check_matmul`; or devices of the process outside the mesh.
    """
    devices = devices_along(axis_name, NAME)
    count = jax.device_count()
    require(devices == count, NAME, f"all {count} devices of the process must take part, {devices} do")
    check_matmul(NAME, lhs, rhs, lhs.shape[0], tiles)
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as stock

    dimension = {"m": stock.MatmulDimension.M, "n": stock.MatmulDimension.N}
    piece_m, piece_n = tiles.piece
    config = stock.TuningConfig(
        tile_m=tiles.tile_m,
        tile_n=tiles.tile_n,
        tile_k=tiles.tile_k,
        max_concurrent_steps=tiles.steps,
        epi_tile_m=piece_m,
        epi_tile_n=piece_n,
        grid_minor_dim=dimension[tiles.minor],
        grid_tile_width=tiles.panel,
        wg_dimension=dimension[tiles.split],
    )
    result: jax.Array = stock.all_gather_lhs_matmul(lhs, rhs, axis_name, config=config, dtype=lhs.dtype)
    return result


def reference(lhs: jax.Array, rhs: jax.Array, axis_name: str) -> jax.Array:
    """The same by XLA's separate operations."""
    rows = lax.all_gather(lhs, axis_name, tiled=True)
    return jnp.dot(rows, rhs, preferred_element_type=lhs.dtype)
