"""The analytical estimate of a fused kernel: what it moves and what it computes, on this device.

The baseline beside the GNN of DisCo's section 4.3, behind the same interface: the time of a kernel is

    max(streaming time of the bytes it moves, time of the element evaluations inside it)

Bytes are distinct external reads plus results; how often each value is computed inside follows from
the loop nests (``kernel_cost``). Launch cost is the simulator's and not in these times. With nothing
but a device's bandwidth and flop rate this is a roofline; ``calibration`` replaces the roofline by
what single ops measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated
from weakref import ref

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from disco_hlo.errors import ProfileError
from disco_hlo.estimator.contexts import Scratch, make_scratch
from disco_hlo.estimator.kernel_cost import kernels_ns, streaming_ns
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
from disco_hlo.hlo.graph import Graph, Kind, Node, flat_graph
from disco_hlo.hlo.opcodes import ASYNCHRONOUS

TRANSCENDENTAL_FLOPS = 16.0
"""Flops that one exp, log or tanh stands for, where nothing better was measured."""


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

        Parameters, constants, free nodes and all-reduces are 0 (see the all-reduce lines). A loop is
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
            times[x] = _whole(self._library_call_ns(graph, graph.nodes[x], tables))
        return times

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """Time of each kernel, ``[len(kernels)]``."""
        known = self._of(graph)
        return _whole_times(known.tables, kernels, known.scratch)

    def _of(self, graph: Graph) -> _Step:
        """By identity: hashing a graph takes longer than estimating a group of it."""
        known = self._known.get(id(graph))
        if known is None or known.graph() is not graph:
            shapes = structure(graph)
            known = _Step(ref(graph), _tables(graph, shapes, self.device), make_scratch(shapes))
            self._known[id(graph)] = known
        return known

    def _library_call_ns(self, graph: Graph, node: Node, tables: KernelTables) -> float:
        if node.opcode in ASYNCHRONOUS:  # copies on a stream of their own, of a part of what they are given
            return 0.0
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


def _whole(time_ns: float) -> int:
    return max(round(time_ns), 1)
