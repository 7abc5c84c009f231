"""The graph as the compiled search reads it: flat arrays, built once per search.

Free nodes disappear here: a node's *sources* are the executing nodes whose values it reads through
any tuples and bitcasts between. Parameters and constants are there from the start and are nobody's
source. Bitcasts are no units and belong to no group in the search; a group that holds both ends of
one takes it along (see ``state.to_strategy``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from disco_hlo.search import layout as at
from disco_hlo.search.rng import mixed
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError
from disco_hlo.hlo import gpu_facts as fact
from disco_hlo.hlo.gpu_facts import gpu_facts
from disco_hlo.hlo.graph import Graph, Kind, Node, is_cloned
from disco_hlo.hlo.legality import LIMITS, is_elementwise, is_joinable, keeps_own_buffer

UNSUPPORTED = ("stochastic-convert",)
"""Ops that XLA:GPU has no code generator for (see ``hlo.legality_gpu``)."""
MAXIMUM_NODES = (1 << 24) - 2
"""Nodes are written down in 24 bits, plus 1 (see ``ready_queue``)."""
_NEVER_JOINS = 1 << 20
"""Beside the bits of ``FLAGS``: no kernel may hold ops of this key."""
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
    rules hold; how many kernels in ``special`` are larger than any other may be, and how many ops each owns."""


def build_step(graph: Graph) -> Step:
    """Flat arrays of ``graph``; :class:`DiscoError` where it has more nodes than the search can number."""
    count = len(graph)
    if count > MAXIMUM_NODES:
        raise DiscoError(f"The step has {count} nodes, expected at most {MAXIMUM_NODES}.")
    sources = _sources(graph)
    readers, earlier = _reversed(sources), _earlier(graph)
    node = np.zeros((at.NODE_ROWS, count + 1), np.int64)
    edges: list[NDArray[np.int64]] = []
    placed = 0
    for row, lists in (
        (at.OPERANDS_AT, [n.operands for n in graph.nodes]),
        (at.SOURCES_AT, sources),
        (at.READERS_AT, readers),
        (at.EARLIER_AT, earlier),
        (at.LATER_AT, _reversed(earlier)),
        (at.BUFFERS_AT, _buffers(graph)),
        (at.USERS_AT, graph.users),
    ):
        node[row, 0] = placed
        node[row, 1:] = placed + np.cumsum(np.fromiter(map(len, lists), np.int64, count))
        edges.append(np.fromiter(chain.from_iterable(lists), np.int64, int(node[row, count]) - placed))
        placed = int(node[row, count])
    first, alike = np.unique(np.array(graph.first_of_key, np.int64), return_inverse=True)
    examples = [graph.nodes[x] for x in first.tolist()]
    node[at.FLAGS, :count] = _flags(graph, np.array([_flags_of_key(graph, n) for n in examples])[alike])
    node[at.FLAGS, :count] |= np.where(np.diff(node[at.LATER_AT]) > 0, at.ORDERED, 0)
    shapes = [n.shape for n in examples]
    node[at.SHAPE, :count] = _numbered((x.dtype, x.dims, x.layout, x.elements) for x in shapes)[alike]
    node[at.GEOMETRY, :count] = _numbered((x.dims, x.layout) for x in shapes)[alike]
    gradients = list(graph.all_reduces)
    node[at.CHANNEL, gradients] = _numbered(
        (graph.nodes[x].collective, graph.nodes[x].shape.dtype) for x in gradients
    )
    node[at.KEY, :count] = alike
    node[at.MIXED, :count] = mixed(np.arange(count))
    for rank, x in enumerate(production_order(graph, sources)):
        node[at.RANK, x] = rank
    limits = LIMITS[graph.backend]
    is_gpu = graph.backend == "gpu"
    if is_gpu:
        _add_gpu_facts(graph, node)
    bounds = np.array([limits.operands_and_results, limits.emissions, limits.reductions, is_gpu, 0], np.int64)
    return Step(node, np.concatenate(edges), np.zeros((1, 3), np.int64), bounds)


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
    for x in np.flatnonzero((facts.reduction >= 0) & (facts.flags & fact.LONG_REDUCE != 0)).tolist():
        if not any(facts.flags[user] & fact.CHAIN for user in graph.users[x]):
            node[at.FLAGS, x] |= at.BLOCK_ALONE


def production_order(graph: Graph, sources: Sequence[Sequence[int]]) -> list[int]:
    """All-reduces in the order in which backpropagation produces their gradients.

    By the number of ops on the longest path before each, ties by node id. In the paper's words
    (section 3.2), the neighbours of a gradient tensor belong to the successor and the predecessor
    of the op that produces it; here that is the next and the previous one in this order.
    """
    depth: list[int] = []
    for found in sources:
        depth.append(1 + max([depth[x] for x in found], default=0))
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


def _sources(graph: Graph) -> list[tuple[int, ...]]:
    """What each executing node reads; nothing for the others."""
    shown: list[tuple[int, ...]] = []  # the executing nodes that a reader of this node reads, itself included
    found: list[tuple[int, ...]] = []
    for node in graph.nodes:
        if len(node.operands) == 1:
            read = shown[node.operands[0]]
        else:
            read = tuple(sorted({x for operand in node.operands for x in shown[operand]}))
        active = is_active(node)
        found.append(read if active else ())
        shown.append((node.id,) if active else read if node.kind is Kind.FREE else ())
    return found


def _earlier(graph: Graph) -> list[list[int]]:
    found: dict[int, set[int]] = {}
    for first, second in graph.before:
        running = _running(graph, first)
        for later in _running(graph, second):
            found.setdefault(later, set()).update(running - {later})
    return [sorted(found.get(x, ())) for x in range(len(graph))]


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


def _flags_of_key(graph: Graph, node: Node) -> int:
    """What follows from a node's op and shapes: the same for all nodes of equal key."""
    unsupported = graph.backend == "gpu" and node.opcode in UNSUPPORTED
    answers = (
        (at.BITCAST, node.opcode == "bitcast"),
        (at.ELEMENTWISE, is_elementwise(graph, node)),
        (at.REDUCE, node.opcode == "reduce"),
        (at.SINGLE_RESULT, node.opcode in _SINGLE_RESULT),
        (at.TUPLE, node.shape.dtype == "tuple"),
        (_NEVER_JOINS, unsupported or keeps_own_buffer(graph, node)),
    )
    return sum(bit for bit, answer in answers if answer)


def _flags(graph: Graph, of_key: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row ``FLAGS`` but for ``ORDERED``, ``[nodes]``."""
    flags: list[int] = []
    returned = set(_through_free(graph, (graph.root,)))
    tuples = _tuples_of_fusible(graph)
    for node, found in zip(graph.nodes, of_key.tolist(), strict=True):
        x, flag = node.id, found & ~_NEVER_JOINS
        if x in returned:
            flag |= at.RETURNED
        if is_cloned(node):
            flag |= at.CLONED
        if is_active(node):
            flag |= at.ACTIVE
            joinable = is_joinable(node) or (graph.backend == "gpu" and node.opcode == "scatter")
            read = x in returned or graph.users[x]
            # Where a value passes through a tuple it leaves the kernel, so both ends cannot share one.
            if joinable and read and not found & _NEVER_JOINS and tuples.isdisjoint(node.operands):
                flag |= at.FUSIBLE
        flags.append(flag)
    for x in graph.all_reduces:
        readers = {reader for user in graph.users[x] for reader in _running(graph, user)}
        flags[x] |= at.ALL_REDUCE
        if x in returned or not all(flags[reader] & at.FUSIBLE for reader in readers):
            flags[x] |= at.UNPACKED
    return np.array(flags, np.int64)


def _tuples_of_fusible(graph: Graph) -> set[int]:
    """Tuples, and what is taken out of them or shows it, through which one reads ops that may be fused."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.kind is not Kind.FREE:
            continue
        if node.opcode == "bitcast":
            if node.operands[0] in found:
                found.add(node.id)
        elif any(graph.nodes[x].kind is Kind.FUSIBLE for x in _through_free(graph, node.operands)):
            found.add(node.id)
    return found


def _reversed(lists: Sequence[Sequence[int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in lists]
    for x, items in enumerate(lists):
        for item in items:
            found[item].append(x)
    return found


def _numbered(keys: Iterable[object]) -> NDArray[np.int64]:
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
