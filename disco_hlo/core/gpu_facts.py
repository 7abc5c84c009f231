"""What XLA:GPU's emitters look at in an op, as numbers per node.

XLA picks the code generator of a fusion by its *heroes*: reductions that a block of threads does
together, and transposes done tile by tile through shared memory. Which op is one depends on the op
and its shapes alone, so it is computed once per graph, into flat arrays that compiled code can read
as they are. The rules made of them are in ``legality_gpu``. They follow XLA as of jax 0.11:
``reduction_utils.cc``, ``ir_emission_utils.cc``, ``gpu_fusible.cc``, ``hlo_fusion_analysis.cc``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.core.gpu_heroes import (
    WARP,
    Reduction,
    Transpose,
    block_reduction,
    element_bits,
    is_row_major,
    tiled_transpose,
)
from disco_hlo.hlo.flat_graph import flat_graph, flat_shapes
from disco_hlo.hlo.graph import Graph, Kind, Node, Shape, once_per_graph
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
