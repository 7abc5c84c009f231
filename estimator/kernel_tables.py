"""What the analytic model knows of a graph, as flat arrays that compiled code can read.

An emitted kernel is a loop nest over the elements of its result; what stands inside is evaluated
where its index needs it. So for every operand of every node the tables say which of the reader's
dimensions each of its dimensions follows, in physical order (major to minor), and which loops the
reader adds (a reduce walks over what it reduces). ``kernel_cost`` composes these maps from the
results of a kernel back to what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import DTYPE_BYTES, Graph, Node, Shape, is_cloned

# Rows of KernelTables.node: offsets into ``edge``. The lists of a node lie one after the other, so each
# ends where the next row's begins, and the last where the next node's first does.
OPERANDS_AT: Final = 0
"""Pairs (operand, offset of its map). Bitcasts are looked through, scalar constants left out."""
EXTENTS_AT: Final = 1
"""Extents of the node's dimensions, major to minor."""
LOOPS_AT: Final = 2
"""Extents of the loops that computing one element adds."""
NODE_ROWS: Final = 3

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

_SAME_POSITIONS = frozenset({"slice", "pad", "reverse", "dynamic-slice", "concatenate"})
_REARRANGING = frozenset({"reshape", "bitcast"})


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
    slots = _slot_maps(graph)
    maps = _edges(graph, slots)
    pool: list[int] = []
    rows: list[list[int]] = [[], [], []]
    offsets: dict[tuple[int, ...], int] = {}
    for reader in maps:
        for _, index_map in reader:
            if index_map not in offsets:
                offsets[index_map] = len(pool)
                pool.extend(index_map or (UNUSED,))  # no two maps begin at one place
    own: list[_Own] = []
    for reader, node, first in zip(maps, graph.nodes, graph.first_of_key, strict=True):
        own.append(own[first] if first < node.id else _own(graph, node))
        rows[OPERANDS_AT].append(len(pool))
        for target, index_map in reader:
            pool += (target, offsets[index_map])
        rows[EXTENTS_AT].append(len(pool))
        pool += own[-1].extents
        rows[LOOPS_AT].append(len(pool))
        pool += own[-1].loops
    return Structure(
        _closed(rows, len(pool)),
        np.array([*pool, 0], np.int32),
        np.array([one.elements for one in own], np.float64),
        np.array([one.item_bytes for one in own], np.float64),
    )


class _Own(NamedTuple):
    """What nodes of equal key share."""

    extents: tuple[int, ...]
    loops: list[int]
    elements: int
    item_bytes: float


def _own(graph: Graph, node: Node) -> _Own:
    shape = array_of(node.shape)
    loops = _added_loops(graph, node)
    return _Own(_physical_extents(shape), loops, shape.element_count, DTYPE_BYTES.get(shape.dtype, 4))


def array_of(shape: Shape) -> Shape:
    """The shape itself, or the first array of a tuple (the results of a variadic reduce are alike)."""
    while shape.dtype == "tuple" and shape.elements:
        shape = shape.elements[0]
    return shape


def _closed(rows: list[list[int]], end: int) -> NDArray[np.int32]:
    return np.array([[*row, end] for row in rows], np.int32)


def _slot_maps(graph: Graph) -> list[list[tuple[int, ...]]]:
    """The maps of every node's operands, shared by nodes of equal key."""
    found: list[list[tuple[int, ...]]] = []
    for node, first in zip(graph.nodes, graph.first_of_key, strict=True):
        known = first < node.id
        found.append(
            found[first] if known else [_map(graph, node, slot) for slot in range(len(node.operands))]
        )
    return found


def _edges(
    graph: Graph, slots: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[tuple[int, tuple[int, ...]]]]:
    """What every node reads, looked at through bitcasts, each with its map; without scalar constants."""
    cloned = [is_cloned(node) for node in graph.nodes]
    found = []
    for node in graph.nodes:
        read = []
        for operand, index_map in zip(node.operands, slots[node.id], strict=True):
            x = operand
            while not cloned[x] and graph.nodes[x].opcode == "bitcast":
                index_map = _composed(index_map, slots[x][0])
                x = graph.nodes[x].operands[0]
            if not cloned[x]:
                read.append((x, index_map))
        found.append(read)
    return found


def _composed(outer: tuple[int, ...], inner: tuple[int, ...]) -> tuple[int, ...]:
    """Map of an operand's operand, where the one between adds no loops."""
    return tuple(outer[value] if value >= 0 else value for value in inner)


def _map(graph: Graph, node: Node, slot: int) -> tuple[int, ...]:
    """Which physical dimension of ``node`` each physical dimension of operand ``slot`` follows."""
    operand = array_of(graph.nodes[node.operands[slot]].shape)
    result = array_of(node.shape)
    if operand.element_count == 1:
        return (UNUSED,) * len(operand.dims)
    logical = _logical_map(node, operand, result)
    if logical is None:
        extents = _physical_extents(operand), _physical_extents(result)
        return _rearranged(*extents) if node.opcode in _REARRANGING else (ALL,) * len(operand.dims)
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
    if not node.operands:
        return []
    operand = array_of(graph.nodes[node.operands[0]].shape)
    if node.opcode == "reduce":
        return [
            operand.dims[dimension] for dimension in sorted(node.dimensions) if dimension < len(operand.dims)
        ]
    if node.opcode == "reduce-window":
        elements = max(array_of(node.shape).element_count, 1)
        return [node.flops // elements + 1]
    return []


def _major_to_minor(shape: Shape) -> tuple[int, ...]:
    if len(shape.layout) == len(shape.dims):
        return tuple(reversed(shape.layout))
    return tuple(range(len(shape.dims)))


def _physical_extents(shape: Shape) -> tuple[int, ...]:
    return tuple(shape.dims[dimension] for dimension in _major_to_minor(shape))
