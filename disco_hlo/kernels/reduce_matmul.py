"""Matmul + reduce-scatter, + all-reduce and + all-to-all: what one GPU has computed travels tile by tile.

Every device has a part of K, so each computes a partial sum of the whole result, and owns the rows of one shard
(Punniyamurthy et al., section III-B, "two-phase direct"):

1. It computes the tiles of other devices' rows first and stores each into its owner's memory (communication-aware
   order; with `remote_first=False` in the order of rows, as their baseline).
2. It computes the tiles of its own rows, and adds what arrived before it stores them: into its own result for a
   reduce-scatter, into everybody's for an all-reduce.

An all-to-all ends with step 1: the owner keeps what arrives, device by device (the same section, last paragraph).

A tile belongs to the same block on all devices. So a block waits for one flag of each device, raised by the block of
its own number there once that has stored all its tiles of this owner: not for each tile, and not for whole devices.
Partial sums travel in the operands' dtype, as XLA's all-reduce has them; the owner adds them to its own in float32.

The loop over K is that of JAX's own kernel (`jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu`). Its epilogue is
not: that one stores a tile to one place only and takes no sum of several.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from disco_hlo.kernels.peers import Ref, launch, peers_of
from disco_hlo.kernels.refusals import devices_along, multiple
from disco_hlo.kernels.tiles import MATMUL_RANGE, WARPGROUPS, MatmulTiles, blocks_of, check_matmul

SCATTER_NAME = "matmul + reduce-scatter"
ALL_REDUCE_NAME = "matmul + all-reduce"
EXCHANGE_NAME = "matmul + all-to-all"
RANGE: tuple[MatmulTiles, ...] = (
    MATMUL_RANGE[0],
    MatmulTiles(tile_k=32, steps=6, slots=4),
    MatmulTiles(steps=3, slots=4),
    *MATMUL_RANGE[1:],
)
"""What these are tuned over. The second and third stage a whole tile, which leaves while the next one is multiplied."""

LEAST_SWIZZLE = 32
REGISTERS_OF_THE_MOVER = 40

Collective = Literal["reduce-scatter", "all-reduce", "all-to-all"]


def matmul_reduce_scatter(
    lhs: jax.Array, rhs: jax.Array, axis_name: str, tiles: MatmulTiles = RANGE[0]
) -> jax.Array:
    """Multiply, sum over the devices, and keep this device's shard of the rows.

    Args:
        lhs: (M, K / devices), bfloat16 or float16: this device's part of K.
        rhs: (K / devices, N), of the same dtype.
        axis_name: the only axis of the mesh.
        tiles: see `MatmulTiles`; RANGE holds those worth trying.

    Returns:
        (M / devices, N), in the dtype of the operands.

    Raises:
        KernelRefusedError: see `devices_along` and `check_matmul`; M that the devices do not divide.
    """
    return _launch(SCATTER_NAME, lhs, rhs, axis_name, tiles, "reduce-scatter")


def matmul_all_reduce(
    lhs: jax.Array, rhs: jax.Array, axis_name: str, tiles: MatmulTiles = RANGE[0]
) -> jax.Array:
    """Multiply and sum over the devices; as `matmul_reduce_scatter`, but every device gets all rows: (M, N)."""
    return _launch(ALL_REDUCE_NAME, lhs, rhs, axis_name, tiles, "all-reduce")


def matmul_all_to_all(
    lhs: jax.Array, rhs: jax.Array, axis_name: str, tiles: MatmulTiles = RANGE[0]
) -> jax.Array:
    """Multiply, and send every device its shard of the rows, as experts do with what they computed for others.

    Args:
        lhs: (M, K), bfloat16 or float16: rows that belong to the devices in turn, M / devices each.
        rhs: (K, N), of the same dtype: this device's own.
        axis_name: the only axis of the mesh.
        tiles: see `MatmulTiles`; RANGE holds those worth trying.

    Returns:
        (M, N): M / devices rows from each device, in their order.

    Raises:
        KernelRefusedError: as `matmul_reduce_scatter`.
    """
    return _launch(EXCHANGE_NAME, lhs, rhs, axis_name, tiles, "all-to-all")


def scatter_reference(lhs: jax.Array, rhs: jax.Array, axis_name: str) -> jax.Array:
    """`matmul_reduce_scatter` by XLA's separate operations."""
    product = jnp.dot(lhs, rhs, preferred_element_type=lhs.dtype)
    result: jax.Array = lax.psum_scatter(product, axis_name, tiled=True)
    return result


def all_reduce_reference(lhs: jax.Array, rhs: jax.Array, axis_name: str) -> jax.Array:
    """`matmul_all_reduce` by XLA's separate operations."""
    result: jax.Array = lax.psum(jnp.dot(lhs, rhs, preferred_element_type=lhs.dtype), axis_name)
    return result


def exchange_reference(lhs: jax.Array, rhs: jax.Array, axis_name: str) -> jax.Array:
    """`matmul_all_to_all` by XLA's separate operations."""
    product = jnp.dot(lhs, rhs, preferred_element_type=lhs.dtype)
    result: jax.Array = lax.all_to_all(product, axis_name, 0, 0, tiled=True)
    return result


@dataclasses.dataclass(frozen=True)
class _Job:
    """What one launch computes, in numbers known when it is traced; rows are those of one device's shard."""

    axis: str
    devices: int
    rows: int
    columns: int
    depth: int
    dtype: jnp.dtype
    tiles: MatmulTiles
    blocks: int
    collective: Collective

    @property
    def adds_at_once(self) -> bool:
        """Whether own tiles come when the others' partial sums of them are there."""
        return self.collective != "all-to-all" and self.tiles.remote_first

    @property
    def adds_later(self) -> bool:
        """Whether own tiles are kept until the others' partial sums of them are there."""
        return self.collective != "all-to-all" and not self.tiles.remote_first

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of a shard along its rows and its columns."""
        return self.rows // self.tiles.block_m, self.columns // self.tiles.block_n

    @property
    def tiles_of_a_shard(self) -> int:
        """How many."""
        return self.grid[0] * self.grid[1]

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Where the pieces of a warpgroup's tile begin, in the order in which they are stored."""
        piece_m, piece_n = self.tiles.piece
        return list(
            itertools.product(range(0, self.tiles.tile_m, piece_m), range(0, self.tiles.tile_n, piece_n))
        )

    @property
    def slots(self) -> int:
        """How many pieces are on their way at once."""
        return min(self.tiles.slots, len(self.pieces))


def _launch(
    name: str,
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str,
    tiles: MatmulTiles,
    collective: Collective,
) -> jax.Array:
    devices = devices_along(axis_name, name)
    multiple(name, "M", lhs.shape[0], devices, "devices")
    rows = lhs.shape[0] // devices
    check_matmul(name, lhs, rhs, rows, tiles)
    (depth, columns), dtype = rhs.shape, lhs.dtype
    job = _Job(axis_name, devices, rows, columns, depth, dtype, tiles, blocks_of(name, tiles), collective)
    # What the others store of this device's rows arrives in one slot for each device.
    arrives = jax.ShapeDtypeStruct((devices, rows, columns), dtype)
    result = jax.ShapeDtypeStruct((rows * (devices if collective == "all-reduce" else 1), columns), dtype)
    outputs = [arrives] if collective == "all-to-all" else [arrives, result]
    kernel, threads = functools.partial(_kernel, job), WARPGROUPS + 1
    made = launch(kernel, job.blocks, outputs, lhs, rhs, num_threads=threads, thread_name="warpgroup")
    return made[-1].reshape(-1, columns)


def _kernel(job: _Job, lhs: Ref, rhs: Ref, arrived: Ref, result: Ref | None = None) -> None:
    """One block's work: its tiles of all shards."""
    flags = pl.get_global(plgpu.SemaphoreType.REGULAR((2 * job.blocks,)))
    block = lax.axis_index("block")
    piece_type = plgpu.SMEM(
        (WARPGROUPS, job.slots, *job.tiles.piece),
        job.dtype,
        transforms=_transforms(job.tiles.piece[1], job.dtype),
    )

    @functools.partial(
        pl.run_scoped,
        operands=_pipeline(job, _nothing, _nothing).get_allocations(lhs, rhs),
        staging=piece_type,
        landed=plgpu.Barrier(num_barriers=WARPGROUPS * job.slots),
        collective_axes="warpgroup",
    )
    def _(operands: Any, staging: Ref, landed: Ref) -> None:
        sums = _Sums(job, result, arrived, flags.at[block], staging, landed)
        here = lax.axis_index(job.axis)

        def tile(step: jax.Array, _: None) -> None:
            number, owner, before = _tile_at(job, block, here, step)
            m, n = _place_in_shard(job, number)
            lhs_rows = pl.ds(owner * job.rows + m * job.tiles.block_m, job.tiles.block_m)
            rhs_columns = pl.ds(n * job.tiles.block_n, job.tiles.block_n)
            _pipeline(
                job, _multiply(job), _summed(job, lambda total: sums.store(total, m, n, owner, before))
            )(
                lhs.at[lhs_rows, :],
                rhs.at[:, rhs_columns],
                allocations=operands,
            )

        lax.fori_loop(0, _steps(job, block), tile, None)

        @pl.when(lax.axis_index("warpgroup") < WARPGROUPS)
        def _() -> None:
            sums.tell_of_last(_tile_at(job, block, here, _steps(job, block))[2])
            if job.adds_later:
                sums.add_own_tiles(block)
            sums.end(flags.at[job.blocks + block])


# --- which tile a block computes when ---


def _steps(job: _Job, block: jax.Array, end: jax.Array | int | None = None) -> jax.Array:
    """How many of a block's tiles have numbers below `end` (all shards' tiles where None)."""
    end = job.devices * job.tiles_of_a_shard if end is None else end
    return lax.div(lax.max(jnp.int32(end) - block + job.blocks - 1, jnp.int32(0)), jnp.int32(job.blocks))


def _tile_at(
    job: _Job, block: jax.Array, here: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The number of a block's tile, who owns it, and who owns the block's tile before it (`here` if there is none)."""
    steps = _steps(job, block)
    first = _steps(job, block, (here + 1) * job.tiles_of_a_shard) if job.tiles.remote_first else 0

    def number(step: jax.Array) -> jax.Array:
        return block + job.blocks * lax.rem(first + step, lax.max(steps, jnp.int32(1)))

    def owner(step: jax.Array) -> jax.Array:
        return lax.div(number(step), jnp.int32(job.tiles_of_a_shard))

    return number(step), owner(step), jnp.where(step == 0, here, owner(lax.max(step - 1, jnp.int32(0))))


def _place_in_shard(job: _Job, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row and column, in tiles, of a tile within its shard."""
    within = lax.rem(number, jnp.int32(job.tiles_of_a_shard))
    m, n = plgpu.planar_snake(within, job.grid, "mn".index(job.tiles.minor), job.tiles.panel)
    return m, n


# --- the product ---


def _nothing(*_: Any, **__: Any) -> None:
    """What a pipeline computes that is asked for its buffers only."""


def _transforms(columns: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    """How a matrix with rows of `columns` lies in shared memory: as the tensor cores and the copies want it."""
    swizzle = plgpu.find_swizzle(columns * dtype.itemsize * 8)
    if swizzle < LEAST_SWIZZLE:
        return ()
    # The checker takes both for abstract: their base has a method without a body.
    return (
        plgpu.TilingTransform((8, swizzle // dtype.itemsize)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(swizzle),  # type: ignore[abstract]
    )


def _pipeline(job: _Job, multiply: Callable[..., Any], context: Callable[..., None]) -> Any:
    """The loop over K: one warpgroup fetches operands some steps ahead of the two that multiply."""
    tiles = job.tiles
    operand = functools.partial(plgpu.BlockSpec, memory_space=plgpu.SMEM, delay_release=1)
    lie = _transforms(min(tiles.tile_k, tiles.tile_n), job.dtype)  # both alike, as the instruction wants them
    return plgpu.emit_pipeline_warp_specialized(
        multiply,
        grid=(job.depth // tiles.tile_k,),
        memory_registers=REGISTERS_OF_THE_MOVER,
        in_specs=[
            operand((tiles.block_m, tiles.tile_k), lambda k: (0, k), transforms=lie),
            operand((tiles.tile_k, tiles.block_n), lambda k: (k, 0), transforms=lie),
        ],
        wg_axis="warpgroup",
        num_compute_wgs=WARPGROUPS,
        max_concurrent_steps=tiles.steps,
        compute_context=context,
    )


def _multiply(job: _Job) -> Callable[..., Ref]:
    """One step of the loop over K, on one warpgroup's part of the tile."""

    def multiply(_: Any, lhs: Ref, rhs: Ref, total: Ref) -> Ref:
        m, n = _part_of_warpgroup(job)
        plgpu.wgmma(total, lhs.at[m], rhs.at[:, n])
        plgpu.wgmma_wait(1)  # the step before is done, so its operands may be overwritten: delay_release
        return total

    return multiply


def _part_of_warpgroup(job: _Job) -> tuple[Any, Any]:
    """The rows and columns of a block's tile that this warpgroup computes."""
    warpgroup, tiles = lax.axis_index("warpgroup"), job.tiles
    if tiles.split == "m":
        return pl.ds(warpgroup * tiles.tile_m, tiles.tile_m), slice(None)
    return slice(None), pl.ds(warpgroup * tiles.tile_n, tiles.tile_n)


def _summed(job: _Job, store: Callable[[jax.Array], None]) -> Callable[..., None]:
    """What the computing warpgroups do with a tile: the loop over K, then `store`."""

    def context(run: Callable[[Ref], Any]) -> None:
        @functools.partial(
            pl.run_scoped, total=plgpu.WGMMAAccumulatorRef((job.tiles.tile_m, job.tiles.tile_n), jnp.float32)
        )
        def _(total: Ref) -> None:
            run(total)
            store(total[...])

    return context


# --- the sum over the devices ---


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Where the computing warpgroups of a block store tiles and get those of the other devices.

    Attributes:
        result: this device's rows, or everybody's, summed; None for an all-to-all.
        arrived: (devices, rows, columns): what each device has computed of this device's rows.
        received: raised by the others when their tiles of this block have arrived.
        staging, landed: shared memory through which pieces of tiles pass, and the barriers of what comes into it.
    """

    job: _Job
    result: Ref
    arrived: Ref
    received: Ref
    staging: Ref
    landed: Ref

    @property
    def here(self) -> jax.Array:
        """This device's position on the axis."""
        return lax.axis_index(self.job.axis)

    @property
    def peers(self) -> list[jax.Array]:
        """The positions of the others, the next one first."""
        return peers_of(self.job.axis, self.job.devices)

    @property
    def results(self) -> list[Ref]:
        """Where a tile of this device's rows goes."""
        if self.job.collective != "all-reduce":
            return [self.result]
        rows = pl.ds(self.here * self.job.rows, self.job.rows)
        there = [plgpu.remote_ref(self.result, {self.job.axis: peer}) for peer in self.peers]
        return [ref.at[rows, :] for ref in (self.result, *there)]

    def store(
        self, total: jax.Array, m: jax.Array, n: jax.Array, owner: jax.Array, before: jax.Array
    ) -> None:
        """Store this warpgroup's part of tile (m, n), where its owner has or will have the sum.

        An owner is told of all its tiles when the next one has been multiplied: they have arrived meanwhile.
        """
        pl.when(owner != before)(functools.partial(self.tell_of_last, before))
        for peer in self.peers:

            @pl.when(owner == peer)
            def _(peer: jax.Array = peer) -> None:
                there = plgpu.remote_ref(self.arrived, {self.job.axis: peer}).at[self.here]
                self._put(total, [], [there], m, n)

        @pl.when(owner == self.here)
        def _() -> None:
            if self.job.adds_at_once:
                self._wait(self.received)
                self._put(total, [self.arrived.at[peer] for peer in self.peers], self.results, m, n)
            else:
                self._put(total, [], [self.arrived.at[self.here]], m, n)

    def tell_of_last(self, owner: jax.Array) -> None:
        """Tell `owner`, if it is another, that this warpgroup has stored the last of its tiles."""
        if self.job.collective != "all-to-all":
            for peer in self.peers:
                pl.when(owner == peer)(functools.partial(self._tell, self.received, peer))

    def add_own_tiles(self, block: jax.Array) -> None:
        """Where own tiles came before all partial sums had: add all of them up now."""
        job = self.job
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        def tile(step: jax.Array, _: None) -> None:
            self._wait(self.received)
            m, n = _place_in_shard(job, block + job.blocks * step)
            self._put(None, [self.arrived.at[device] for device in range(job.devices)], self.results, m, n)

        first, end = (_steps(job, block, (self.here + i) * job.tiles_of_a_shard) for i in (0, 1))
        lax.fori_loop(first, end, tile, None)

    def end(self, finished: Ref) -> None:
        """Leave no copy behind: neither this block's own nor the others' into this device's memory."""
        if self.job.collective == "reduce-scatter":  # those were waited for when they were added
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return
        for peer in self.peers:
            self._tell(finished, peer)
        self._wait(finished)

    def _tell(self, flag: Ref, peer: jax.Array) -> None:
        """Tell the same block on another device that all this warpgroup has stored has arrived."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        pl.semaphore_signal(flag, device_id={self.job.axis: peer})

    def _wait(self, flag: Ref) -> None:
        """Wait for the computing warpgroups of the same block on all other devices."""
        pl.semaphore_wait(flag, WARPGROUPS * (self.job.devices - 1), decrement=False)

    def _put(
        self,
        total: jax.Array | None,
        sources: Sequence[Ref],
        destinations: Sequence[Ref],
        m: jax.Array,
        n: jax.Array,
    ) -> None:
        """Store `total` (tile_m, tile_n) and the same part of the `sources`, summed, to all `destinations`."""
        job, tiles, warpgroup = self.job, self.job.tiles, lax.axis_index("warpgroup")
        piece_m, piece_n = tiles.piece
        first_row = m * tiles.block_m + (warpgroup * tiles.tile_m if tiles.split == "m" else 0)
        first_column = n * tiles.block_n + (warpgroup * tiles.tile_n if tiles.split == "n" else 0)

        def part(index: int) -> Any:
            i, j = job.pieces[index]
            return pl.ds(first_row + i, piece_m), pl.ds(first_column + j, piece_n)

        def fetch(index: int, source: Ref) -> None:
            slot = index % job.slots
            landed = self.landed.at[warpgroup * job.slots + slot]
            plgpu.copy_gmem_to_smem(source.at[part(index)], self.staging.at[warpgroup, slot], landed)

        def fetched(index: int, piece: jax.Array | None) -> jax.Array:
            slot = index % job.slots
            plgpu.barrier_wait(self.landed.at[warpgroup * job.slots + slot])
            addend: jax.Array = self.staging[warpgroup, slot].astype(jnp.float32)
            plgpu.commit_smem()  # all have read it before anything else overwrites it
            return addend if piece is None else piece + addend

        if sources:  # as many as there are slots come at once, when what last left from there has left
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for index in range(job.slots):
                fetch(index, sources[0])
        for index, (i, j) in enumerate(job.pieces):
            slot = index % job.slots
            piece = None if total is None else total[i : i + piece_m, j : j + piece_n]
            if sources:
                piece = fetched(index, piece)
                for source in sources[1:]:
                    fetch(index, source)
                    piece = fetched(index, piece)
            else:  # the copies that last read this slot are done; those of the slots in between may go on
                plgpu.wait_smem_to_gmem((job.slots - 1) * len(destinations), wait_read_only=True)
            assert piece is not None
            self.staging[warpgroup, slot] = piece.astype(job.dtype)
            plgpu.commit_smem()
            for destination in destinations:
                plgpu.copy_smem_to_gmem(self.staging.at[warpgroup, slot], destination.at[part(index)])
            following = index - 1 + job.slots
            if sources and index and following < len(job.pieces):
                plgpu.wait_smem_to_gmem(len(destinations), wait_read_only=True)
                fetch(following, sources[0])
