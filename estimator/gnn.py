"""The trained estimator as a cost model: times of op groups that nobody ever ran (DisCo, section 4.3).

The interface is that of :class:`~disco_hlo.estimator.analytic.AnalyticModel`, which it corrects: the network says
how far the analytical estimate is off. Kernels that look alike to the network, by a digest of their features, are
computed once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import BACKENDS
from disco_hlo.compiled import compiled, inner
from disco_hlo.errors import ProfileError
from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator.analytic import AnalyticModel
from disco_hlo.estimator.features import Batch, GraphFeatures, encode_kernel, graph_features, new_batch, room
from disco_hlo.estimator.kernel_cost import Scratch
from disco_hlo.estimator.network import Network, Room, dense, embed_kernel, network, room_for
from disco_hlo.estimator.weights import Weights, shipped
from disco_hlo.hlo.cost_model import CostModel, FlatKernels, Kernels
from disco_hlo.hlo.graph import Graph, Kind, flat_graph

_LOGGER = logging.getLogger("disco_hlo")
_MOST_KNOWN = 1 << 20
"""Kernels remembered."""
_NODE: Final = len(spec.NODE)
_EDGE: Final = len(spec.EDGE)
_KERNEL: Final = len(spec.KERNEL)
_ODD: Final = np.random.default_rng(1).integers(1, 1 << 63, (2, _NODE + 1), np.uint64) | np.uint64(1)
"""What the numbers of a row are multiplied by, for either half of a digest."""


class GnnModel(CostModel):
    """Estimated times of single ops and op groups of any graph on one device.

    Args:
        weights: a trained network.
        times_ns: measured times of single ops by ``Node.key``, as far as there are any.
        analytic: the analytical estimate to correct, instead of the one it was trained with.

    Raises:
        ProfileError: the weights are of a network that has no compiled form.
    """

    def __init__(
        self,
        weights: Weights,
        times_ns: Mapping[str, float] | None = None,
        analytic: AnalyticModel | None = None,
    ) -> None:
        self.weights = weights
        self.analytic = analytic or AnalyticModel(weights.device)
        self._network = network(weights)
        self._times_ns = dict(times_ns or {})
        self._steps: dict[int, tuple[ref[Graph], GraphFeatures]] = {}
        self._known = nothing_known()
        self._space = new_space(self._network, 1, 1)

    def __reduce__(self) -> tuple[type[GnnModel], tuple[Weights, dict[str, float], AnalyticModel]]:
        """A copy in another process makes its own tables; what is kept of a graph is for this one."""
        return GnnModel, (self.weights, self._times_ns, self.analytic)

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Time of each node as a kernel of its own, ``[len(graph)]``, launch not included.

        Library calls and loops are the analytical model's; parameters, constants, free nodes and
        collectives that a plan moves are 0.
        """
        times = self.analytic.op_ns(graph)
        alone = np.flatnonzero(flat_graph(graph).kind == Kind.FUSIBLE)
        if alone.size:
            place = np.arange(alone.size + 1)
            times[alone] = self.kernels_ns(graph, Kernels.of_arrays(place, alone, place, alone))
        return times

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """Time of each kernel, ``[len(kernels)]``."""
        if self._known.used[0] > _MOST_KNOWN:
            self._known = nothing_known()
        found = np.zeros(len(kernels), np.int64)
        self._known = with_room(self._known, len(found))
        features, scratch = self._features(graph), self.analytic.scratch(graph)
        net, flat = self._network, kernels.flat
        nodes, edges = times_ns(features, flat, scratch, net, self._known, self._space, found)
        if nodes:
            self._space = new_space(net, 2 * nodes, 2 * edges)
            times_ns(features, flat, scratch, net, self._known, self._space, found)
        return found

    def moving_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """The analytical model's."""
        return self.analytic.moving_ns(graph, kernels)

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        """``[len(graph)]``: equal numbers for nodes that look alike to a kernel that reads them."""
        return row_digests(self._features(graph).static)

    def _features(self, graph: Graph) -> GraphFeatures:
        """By identity: hashing a graph takes longer than estimating a kernel of it."""
        known = self._steps.get(id(graph))
        if known is None or known[0]() is not graph:
            known = ref(graph), graph_features(graph, self.analytic, self._times_ns)
            self._steps[id(graph)] = known
        return known[1]


def estimator_for(
    backend: str, device_kind: str, local: AnalyticModel, times_ns: Mapping[str, float] | None = None
) -> AnalyticModel | GnnModel:
    """The best estimator there is for a device: trained where weights ship for it or for one of the same processor,
    else the analytical one.

    Args:
        backend: ``cpu`` or ``gpu``.
        device_kind: as the profile names it.
        local: the analytical model as calibrated on this very device.
        times_ns: measured times of single ops by ``Node.key``.
    """
    try:
        weights = shipped(backend, device_kind)
        if weights is not None:  # the network has no part in library calls: they go by this device's rates
            trained = AnalyticModel(weights.device, local.library_flops_per_s)
        if weights is not None and weights.device_kind == device_kind:
            return GnnModel(weights, times_ns, trained)
        if weights is not None and BACKENDS[backend].estimator_by_kind:
            # What it was trained with fits it better than this GPU's own analytical model, once both are put right by
            # what this GPU's kernels took (docs/estimator.md).
            _say_once(
                logging.INFO,
                f"fused ops on {device_kind}: estimated as on {weights.device_kind}, put right by what the step's "
                "measured kernels take here",
            )
            return GnnModel(weights, times_ns, trained)
        if weights is not None:
            _say_once(
                logging.INFO,
                f"fused ops on {device_kind}: the estimator trained on {weights.device_kind} corrects this machine's "
                "own analytical estimate",
            )
            return GnnModel(weights, times_ns, local)
        reason = "no estimator was trained for it"
    except ProfileError as error:
        reason = str(error)
    _say_once(logging.WARNING, f"fused ops on {device_kind} are estimated analytically: {reason}")
    return local


@functools.cache
def _say_once(level: int, line: str) -> None:
    """A search asks for its estimator several times: for the profile, the search, and each look."""
    _LOGGER.log(level, "%s", line)


class Known(NamedTuple):
    """A hash table, open addressing. An estimate of 0 stands for an empty slot."""

    digest: NDArray[np.uint64]
    """``[slots, 2]``, a power of two."""
    time_ns: NDArray[np.float64]
    """``[slots]``"""
    used: NDArray[np.int64]
    """``[1]``"""


class Space(NamedTuple):
    """Working space for one kernel at a time, kept from call to call: as large as it is, it would be given back to the
    system and cleared by it every time."""

    batch: Batch
    room: Room
    pooled: NDArray[np.float32]
    """``[1, ..]``: see ``inference.dense``."""
    log_ratio: NDArray[np.float32]
    """``[1]``"""


def nothing_known(slots: int = 1 << 2) -> Known:
    """An empty table. It begins small, so that the first few kernels compile what makes it larger."""
    return Known(np.zeros((slots, 2), np.uint64), np.zeros(slots), np.zeros(1, np.int64))


def with_room(known: Known, wanted: int) -> Known:
    """The table itself, or a larger copy, so that ``wanted`` more keep it at most half full."""
    slots = known.time_ns.size
    while 2 * (int(known.used[0]) + wanted) > slots:
        slots *= 2
    if slots == known.time_ns.size:
        return known
    larger = nothing_known(slots)
    _copy(known, larger)
    return larger


def new_space(net: Network, nodes: int, edges: int) -> Space:
    """Working space for kernels of up to so many nodes and edges."""
    pooled, log_ratio = np.empty((1, net.dense1.shape[0]), np.float32), np.empty(1, np.float32)
    return Space(new_batch(1, nodes, edges), room_for(net, nodes, edges), pooled, log_ratio)


@compiled
def times_ns(
    graph: GraphFeatures,
    kernels: FlatKernels,
    scratch: Scratch,
    net: Network,
    known: Known,
    space: Space,
    found: NDArray[np.int64],
) -> tuple[int, int]:
    """Time of each kernel of one step as the network has it, in whole ns, at least 1, into ``found``.

    One after the other, from members to time: what a kernel needs stays in the second cache. ``known`` has
    room for all.

    Returns:
        (0, 0), or for how many nodes and edges ``space`` must be made: it is too small, nothing was done.
    """
    nodes = edges = 1
    for kernel in range(found.size):
        most = room(graph.tables, kernels, kernel, kernel + 1)
        nodes, edges = max(nodes, most[0]), max(edges, most[1])
    batch, pooled, log_ratio = space.batch, space.pooled, space.log_ratio
    if nodes > batch.op.size or edges > batch.neighbour.size:
        return nodes, edges
    for kernel in range(found.size):
        encode_kernel(graph, kernels, kernel, scratch, batch, 0)
        first, second = _digest(batch, 0)
        slot = _slot(known, first, second)
        if known.time_ns[slot] == 0:
            embed_kernel(net, batch, 0, space.room, pooled[0])
            dense(net, pooled, log_ratio)
            known.digest[slot, 0], known.digest[slot, 1] = first, second
            known.time_ns[slot] = batch.estimate_ns[0] * np.exp(np.float64(log_ratio[0]))
            known.used[0] += 1
        found[kernel] = np.int64(max(np.rint(known.time_ns[slot]), 1.0))
    return 0, 0


@compiled
def digests(batch: Batch) -> NDArray[np.uint64]:
    """``[kernels, 2]``: 128 bits of each kernel's features; equal structure, equal digest."""
    found = np.empty((batch.estimate_ns.size, 2), np.uint64)
    for kernel in range(found.shape[0]):
        found[kernel, 0], found[kernel, 1] = _digest(batch, kernel)
    return found


def row_digests(numbers: NDArray[np.float32]) -> NDArray[np.int64]:
    """A hash of each row of ``[rows, up to len(NODE)]`` numbers."""
    words = numbers.view(np.uint32).astype(np.uint64)
    found: NDArray[np.int64] = (words * _ODD[0, : words.shape[1]]).sum(axis=1, dtype=np.uint64).view(np.int64)
    return found


@inner
def _digest(batch: Any, kernel: Any) -> Any:
    """Two hashes side by side. The numbers of a row are multiplied and added up, independently of each other, and
    one row after the other is mixed in."""
    node, edge, own = batch.node.view(np.uint32), batch.edge.view(np.uint32), batch.kernel.view(np.uint32)
    start, end = batch.node_start[kernel], batch.node_start[kernel + 1]
    first, last = batch.edge_start[start], batch.edge_start[end]
    a, b = np.uint64(end - start), np.uint64(last - first)
    x, y = np.uint64(0), np.uint64(0)
    for i in range(_KERNEL):
        x += own[kernel, i] * _ODD[0, i]
        y += own[kernel, i] * _ODD[1, i]
    a, b = _mixed(a, b, x, y)
    for row in range(start, end):
        label = np.uint64(batch.op[row]) + (np.uint64(batch.edge_start[row] - first) << np.uint64(16))
        x, y = label * _ODD[0, _NODE], label * _ODD[1, _NODE]
        for i in range(_NODE):
            x += node[row, i] * _ODD[0, i]
            y += node[row, i] * _ODD[1, i]
        a, b = _mixed(a, b, x, y)
    for row in range(first, last):
        label = np.uint64(batch.neighbour[row] - start)
        x, y = label * _ODD[0, _NODE], label * _ODD[1, _NODE]
        for i in range(_EDGE):
            x += edge[row, i] * _ODD[0, i]
            y += edge[row, i] * _ODD[1, i]
        a, b = _mixed(a, b, x, y)
    return a, b


@inner
def _mixed(a: Any, b: Any, x: Any, y: Any) -> Any:
    a = (a ^ x) * np.uint64(0x9E3779B97F4A7C15)
    b = (b ^ y) * np.uint64(0xD1342543DE82EF95)
    return a ^ (a >> np.uint64(32)), b ^ (b >> np.uint64(29))


@inner
def _slot(known: Any, first: Any, second: Any) -> Any:
    """Where the digest is, or where it belongs."""
    mask = known.time_ns.size - 1
    slot = np.int64(first >> np.uint64(1)) & mask
    # Ends: half of the table is empty (with_room).
    while known.time_ns[slot] != 0 and (known.digest[slot, 0] != first or known.digest[slot, 1] != second):
        slot = (slot + 1) & mask
    return slot


@compiled
def _copy(known: Known, larger: Known) -> None:
    """Everything known into the larger table."""
    for old in range(known.time_ns.size):
        if known.time_ns[old] != 0:
            slot = _slot(larger, known.digest[old, 0], known.digest[old, 1])
            for half in range(2):
                larger.digest[slot, half] = known.digest[old, half]
            larger.time_ns[slot] = known.time_ns[old]
            larger.used[0] += 1
