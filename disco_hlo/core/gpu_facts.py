"""What XLA:GPU's emitters look at in an op, as numbers per node.

XLA picks the code generator of a fusion by its *heroes*: reductions over or beside neighbouring dimensions, which a
block of threads does together, and transposes that part neighbours in memory, which are done tile by tile through
shared memory. Which op is one depends on the op and its shapes alone, so it is computed once per graph, into flat
arrays that compiled code can read as they are. The rules made of them are in ``legality_gpu``. They follow XLA as of
jax 0.11: ``reduction_utils.cc``, ``ir_emission_utils.cc``, ``gpu_fusible.cc``, ``hlo_fusion_analysis.cc``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise, repeat
from math import prod
from operator import gt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import DTYPE_BYTES, Graph, Kind, Node, Shape, flat_graph, flat_shapes, once_per_graph
from disco_hlo.hlo.opcodes import ELEMENTWISE

# Bits of GpuFacts.flags.
CHAIN: Final = 1
"""Trivial, with one operand: a hero may stand behind a chain of such ops."""
WEB: Final = 2
"""Trivial, with at most three operands: a transpose or concatenate may stand behind a web of such ops."""
RACE_FREE: Final = 4
"""A reduction that one block finishes, so that ops may follow it in its kernel."""
LONG_REDUCE: Final = 8
"""A reduction of 16 elements or more into one."""
NESTED_TRANSPOSE: Final = 16
"""A transpose that is not done by tiles."""
MOVES: Final = 32
"""Moves elements: a transpose, or a copy to another layout."""
CONCATENATE: Final = 64
SCATTER: Final = 128
LOOP_PRODUCER: Final = 256
"""May be computed element by element wherever its value is wanted."""
SAME_PLACE: Final = 512
"""Element i of the result, counted in memory, needs element i of every array operand of its size."""
_BY_OPCODE: Final = {"copy": MOVES, "concatenate": CONCATENATE, "scatter": SCATTER}
_KNOWN_PRODUCERS = frozenset({
    "bitcast", "broadcast", "concatenate", "copy", "dynamic-slice", "gather", "iota", "pad", "reduce",
    "reduce-window", "reshape", "reverse", "slice", "transpose",
})  # fmt: skip
WARP: Final = 32


class GpuFacts(NamedTuple):
    """One entry per node in each array, int64."""

    flags: NDArray[np.int64]
    reduction: NDArray[np.int64]
    """Reductions done by a block: equal numbers, same kernel layout. -1 for other ops."""
    transpose: NDArray[np.int64]
    """Transposes done by tiles: equal numbers, same kernel layout. -1 for other ops."""
    loop: NDArray[np.int64]
    """Equal numbers: one loop can produce results of both shapes, whatever their element types."""
    operand_loop: NDArray[np.int64]
    """``loop`` of the first operand's shape; -1 where there is none."""
    shared_bytes: NDArray[np.int64]
    """Shared memory that the op takes inside any kernel, hero or not (as XLA budgets it)."""


@once_per_graph
def gpu_facts(graph: Graph) -> GpuFacts:
    """The facts of ``graph``. All of it follows from a node's shapes and attributes: found for the first node of
    each key."""
    flat, shapes = flat_graph(graph), flat_shapes(graph)
    place = flat.of_key
    nodes = [graph.nodes[x] for x in flat.example.tolist()]
    operands = [graph.nodes[node.operands[0]].shape if node.operands else None for node in nodes]
    reductions = [
        block_reduction(node, shape) if node.opcode == "reduce" else None
        for node, shape in zip(nodes, operands, strict=True)
    ]
    transposes = [
        tiled_transpose(node, shape) if node.opcode == "transpose" else None
        for node, shape in zip(nodes, operands, strict=True)
    ]
    layouts = [tile and (tile.dimensions, tile.permutation, tile.bits) for tile in transposes]
    loop = _array(_numbered(map(_loop, shapes.distinct)))[shapes.of_key][place]
    operand_loop = np.full(len(graph), -1, np.int64)
    reading = np.flatnonzero(np.diff(flat.operand_at))
    operand_loop[reading] = loop[flat.operand[flat.operand_at[reading]]]
    in_place = shapes.reads_in_place.tolist()
    return GpuFacts(
        flags=_array(map(_flags, repeat(graph), nodes, reductions, transposes, in_place))[place],
        reduction=_array(_numbered(reductions))[place],
        transpose=_array(_numbered(layouts))[place],
        loop=loop,
        operand_loop=operand_loop,
        shared_bytes=_array(map(_shared_bytes, repeat(graph), nodes, reductions, transposes))[place],
    )


def _array(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [-1 if key is None else numbers.setdefault(key, len(numbers)) for key in keys]


def _loop(shape: Shape) -> Hashable:
    """What a loop over ``shape`` iterates: its elements in memory order, or, where they do not lie in
    the order of the dimensions, these dimensions in this layout."""
    if shape.dtype == "tuple":
        return shape
    return shape.element_count if is_row_major(shape) else (shape.dims, shape.layout)


def _flags(
    graph: Graph, node: Node, reduction: Reduction | None, transpose: Transpose | None, reads_in_place: bool
) -> int:
    if node.kind in (Kind.PARAMETER, Kind.CONSTANT):
        return 0
    flags = 0
    if _is_trivial(graph, node):
        flags |= CHAIN if len(node.operands) == 1 else 0
        flags |= WEB if len(node.operands) <= 3 else 0
        flags |= SAME_PLACE if _keeps_place(graph, node, reads_in_place) else 0
    if node.opcode == "reduce":
        flags |= RACE_FREE if reduction is not None and reduction.is_race_free else 0
        flags |= LONG_REDUCE if _reduced_elements(graph, node) >= 16 else 0
    elif node.opcode == "transpose":
        flags |= MOVES if transpose is not None else MOVES | NESTED_TRANSPOSE
    else:
        flags |= _BY_OPCODE.get(node.opcode, 0)
    return flags | LOOP_PRODUCER if _is_loop_producer(node) else flags


def _is_trivial(graph: Graph, node: Node) -> bool:
    """XLA's ``IsIntermediate``; in canonical form a transpose that moves nothing is a bitcast."""
    if not node.operands:
        return False
    operand = graph.nodes[node.operands[0]].shape
    if node.opcode == "copy":
        return operand == node.shape
    if node.opcode == "reshape":
        return is_row_major(operand) and is_row_major(node.shape)
    return node.opcode == "bitcast" or node.opcode in ELEMENTWISE


def _keeps_place(graph: Graph, node: Node, reads_in_place: bool) -> bool:
    if node.opcode in ("bitcast", "reshape"):
        own, other = node.shape, graph.nodes[node.operands[0]].shape
        return (own.size_bytes, own.element_count) == (other.size_bytes, other.element_count)
    return reads_in_place


def _is_loop_producer(node: Node) -> bool:
    if node.kind is not Kind.FUSIBLE and node.opcode != "bitcast":
        return False
    return node.shape.dtype != "tuple" and (node.opcode in ELEMENTWISE or node.opcode in _KNOWN_PRODUCERS)


def _reduced_elements(graph: Graph, node: Node) -> int:
    """Elements of the operand for each element of the result; 0 for reductions of several arrays."""
    if not node.shape.element_count:
        return 0
    return graph.nodes[node.operands[0]].shape.element_count // node.shape.element_count


def _shared_bytes(graph: Graph, node: Node, reduction: Reduction | None, transpose: Transpose | None) -> int:
    if transpose is not None:
        return transpose.shared_bytes
    if reduction is None:
        return 0
    arrays = node.operands[: len(node.operands) // 2]
    width = sum(element_bits(graph.nodes[array].shape) // 8 for array in arrays)
    # One value per warp of a row; for columns a tile of 32 x (4 x 32 + 1).
    return WARP * width if reduction.is_row else WARP * (4 * WARP + 1) * width


def is_row_major(shape: Shape) -> bool:
    """Whether the last dimension is the one whose neighbours are neighbours in memory, and so on."""
    layout = shape.layout
    return len(layout) == len(shape.dims) and all(map(gt, layout, layout[1:]))


def element_bits(shape: Shape) -> int:
    """Bits of one element as it lies in memory."""
    return int(8 * DTYPE_BYTES[shape.dtype])


# Reductions -------------------------------------------------------------------------------------


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


# Transposes -------------------------------------------------------------------------------------


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
