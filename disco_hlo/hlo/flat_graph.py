"""Who reads whom in a graph: as flat arrays, from which whatever compiled code runs on is made, and through bitcasts.

A bitcast shows a value in another shape and takes no time. So strategies name ops only, and a kernel is its ops with
all bitcasts through which they read: it has each value that it reads under one name, and leaves the ops themselves.
What nothing but a kernel reads by another shape is written where it is read: in another kernel, or next to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph, Kind, Shape, is_cloned, once_per_graph


class FlatGraph(NamedTuple):
    """A graph's edges and what is asked of every node. Arrays are never written."""

    kind: NDArray[np.int64]
    """``[nodes]``: ``Kind``."""
    first: NDArray[np.int64]
    """``[nodes]``: ``Graph.first_of_key``."""
    example: NDArray[np.int64]
    """``[keys]``: the first node of each key, ascending."""
    of_key: NDArray[np.int64]
    """``[nodes]``: place in ``example`` of the first node with the key of each."""
    is_bitcast: NDArray[np.bool_]
    """``[nodes]``"""
    is_cloned: NDArray[np.bool_]
    """``[nodes]``: :func:`~disco_hlo.hlo.graph.is_cloned`."""
    operand_at: NDArray[np.int64]
    """``[nodes + 1]``: where the operands of each node begin in ``operand``."""
    operand: NDArray[np.int64]
    """As written, repeats included."""

    @property
    def reader(self) -> NDArray[np.int64]:
        """For each entry of ``operand`` the node that reads it."""
        return np.repeat(np.arange(self.first.size), np.diff(self.operand_at))

    @property
    def shown(self) -> NDArray[np.int64]:
        """``[nodes]``: of a bitcast what it shows, directly or through others; any other node itself."""
        shown = np.arange(self.first.size)
        shown[self.is_bitcast] = self.operand[self.operand_at[:-1][self.is_bitcast]]
        while self.is_bitcast[shown].any():
            shown = shown[shown]
        return shown


@once_per_graph
def flat_graph(graph: Graph) -> FlatGraph:
    """The arrays of ``graph``."""
    nodes = graph.nodes
    kind = np.fromiter([node.kind for node in nodes], np.int64, len(nodes))
    cloned = np.zeros(len(nodes), np.bool_)
    for x in np.flatnonzero(kind == Kind.CONSTANT).tolist():
        cloned[x] = is_cloned(nodes[x])
    bitcast = np.fromiter([node.opcode == "bitcast" for node in nodes], np.bool_, len(nodes))
    first = np.array(graph.first_of_key, np.int64)
    keys = np.unique(first, return_inverse=True)
    return FlatGraph(kind, first, *keys, bitcast, cloned, *flat_lists([node.operands for node in nodes]))


class FlatShapes(NamedTuple):
    """The shapes of a graph. Nodes have few different ones, so what follows from a shape is found once for each."""

    distinct: tuple[Shape, ...]
    """In the order of the first nodes that have them."""
    of_key: NDArray[np.int64]
    """``[keys]``: place in ``distinct``, for each of ``FlatGraph.example``."""
    geometry: NDArray[np.int64]
    """``[distinct]``: equal numbers, equal dimensions and layout, whatever the element type."""
    elements: NDArray[np.int64]
    """``[distinct]``: ``Shape.element_count``."""
    reads_in_place: NDArray[np.bool_]
    """``[keys]``: whether all operands that have dimensions have the node's own, in its layout."""


@once_per_graph
def flat_shapes(graph: Graph) -> FlatShapes:
    """The shapes of ``graph``."""
    flat = flat_graph(graph)
    number: dict[object, int] = {}
    distinct: list[Shape] = []
    of_key = np.empty(flat.example.size, np.int64)
    for key, x in enumerate(flat.example.tolist()):
        shape = graph.nodes[x].shape  # its fields are hashed in half the time that it takes
        of_key[key] = place = number.setdefault(
            (shape.dtype, shape.dims, shape.layout, shape.elements), len(distinct)
        )
        if place == len(distinct):
            distinct.append(shape)
    geometries: dict[object, int] = {}
    geometry = [geometries.setdefault((shape.dims, shape.layout), len(geometries)) for shape in distinct]
    flat_geometry = np.array(geometry, np.int64)
    has_dims = np.array([bool(shape.dims) for shape in distinct], np.bool_)
    of_node = of_key[flat.of_key]
    read, own = of_node[flat.operand], of_node[flat.reader]
    moved = flat.reader[has_dims[read] & (flat_geometry[read] != flat_geometry[own])]
    in_place = np.ones(len(graph), np.bool_)
    in_place[moved] = False
    elements = np.array([shape.element_count for shape in distinct], np.int64)
    return FlatShapes(tuple(distinct), of_key, flat_geometry, elements, in_place[flat.example])


def flat_users(graph: Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``Graph.users``: ``[nodes + 1]`` where each list begins, and all of them one after the other."""
    flat, count = flat_graph(graph), len(graph)
    read, user = np.divmod(ascending(flat.operand * count + flat.reader), count)
    return grouped(read, user, count)


# Bitcasts ---------------------------------------------------------------------------------------


@once_per_graph
def behind_bitcasts(graph: Graph) -> tuple[int, ...]:
    """For each node what it shows: a bitcast what it reads, directly or through others, any other node itself."""
    return tuple(flat_graph(graph).shown.tolist())


def kernel_nodes(graph: Graph, ops: Iterable[int]) -> tuple[int, ...]:
    """All nodes of the kernel that computes ``ops``, ascending: these and the bitcasts through which they read."""
    read, inside = _bitcasts_read(graph), {*ops}
    return tuple(sorted(inside.union(*(read[x] for x in inside))))


@once_per_graph
def _bitcasts_read(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each node the bitcasts through which it reads."""
    found: list[tuple[int, ...]] = []
    for node in graph.nodes:
        read = [x for x in node.operands if graph.nodes[x].opcode == "bitcast"]
        found.append(tuple(dict.fromkeys(y for x in read for y in (x, *found[x]))) if read else ())
    return tuple(found)


def as_kernel(
    graph: Graph, nodes: Iterable[int], results: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A kernel as a module has it, wherever its bitcasts stand there: its ops, and those whose values leave it; both
    ascending."""
    shown = behind_bitcasts(graph)
    ops = [x for x in nodes if shown[x] == x]
    return tuple(sorted(ops)), tuple(sorted({shown[x] for x in results}))


def readers(graph: Graph, node: int) -> tuple[int, ...]:
    """The ops that read a node's value, bitcasts looked through; a bitcast nobody reads counts itself."""
    found: dict[int, None] = {}
    pending = [node]
    while pending:
        current = pending.pop()
        users = graph.users[current]
        if not users:
            found[current] = None
        for user in users:
            if graph.nodes[user].opcode == "bitcast":
                pending.append(user)
            else:
                found[user] = None
    return tuple(found)


# Lists that lie one after the other -------------------------------------------------------------


def flat_lists(lists: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``[lists + 1]`` where each list begins, and all of them one after the other."""
    start = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(items) for items in lists], out=start[1:])
    return start, np.fromiter(chain.from_iterable(lists), np.int64, int(start[-1]))


def chosen_lists(
    start: NDArray[np.int64], items: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Some of the lists that lie one after the other in ``items``, as :func:`flat_lists` has them."""
    lengths = start[chosen + 1] - start[chosen]
    return np.concatenate([[0], np.cumsum(lengths)]), items[stretches(start[chosen], lengths)]


def stretches(start: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions start[0], start[0] + 1, .. for lengths[0] of them, then those from start[1] on, and so forth."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if ends.size else 0) + np.repeat(start - ends + lengths, lengths)


def ascending(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """``numbers`` sorted, without repeats, in a tenth of the time of ``numpy.unique``."""
    found: NDArray[np.int64] = np.sort(numbers)
    distinct: NDArray[np.int64] = found[np.diff(found, prepend=found[:1] - 1) != 0]
    return distinct


def grouped(
    numbers: NDArray[np.int64], items: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``items`` by their ``numbers``, else in their order: ``[count + 1]`` where those of each begin, and all."""
    start = np.zeros(count + 1, np.int64)
    np.cumsum(np.bincount(numbers, minlength=count), out=start[1:])
    return start, items[np.argsort(numbers, kind="stable")]
