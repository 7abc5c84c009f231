"""The graph as the compiled search reads it: flat arrays, built once per search.

Free nodes disappear here: a node's *sources* are the executing nodes whose values it reads through
any tuples and bitcasts between. Parameters and constants are there from the start and are nobody's
source. Bitcasts are no units and belong to no group in the search; a group that holds both ends of
one takes it along (see ``strategies.to_strategy``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Ints, compiled
from disco_hlo.core.legality_gpu import must_be_returned
from disco_hlo.core.rows import NOT_GENERATED, OWN_BUFFER, rows
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.graph import FlatGraph, Graph, Kind, Node, ascending, flat_graph, grouped, rewriting
from disco_hlo.hlo.opcodes import PRODUCTS
from disco_hlo.hlo.walks import reached
from disco_hlo.plan.legal import bucket_of
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import mixed
from disco_hlo.search.layout import GraphView, row_numbers

MAXIMUM_NODES = (1 << 24) - 2
"""Slots of the order are written down in 24 bits (see ``segments``)."""
_ACTIVE = (Kind.FUSIBLE, Kind.FIXED, Kind.COLLECTIVE)


class Step(NamedTuple):
    """One training step, read only. See ``layout`` for the rows."""

    node: NDArray[np.int64]
    """``[NODE_ROWS, nodes + 1]``"""
    edge: NDArray[np.int64]
    """All adjacency lists, one after the other."""
    special: NDArray[np.int64]
    """``[slots, 3]``, slots a power of two: kernels that stand as they are whatever the rules say, by
    the hash of what they compute (0: empty slot), as long as what they return has this one; last column: 1
    where they may not stand with other results even if the rules allow it (Triton's tiles)."""
    limits: NDArray[np.int64]
    """``core.rows.Rows.limits``, then how many kernels in ``special`` are larger than any other may be, and how many
    ops each owns."""


def build_step(graph: Graph) -> Step:
    """Flat arrays of ``graph``; :class:`DiscoError` where it has more nodes than the search can number."""
    count = len(graph)
    if count > MAXIMUM_NODES:
        raise DiscoError(f"The step has {count} nodes, expected at most {MAXIMUM_NODES}.")
    flat, read, known = flat_graph(graph), rows(graph), row_numbers(GraphView)
    active = np.isin(flat.kind, _ACTIVE)
    begin, source, depth = _sources(active, flat.kind == Kind.FREE, flat.operand_at, flat.operand)
    sources = begin, source[np.lexsort([source, np.repeat(np.arange(count), np.diff(begin))])]
    earlier = _earlier(graph)
    node = np.zeros((at.NODE_ROWS, count + 1), np.int64)
    for name, row in read._asdict().items():
        if name in known:
            node[known[name], : row.size] = row
    edges, placed = [read.edge], read.edge.size
    for row, (begin, items) in (
        (at.SOURCES_AT, sources),
        (at.READERS_AT, _reversed(*sources)),
        (at.EARLIER_AT, earlier),
        (at.LATER_AT, _reversed(*earlier)),
    ):
        node[row] = placed + begin
        edges.append(items)
        placed += items.size
    node[at.FLAGS, :count] |= _flags(graph, flat, active, read.flags)
    node[at.FLAGS, :count] |= np.where(np.diff(node[at.LATER_AT]) > 0, at.ORDERED, 0)
    gradients = list(graph.collectives)
    node[at.CHANNEL, gradients] = _numbered(
        (graph.nodes[x].collective, graph.nodes[x].shape.dtype) for x in gradients
    )
    node[at.KEY, :count] = flat.of_key
    node[at.MIXED, :count] = mixed(np.arange(count))
    node[at.RANK, production_order(graph, depth)] = np.arange(len(gradients))
    for x in np.flatnonzero(read.reduction >= 0).tolist():
        if must_be_returned(read, x):
            node[at.FLAGS, x] |= at.MUST_BE_RETURNED
    return Step(node, np.concatenate(edges), np.zeros((1, 3), np.int64), np.append(read.limits, 0))


def production_order(graph: Graph, depth: Ints) -> Ints:
    """Collectives in the order in which backpropagation produces their gradients.

    By the number of ops on the longest path before each (``depth``), ties by node id. In the paper's words
    (section 3.2), the neighbours of a gradient tensor belong to the successor and the predecessor
    of the op that produces it; here that is the next and the previous one in this order.
    """
    gradients = np.array(graph.collectives, np.int64)
    return gradients[np.argsort(depth[gradients], kind="stable")]


def is_active(node: Node) -> bool:
    """Whether the node executes."""
    return node.kind in _ACTIVE


def _through_free(graph: Graph, start: int, following: Callable[[int], Iterable[int]]) -> list[int]:
    """The executing nodes that one reaches from a node through free ones, itself included, ascending."""
    behind = reached([start], lambda x: following(x) if graph.nodes[x].kind is Kind.FREE else ())
    return sorted(x for x in behind if is_active(graph.nodes[x]))


@compiled
def _sources(active: NDArray[np.bool_], free: NDArray[np.bool_], operand_at: Ints, operand: Ints) -> Any:
    """What each executing node reads, nothing for the others, in any order: where each list begins, and all of them;
    and for each node the number of ops on the longest path before it."""
    count = active.size
    begin, end = np.zeros(count, np.int64), np.zeros(count, np.int64)
    read, filled = np.empty(2 * operand.size + 64, np.int64), 0
    seen = np.empty(count, np.int64)
    for x in range(count):
        seen[x] = -1
    total = 0
    for x in range(count):
        if not active[x] and not free[x]:
            continue
        only = operand[operand_at[x]] if operand_at[x + 1] == operand_at[x] + 1 else -1
        if only >= 0 and not active[only]:  # a chain shares its list
            begin[x], end[x] = begin[only], end[only]
            if active[x]:
                total += end[x] - begin[x]
            continue
        begin[x] = filled
        for e in range(operand_at[x], operand_at[x + 1]):
            y = operand[e]
            first, last = begin[y], end[y]
            if filled + max(last - first, 1) > read.size:
                larger = np.empty(2 * read.size + last - first, np.int64)
                for k in range(filled):
                    larger[k] = read[k]
                read = larger
            if active[y]:
                if seen[y] != x:
                    seen[y], read[filled] = x, y
                    filled += 1
                continue
            for k in range(first, last):
                if seen[read[k]] != x:
                    seen[read[k]], read[filled] = x, read[k]
                    filled += 1
        end[x] = filled
        if active[x]:
            total += filled - begin[x]
    source_at, source, depth = (
        np.zeros(count + 1, np.int64),
        np.empty(total, np.int64),
        np.zeros(count, np.int64),
    )
    for x in range(count):
        filled = source_at[x]
        if active[x]:
            for k in range(begin[x], end[x]):
                source[filled] = read[k]
                depth[x] = max(depth[x], depth[read[k]] + 1)
                filled += 1
        source_at[x + 1] = filled
    return source_at, source, depth


def _earlier(graph: Graph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each node those that must run before it: where each list begins, and all of them."""
    count = len(graph)
    pairs = [
        later * count + x
        for first, second in graph.before
        for later in _running(graph, second)
        for x in _running(graph, first)
        if x != later
    ]
    # What overwrites what it reads waits for itself, so for whatever recomputes it: no move duplicates it.
    pairs += [writer * (count + 1) for _, writer in rewriting(graph)]
    later, earlier = np.divmod(ascending(np.array(pairs, np.int64)), count)
    return grouped(later, earlier, count)


def _running(graph: Graph, node: int) -> list[int]:
    """Nodes that execute when ``node`` does: itself, or whoever reads through it where it is free."""
    return _through_free(graph, node, graph.users.__getitem__)


def _flags(
    graph: Graph, flat: FlatGraph, active: NDArray[np.bool_], known: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The search's own bits of row ``FLAGS`` but for ``ORDERED``, ``[nodes]``; ``known`` are the others."""
    returned, through_tuple = np.zeros((2, len(graph)), np.bool_)
    returned[_through_free(graph, graph.root, lambda x: graph.nodes[x].operands)] = True
    through_tuple[list(_tuples_of_fusible(graph))] = True
    # Not a scatter, though XLA:GPU would take it: what its updates cost inside it no estimate tells (docs/search.md).
    fusible = (flat.kind == Kind.FUSIBLE) & (known & (OWN_BUFFER | NOT_GENERATED) == 0)
    # Where a value passes through a tuple it leaves the kernel, so both ends cannot share one.
    fusible[flat.reader[through_tuple[flat.operand]]] = False
    is_read = np.zeros(len(graph), np.bool_)
    is_read[flat.operand] = True
    fusible &= returned | is_read
    flags = np.zeros(len(graph), np.int64)
    for bit, holds in (
        (at.RETURNED, returned), (at.ACTIVE, active), (at.FUSIBLE, fusible),
        (at.PRODUCT, np.array([node.opcode in PRODUCTS for node in graph.nodes], np.bool_)),
    ):  # fmt: skip
        flags |= np.where(holds, bit, 0)
    for x in graph.collectives:
        flags[x] |= at.COLLECTIVE | (at.VARIADIC if bucket_of(graph, (x, x)).form == "variadic" else 0)
    return flags


def _tuples_of_fusible(graph: Graph) -> set[int]:
    """Tuples, and what is taken out of them or shows it, through which one reads ops that may be fused."""
    kind, found, showing = flat_graph(graph).kind, set[int](), set[int]()
    is_fusible = (kind == Kind.FUSIBLE).tolist()
    for x in np.flatnonzero(kind == Kind.FREE).tolist():
        node = graph.nodes[x]
        if any(is_fusible[y] or y in showing for y in node.operands):
            showing.add(x)
        if node.operands[0] in found if node.opcode == "bitcast" else x in showing:
            found.add(x)
    return found


def _reversed(
    begin: NDArray[np.int64], items: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each node those whose list has it, ascending: where each list begins, and all of them."""
    return grouped(items, np.repeat(np.arange(begin.size - 1), np.diff(begin)), begin.size - 1)


def _numbered(keys: Iterable[object]) -> NDArray[np.int64]:
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
