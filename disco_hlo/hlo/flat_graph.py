"""Who reads whom in a graph, as flat arrays: what everything that prepares a step for compiled code begins with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph, Kind, is_cloned


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


def flat_graph(graph: Graph) -> FlatGraph:
    """The arrays of ``graph``, made at the first call and kept with it."""
    known = vars(graph).get("_flat_graph")
    if isinstance(known, FlatGraph):
        return known
    nodes = graph.nodes
    kind = np.fromiter([node.kind for node in nodes], np.int64, len(nodes))
    cloned = np.zeros(len(nodes), np.bool_)
    for x in np.flatnonzero(kind == Kind.CONSTANT).tolist():
        cloned[x] = is_cloned(nodes[x])
    bitcast = np.fromiter([node.opcode == "bitcast" for node in nodes], np.bool_, len(nodes))
    first = np.array(graph.first_of_key, np.int64)
    keys = np.unique(first, return_inverse=True)
    found = FlatGraph(kind, first, *keys, bitcast, cloned, *flat_lists([node.operands for node in nodes]))
    vars(graph)["_flat_graph"] = found
    return found


def flat_lists(lists: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``[lists + 1]`` where each list begins, and all of them one after the other."""
    start = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(items) for items in lists], out=start[1:])
    return start, np.fromiter(chain.from_iterable(lists), np.int64, int(start[-1]))


def stretches(start: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions start[0], start[0] + 1, .. for lengths[0] of them, then those from start[1] on, and so forth."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if ends.size else 0) + np.repeat(start - ends + lengths, lengths)
