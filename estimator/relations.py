"""Who feeds whom inside a kernel: the edges of its graph, and how an index passes along each.

Every operand becomes two edges, one each way, and every node gets an edge to itself. How the index of a node becomes
that of what it reads is the same in every kernel, so it is worked out once for a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import inner
from disco_hlo.estimator import feature_spec as spec
from disco_hlo.estimator import kernel_tables as at
from disco_hlo.estimator.contexts import Scratch, place_of
from disco_hlo.estimator.kernel_tables import KernelTables

if TYPE_CHECKING:
    from disco_hlo.estimator.encoding import Batch, GraphFeatures, Values

_EDGE_NUMBERS: Final = len(spec.EDGE)
_FORWARD: Final = spec.EDGE.index("forward")
_BACKWARD: Final = spec.EDGE.index("backward")
_ITSELF: Final = spec.EDGE.index("itself")
_IDENTITY: Final = spec.EDGE.index("identity")
_REDUCED: Final = spec.EDGE.index("reduced")
_ANYWHERE: Final = spec.EDGE.index("anywhere")
_PERMUTED: Final = spec.EDGE.index("permuted")
_BROADCAST: Final = spec.EDGE.index("broadcast")
_ALONG: Final = spec.EDGE.index("along_grain")
_RATIO: Final = spec.EDGE.index("elements_ratio")
_READERS: Final = spec.NODE.index("readers")


@inner
def _links(
    tables: KernelTables,
    members: NDArray[np.int64],
    count: int,
    nodes: int,
    values: Values,
    scratch: Scratch,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(how many edges lead into each node, the numbers of what they read one after the other, -1 for none)."""
    filled = np.ones(nodes, np.int64)
    slots = 0
    for member in members:
        slots += tables.node[at.EXTENTS_AT, member] - tables.node[at.OPERANDS_AT, member]
    others = np.empty(slots // 2, np.int64)
    slots = 0
    for number in range(nodes):
        place = values.order[number]
        if place >= members.size:
            continue
        node = members[place]
        for slot in range(tables.node[at.OPERANDS_AT, node], tables.node[at.EXTENTS_AT, node], 2):
            operand = place_of(tables.edge[slot], scratch)
            others[slots] = -1
            if 0 <= operand < count:
                other = values.number[operand]
                others[slots] = other
                filled[number] += 1
                filled[other] += 1
                values.readers[other] += 1
            slots += 1
    return filled, others


@inner
def edge_rows(
    graph: GraphFeatures,
    members: NDArray[np.int64],
    count: int,
    nodes: int,
    values: Values,
    scratch: Scratch,
    start: int,
    batch: Batch,
) -> None:
    """Edges into each node: from itself, from what it reads, from what reads it."""
    tables, edge_start = graph.tables, batch.edge_start
    filled, others = _links(tables, members, count, nodes, values, scratch)
    for number in range(nodes):
        row = edge_start[start + number]
        edge_start[start + number + 1] = row + filled[number]
        filled[number] = row + 1
        batch.neighbour[row] = start + number
        for i in range(_EDGE_NUMBERS):
            batch.edge[row, i] = 0
        batch.edge[row, _ITSELF] = 1
        batch.node[start + number, _READERS] = np.log2(values.readers[number] + 1.0)
    slots = 0
    for number in range(nodes):
        place = values.order[number]
        if place >= members.size:
            continue
        node = members[place]
        first = graph.relation_at[node]
        operands = (tables.node[at.EXTENTS_AT, node] - tables.node[at.OPERANDS_AT, node]) // 2
        for relation in range(first, first + operands):
            other = others[slots]
            slots += 1
            if other < 0:
                continue
            forward = filled[number]
            filled[number] += 1
            backward = filled[other]
            filled[other] += 1
            batch.neighbour[forward] = start + other
            batch.neighbour[backward] = start + number
            for i in range(_EDGE_NUMBERS):
                batch.edge[forward, i] = graph.relation[relation, i]
                batch.edge[backward, i] = graph.relation[relation, i]
            batch.edge[forward, _FORWARD] = 1
            batch.edge[backward, _BACKWARD] = 1


@inner
def relation_of(tables: KernelTables, reader: int, slot: int, row: NDArray[np.float32]) -> None:
    """How the index of ``reader`` becomes that of its operand at ``slot``."""
    operand, map_at = tables.edge[slot], tables.edge[slot + 1]
    rank = tables.node[at.LOOPS_AT, operand] - tables.node[at.EXTENTS_AT, operand]
    reader_rank = tables.node[at.LOOPS_AT, reader] - tables.node[at.EXTENTS_AT, reader]
    followed = 0
    last = -1
    identity = rank == reader_rank
    for dimension in range(rank):
        follows = tables.edge[map_at + dimension]
        if follows >= 0:
            followed += 1
            if follows < last:
                row[_PERMUTED] = 1
            last = follows
            row[_ALONG] = follows == reader_rank - 1 and dimension == rank - 1
        elif follows == at.ALL:
            row[_ANYWHERE] = 1
        elif follows <= at.ADDED:
            row[_REDUCED] = 1
        identity = identity and follows == dimension
    row[_IDENTITY] = identity
    row[_BROADCAST] = followed < reader_rank
    elements, of_reader = tables.value[at.ELEMENTS, operand], tables.value[at.ELEMENTS, reader]
    row[_RATIO] = np.log2((elements + 1.0) / (of_reader + 1.0))
