"""How a fused matmul is cut into tiles, and the range over which it is tuned."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import jax
import jax.numpy as jnp

from disco_hlo.kernels.refusals import multiple, one_dtype, require

WARPGROUPS = 2
"""Warpgroups of a block that compute; a third moves the operands."""

MOST_BLOCKS = 1024
"""On a device that does not say how many multiprocessors it has."""

MOST_STEPS, MOST_PANEL, LARGEST_TILE = 64, 1 << 16, 1024
"""Beyond what shared memory and registers hold."""

Side = Literal["m", "n"]
"""A dimension of a matmul's result."""

HALF_TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


@dataclasses.dataclass(frozen=True)
class MatmulTiles:
    """The tiles of a matmul of (M, K) by (K, N), whose two computing warpgroups share a block's tile.

    Attributes:
        tile_m, tile_n: rows and columns that one warpgroup computes.
        tile_k: how much of K is multiplied in one step.
        steps: how many steps' operands are in shared memory at once; at least 2.
        split: the dimension along which the second warpgroup's tile lies beside the first's.
        minor: the dimension along which tiles that follow each other lie.
        panel: how many tiles along `minor` before the other dimension advances.
        remote_first: tiles that another device needs are computed first (communication-aware order); else in the
            order of their rows. All-gather + matmul has one order: the rows that are here first.
        slots: pieces of a warpgroup's tile that are on their way to memory at once. All-gather + matmul has its own.
        blocks: thread blocks; all multiprocessors where None.
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    steps: int = 4
    split: Side = "n"
    minor: Side = "m"
    panel: int = 8
    remote_first: bool = True
    slots: int = 2
    blocks: int | None = None

    @property
    def block_m(self) -> int:
        """Rows of a block's tile."""
        return self.tile_m * (WARPGROUPS if self.split == "m" else 1)

    @property
    def block_n(self) -> int:
        """Columns of a block's tile."""
        return self.tile_n * (WARPGROUPS if self.split == "n" else 1)

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of what is stored at once: 64 × 64 keeps four pieces in 32 KiB."""
        return min(self.tile_m, 64), min(self.tile_n, 64)


def blocks_of(kernel: str, tiles: MatmulTiles) -> int:
    """How many thread blocks run: one on each multiprocessor, unless the tiles say.

    Raises:
        KernelRefusedError: fewer than one, or more than run at once: those that run would wait for them.
    """
    there = int(getattr(jax.devices()[0], "core_count", None) or MOST_BLOCKS)
    blocks = there if tiles.blocks is None else tiles.blocks
    require(1 <= blocks <= there, kernel, f"tiles.blocks must be from 1 to {there}, got {blocks}")
    return blocks


def within(kernel: str, tiles: MatmulTiles, **bounds: tuple[int, int]) -> None:
    """Refuse tiles of which a number is out of bounds: a kernel of thousands of steps takes for ever to lower.

    Raises:
        KernelRefusedError: naming the number.
    """
    for name, (least, most) in bounds.items():
        came = getattr(tiles, name)
        require(least <= came <= most, kernel, f"tiles.{name} must be from {least} to {most}, got {came}")


def check_matmul(kernel: str, lhs: jax.Array, rhs: jax.Array, rows: int, tiles: MatmulTiles) -> None:
    """Refuse what a tiled matmul of `rows` rows at a time cannot compute.

    Raises:
        KernelRefusedError: other dtypes than bfloat16 and float16, shapes that do not fit each other or the tiles.
    """
    one_dtype(kernel, {"lhs": lhs, "rhs": rhs}, HALF_TYPES)
    met = lhs.ndim == rhs.ndim == 2 and lhs.shape[1] == rhs.shape[0]
    require(met, kernel, f"needs an (M, K) and a (K, N) array, got {lhs.shape} and {rhs.shape}")
    within(kernel, tiles, steps=(2, MOST_STEPS), slots=(2, MOST_STEPS), panel=(1, MOST_PANEL))
    within(kernel, tiles, tile_m=(1, LARGEST_TILE), tile_n=(1, LARGEST_TILE), tile_k=(1, LARGEST_TILE))
    multiple(kernel, "tiles.tile_m", tiles.tile_m, 64, "rows of a warpgroup's instruction")
    multiple(kernel, "tiles.tile_n", tiles.tile_n, 8, "columns of a warpgroup's instruction")
    multiple(kernel, "rows of one device", rows, tiles.block_m, "rows of a block's tile")
    multiple(kernel, "N", rhs.shape[1], tiles.block_n, "columns of a block's tile")
    multiple(kernel, "K of one device", lhs.shape[1], tiles.tile_k, "tiles.tile_k")
    least = 2 * tiles.tile_k
    require(lhs.shape[1] >= least, kernel, f"K of one device must be at least {least}, got {lhs.shape[1]}")


# Rows and columns of a warpgroup's tile, and where the second warpgroup's lies: what fits into shared memory.
_SHAPES: tuple[tuple[int, int, Side], ...] = (
    (128, 128, "n"),
    (128, 128, "m"),
    (256, 64, "n"),
    (128, 64, "n"),
    (128, 64, "m"),
)
_MINORS: tuple[Side, Side] = ("m", "n")

MATMUL_RANGE: tuple[MatmulTiles, ...] = tuple(
    MatmulTiles(tile_m=m, tile_n=n, split=split, minor=minor, panel=panel)
    for panel, minor, (m, n, split) in itertools.product((8, 16, 4), _MINORS, _SHAPES)
)
"""What a fused matmul is tuned over, the likeliest first: JAX's own range for Hopper."""

VECTOR_ROWS = 64
"""Rows of its tile, as in a tensor core's layout: a row lies in four threads."""
VECTOR_PIECE = 64
"""Columns that it multiplies at once: what a row of swizzled shared memory holds."""


VECTOR_RANGE: tuple[MatmulTiles, ...] = tuple(
    MatmulTiles(tile_m=VECTOR_ROWS, tile_n=8, tile_k=k, steps=steps)
    for k, steps in ((256, 6), (512, 3), (256, 4), (128, 12), (128, 8))
)
"""What a matrix × vector is tuned over: as many bytes on their way as shared memory holds, first. The warpgroups share
the rows of a tile, each with a half of every step."""


LANES = 128
"""Threads of a warpgroup."""
VECTOR = 4
"""Neighbours that a thread loads at once: the layout in which copies between memory and registers are fastest."""


@dataclasses.dataclass(frozen=True)
class UpdateTiles:
    """How an update is cut.

    Attributes:
        size: elements that a block updates at once; a multiple of 512, which is 16 bytes a thread.
        blocks: thread blocks; all multiprocessors, `blocks_each` times, where None.
        blocks_each: blocks that share a multiprocessor, so that one reads while another computes.
    """

    size: int = 2048
    blocks_each: int = 2
    blocks: int | None = None


UPDATE_RANGE: tuple[UpdateTiles, ...] = tuple(
    UpdateTiles(size=size, blocks_each=each)
    for size, each in itertools.product((2048, 1024, 4096), (2, 4, 1))
)
"""What an update is tuned over, the likeliest first."""

NORMED_RANGE: tuple[UpdateTiles, ...] = tuple(
    UpdateTiles(size=size, blocks_each=1) for size in (2048, 4096, 1024)
)
"""What an update is tuned over whose blocks wait for each other, so that all run at once, the likeliest first."""
