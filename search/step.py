"""The graph as the compiled search reads it: flat arrays, built once per search.

Free nodes disappear here: a node's *sources* are the executing nodes whose values it reads through
any tuples and bitcasts between. Parameters and constants are there from the start and are nobody's
source. Bitcasts are no units and belong to no group in the search; a group that holds both ends of
one takes it along (see ``state.to_strategy``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from disco_hlo.search import layout as at
from disco_hlo.search.rng import mixed
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.gpu_facts import gpu_facts
from disco_hlo.hlo.graph import Graph, Kind, Node, is_cloned
from disco_hlo.hlo.legality import LIMITS, is_elementwise, is_joinable, keeps_own_buffer

UNSUPPORTED = ("stochastic-convert",)
"""Ops that XLA:GPU has no code generator for (see ``hlo.legality_gpu``)."""
MAXIMUM_NODES = (1 << 24) - 2
"""Nodes are written down in 24 bits, plus 1 (see ``ready_queue``)."""
_SINGLE_RESULT = ("concatenate", "reduce-window", "gather")


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
    """Operands and results, emissions, reductions of one kernel, see ``legality.Limits``; whether XLA:GPU's
    rules hold; most ops that a kernel in ``special`` computes; how many of these are larger than any other may be,
    and how many ops each owns."""


def build_step(graph: Graph) -> Step:
    """Flat arrays of ``graph``; :class:`DiscoError` where it has more nodes than the search can number."""
    count = len(graph)
    if count > MAXIMUM_NODES:
        raise DiscoError(f"The step has {count} nodes, expected at most {MAXIMUM_NODES}.")
    sources = _sources(graph)
    earlier = _earlier(graph)
    node = np.zeros((at.NODE_ROWS, count + 1), np.int64)
    edges: list[int] = []
    for row, lists in (
        (at.OPERANDS_AT, [list(n.operands) for n in graph.nodes]),
        (at.SOURCES_AT, sources),
        (at.READERS_AT, _reversed(sources)),
        (at.EARLIER_AT, earlier),
        (at.LATER_AT, _reversed(earlier)),
        (at.BUFFERS_AT, _buffers(graph)),
        (at.USERS_AT, graph.users),
    ):
        for x, items in enumerate(lists):
            node[row, x] = len(edges)
            edges.extend(items)
        node[row, count] = len(edges)
    returned = set(_through_free(graph, (graph.root,)))
    for x in range(count):
        node[at.FLAGS, x] = _flags(graph, x, returned)
        if node[at.LATER_AT, x] < node[at.LATER_AT, x + 1]:
            node[at.FLAGS, x] |= at.ORDERED
    node[at.SHAPE, :count] = _numbered(
        (n.shape.dtype, n.shape.dims, n.shape.layout, n.shape.elements) for n in graph.nodes
    )
    node[at.GEOMETRY, :count] = _numbered((n.shape.dims, n.shape.layout) for n in graph.nodes)
    node[at.CHANNEL, :count] = _numbered((n.collective, n.shape.dtype) for n in graph.nodes)
    node[at.KEY, :count] = _numbered(n.key for n in graph.nodes)
    node[at.MIXED, :count] = mixed(np.arange(count))
    for rank, x in enumerate(production_order(graph, sources)):
        node[at.RANK, x] = rank
    limits = LIMITS[graph.backend]
    is_gpu = graph.backend == "gpu"
    if is_gpu:
        _add_gpu_facts(graph, node)
    bounds = np.array(
        [limits.operands_and_results, limits.emissions, limits.reductions, is_gpu, 0, 0], np.int64
    )
    return Step(node, np.array(edges, np.int64), np.zeros((1, 3), np.int64), bounds)


def _add_gpu_facts(graph: Graph, node: NDArray[np.int64]) -> None:
    facts = gpu_facts(graph)
    for row, values in (
        (at.GPU_FLAGS, facts.flags),
        (at.REDUCTION, facts.reduction),
        (at.TRANSPOSE, facts.transpose),
        (at.LOOP, facts.loop),
        (at.OPERAND_LOOP, facts.operand_loop),
        (at.ELEMENTS, facts.elements),
        (at.SHARED_BYTES, facts.shared_bytes),
    ):
        node[row, : len(graph)] = values


def production_order(graph: Graph, sources: Sequence[Sequence[int]]) -> list[int]:
    """All-reduces in the order in which backpropagation produces their gradients.

    By the number of ops on the longest path before each, ties by node id. In the paper's words
    (section 3.2), the neighbours of a gradient tensor belong to the successor and the predecessor
    of the op that produces it; here that is the next and the previous one in this order.
    """
    depth = [0] * len(graph)
    for node in graph.nodes:
        depth[node.id] = 1 + max((depth[s] for s in sources[node.id]), default=0)
    return sorted(graph.all_reduces, key=lambda x: (depth[x], x))


def is_active(node: Node) -> bool:
    """Whether the node executes."""
    return node.kind in (Kind.FUSIBLE, Kind.FIXED, Kind.ALL_REDUCE)


def _through_free(graph: Graph, starts: Iterable[int]) -> list[int]:
    found: set[int] = set()
    seen: set[int] = set()
    pending = list(starts)
    while pending:
        x = pending.pop()
        if x in seen:
            continue
        seen.add(x)
        node = graph.nodes[x]
        if is_active(node):
            found.add(x)
        elif node.kind is Kind.FREE:
            pending += node.operands
    return sorted(found)


def _sources(graph: Graph) -> list[list[int]]:
    return [_through_free(graph, node.operands) if is_active(node) else [] for node in graph.nodes]


def _earlier(graph: Graph) -> list[list[int]]:
    found: list[set[int]] = [set() for _ in graph.nodes]
    for first, second in graph.before:
        for later in _running(graph, second):
            found[later].update(x for x in _running(graph, first) if x != later)
    return [sorted(items) for items in found]


def _running(graph: Graph, node: int) -> set[int]:
    """Nodes that execute when ``node`` does: itself, or whoever reads through it where it is free."""
    found: set[int] = set()
    seen: set[int] = set()
    pending = [node]
    while pending:
        x = pending.pop()
        if x in seen:
            continue
        seen.add(x)
        if is_active(graph.nodes[x]):
            found.add(x)
        elif graph.nodes[x].kind is Kind.FREE:
            pending += graph.users[x]
    return found


def _buffers(graph: Graph) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in graph.nodes]
    for buffer, writer in graph.inplace:
        found[writer].append(buffer)
    return found


def _flags(graph: Graph, x: int, returned: set[int]) -> int:
    node = graph.nodes[x]
    answers = (
        (at.FUSIBLE, _may_join(graph, node, x in returned)),
        (at.ACTIVE, is_active(node)),
        (at.ALL_REDUCE, node.kind is Kind.ALL_REDUCE),
        (at.BITCAST, node.opcode == "bitcast"),
        (at.CLONED, is_cloned(node)),
        (at.RETURNED, x in returned),
        (at.ELEMENTWISE, is_elementwise(graph, node)),
        (at.REDUCE, node.opcode == "reduce"),
        (at.SINGLE_RESULT, node.opcode in _SINGLE_RESULT),
        (at.TUPLE, node.shape.dtype == "tuple"),
        (
            at.UNPACKED,
            node.kind is Kind.ALL_REDUCE and (x in returned or not _only_joinable(graph, x, returned)),
        ),
    )
    return sum(bit for bit, answer in answers if answer)


def _may_join(graph: Graph, node: Node, returned: bool) -> bool:
    on_gpu = graph.backend == "gpu"
    joinable = is_joinable(node) or (on_gpu and node.opcode == "scatter")
    if not is_active(node) or not joinable or keeps_own_buffer(graph, node):
        return False
    if on_gpu and node.opcode in UNSUPPORTED:
        return False
    if not returned and not graph.users[node.id]:
        return False
    # Where a value passes through a tuple it leaves the kernel, so both ends cannot share one.
    return not any(_is_tuple_of_fusible(graph, operand) for operand in node.operands)


def _only_joinable(graph: Graph, x: int, returned: set[int]) -> bool:
    readers = {r for user in graph.users[x] for r in _running(graph, user)}
    return all(_may_join(graph, graph.nodes[r], r in returned) for r in readers)


def _is_tuple_of_fusible(graph: Graph, x: int) -> bool:
    node = graph.nodes[x]
    if node.opcode == "bitcast":
        return _is_tuple_of_fusible(graph, node.operands[0])
    if node.kind is not Kind.FREE:
        return False
    return any(graph.nodes[s].kind is Kind.FUSIBLE for s in _through_free(graph, node.operands))


def _reversed(lists: Sequence[Sequence[int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in lists]
    for x, items in enumerate(lists):
        for item in items:
            found[item].append(x)
    return found


def _numbered(keys: Iterable[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
