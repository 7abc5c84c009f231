"""From measured single ops to a device model: how fast this device really streams and computes.

Three things are learned, in this order, each from ops that show it alone:

1. the streaming curve, bytes moved to time, from elementwise ops that do next to no arithmetic
   (median per octave of bytes, made monotone): caches make it anything but a line;
2. the time of one element evaluation by opcode, from ops that take longer than their bytes do; an
   op that streams its bytes only bounds its arithmetic from above. Ops that only say where a value
   comes from (broadcast, slice) are index arithmetic inside a kernel and cost nothing;
3. the extra time of reading across the memory's grain, from the ops that do: what they take
   beyond their evaluations.

Medians, so that a few disturbed measurements move nothing; for 2 the lower quartile, since
disturbances only add time (on CPU, the op that first touches a page of fresh memory pays for the
page). What was not measured keeps the base model's figure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import log2
from statistics import median

import numpy as np

from disco_hlo.backends import BACKENDS
from disco_hlo.estimator.analytic import (
    AnalyticModel,
    DeviceModel,
    device_arrays,
    element_ns,
    multiplied_dtype,
)
from disco_hlo.estimator.kernel_cost import kernel_work, streaming_ns
from disco_hlo.hlo.graph import Graph, Kind, Node, Shape, is_cloned

STREAMING_OPCODES = frozenset({
    "abs", "add", "and", "compare", "convert", "copy", "maximum", "minimum", "multiply", "negate", "not",
    "or", "select", "subtract", "xor",
})  # fmt: skip
"""Elementwise ops whose arithmetic is far cheaper than their memory traffic."""

INDEXING_OPCODES = frozenset({"bitcast", "broadcast", "iota", "reshape", "reverse", "slice", "transpose"})
"""Ops that become index arithmetic inside a kernel."""

_BEYOND_BYTES = 1.15
"""An op is taken to be bound by arithmetic when it takes this much longer than its bytes."""
_UNPRICED = STREAMING_OPCODES | INDEXING_OPCODES
_SHOWS_BANDWIDTH_BYTES = 1 << 20
_ENOUGH_ELEMENTS = 1024
"""Smaller ops tell what a kernel costs, not what an element does."""


@dataclass(frozen=True, slots=True)
class MeasuredOp:
    """One fusible node with its measured time."""

    graph: Graph
    node: Node
    time_ns: float
    moved_bytes: int

    @property
    def evaluations(self) -> int:
        """Element evaluations: of a reduction one for each element it reads."""
        if self.node.opcode == "reduce":
            return self.graph.nodes[self.node.operands[0]].shape.first_array.element_count
        return self.node.shape.first_array.element_count


def measured_ops(graphs: Iterable[Graph], times_ns: Mapping[str, float]) -> list[MeasuredOp]:
    """The fusible nodes that have a measured time (by ``Node.key``), one for each key."""
    found: dict[str, MeasuredOp] = {}
    for graph in graphs:
        for node in graph.nodes:
            if node.kind is Kind.FUSIBLE and node.key in times_ns and node.key not in found:
                found[node.key] = MeasuredOp(
                    graph, node, float(times_ns[node.key]), _moved_bytes(graph, node)
                )
    return [found[key] for key in sorted(found) if found[key].time_ns > 0]


def calibrated(base: DeviceModel, ops: Iterable[MeasuredOp]) -> DeviceModel:
    """``base`` with everything replaced that the measured ops tell."""
    ops = list(ops)
    if not ops:
        return base
    along = [op for op in ops if not _reads_across(op)]
    streaming = _streaming_curve([op for op in along if op.node.opcode in STREAMING_OPCODES])
    streaming = _continued(streaming, base.memory_bandwidth)
    device = replace(base, streaming=streaming, shortest_kernel_ns=min(op.time_ns for op in ops))
    device = replace(device, element_ns={**base.element_ns, **_element_times(device, along)})
    return replace(device, strided_ns=_strided_ns(device, filter(_is_emitted, ops)))


def library_flops_per_s(graphs: Iterable[Graph], times_ns: Mapping[str, float]) -> dict[str, float]:
    """Flop rate of the library calls that have a measured time, by the dtype that they multiply: their median, each
    weighted by its flops, since a small one shows what a call costs."""
    calls: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
    for graph in graphs:
        for node in graph.nodes:
            if node.kind is Kind.FIXED and node.flops and times_ns.get(node.key, 0) > 0:
                rate = 1e9 * node.flops / times_ns[node.key]
                calls[multiplied_dtype(graph, node)][node.key] = rate, node.flops
    found = {}
    for dtype, by_key in sorted(calls.items()):
        rates, flops = zip(*sorted(by_key.values()), strict=True)
        passed = np.cumsum(np.array(flops, np.float64))
        found[dtype] = rates[int(np.searchsorted(passed, passed[-1] / 2))]
    return found


def _is_emitted(op: MeasuredOp) -> bool:
    """Copies to another layout run as a library transposition on CPU, and say nothing of kernels."""
    return op.node.opcode != "copy" or not BACKENDS[op.graph.backend].transposes_by_library


def _moved_bytes(graph: Graph, node: Node) -> int:
    reads = {operand for operand in node.operands if not is_cloned(graph.nodes[operand])}
    return node.shape.size_bytes + sum(
        min(graph.nodes[operand].shape.size_bytes, _wanted_bytes(node, graph.nodes[operand]))
        for operand in reads
    )


def _wanted_bytes(node: Node, operand: Node) -> int:
    """A slice or gather reads what it returns, anything else all of its operand."""
    partial = node.opcode in ("slice", "dynamic-slice", "gather")
    return node.shape.size_bytes if partial else operand.shape.size_bytes


def _streaming_curve(ops: list[MeasuredOp]) -> tuple[tuple[float, float], ...]:
    octaves: dict[int, list[MeasuredOp]] = defaultdict(list)
    for op in ops:
        if op.moved_bytes > 0:
            octaves[int(log2(op.moved_bytes))].append(op)
    curve: list[tuple[float, float]] = []
    for octave in sorted(octaves):
        moved = median(op.moved_bytes for op in octaves[octave])
        time = median(op.time_ns for op in octaves[octave])
        if not curve or moved > curve[-1][0]:
            curve.append((float(moved), max(time, curve[-1][1]) if curve else time))
    return tuple(curve)


def _continued(
    curve: tuple[tuple[float, float], ...], memory_bandwidth: float
) -> tuple[tuple[float, float], ...]:
    """The curve with the device's bandwidth beyond it, where no op was large enough to show one: a tiny
    kernel takes as long as a somewhat larger one, and its time says nothing of bytes."""
    if not curve or curve[-1][0] >= _SHOWS_BANDWIDTH_BYTES:
        return curve
    moved, time_ns = curve[-1]
    knee = time_ns * 1e-9 * memory_bandwidth
    return (*curve, (knee, time_ns)) if knee > moved else curve


def _reads_across(op: MeasuredOp) -> bool:
    """Whether neighbouring results come from operand elements that lie apart."""
    operand = op.graph.nodes[op.node.operands[0]].shape.first_array if op.node.operands else Shape("f32")
    minor = _minor_dimension(operand)
    if minor is None:
        return False
    if op.node.opcode == "reduce":
        return minor not in op.node.dimensions
    result = _minor_dimension(op.node.shape.first_array)
    if op.node.opcode == "copy":
        return result != minor
    if op.node.opcode == "transpose" and result is not None and len(op.node.dimensions) > result:
        return op.node.dimensions[result] != minor
    return False


def _minor_dimension(shape: Shape) -> int | None:
    """The dimension along which neighbours in memory lie, None where there is only one element."""
    return next((dimension for dimension in shape.layout if shape.dims[dimension] > 1), None)


def _element_times(device: DeviceModel, ops: list[MeasuredOp]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for op in ops:
        if op.node.opcode in _UNPRICED or op.evaluations < _ENOUGH_ELEMENTS:
            continue
        per_element = op.time_ns / op.evaluations
        bound_by_bytes = op.time_ns <= _BEYOND_BYTES * _streaming(device, op.moved_bytes)
        found[op.node.opcode].append(
            min(per_element, element_ns(op.node, device)) if bound_by_bytes else per_element
        )
    return {opcode: _lower_quartile(times) for opcode, times in sorted(found.items())}


def _lower_quartile(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 4]


def _strided_ns(device: DeviceModel, ops: Iterable[MeasuredOp]) -> float:
    model = AnalyticModel(device)
    extra = []
    for op in ops:
        tables, scratch, alone = model.tables(op.graph), model.scratch(op.graph), np.array([op.node.id])
        moved, work, strided = kernel_work(tables, alone, alone, False, scratch)
        if strided >= _ENOUGH_ELEMENTS and op.time_ns > _BEYOND_BYTES * _streaming(device, moved):
            extra.append(max(op.time_ns - work, 0.0) / strided)
    return median(extra) if extra else device.strided_ns


def _streaming(device: DeviceModel, moved_bytes: float) -> float:
    return float(streaming_ns(*device_arrays(device), float(moved_bytes)))
