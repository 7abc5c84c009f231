"""What the analytic model knows of a graph, as flat arrays that compiled code can read.

An emitted kernel is a loop nest over the elements of its result; what stands inside is evaluated
where its index needs it. So for every operand of every node the tables say which of the reader's
dimensions each of its dimensions follows, in physical order (major to minor), and which loops the
reader adds (a reduce walks over what it reduces). ``kernel_cost`` composes these maps from the
results of a kernel back to what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import (
    DTYPE_BYTES,
    Graph,
    Node,
    Shape,
    flat_graph,
    flat_lists,
    flat_shapes,
    stretches,
)

# Rows of KernelTables.node: offsets into ``edge``. The lists of a node lie one after the other, so each
# ends where the next row's begins, and the last where the next node's first does.
OPERANDS_AT: Final = 0
"""Pairs (operand, offset of its map). Bitcasts are looked through, scalar constants left out; none for tuples."""
EXTENTS_AT: Final = 1
"""Extents of the node's dimensions, major to minor."""
LOOPS_AT: Final = 2
"""Extents of the loops that computing one element adds."""
WRITTEN: Final = 3
"""Not a list: the node whose elements a kernel of this op alone writes. Its own, but an update of an array that is no
copy writes over it (XLA shares the buffer): as many elements as the update has."""
NODE_ROWS: Final = 4

# Values in a map, one for each dimension of the operand, major to minor: a dimension of the reader, or
UNUSED: Final = -1
"""no loop at all (the extent is 1),"""
ALL: Final = -2
"""all loops of the reader and those it adds,"""
ADDED: Final = -3
"""minus k: the k-th loop that the reader adds."""

# Rows of KernelTables.value.
ELEMENTS: Final = 0
ITEM_BYTES: Final = 1
ELEMENT_NS: Final = 2
"""Time of one evaluation of one element."""
VALUE_ROWS: Final = 3

# KernelTables.constant.
NS_PER_BYTE: Final = 0
"""Of memory traffic, where there is no curve."""
KERNEL_NS: Final = 1
"""The shortest kernel."""
STRIDED_NS: Final = 2
"""Of reading one element across the memory's grain, beyond its bytes."""
HOISTS: Final = 3
"""1 where loop-invariant values are computed once per outer iteration (CPU), else 0."""
CONSTANTS: Final = 4

_OVERWRITTEN = frozenset({"dynamic-update-slice", "get-tuple-element", "parameter"})
"""What makes an array that an update writes over, where its kernel does not compute it."""
_SAME_POSITIONS = frozenset({"slice", "pad", "reverse", "dynamic-slice", "concatenate"})
_REARRANGING = frozenset({"reshape", "bitcast"})
_NEVER_INSIDE = frozenset({"tuple", "get-tuple-element", "opt-barrier"})
"""No kernel computes these, so what they read needs no maps."""
_MOVING = frozenset({"broadcast", "transpose", "reduce", "gather", "reduce-window"})
"""Where an operand like the result need not be read in its order."""


class KernelTables(NamedTuple):
    """A graph and a device as the compiled cost function reads them. Arrays are never written."""

    node: NDArray[np.int32]
    """``[NODE_ROWS, nodes + 1]``"""
    edge: NDArray[np.int32]
    """The lists."""
    value: NDArray[np.float64]
    """``[VALUE_ROWS, nodes]``"""
    curve: NDArray[np.float64]
    """``[2, points]``: bytes moved and measured ns of streaming kernels, both ascending."""
    constant: NDArray[np.float64]
    """``[CONSTANTS]``"""


class Structure(NamedTuple):
    """The half of the tables that depends on the graph alone."""

    node: NDArray[np.int32]
    edge: NDArray[np.int32]
    elements: NDArray[np.float64]
    item_bytes: NDArray[np.float64]


def structure(graph: Graph) -> Structure:
    """Index maps and sizes of every node of the graph."""
    flat = flat_graph(graph)
    first, of_key = flat.example, flat.of_key
    examples = [graph.nodes[x] for x in first.tolist()]
    is_mapped = np.array([node.opcode not in _NEVER_INSIDE for node in examples])[of_key]
    shape_of = flat_shapes(graph).of_key[of_key]
    arrays = [shape.first_array for shape in flat_shapes(graph).distinct]
    maps, map_of, target = _edges(graph, examples, of_key, is_mapped, arrays, shape_of.tolist())
    kept = ~flat.is_cloned[target] & is_mapped[flat.reader]
    reader = flat.reader[kept]
    read = np.bincount(reader, minlength=len(graph))
    extents_at, extents = flat_lists([_physical_extents(shape) for shape in arrays])
    loops_at, loops = flat_lists([_added_loops(graph, node) for node in examples])
    rank, added = np.diff(extents_at)[shape_of], np.diff(loops_at)[of_key]
    map_at, pool = flat_lists(
        [index_map or (UNUSED,) for index_map in maps]
    )  # no two maps begin at one place
    begin = pool.size + np.concatenate([[0], np.cumsum(2 * read + rank + added)])
    node = np.full((NODE_ROWS, len(graph) + 1), begin[-1], np.int32)
    node[OPERANDS_AT] = begin
    node[EXTENTS_AT, :-1] = begin[:-1] + 2 * read
    node[LOOPS_AT, :-1] = node[EXTENTS_AT, :-1] + rank
    node[WRITTEN, :-1] = _written(graph)
    edge = np.zeros(int(begin[-1]) + 1, np.int32)
    edge[: pool.size] = pool
    pair = begin[reader] + 2 * (np.arange(reader.size) - (np.cumsum(read) - read)[reader])
    edge[pair], edge[pair + 1] = target[kept], map_at[map_of[kept]]
    edge[stretches(begin[:-1] + 2 * read, rank)] = extents[stretches(extents_at[shape_of], rank)]
    edge[stretches(begin[:-1] + 2 * read + rank, added)] = loops[stretches(loops_at[of_key], added)]
    return Structure(
        node,
        edge,
        np.array([shape.element_count for shape in arrays], np.float64)[shape_of],
        np.array([DTYPE_BYTES.get(shape.dtype, 4) for shape in arrays], np.float64)[shape_of],
    )


def _written(graph: Graph) -> list[int]:
    found = list(range(len(graph)))
    for node in graph.nodes:
        if node.opcode == "dynamic-update-slice":
            whole = graph.nodes[node.operands[0]]
            while whole.opcode == "bitcast":
                whole = graph.nodes[whole.operands[0]]
            if whole.opcode in _OVERWRITTEN:
                found[node.id] = node.operands[1]
    return found


def _edges(
    graph: Graph,
    examples: Sequence[Node],
    of_key: NDArray[np.int64],
    is_mapped: NDArray[np.bool_],
    arrays: Sequence[Shape],
    shape_of: Sequence[int],
) -> tuple[list[tuple[int, ...]], NDArray[np.int64], NDArray[np.int64]]:
    """(maps, and for each operand of all nodes which of them it has and what is read), looked at through bitcasts.

    Args:
        examples: a node of each key; operands of nodes of equal key have equal maps.
        of_key: for each node which of them is its like.
        is_mapped: for each node whether its operands need maps.
        arrays: the shapes that there are.
        shape_of: for each node which of them it has.
    """
    flat = flat_graph(graph)
    number: dict[tuple[int, ...], int] = {(): 0}
    elements = [shape.element_count for shape in arrays]
    slots = [
        len(node.operands) * [0]
        if node.opcode in _NEVER_INSIDE
        else [number.setdefault(one, len(number)) for one in _maps(node, arrays, elements, shape_of)]
        for node in examples
    ]
    slots_at, of_slot = flat_lists(slots)
    map_of = of_slot[stretches(slots_at[of_key], np.diff(flat.operand_at))]
    target, begin = flat.operand.copy(), flat.operand_at
    maps, composed = list(number), dict[tuple[int, int], int]()
    # What a bitcast shows is known by the time its readers come: they have larger numbers.
    for place in np.flatnonzero(flat.is_bitcast[flat.operand] & is_mapped[flat.reader]).tolist():
        shown = begin[target[place]]
        pair = int(map_of[place]), int(map_of[shown])
        if pair not in composed:
            # Of an operand's operand, where the one between adds no loops.
            both = tuple(maps[pair[0]][value] if value >= 0 else value for value in maps[pair[1]])
            composed[pair] = number.setdefault(both, len(number))
            maps += [both] if len(number) > len(maps) else []
        map_of[place], target[place] = composed[pair], target[shown]
    return maps, map_of, target


def _maps(
    node: Node, arrays: Sequence[Shape], elements: Sequence[int], shape_of: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """For each operand, which physical dimension of ``node`` each of its physical dimensions follows."""
    result, moves = arrays[shape_of[node.id]], node.opcode in _MOVING
    for number in node.operands:
        operand = arrays[shape_of[number]]
        if elements[shape_of[number]] == 1:
            yield (UNUSED,) * len(operand.dims)
        elif not moves and operand.dims == result.dims and operand.layout == result.layout:
            yield tuple(range(len(operand.dims)))
        else:
            yield _moved(node, operand, result)


def _moved(node: Node, operand: Shape, result: Shape) -> tuple[int, ...]:
    logical = _logical_map(node, operand, result)
    if logical is None and node.opcode in _REARRANGING:
        return _rearranged(_physical_extents(operand), _physical_extents(result))
    if logical is None:
        return (ALL,) * len(operand.dims)
    place = {dimension: position for position, dimension in enumerate(_major_to_minor(result))}
    return tuple(
        place[logical[dimension]] if logical[dimension] >= 0 else logical[dimension]
        for dimension in _major_to_minor(operand)
    )


def _logical_map(node: Node, operand: Shape, result: Shape) -> list[int] | None:
    """The same in logical dimensions, or None where there is no such correspondence."""
    rank = len(operand.dims)
    if node.opcode == "broadcast" and len(node.dimensions) == rank:
        return list(node.dimensions)
    if node.opcode == "transpose" and len(node.dimensions) == rank:
        return [node.dimensions.index(dimension) for dimension in range(rank)]
    if node.opcode == "reduce":
        kept = [dimension for dimension in range(rank) if dimension not in node.dimensions]
        if len(kept) == len(result.dims):
            added = {dimension: ADDED - k for k, dimension in enumerate(sorted(node.dimensions))}
            return [
                added.get(dimension, kept.index(dimension) if dimension in kept else ALL)
                for dimension in range(rank)
            ]
    same = operand.dims == result.dims or node.opcode in _SAME_POSITIONS
    if same and rank == len(result.dims) and node.opcode not in ("gather", "reduce-window"):
        return list(range(rank))
    return None


def _rearranged(operand: Sequence[int], result: Sequence[int]) -> tuple[int, ...]:
    """Map of a reshape: dimensions that stay to each other, those that merge or split to the minor-most."""
    found = [UNUSED] * len(operand)
    i = j = 0
    while i < len(operand) and j < len(result):
        group, left, right = [i], operand[i], result[j]
        while left != right:
            if left < right and i + 1 < len(operand):
                i += 1
                left *= operand[i]
                group.append(i)
            elif right < left and j + 1 < len(result):
                j += 1
                right *= result[j]
            else:
                return (ALL,) * len(operand)
        for position in group:
            found[position] = j if operand[position] > 1 else UNUSED
        i, j = i + 1, j + 1
    return tuple(found)


def _added_loops(graph: Graph, node: Node) -> list[int]:
    if node.opcode not in ("reduce", "reduce-window") or not node.operands:
        return []
    operand = graph.nodes[node.operands[0]].shape.first_array
    if node.opcode == "reduce":
        return [
            operand.dims[dimension] for dimension in sorted(node.dimensions) if dimension < len(operand.dims)
        ]
    return [node.flops // max(node.shape.first_array.element_count, 1) + 1]


def _major_to_minor(shape: Shape) -> tuple[int, ...]:
    if len(shape.layout) == len(shape.dims):
        return tuple(reversed(shape.layout))
    return tuple(range(len(shape.dims)))


def _physical_extents(shape: Shape) -> tuple[int, ...]:
    return tuple([shape.dims[dimension] for dimension in _major_to_minor(shape)])
