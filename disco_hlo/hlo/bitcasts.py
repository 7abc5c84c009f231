"""Bitcasts belong to the kernels that read through them.

A bitcast shows a value in another shape and takes no time. So strategies name ops only, and a kernel is its ops with
all bitcasts through which they read: it has each value that it reads under one name, and leaves the ops themselves.
What nothing but a kernel reads by another shape is written where it is read: in another kernel, or next to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from disco_hlo.hlo.flat_graph import flat_graph
from disco_hlo.hlo.graph import Graph, once_per_graph


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
