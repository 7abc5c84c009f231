"""From fused ops to arrays: the compiled half of ``features``.

For every kernel, the values that ``kernel_cost`` finds in it (members and what they read) become nodes, numbered
in post-order from the results; every operand becomes two edges, one each way, and every node gets an edge to itself.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from disco_hlo.estimator import feature_spec as spec
from disco_hlo.estimator import kernel_tables as at
from disco_hlo.estimator.contexts import COUNT, FIRST, NODE, Scratch, enter, enter_read, place_of
from disco_hlo.estimator.kernel_cost import nested, streaming_ns
from disco_hlo.estimator.kernel_tables import KernelTables
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner

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
_READERS: Final = spec.NODE.index("readers")
_STATIC: Final = spec.STATIC
_READ: Final = spec.READ

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


class GraphFeatures(NamedTuple):
    """One step as the encoder reads it."""

    tables: KernelTables
    op: NDArray[np.int32]
    """``[nodes]``: op type."""
    static: NDArray[np.float32]
    """``[nodes, STATIC]``"""
    alone_ns: NDArray[np.float64]
    """``[nodes]``: time as a kernel of its own."""
    work: NDArray[np.float64]
    """``[2, nodes]``: flops and transcendentals of one execution."""


class Kernels(NamedTuple):
    """Fused ops of one step as flat lists."""

    members: NDArray[np.int32]
    """Ascending within each."""
    member_start: NDArray[np.int64]
    """``[kernels + 1]``"""
    results: NDArray[np.int32]
    """Ascending within each."""
    result_start: NDArray[np.int64]
    """``[kernels + 1]``"""
    tiled: NDArray[np.bool_]
    """``[kernels]``: emitted by Triton, which computes every value once."""


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


class _Values(NamedTuple):
    """The values of one kernel, by place: members first, then reads."""

    evaluations: NDArray[np.float64]
    strided: NDArray[np.float64]
    contexts: NDArray[np.int64]
    moved_bytes: NDArray[np.float64]
    readers: NDArray[np.int64]
    number: NDArray[np.int64]
    """Position in post-order, -1 for what no result depends on (bitcasts)."""
    order: NDArray[np.int64]
    """Places in post-order; the first ``count`` entries."""


@compiled
def room(tables: KernelTables, kernels: Kernels) -> tuple[int, int]:
    """Upper bounds of (nodes, edges) of the encoded kernels."""
    slots = 0
    for member in kernels.members:
        slots += (tables.node[at.EXTENTS_AT, member] - tables.node[at.OPERANDS_AT, member]) // 2
    nodes = kernels.members.size + slots
    return nodes, nodes + 2 * slots


@compiled
def encode_kernels(graph: GraphFeatures, kernels: Kernels, scratch: Scratch, batch: Batch) -> None:
    """Fill ``batch``, whose arrays have room (see :func:`room`)."""
    for kernel in range(kernels.tiled.size):
        members = kernels.members[kernels.member_start[kernel] : kernels.member_start[kernel + 1]]
        results = kernels.results[kernels.result_start[kernel] : kernels.result_start[kernel + 1]]
        tiled = kernels.tiled[kernel] or members.size >= scratch.value.shape[0]
        if tiled:
            count = _flat(graph.tables, members, scratch)
        else:
            count, _ = nested(graph.tables, members, results, scratch)
            count = min(count, scratch.value.shape[0])
        values = _values(graph.tables, members, results, count, tiled, scratch)
        nodes = _post_order(graph.tables, members, results, count, values, scratch)
        estimate = _kernel_row(graph, members, results, tiled, count, values, scratch, batch.kernel[kernel])
        batch.estimate_ns[kernel] = estimate
        start = batch.node_start[kernel]
        batch.node_start[kernel + 1] = start + nodes
        _node_rows(graph, members, results, nodes, estimate, values, scratch, start, batch)
        _edge_rows(graph.tables, members, count, nodes, values, scratch, start, batch)


@inner
def _flat(tables: KernelTables, members: NDArray[np.int32], scratch: Scratch) -> int:
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
    members: NDArray[np.int32],
    results: NDArray[np.int32],
    count: int,
    tiled: bool,
    scratch: Scratch,
) -> _Values:
    found = _Values(
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
    members: NDArray[np.int32],
    results: NDArray[np.int32],
    count: int,
    values: _Values,
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
    members: NDArray[np.int32],
    results: NDArray[np.int32],
    tiled: bool,
    count: int,
    values: _Values,
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
    members: NDArray[np.int32],
    results: NDArray[np.int32],
    nodes: int,
    estimate: float,
    values: _Values,
    scratch: Scratch,
    start: int,
    batch: Batch,
) -> None:
    for number in range(nodes):
        place = values.order[number]
        node = scratch.value[place, NODE]
        row = batch.node[start + number]
        row[:_STATIC] = graph.static[node]
        is_read = place >= members.size
        batch.op[start + number] = _READ if is_read else graph.op[node]
        times = values.evaluations[place]
        work = 0.0 if is_read else times * graph.tables.value[at.ELEMENT_NS, node]
        row[_IS_READ] = is_read
        row[_EVALUATIONS] = np.log2(times + 1)
        row[_RECOMPUTED] = np.log2((times + 1) / (graph.tables.value[at.ELEMENTS, node] + 1))
        row[_CONTEXTS] = values.contexts[place]
        row[_STRIDED] = values.strided[place] / max(times, 1.0)
        row[_WORK_SHARE] = work / estimate
        row[_WORK_NS] = np.log2(work + 1)
        row[_BYTES_SHARE] = values.moved_bytes[place] * graph.tables.constant[at.NS_PER_BYTE] / estimate
        row[_ALONE_SHARE] = 0.0 if is_read else np.log2(graph.alone_ns[node] / estimate)
    for result in results:
        batch.node[start + values.number[place_of(result, scratch)], _IS_RESULT] = 1


@inner
def _edge_rows(
    tables: KernelTables,
    members: NDArray[np.int32],
    count: int,
    nodes: int,
    values: _Values,
    scratch: Scratch,
    start: int,
    batch: Batch,
) -> None:
    """Edges into each node: from itself, from what it reads, from what reads it."""
    incoming = np.ones(nodes + 1, np.int64)
    for number in range(nodes):
        place = values.order[number]
        if place >= members.size:
            continue
        node = members[place]
        for slot in range(tables.node[at.OPERANDS_AT, node], tables.node[at.EXTENTS_AT, node], 2):
            operand = place_of(tables.edge[slot], scratch)
            if 0 <= operand < count:
                incoming[number] += 1
                incoming[values.number[operand]] += 1
                values.readers[operand] += 1
    for number in range(nodes):
        batch.edge_start[start + number + 1] = batch.edge_start[start + number] + incoming[number]
    filled = batch.edge_start[start : start + nodes].copy()
    for number in range(nodes):
        row = filled[number]
        batch.neighbour[row] = start + number
        batch.edge[row, _ITSELF] = 1
        batch.node[start + number, _READERS] = np.log2(values.readers[values.order[number]] + 1.0)
        filled[number] += 1
    for number in range(nodes):
        place = values.order[number]
        if place >= members.size:
            continue
        node = members[place]
        for slot in range(tables.node[at.OPERANDS_AT, node], tables.node[at.EXTENTS_AT, node], 2):
            operand = place_of(tables.edge[slot], scratch)
            if not 0 <= operand < count:
                continue
            other = values.number[operand]
            forward, backward = filled[number], filled[other]
            if other == number:
                backward += 1
            batch.neighbour[forward] = start + other
            batch.neighbour[backward] = start + number
            _relation(tables, node, slot, batch.edge[forward])
            batch.edge[backward] = batch.edge[forward]
            batch.edge[forward, _FORWARD] = 1
            batch.edge[backward, _BACKWARD] = 1
            filled[number] += 1
            filled[other] += 1


@inner
def _relation(tables: KernelTables, reader: int, slot: int, row: NDArray[np.float32]) -> None:
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
