"""A matmul as GPUs execute it: in stages of tiles, each a phase of reading and multiplying, and a burst of writes.

T3, sections 2.5 and 6.1.2. As many output tiles as there are compute units make a stage. While the products of a stage
are computed its inputs are read; then all tiles are written at once, and nothing is computed meanwhile. The cache takes
what is written at its own bandwidth, and writes it to memory while the next stage computes; what goes around the cache,
as T3's updates do, waits for the memory ("L2 bypassing ... of GEMM writes hurts", section 6.1.3).

What is read from memory: the second operand, the weights, once. BLAS has matrices by columns, so a layer is computed as
its transpose, one feature a row; tiles are taken along rows (T3, section 4.2.1), which is along the tokens. So the
first operand, the activations, is read again by each row of tiles; what the cache holds of what was read since the last
time is not. A cache as GPUs have it replaces at random, so the share that it still holds is (its size) / (what passed
through it since), at most 1. What is written passes through it, too, unless it goes around.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from disco_hlo.whatif.machine import Gpu

TILE = 128
"""Rows and columns of an output tile: assumed, CUTLASS's default for 16-bit matmuls."""
BYTES = 2
"""Of an element."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """``[rows, depth] x [depth, columns]`` on one device."""

    rows: int
    columns: int
    depth: int

    @property
    def flops(self) -> float:
        """A multiplication and an addition are two."""
        return 2.0 * self.rows * self.columns * self.depth

    @property
    def output_bytes(self) -> int:
        """Of the result."""
        return BYTES * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Stages:
    """How a device runs a matmul."""

    count: int
    products_ns: float
    """Of a stage, while nothing else uses the memory."""
    read_bytes: float
    """Of a stage, from memory."""
    write_bytes: float
    """Of a stage."""
    write_ns: float

    @property
    def ns(self) -> float:
        """Of the whole matmul, alone."""
        return self.count * (self.products_ns + self.write_ns)


def stages(gpu: Gpu, matmul: Matmul, *, around_cache: bool = False, units: int | None = None) -> Stages:
    """The stages of a matmul on ``units`` compute units (all, where not given)."""
    units = gpu.compute_units if units is None else units
    across = ceil(matmul.columns / TILE)
    tiles = ceil(matmul.rows / TILE) * across
    count = ceil(tiles / units)
    reads = memory_reads(gpu, matmul, units, around_cache=around_cache)
    flops_per_ns = gpu.matmul_flops_per_ns / gpu.compute_units
    written = matmul.output_bytes / count
    moved = reads / count + (0 if around_cache else written)
    products_ns = max(2.0 * TILE * TILE * matmul.depth / flops_per_ns, moved / gpu.memory_gb_per_s)
    products_ns += gpu.stage_us * 1e3
    write_ns = written / (gpu.memory_gb_per_s if around_cache else gpu.cache_gb_per_s)
    return Stages(count, products_ns, reads / count, written, write_ns)


def memory_reads(gpu: Gpu, matmul: Matmul, units: int, *, around_cache: bool) -> float:
    """Bytes that a matmul reads from memory."""
    first, second = BYTES * matmul.rows * matmul.depth, BYTES * matmul.depth * matmul.columns
    sweeps = max(1.0, matmul.rows * matmul.columns / (TILE * TILE) / max(units, ceil(matmul.rows / TILE)))
    passed = first + second / sweeps + (0 if around_cache else matmul.output_bytes / sweeps)
    kept = min(1.0, gpu.cache_mb * 2**20 / passed)
    return first + second + (sweeps - 1) * (1 - kept) * first


def matmul_ns(gpu: Gpu, matmul: Matmul, units: int | None = None) -> float:
    """Time of a matmul alone, on ``units`` compute units; without its launch."""
    return stages(gpu, matmul, units=units).ns
