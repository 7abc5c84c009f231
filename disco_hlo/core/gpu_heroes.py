"""Reductions and transposes that XLA:GPU does by blocks of threads.

XLA has fast kernels for reductions over or beside neighbouring dimensions, and for transposes that
part neighbours in memory. Whether one of them takes an op depends on its shapes alone. The rules
follow XLA as of jax 0.11: ``reduction_utils.cc``, ``ir_emission_utils.cc``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import gt
from typing import Final

from disco_hlo.hlo.graph import DTYPE_BYTES, Node, Shape

WARP: Final = 32


def is_row_major(shape: Shape) -> bool:
    """Whether the last dimension is the one whose neighbours are neighbours in memory, and so on."""
    layout = shape.layout
    return len(layout) == len(shape.dims) and all(map(gt, layout, layout[1:]))


def element_bits(shape: Shape) -> int:
    """Bits of one element as it lies in memory."""
    return int(8 * DTYPE_BYTES[shape.dtype])


# Reductions ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction that one block of threads does together."""

    is_row: bool
    """Over neighbours in memory."""
    extents: tuple[int, int, int]
    """Of rows: reduced, kept, reduced. Of columns: kept, reduced, kept."""

    @property
    def is_race_free(self) -> bool:
        """Whether one block does a whole result, so that nothing is added up across blocks."""
        if self.is_row:
            return self.extents[2] <= 16 * 1024 and self.extents[0] <= 8
        return self.extents[1] <= 128 * WARP

    @property
    def is_worth_a_block(self) -> bool:
        """XLA's ``IsUnnestedReductionFasterThanElemental``."""
        _, major, minor = self.extents
        if self.is_row:
            return minor >= WARP or WARP % minor == 0
        return not (
            major < WARP
            or (major < 2 * WARP and minor < WARP)
            or (major < 4 * WARP and minor < 8)
            or (major < 8 * WARP and minor < 3)
        )


def block_reduction(node: Node, operand: Shape | None) -> Reduction | None:
    """How a block does ``node``, or None where it is no reduction, or one done element by element.

    ``operand`` is the shape of its first operand (``IsReductionFromOrToContiguousDimensions``).
    """
    if node.opcode != "reduce" or operand is None or not operand.element_count:
        return None
    reduced = set(node.dimensions)
    kept = set(range(len(operand.dims))) - reduced
    if not (_adjacent(operand, kept) or _adjacent(operand, reduced)):
        return None
    found = _reduction_kind(operand, kept, reduced)
    return found if found.is_worth_a_block else None


def _adjacent(shape: Shape, dimensions: set[int]) -> bool:
    """Whether these dimensions are neighbours in the layout."""
    places = sorted(place for place, dimension in enumerate(shape.layout) if dimension in dimensions)
    return all(b == a + 1 for a, b in pairwise(places))


def _reduction_kind(operand: Shape, kept: set[int], reduced: set[int]) -> Reduction:
    if not kept:
        return Reduction(True, (1, 1, operand.element_count))
    if _adjacent(operand, kept):
        major, middle, minor = _around(operand, kept)
        if middle == 1:
            return Reduction(True, (1, 1, major * minor))
        if minor == 1:
            return Reduction(False, (1, major, middle))
        return Reduction(True, (major, middle, minor))
    major, middle, minor = _around(operand, reduced)
    if minor == 1:
        return Reduction(True, (1, major, middle))
    return Reduction(False, (major, middle, minor))


def _around(shape: Shape, middle: set[int]) -> tuple[int, int, int]:
    """Elements of the dimensions further out than ``middle``, of ``middle``, and further in."""
    places = [place for place, dimension in enumerate(shape.layout) if dimension in middle]
    inner, outer = min(places), max(places)
    extents = [shape.dims[dimension] for dimension in shape.layout]
    return prod(extents[outer + 1 :]), prod(extents[inner : outer + 1]), prod(extents[:inner])


# Transposes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transpose:
    """A transpose done by tiles, neighbouring dimensions that stay together merged."""

    dimensions: tuple[int, ...]
    """Of the result."""
    permutation: tuple[int, ...]
    bits: int
    shared_bytes: int


def tiled_transpose(node: Node, operand: Shape | None) -> Transpose | None:
    """How ``node`` is done by tiles, or None where it is not (``GetDescriptionForTiledTransposeEmitter``).

    ``operand`` is the shape of its first operand.
    """
    if node.opcode != "transpose" or operand is None or not node.shape.element_count:
        return None
    if not (is_row_major(operand) and is_row_major(node.shape)):
        return None
    dimensions, permutation = _merged(node.shape.dims, node.dimensions, operand.dims)
    if len(permutation) < 2:
        return None
    bits = element_bits(node.shape)
    shared_bytes = _tile_bytes(dimensions, permutation, bits)
    return Transpose(dimensions, permutation, bits, shared_bytes) if shared_bytes else None


def _merged(
    result: tuple[int, ...], permutation: tuple[int, ...], operand: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Result dimensions and permutation without dimensions of one element, runs merged into one."""
    moved = [pair for pair in zip(result, permutation, strict=True) if operand[pair[1]] != 1]
    order = sorted(source for _, source in moved)
    runs: list[list[int]] = []
    for extent, source in moved:
        place = order.index(source)
        if runs and place == runs[-1][1] + 1:
            runs[-1] = [runs[-1][0] * extent, place, runs[-1][2]]
        else:
            runs.append([extent, place, place])
    first = sorted(start for _, _, start in runs)
    return tuple(extent for extent, _, _ in runs), tuple(first.index(start) for _, _, start in runs)


def _tile_bytes(dimensions: tuple[int, ...], permutation: tuple[int, ...], bits: int) -> int:
    """Shared memory of the tiles, 0 where XLA does not transpose by tiles."""
    last = len(dimensions) - 1
    source = {place: extent for extent, place in zip(dimensions, permutation, strict=True)}
    if _is_packed(dimensions, permutation, source, bits):
        return WARP * 4 * WARP * (32 // bits)
    if permutation[last] == last:
        swapped = min(source[last - 1], dimensions[last - 1])
        fits = bits * dimensions[last] <= 64 and bits * dimensions[last] * swapped >= 8 * 16
        return -(-WARP * (WARP + 1) * bits * dimensions[last] // 8) if fits else 0
    inner, outer = source[last], dimensions[last]
    large = inner >= 16 and outer >= 16
    if bits == 4 or not (large or (inner >= 8 and outer >= 8 and inner * outer >= 64 * 128)):
        return 0
    return -(-WARP * (WARP + 1) * bits // 8)


def _is_packed(
    dimensions: tuple[int, ...], permutation: tuple[int, ...], source: dict[int, int], bits: int
) -> bool:
    """Whether elements of less than 32 bits are moved several at a time (XLA's packed transpose)."""
    last = len(dimensions) - 1
    if bits >= 32 or permutation[last] == last:
        return False
    vector = 32 // bits
    side = WARP * vector
    t1, t2 = source[last], dimensions[last]
    beside = dimensions[last - 1] if permutation[last - 1] == last - 1 else 1
    columns = min(t1, side)
    columns *= min(beside, side // columns)
    rows = min(t2, side)
    enough = columns >= 10 * vector and rows >= 10 * vector
    return enough and rows % vector == 0 and columns % vector == 0 and t2 % rows % vector == 0
