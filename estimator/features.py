"""What the estimator sees of a fused op: a small graph with numbers on its nodes and edges.

DisCo, section 4.3.1: op type, input and output sizes and the measured time of each op, and who
feeds whom. Added is what the analytical estimate knows: how often each value is computed inside
the kernel, whether memory is read along or across its grain, and the estimate itself. Times are
learned relative to it (``log(time / estimate)``), so that an error means the same at one microsecond
and at ten milliseconds. ``architecture`` names the numbers.

The values that ``kernel_cost`` finds in a kernel (members and what they read) become nodes. They are numbered in
post-order from the kernel's results, so equal structure gives equal features, wherever and in whatever step it stands.
Every operand becomes two edges, one each way, and every node gets an edge to itself. How the index of a node becomes
that of what it reads is the same in every kernel, so it is worked out once for a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator import kernel_tables as at
from disco_hlo.estimator.analytic import AnalyticModel
from disco_hlo.estimator.kernel_cost import (
    COUNT,
    FIRST,
    NODE,
    Scratch,
    enter,
    enter_read,
    nested,
    place_of,
    streaming_ns,
    written_for,
)
from disco_hlo.estimator.kernel_tables import KernelTables
from disco_hlo.hlo.cost_model import FlatKernels, Kernels
from disco_hlo.hlo.graph import Graph, Node, flat_graph, flat_shapes

_TYPE_OF = {opcode: number for number, opcode in enumerate(spec.VOCABULARY)}
_FLOATS = ("f", "b", "c")
_SHAPE_NUMBERS = spec.NODE.index("evaluation_ns")
_LOGARITHMS = [
    spec.NODE.index(name)
    for name in ("elements", "bytes", "operand_bytes", "minor", "second_minor", "reduced")
]
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


def graph_features(graph: Graph, analytic: AnalyticModel, times_ns: Mapping[str, float]) -> GraphFeatures:
    """The numbers of a step's own ops; ``times_ns`` are measured times of single ops by ``Node.key``."""
    tables = analytic.tables(graph)
    estimated = np.maximum(analytic.op_ns(graph), 1).astype(np.float64)
    flat = flat_graph(graph)
    first, of_key = flat.example, flat.of_key
    examples = [graph.nodes[x] for x in first.tolist()]  # all but times alone are the same for nodes of a key
    alone = np.array([times_ns.get(node.key, 0.0) for node in examples], np.float64)[of_key]
    is_measured = alone > 0
    alone = np.where(is_measured, alone, estimated)
    static = np.zeros((len(graph), spec.STATIC), np.float32)
    static[:, :_SHAPE_NUMBERS] = _shape_numbers(graph, tables, first, examples)[of_key]
    static[:, _SHAPE_NUMBERS] = np.log2(1000 * tables.value[at.ELEMENT_NS] + 1)
    static[:, _SHAPE_NUMBERS + 1] = np.log2(alone + 1)
    static[:, _SHAPE_NUMBERS + 2] = np.log2(alone / estimated)
    static[:, _SHAPE_NUMBERS + 3] = is_measured
    op = np.array([_TYPE_OF.get(node.opcode, spec.OTHER) for node in examples], np.int32)[of_key]
    work = np.array([[n.flops for n in examples], [n.transcendentals for n in examples]], np.float64)[
        :, of_key
    ]
    operands = (tables.node[at.EXTENTS_AT, :-1] - tables.node[at.OPERANDS_AT, :-1]) // 2
    features = GraphFeatures(
        tables, op, static, alone, np.zeros((2, len(graph))), work, np.cumsum(operands, dtype=np.int64) - operands,
        np.zeros((int(operands.sum()), len(spec.EDGE)), np.float32),
    )  # fmt: skip
    prepare(features)
    return features


def _shape_numbers(
    graph: Graph, tables: KernelTables, first: NDArray[np.int64], examples: Sequence[Node]
) -> NDArray[np.float64]:
    """``[keys, _SHAPE_NUMBERS]``: what follows from shapes, of a node of each key (``first`` are their ids)."""
    flat = flat_graph(graph)
    elements = tables.value[at.ELEMENTS]
    size_bytes = np.floor(elements * tables.value[at.ITEM_BYTES])
    read_bytes = np.bincount(flat.reader, size_bytes[flat.operand], len(graph))
    shapes = [shape.first_array for shape in flat_shapes(graph).distinct]
    # The two dimensions whose neighbours lie closest in memory.
    minor = np.ones((len(shapes), 2), np.int64)
    for row, shape in enumerate(shapes):
        for place, dimension in enumerate(shape.layout[:2]):
            minor[row, place] = shape.dims[dimension]
    of_key = flat_shapes(graph).of_key
    minor = minor[of_key]
    is_float = np.array([shape.dtype.startswith(_FLOATS) for shape in shapes])[of_key]
    rank = np.array([len(shape.dims) for shape in shapes])[of_key]
    reduced = np.tile([1.0, 0.0], (len(examples), 1))
    for row, node in enumerate(examples):
        if node.opcode == "reduce" and node.operands:
            reduced[row] = _reduction(graph, node)
    numbers = np.stack([
        elements[first] + 1,
        size_bytes[first] + 1,
        read_bytes[first] + 1,
        size_bytes[first] / np.maximum(elements[first], 1),
        is_float,
        rank,
        minor[:, 0] + 1,
        minor[:, 1] + 1,
        np.minimum(np.log2(np.maximum(minor[:, 0] & -minor[:, 0], 1)), 7),
        *reduced.T,
    ], axis=1)  # fmt: skip
    numbers[:, _LOGARITHMS] = np.log2(numbers[:, _LOGARITHMS])
    return numbers


def _reduction(graph: Graph, node: Node) -> tuple[int, float]:
    """Of a reduction (elements that go into one, whether the operand's minor dimension is among what is reduced)."""
    result, operand = (
        max(node.shape.first_array.element_count, 1),
        graph.nodes[node.operands[0]].shape.first_array,
    )
    layout = [dimension for dimension in operand.layout if operand.dims[dimension] > 1]
    return max(operand.element_count // result, 1), float(bool(layout) and layout[0] in node.dimensions)


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


def encode(graph: GraphFeatures, kernels: Kernels, scratch: Scratch) -> Batch:
    """Features of fused ops of one step, in their order."""
    flat, rows = kernels.flat, graph.tables.node
    slots = int((rows[at.EXTENTS_AT, flat.members] - rows[at.OPERANDS_AT, flat.members]).sum()) // 2
    nodes = flat.members.size + slots
    batch = new_batch(len(kernels), nodes, nodes + 2 * slots)
    encode_kernels(graph, flat, scratch, batch)
    nodes = int(batch.node_start[-1])
    edges = int(batch.edge_start[nodes])
    return batch._replace(
        edge_start=batch.edge_start[: nodes + 1], op=batch.op[:nodes], node=batch.node[:nodes],
        neighbour=batch.neighbour[:edges], edge=batch.edge[:edges],
    )  # fmt: skip


def joined(batches: Sequence[Batch]) -> Batch:
    """One batch of several, in their order."""
    nodes = np.cumsum([0, *(batch.op.size for batch in batches)])
    edges = np.cumsum([0, *(batch.neighbour.size for batch in batches)])
    return Batch(
        node_start=_starts([batch.node_start for batch in batches], nodes),
        edge_start=_starts([batch.edge_start for batch in batches], edges),
        op=np.concatenate([batch.op for batch in batches]),
        node=np.concatenate([batch.node for batch in batches]),
        neighbour=np.concatenate([b.neighbour + n for b, n in zip(batches, nodes, strict=False)]).astype(
            np.int32
        ),
        edge=np.concatenate([batch.edge for batch in batches]),
        kernel=np.concatenate([batch.kernel for batch in batches]),
        estimate_ns=np.concatenate([batch.estimate_ns for batch in batches]),
    )


def _starts(starts: Sequence[NDArray[np.int64]], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    moved = [start[:-1] + offset for start, offset in zip(starts, offsets, strict=False)]
    return np.concatenate([*moved, offsets[-1:]])


def selected(batch: Batch, kernels: NDArray[np.int64]) -> Batch:
    """The batch of these kernels of ``batch``, in this order."""
    nodes, node_start = _rows(batch.node_start, kernels)
    edges, edge_start = _rows(batch.edge_start, nodes)
    moved = np.repeat(node_start[:-1] - batch.node_start[kernels], np.diff(node_start))
    moved = np.repeat(moved, np.diff(edge_start))
    return Batch(
        node_start, edge_start, batch.op[nodes], batch.node[nodes], (batch.neighbour[edges] + moved).astype(np.int32),
        batch.edge[edges], batch.kernel[kernels], batch.estimate_ns[kernels],
    )  # fmt: skip


def _rows(start: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rows of the chosen stretches, where each of these begins among them)."""
    lengths = start[chosen + 1] - start[chosen]
    new_start = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.arange(new_start[-1]) + np.repeat(start[chosen] - new_start[:-1], lengths)
    return rows, new_start


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
        whole = written_for(tables, members, results, result)
        found.moved_bytes[place] = tables.value[at.ELEMENTS, whole] * tables.value[at.ITEM_BYTES, whole]
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
    first = written_for(tables, members, results, results[0])
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
