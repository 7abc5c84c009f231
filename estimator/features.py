"""What the estimator sees of a fused op: a small graph with numbers on its nodes and edges.

DisCo, section 4.3.1: op type, input and output sizes and the measured time of each op, and who
feeds whom. Added is what the analytical estimate knows: how often each value is computed inside
the kernel, whether memory is read along or across its grain, and the estimate itself. Times are
learned relative to it (``log(time / estimate)``), so that an error means the same at one microsecond
and at ten milliseconds.

Values are numbered in post-order from the kernel's results, so equal structure gives equal features,
wherever and in whatever step it stands. ``feature_spec`` names the numbers, ``encoding`` computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from disco_hlo.estimator import feature_spec as spec
from disco_hlo.estimator import kernel_tables as at
from disco_hlo.estimator.analytic import AnalyticModel
from disco_hlo.estimator.contexts import Scratch
from disco_hlo.estimator.encoding import (
    Batch,
    GraphFeatures,
    encode_kernels,
    new_batch,
    prepare,
)
from disco_hlo.estimator.kernel_tables import KernelTables
from disco_hlo.hlo.cost_model import Kernels
from disco_hlo.hlo.graph import Graph, Node, flat_graph, flat_shapes

_TYPE_OF = {opcode: number for number, opcode in enumerate(spec.VOCABULARY)}
_FLOATS = ("f", "b", "c")
_SHAPE_NUMBERS = spec.NODE.index("evaluation_ns")
_LOGARITHMS = [
    spec.NODE.index(name)
    for name in ("elements", "bytes", "operand_bytes", "minor", "second_minor", "reduced")
]


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
