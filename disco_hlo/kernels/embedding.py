"""Embedding bag + all-to-all: each sample's pooled rows go to the device that owns the sample as they are summed.

Punniyamurthy et al., section III-A with the stores of III-B: each device has some of the tables, and pools their rows
for the samples of all devices. A warpgroup sums the rows of one bag in registers and stores the sum where it belongs,
in the layout of the result; no buffer lies between, and nothing is transposed.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from disco_hlo.kernels.peers import Ref, launch, load, meet_at_the_end, peers_of
from disco_hlo.kernels.refusals import devices_along, multiple, one_dtype, require
from disco_hlo.kernels.tiles import HALF_TYPES, LANES

NAME = "embedding bag + all-to-all"

MOST_COLUMNS = 1024
"""Of a table: eight to a thread."""


@dataclasses.dataclass(frozen=True)
class BagTiles:
    """How bags are summed.

    Attributes:
        rows: rows of a bag that are read at once, at most.
        remote_first: the bags of other devices' samples come first (communication-aware order); else in the order of
            samples.
        blocks_each: blocks that share a multiprocessor: while some wait for rows, others add.
        blocks: thread blocks; all multiprocessors, `blocks_each` times, where None.
    """

    rows: int = 16
    remote_first: bool = True
    blocks_each: int = 8
    blocks: int | None = None


RANGE: tuple[BagTiles, ...] = (
    BagTiles(),
    BagTiles(rows=8, blocks_each=12),
    BagTiles(rows=4, blocks_each=16),
    BagTiles(rows=8),
    BagTiles(blocks_each=4),
    BagTiles(rows=32, blocks_each=4),
)
"""What a bag is tuned over, the likeliest first."""


def embedding_bag_all_to_all(
    tables: jax.Array, indices: jax.Array, axis_name: str, tiles: BagTiles = RANGE[0]
) -> jax.Array:
    """Sum the rows of each bag, and send every device the bags of its samples.

    Args:
        tables: (T, R, D), float32, bfloat16 or float16: this device's tables.
        indices: (T, B, P) int32: the rows of each table in the bag of each of all devices' samples; an index outside
            the table is its nearest row.
        axis_name: the only axis of the mesh.
        tiles: RANGE holds those worth trying.

    Returns:
        (B / devices, devices × T, D): this device's samples, the tables of all devices in their order, in the dtype
        of the tables, summed in float32.

    Raises:
        KernelRefusedError: see `devices_along`; other dtypes; shapes that do not fit each other, D that is not 128
            columns or a multiple up to 1024, B that the devices do not divide.
    """
    devices = devices_along(axis_name, NAME)
    one_dtype(NAME, {"tables": tables}, (jnp.dtype(jnp.float32), *HALF_TYPES))
    one_dtype(NAME, {"indices": indices}, (jnp.dtype(jnp.int32),))
    fits = tables.ndim == indices.ndim == 3 and tables.shape[0] == indices.shape[0]
    require(fits, NAME, f"needs a (T, R, D) and a (T, B, P) array, got {tables.shape} and {indices.shape}")
    (count, _, columns), (_, samples, bag) = tables.shape, indices.shape
    multiple(NAME, "D", columns, LANES, "threads")
    require(columns <= MOST_COLUMNS, NAME, f"D must be at most {MOST_COLUMNS}, got {columns}")
    multiple(NAME, "B", samples, devices, "devices")
    require(bag > 0, NAME, "needs at least one row in a bag, got P = 0")
    blocks = tiles.blocks or tiles.blocks_each * int(jax.devices()[0].core_count)
    kernel = functools.partial(_kernel, axis_name, devices, blocks, tiles)
    output = jax.ShapeDtypeStruct((samples // devices, devices * count, columns), tables.dtype)
    return launch(kernel, blocks, [output], tables, indices)[0]


def reference(tables: jax.Array, indices: jax.Array, axis_name: str) -> jax.Array:
    """The same by XLA's separate operations: without the barrier it makes one kernel of each row of all bags."""
    sums = lax.optimization_barrier(pooled(tables, indices))
    by_table = lax.all_to_all(sums, axis_name, split_axis=1, concat_axis=0, tiled=True)
    by_sample: jax.Array = by_table.swapaxes(0, 1)
    return by_sample


def pooled(tables: jax.Array, indices: jax.Array) -> jax.Array:
    """The sums of all bags, (T, B, D): XLA makes one kernel of the gathers and sums."""
    take = jax.vmap(functools.partial(jnp.take, axis=0, mode="clip"))
    rows = [take(tables, indices[:, :, turn]).astype(jnp.float32) for turn in range(indices.shape[2])]
    total: jax.Array = functools.reduce(jnp.add, rows).astype(tables.dtype)
    return total


def _kernel(axis: str, devices: int, blocks: int, tiles: BagTiles, *refs: Ref) -> None:
    """One block's bags."""
    tables, indices, result = refs
    here = lax.axis_index(axis)
    peers = peers_of(axis, devices)
    (count, table_rows, columns), (_, samples, bag) = tables.shape, indices.shape
    shard = samples // devices
    # Neighbours that one thread loads at once: 16 bytes at most.
    vector = min(columns & -columns, LANES * 16 // tables.dtype.itemsize) // LANES

    def row(table: jax.Array, sample: jax.Array, place: jax.Array | int) -> jax.Array:
        chosen = lax.clamp(0, indices[table, sample, place], table_rows - 1)
        return load(tables, (table, chosen), columns, vector).astype(jnp.float32)

    def summed(table: jax.Array, sample: jax.Array) -> jax.Array:
        at_once = min(tiles.rows, bag)

        def add(turn: jax.Array, total: jax.Array) -> jax.Array:
            rows = [row(table, sample, turn * at_once + place) for place in range(at_once)]
            return functools.reduce(jnp.add, rows, total)

        rest = [row(table, sample, place) for place in range(bag - bag % at_once, bag)]
        layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)
        zeros = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), layout)
        total: jax.Array = lax.fori_loop(0, bag // at_once, add, functools.reduce(jnp.add, rest, zeros))
        return total

    # Table by table: the rows of one come from the cache that many multiprocessors share.
    @plgpu.nd_loop((devices, count, shard), collective_axes="block")
    def _bags(loop: plgpu.NDLoopInfo) -> None:
        turn, table, place = loop.index
        owner = lax.rem(here + 1 + turn, jnp.int32(devices)) if tiles.remote_first else turn
        total = summed(table, owner * shard + place).astype(result.dtype)
        owners = [(here, result), *((peer, plgpu.remote_ref(result, {axis: peer})) for peer in peers)]
        for device, ref in owners:
            pl.when(owner == device)(
                functools.partial(ref.at[place, here * count + table].__setitem__, ..., total)
            )

    # The others have stored their bags of this device's samples when all have come here.
    meet_at_the_end(axis, peers, blocks)
