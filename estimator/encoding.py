"""From fused ops to arrays: the compiled half of ``features``.

For every kernel, the values that ``kernel_cost`` finds in it (members and what they read) become nodes, numbered
in post-order from the results; every operand becomes two edges, one each way, and every node gets an edge to itself.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.estimator import feature_spec as spec
from disco_hlo.estimator import kernel_tables as at
from disco_hlo.estimator.contexts import COUNT, FIRST, NODE, Scratch, enter, enter_read, place_of
from disco_hlo.estimator.kernel_cost import nested, streaming_ns
from disco_hlo.estimator.kernel_tables import KernelTables
from disco_hlo.estimator.relations import edge_rows, relation_of
from disco_hlo.hlo.cost_model import FlatKernels

_IS_READ: Final = spec.NODE.index("is_read")
_IS_RESULT: Final = spec.NODE.index("is_result")
_EVALUATIONS: Final = spec.NODE.index("evaluations")
_RECOMPUTED: Final = spec.NODE.index("recomputed")
_CONTEXTS: Final = spec.NODE.index("contexts")
_STRIDED: Final = spec.NODE.index("strided")
_WORK_SHARE: Final = spec.NODE.index("work_share")
_WORK_NS: Final = spec.NODE.index("work_ns")
_BYTES_SHARE: Final = spec.NODE.index("bytes_share")
_ALONE_SHARE: Final = spec.NODE.index("alone_share")
_STATIC: Final = spec.STATIC
_READ: Final = spec.READ

_NODE_NUMBERS: Final = len(spec.NODE)
_EDGE_NUMBERS: Final = len(spec.EDGE)
_KERNEL_NUMBERS: Final = len(spec.KERNEL)


class GraphFeatures(NamedTuple):
    """One step as the encoder reads it."""

    tables: KernelTables
    op: NDArray[np.int32]
    """``[nodes]``: op type."""
    static: NDArray[np.float32]
    """``[nodes, STATIC]``"""
    alone_ns: NDArray[np.float64]
    """``[nodes]``: time as a kernel of its own."""
    log: NDArray[np.float64]
    """``[2, nodes]``: logarithms to base 2 of that and of the number of elements plus 1."""
    work: NDArray[np.float64]
    """``[2, nodes]``: flops and transcendentals of one execution."""
    relation_at: NDArray[np.int64]
    """``[nodes]``: where the rows of ``relation`` for a node's operands begin."""
    relation: NDArray[np.float32]
    """``[operands of all nodes, len(EDGE)]``: how the index of a node becomes that of what it reads, either way."""


class Batch(NamedTuple):
    """Encoded kernels, one after the other."""

    node_start: NDArray[np.int64]
    """``[kernels + 1]``: where the nodes of each kernel begin."""
    edge_start: NDArray[np.int64]
    """``[nodes + 1]``: where the edges into each node begin."""
    op: NDArray[np.int32]
    """``[nodes]``: op type."""
    node: NDArray[np.float32]
    """``[nodes, len(NODE)]``"""
    neighbour: NDArray[np.int32]
    """``[edges]``: node of the batch that each edge comes from."""
    edge: NDArray[np.float32]
    """``[edges, len(EDGE)]``"""
    kernel: NDArray[np.float32]
    """``[kernels, len(KERNEL)]``"""
    estimate_ns: NDArray[np.float64]
    """``[kernels]``: the analytical estimate, at least 1."""


class Values(NamedTuple):
    """The values of one kernel, by place: members first, then reads."""

    evaluations: NDArray[np.float64]
    strided: NDArray[np.float64]
    contexts: NDArray[np.int64]
    moved_bytes: NDArray[np.float64]
    readers: NDArray[np.int64]
    """By position in post-order."""
    number: NDArray[np.int64]
    """Position in post-order, -1 for what no result depends on (bitcasts)."""
    order: NDArray[np.int64]
    """Places in post-order; the first ``count`` entries."""


@inner
def room(tables: KernelTables, kernels: FlatKernels, first: int, last: int) -> tuple[int, int]:
    """Upper bounds of (nodes, edges) of the kernels from ``first`` to ``last`` - 1, encoded."""
    slots = 0
    members = kernels.members[kernels.member_at[first] : kernels.member_at[last]]
    for member in members:
        slots += (tables.node[at.EXTENTS_AT, member] - tables.node[at.OPERANDS_AT, member]) // 2
    nodes = members.size + slots
    return nodes, nodes + 2 * slots


def new_batch(kernels: int, nodes: int, edges: int) -> Batch:
    """Room for so many."""
    return Batch(
        np.zeros(kernels + 1, np.int64), np.zeros(nodes + 1, np.int64), np.empty(nodes, np.int32),
        np.empty((nodes, _NODE_NUMBERS), np.float32), np.empty(edges, np.int32),
        np.empty((edges, _EDGE_NUMBERS), np.float32), np.empty((kernels, _KERNEL_NUMBERS), np.float32),
        np.empty(kernels, np.float64),
    )  # fmt: skip


@compiled
def prepare(graph: GraphFeatures) -> None:
    """Fill in ``log`` and ``relation``, which is zero."""
    tables = graph.tables
    for node in range(graph.op.size):
        graph.log[0, node] = np.log2(graph.alone_ns[node])
        graph.log[1, node] = np.log2(tables.value[at.ELEMENTS, node] + 1)
        first = tables.node[at.OPERANDS_AT, node]
        for slot in range(first, tables.node[at.EXTENTS_AT, node], 2):
            relation_of(tables, node, slot, graph.relation[graph.relation_at[node] + (slot - first) // 2])


@inner
def encode_kernel(
    graph: GraphFeatures, kernels: FlatKernels, kernel: int, scratch: Scratch, batch: Batch, place: int
) -> None:
    """Write a kernel as number ``place`` of ``batch``, behind those before it."""
    members = kernels.members[kernels.member_at[kernel] : kernels.member_at[kernel + 1]]
    results = kernels.results[kernels.result_at[kernel] : kernels.result_at[kernel + 1]]
    tiled = kernels.tiled[kernel] or members.size >= scratch.value.shape[0]
    if tiled:
        count = _flat(graph.tables, members, scratch)
    else:
        count, _ = nested(graph.tables, members, results, scratch)
        count = min(count, scratch.value.shape[0])
    values = _values(graph.tables, members, results, count, tiled, scratch)
    nodes = _post_order(graph.tables, members, results, count, values, scratch)
    estimate = _kernel_row(graph, members, results, tiled, count, values, scratch, batch.kernel[place])
    batch.estimate_ns[place] = estimate
    start = batch.node_start[place]
    batch.node_start[place + 1] = start + nodes
    _node_rows(graph, members, results, nodes, estimate, values, scratch, start, batch)
    edge_rows(graph, members, count, nodes, values, scratch, start, batch)


@compiled
def encode_kernels(graph: GraphFeatures, kernels: FlatKernels, scratch: Scratch, batch: Batch) -> None:
    """Write all kernels into ``batch``, which has room for them."""
    for kernel in range(kernels.tiled.size):
        encode_kernel(graph, kernels, kernel, scratch, batch, kernel)


@inner
def _flat(tables: KernelTables, members: NDArray[np.int64], scratch: Scratch) -> int:
    """Register members and reads, each computed once; the number of values."""
    enter(members, scratch)
    count = min(members.size, scratch.value.shape[0])
    for member in members[:count]:
        for slot in range(tables.node[at.OPERANDS_AT, member], tables.node[at.EXTENTS_AT, member], 2):
            _, count = enter_read(tables.edge[slot], count, scratch)
    return int(min(count, scratch.value.shape[0]))


@inner
def _values(
    tables: KernelTables,
    members: NDArray[np.int64],
    results: NDArray[np.int64],
    count: int,
    tiled: bool,
    scratch: Scratch,
) -> Values:
    found = Values(
        np.zeros(count), np.zeros(count), np.zeros(count, np.int64), np.zeros(count), np.zeros(count, np.int64),
        np.full(count, -1), np.zeros(count, np.int64),
    )  # fmt: skip
    for place in range(count):
        node = scratch.value[place, NODE]
        elements = tables.value[at.ELEMENTS, node]
        if tiled:
            found.evaluations[place] = elements
            found.contexts[place] = 1
        else:
            found.contexts[place] = scratch.value[place, COUNT]
            for row in range(FIRST, FIRST + scratch.value[place, COUNT]):
                context = scratch.value[place, row]
                found.evaluations[place] += scratch.evaluations[context]
                if scratch.strided[context]:
                    found.strided[place] += scratch.evaluations[context]
        if place >= members.size:
            found.moved_bytes[place] = (
                min(elements, found.evaluations[place]) * tables.value[at.ITEM_BYTES, node]
            )
    for result in results:
        place = place_of(result, scratch)
        found.moved_bytes[place] = tables.value[at.ELEMENTS, result] * tables.value[at.ITEM_BYTES, result]
    return found


@inner
def _post_order(
    tables: KernelTables,
    members: NDArray[np.int64],
    results: NDArray[np.int64],
    count: int,
    values: Values,
    scratch: Scratch,
) -> int:
    """Number the values that the results depend on; how many there are."""
    stack = np.zeros(count + 1, np.int64)
    slots = np.zeros(count + 1, np.int64)
    seen = np.zeros(count, np.bool_)
    numbered = 0
    for result in results:
        place = place_of(result, scratch)
        if seen[place]:
            continue
        seen[place] = True
        depth = 0
        stack[0] = place
        slots[0] = tables.node[at.OPERANDS_AT, result]
        # Ends: each value is put there once, and each pass reads an operand or takes a value off.
        while depth >= 0:
            place = stack[depth]
            node = scratch.value[place, NODE]
            slot = slots[depth]
            if place < members.size and slot < tables.node[at.EXTENTS_AT, node]:
                slots[depth] += 2
                operand = place_of(tables.edge[slot], scratch)
                if operand < 0 or operand >= count or seen[operand]:
                    continue
                seen[operand] = True
                depth += 1
                stack[depth] = operand
                slots[depth] = tables.node[at.OPERANDS_AT, tables.edge[slot]]
            else:
                values.number[place] = numbered
                values.order[numbered] = place
                numbered += 1
                depth -= 1
    return numbered


@inner
def _kernel_row(
    graph: GraphFeatures,
    members: NDArray[np.int64],
    results: NDArray[np.int64],
    tiled: bool,
    count: int,
    values: Values,
    scratch: Scratch,
    row: NDArray[np.float32],
) -> float:
    """Fill the numbers of the kernel (in the order of ``KERNEL``); its estimated time in ns."""
    tables = graph.tables
    work = strided = read = written = alone = flops = transcendentals = 0.0
    for place in range(count):
        node = scratch.value[place, NODE]
        if place < members.size:
            work += values.evaluations[place] * tables.value[at.ELEMENT_NS, node]
            alone += graph.alone_ns[node]
            flops += graph.work[0, node]
            transcendentals += graph.work[1, node]
        else:
            strided += values.strided[place]
            read += values.moved_bytes[place]
    for result in results:
        written += values.moved_bytes[place_of(result, scratch)]
    strided_ns = strided * tables.constant[at.STRIDED_NS]
    streaming = streaming_ns(tables.curve, tables.constant, read + written)
    estimate = max(streaming, work + strided_ns, 1.0)
    first = results[0]
    rank = tables.node[at.LOOPS_AT, first] - tables.node[at.EXTENTS_AT, first]
    minor = major = 1
    if rank > 0:
        major = tables.edge[tables.node[at.EXTENTS_AT, first]]
        minor = tables.edge[tables.node[at.LOOPS_AT, first] - 1]
    numbers = (
        estimate, streaming, work, strided_ns, read, written, tables.value[at.ELEMENTS, first], float(members.size),
        float(count - members.size), float(results.size), flops, transcendentals,
    )  # fmt: skip
    for column in range(len(numbers)):
        row[column] = np.log2(numbers[column] + 1.0)
    column = len(numbers)
    row[column] = np.log2((flops + 1.0) / (read + written + 1.0))
    row[column + 1] = np.log2(max(alone, 1.0) / estimate)
    row[column + 2] = tiled
    row[column + 3] = rank
    row[column + 4] = np.log2(minor + 1.0)
    row[column + 5] = np.log2(major + 1.0)
    return float(estimate)


@inner
def _node_rows(
    graph: GraphFeatures,
    members: NDArray[np.int64],
    results: NDArray[np.int64],
    nodes: int,
    estimate: float,
    values: Values,
    scratch: Scratch,
    start: int,
    batch: Batch,
) -> None:
    tables, log_estimate = graph.tables, np.log2(estimate)
    for number in range(nodes):
        place, row = values.order[number], start + number
        node = scratch.value[place, NODE]
        is_read = place >= members.size
        batch.op[row] = _READ if is_read else graph.op[node]
        for column in range(_STATIC):
            batch.node[row, column] = graph.static[node, column]
        times = values.evaluations[place]
        work = 0.0 if is_read else times * tables.value[at.ELEMENT_NS, node]
        log_times = np.log2(times + 1)
        bytes_ns = values.moved_bytes[place] * tables.constant[at.NS_PER_BYTE]
        batch.node[row, _IS_READ] = is_read
        batch.node[row, _IS_RESULT] = 0
        batch.node[row, _EVALUATIONS] = log_times
        batch.node[row, _RECOMPUTED] = log_times - graph.log[1, node]
        batch.node[row, _CONTEXTS] = values.contexts[place]
        batch.node[row, _STRIDED] = values.strided[place] / max(times, 1.0)
        batch.node[row, _WORK_SHARE] = work / estimate
        batch.node[row, _WORK_NS] = np.log2(work + 1) if work > 0 else 0.0
        batch.node[row, _BYTES_SHARE] = bytes_ns / estimate
        batch.node[row, _ALONE_SHARE] = 0.0 if is_read else graph.log[0, node] - log_estimate
    for result in results:
        batch.node[start + values.number[place_of(result, scratch)], _IS_RESULT] = 1
