"""The analytical estimate of a fused kernel: what it moves and what it computes, on this device.

The baseline beside the GNN of DisCo's section 4.3, behind the same interface: the time of a kernel is

    max(streaming time of the bytes it moves, time of the element evaluations inside it)

Bytes are distinct external reads plus results; how often each value is computed inside follows from
the loop nests (``kernel_cost``). Launch cost is the simulator's and not in these times. With nothing
but a device's bandwidth and flop rate this is a roofline. :func:`calibrated` replaces the roofline by
what single ops measured. Three things are learned, in this order, each from ops that show it alone:

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
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import log2
from statistics import median
from typing import Annotated
from weakref import ref

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ProfileError
from disco_hlo.estimator.kernel_cost import Scratch, kernel_work, kernels_ns, make_scratch, streaming_ns
from disco_hlo.estimator.kernel_tables import (
    CONSTANTS,
    ELEMENT_NS,
    ELEMENTS,
    HOISTS,
    ITEM_BYTES,
    KERNEL_NS,
    NS_PER_BYTE,
    STRIDED_NS,
    VALUE_ROWS,
    KernelTables,
    Structure,
    structure,
)
from disco_hlo.hlo.cost_model import CostModel, Kernels
from disco_hlo.hlo.graph import Graph, Kind, Node, Shape, flat_graph, is_cloned
from disco_hlo.hlo.opcodes import ASYNCHRONOUS

TRANSCENDENTAL_FLOPS = 16.0
"""Flops that one exp, log or tanh stands for, where nothing better was measured."""
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
_Number = Annotated[float, Meta(ge=0, le=1e18)]
"""A rate, a size or a time."""


@dataclass(frozen=True)
class DeviceModel:
    """A device as the analytical estimate sees it."""

    memory_bandwidth: _Number
    """Bytes read plus written per second, from main memory."""
    flops_per_s: _Number
    """Of a large f32 matmul."""
    hoists: bool
    """Whether loop-invariant values inside a kernel move out of its inner loops (XLA:CPU)."""
    shortest_kernel_ns: _Number = 0.0
    streaming: tuple[tuple[_Number, _Number], ...] = ()
    """Measured (bytes moved, ns) of streaming kernels, both ascending: caches make it no line."""
    strided_ns: _Number = 0.0
    """Extra time to read one element across the memory's grain."""
    element_ns: Mapping[str, _Number] = field(default_factory=dict)
    """Measured time of one evaluation by opcode; for the rest flops over the flop rate."""

    def __post_init__(self) -> None:
        rates = (self.memory_bandwidth, self.flops_per_s)
        if not all(np.isfinite(rate) and rate > 0 for rate in rates):
            raise ProfileError(f"expected a positive bandwidth and flop rate, got {rates}")
        times = (self.shortest_kernel_ns, self.strided_ns, *self.element_ns.values())
        if not all(np.isfinite(time) and time >= 0 for time in times):
            raise ProfileError("expected finite times that are not negative in a device model")
        steps = list(pairwise(self.streaming))
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in steps) or any(
            min(point) <= 0 for point in self.streaming
        ):
            raise ProfileError(f"expected streaming times that grow with the bytes, got {self.streaming}")


@dataclass(slots=True)
class _Step:
    """What is kept of one graph."""

    graph: ref[Graph]
    tables: KernelTables
    scratch: Scratch
    op_ns: NDArray[np.int64] | None = None
    """``[nodes]``: each as a kernel of its own, once somebody asked."""
    moving: KernelTables | None = None
    """The tables of a device that computes in no time, likewise."""


class AnalyticModel(CostModel):
    """Estimated times of single ops and op groups of any graph on one device.

    Args:
        device: what is known of it.
        library_flops_per_s: flop rates of library calls by the dtype that they multiply; the device's for the rest.
    """

    def __init__(self, device: DeviceModel, library_flops_per_s: Mapping[str, float] | None = None) -> None:
        self.device = device
        self.library_flops_per_s = dict(library_flops_per_s or {})
        self._known: dict[int, _Step] = {}

    def __reduce__(self) -> tuple[type[AnalyticModel], tuple[DeviceModel, dict[str, float]]]:
        """A copy in another process makes its own tables."""
        return AnalyticModel, (self.device, self.library_flops_per_s)

    def tables(self, graph: Graph) -> KernelTables:
        """The flat arrays that :func:`~disco_hlo.estimator.kernel_cost.kernel_ns` reads."""
        return self._of(graph).tables

    def scratch(self, graph: Graph) -> Scratch:
        """Working space for ``kernel_ns``, for one caller at a time."""
        return self._of(graph).scratch

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Time of each node as a kernel of its own, ``[len(graph)]``, launch not included.

        Parameters, constants, free nodes and collectives that a plan moves are 0. A loop is
        only charged for what it reads and returns: its time has to be measured.
        """
        known = self._of(graph)
        if known.op_ns is None:
            known.op_ns = self._op_ns(graph, known.tables, known.scratch)
        return known.op_ns.copy()

    def _op_ns(self, graph: Graph, tables: KernelTables, scratch: Scratch) -> NDArray[np.int64]:
        times = np.zeros(len(graph), np.int64)
        kind = flat_graph(graph).kind
        alone = np.flatnonzero(kind == Kind.FUSIBLE)
        place = np.arange(alone.size + 1)
        times[alone] = _whole_times(tables, Kernels.of_arrays(place, alone, place, alone), scratch)
        for x in np.flatnonzero(kind == Kind.FIXED).tolist():
            times[x] = max(round(self._library_call_ns(graph, graph.nodes[x], tables)), 1)
        return times

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """Time of each kernel, ``[len(kernels)]``."""
        known = self._of(graph)
        return _whole_times(known.tables, kernels, known.scratch)

    def moving_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """Streaming time of each kernel's bytes, ``[len(kernels)]``; 0 where that binds nobody."""
        if not BACKENDS[graph.backend].streams_steadily:
            return np.zeros(len(kernels), np.int64)
        known = self._of(graph)
        if known.moving is None:
            value, constant = known.tables.value.copy(), known.tables.constant.copy()
            value[ELEMENT_NS], constant[STRIDED_NS] = 0, 0
            known.moving = known.tables._replace(value=value, constant=constant)
        return _whole_times(known.moving, kernels, known.scratch)

    def _of(self, graph: Graph) -> _Step:
        """By identity: hashing a graph takes longer than estimating a group of it."""
        known = self._known.get(id(graph))
        if known is None or known.graph() is not graph:
            shapes = structure(graph)
            known = _Step(ref(graph), _tables(graph, shapes, self.device), make_scratch(shapes))
            self._known[id(graph)] = known
        return known

    def _library_call_ns(self, graph: Graph, node: Node, tables: KernelTables) -> float:
        if node.opcode == "async-start":  # the copy of a slice, out of an array or into it
            moved = 2 * min((leaf.size_bytes for leaf in node.shape.leaves if leaf.dims), default=0)
        elif node.opcode in ASYNCHRONOUS:  # copies on a stream of their own
            return 0.0
        elif node.opcode == "dynamic-update-slice":  # by itself it writes over the array
            moved = 2 * graph.nodes[node.operands[1]].shape.size_bytes
        else:
            moved = node.shape.size_bytes + sum(
                graph.nodes[operand].shape.size_bytes for operand in set(node.operands)
            )
        work = node.flops + TRANSCENDENTAL_FLOPS * node.transcendentals
        flops_per_s = self.library_flops_per_s.get(multiplied_dtype(graph, node), self.device.flops_per_s)
        return max(streaming_ns(tables.curve, tables.constant, float(moved)), 1e9 * work / flops_per_s)


def multiplied_dtype(graph: Graph, node: Node) -> str:
    """Dtype of a library call's first operand; empty where it reads nothing."""
    return graph.nodes[node.operands[0]].shape.dtype if node.operands else ""


def _whole_times(tables: KernelTables, kernels: Kernels, scratch: Scratch) -> NDArray[np.int64]:
    times = np.zeros(len(kernels), np.float64)
    kernels_ns(tables, kernels.flat, scratch, times)
    return np.maximum(np.rint(times), 1).astype(np.int64)


def element_ns(node: Node, device: DeviceModel) -> float:
    """Time of one evaluation of one element of the node, operands ready."""
    measured = device.element_ns.get(node.opcode)
    if measured is not None:
        return measured
    work = node.flops + TRANSCENDENTAL_FLOPS * node.transcendentals
    if not work:
        return 0.0
    return 1e9 * work / max(node.shape.first_array.element_count, 1) / device.flops_per_s


def _tables(graph: Graph, shapes: Structure, device: DeviceModel) -> KernelTables:
    value = np.zeros((VALUE_ROWS, len(graph)), np.float64)
    value[ELEMENTS] = shapes.elements
    value[ITEM_BYTES] = shapes.item_bytes
    # Flops and shapes are those of all nodes of a key.
    flat = flat_graph(graph)
    first, of_key = flat.example, flat.of_key
    value[ELEMENT_NS] = np.array([element_ns(graph.nodes[x], device) for x in first.tolist()])[of_key]
    return KernelTables(shapes.node, shapes.edge, value, *device_arrays(device))


def device_arrays(device: DeviceModel) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """``curve`` and ``constant`` of :class:`KernelTables`."""
    constant = np.zeros(CONSTANTS, np.float64)
    constant[NS_PER_BYTE] = 1e9 / device.memory_bandwidth
    constant[KERNEL_NS] = device.shortest_kernel_ns
    constant[STRIDED_NS] = device.strided_ns
    constant[HOISTS] = device.hoists
    curve = np.array(device.streaming, np.float64).reshape(-1, 2)
    return np.ascontiguousarray(curve.T), constant


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
    """A slice or gather reads what it returns, anything else all of its operands."""
    result = node.shape.size_bytes
    reads = {operand for operand in node.operands if not is_cloned(graph.nodes[operand])}
    sizes = [graph.nodes[operand].shape.size_bytes for operand in reads]
    if node.opcode in ("slice", "dynamic-slice", "gather"):
        sizes = [min(size, result) for size in sizes]
    return result + sum(sizes)


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
    # Lower quartiles.
    return {opcode: sorted(times)[(len(times) - 1) // 4] for opcode, times in sorted(found.items())}


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
