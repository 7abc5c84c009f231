"""What the rules read of a graph: rows of integers with one entry a node, as arrays and as plain lists.

Compiled functions read a row by its name from a view of arrays (``search.layout``), Python from a record of
lists: the same function runs on both.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import BACKENDS
from disco_hlo.core.gpu_facts import GpuFacts, gpu_facts
from disco_hlo.hlo.graph import (
    Graph,
    Kind,
    Node,
    flat_graph,
    flat_shapes,
    flat_users,
    grouped,
    once_per_graph,
    overwritten_names,
)
from disco_hlo.hlo.opcodes import ELEMENTWISE as ELEMENTWISE_OPS

Row = NDArray[np.int64]

# Bits of Rows.flags. Those from 1 << 16 on are the search's own (search.layout).
ELEMENTWISE: Final = 1
"""Element i of the result needs element i of each operand: same dimensions, same layout."""
BITCAST: Final = 2
REDUCE: Final = 4
SINGLE_RESULT: Final = 8
"""May be a result only where it is the sole one (XLA:CPU)."""
TUPLE: Final = 16
"""The value is a tuple."""
CLONED: Final = 32
"""Scalar constant, which every kernel has its own copy of."""
JOINS: Final = 64
"""May be in a kernel with others, unless one of the next two forbids it."""
OWN_BUFFER: Final = 128
"""A copy that changes nothing: XLA put it there to give a value its own buffer."""
NOT_GENERATED: Final = 256
"""There is no code generator for it."""

# Places in Rows.limits.
OPERANDS_LIMIT: Final = 0
REDUCTIONS_LIMIT: Final = 1
EMISSIONS_LIMIT: Final = 2
SHARED_BYTES_LIMIT: Final = 3
HAS_HEROES: Final = 4
"""1 where XLA:GPU's rules hold, 0 where XLA:CPU's do."""
LIMITS: Final = 5

_FLAG_OF_OPCODE = {
    **dict.fromkeys(ELEMENTWISE_OPS, ELEMENTWISE),
    **dict.fromkeys(("concatenate", "reduce-window", "gather"), SINGLE_RESULT),
    "bitcast": BITCAST,
    "reduce": REDUCE,
}


class Rows(NamedTuple):
    """Rows ending in ``_at`` are offsets into ``edge``: the list of x is ``edge[row[x] : row[x + 1]]``. The others have
    one entry a node. Never written."""

    flags: Row
    shape: Row
    """Equal numbers, equal shapes (layout included)."""
    geometry: Row
    """Equal numbers, equal dimensions and layout, whatever the element type."""
    element_count: Row
    """:func:`element_count`"""
    reads_per_element: Row
    """:func:`reads_per_element`"""
    gpu_flags: Row
    """This row and the next ones are :class:`~disco_hlo.core.gpu_facts.GpuFacts`; zeros where there are no heroes."""
    reduction: Row
    transpose: Row
    loop: Row
    operand_loop: Row
    shared_bytes: Row
    operands_at: Row
    """Operands as written, repeats included."""
    users_at: Row
    """All nodes that list x, any node, among their operands."""
    buffers_at: Row
    """Nodes whose storage x overwrites."""
    edge: Row
    """All lists, one after the other."""
    limits: Row
    """The backend's (``backends``), by the places above."""


def rows(graph: Graph) -> Rows:
    """The rows of ``graph``."""
    flat, shapes = flat_graph(graph), flat_shapes(graph)
    alike = flat.of_key
    examples = [graph.nodes[x] for x in flat.example.tolist()]
    overwritten = np.array(sorted(set(overwritten_names(graph))), np.int64).reshape(-1, 2)
    buffers = grouped(overwritten[:, 1], overwritten[:, 0], len(graph))
    lists = ((flat.operand_at, flat.operand), flat_users(graph), buffers)
    begins = np.cumsum([0, *(items.size for _, items in lists)]).tolist()
    facts = _gpu_rows(graph)
    flags = _flags_of_keys(graph, examples)[alike]
    flags[flat.is_cloned] |= CLONED
    return Rows(
        flags=flags,
        shape=shapes.of_key[alike],
        geometry=shapes.geometry[shapes.of_key][alike],
        element_count=np.array([element_count(x) for x in examples], np.int64)[alike],
        reads_per_element=np.array([reads_per_element(graph, x) for x in examples], np.int64)[alike],
        gpu_flags=facts.flags,
        reduction=facts.reduction,
        transpose=facts.transpose,
        loop=facts.loop,
        operand_loop=facts.operand_loop,
        shared_bytes=facts.shared_bytes,
        operands_at=begins[0] + lists[0][0],
        users_at=begins[1] + lists[1][0],
        buffers_at=begins[2] + lists[2][0],
        edge=np.concatenate([items for _, items in lists]),
        limits=_limits(graph),
    )


@once_per_graph
def plain_rows(graph: Graph) -> Rows:
    """The rows as lists, which Python reads faster."""
    return Rows(*(row.tolist() for row in rows(graph)))


def is_joinable(node: Node) -> bool:
    """Whether the node may stand in a group at all, on every backend."""
    return node.kind is Kind.FUSIBLE or node.opcode == "bitcast"


def element_count(node: Node) -> int:
    """Elements of a node's array, or of the first where it has several (a reduce of several arrays)."""
    return node.shape.first_array.element_count


def reads_per_element(graph: Graph, node: Node) -> int:
    """How many elements of an operand one element of the result is made of; 0: of one operand out of several."""
    if node.opcode == "concatenate":
        return 0
    own = max(1, element_count(node))
    if node.opcode == "reduce":
        return max(1, element_count(graph.nodes[node.operands[0]]) // own)
    return node.flops // own + 1 if node.opcode == "reduce-window" else 1


def _flags_of_keys(graph: Graph, examples: list[Node]) -> Row:
    """``[keys]``: what follows from a node's op and shapes, the same for all nodes of equal key."""
    backend = BACKENDS[graph.backend]
    found = np.array([_FLAG_OF_OPCODE.get(node.opcode, 0) for node in examples], np.int64)
    found[~flat_shapes(graph).reads_in_place] &= ~ELEMENTWISE
    for i, node in enumerate(examples):
        if node.shape.dtype == "tuple":
            found[i] |= TUPLE
        if is_joinable(node) or node.opcode in backend.also_joined:
            found[i] |= JOINS
        if node.opcode == "copy" and graph.nodes[node.operands[0]].shape == node.shape:
            found[i] |= OWN_BUFFER
        if node.opcode in backend.never_generated:
            found[i] |= NOT_GENERATED
    return found


def _gpu_rows(graph: Graph) -> GpuFacts:
    if BACKENDS[graph.backend].has_heroes:
        return gpu_facts(graph)
    return GpuFacts(*np.zeros((len(GpuFacts._fields), len(graph)), np.int64))


def _limits(graph: Graph) -> Row:
    backend = BACKENDS[graph.backend]
    return np.array(
        [
            backend.operands_and_results,
            backend.reductions,
            backend.emissions,
            backend.shared_bytes,
            backend.has_heroes,
        ],
        np.int64,
    )
