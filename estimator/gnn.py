"""The trained estimator as a cost model: times of op groups that nobody ever ran (DisCo, section 4.3).

The interface is that of :class:`~disco_hlo.estimator.analytic.AnalyticModel`, which it corrects: the network says
how far the analytical estimate is off. Kernels that look alike to the network, by a digest of their features, are
computed once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ProfileError
from disco_hlo.estimator.analytic import AnalyticModel
from disco_hlo.estimator.features import Batch, GraphFeatures, encode, graph_features, selected
from disco_hlo.estimator.network import network, predicted_ns
from disco_hlo.estimator.weights import Weights, shipped
from disco_hlo.hlo.cost_model import CostModel, Kernels
from disco_hlo.hlo.graph import Graph, Kind, flat_graph

_LOGGER = logging.getLogger("disco_hlo")
_MOST_KNOWN = 1 << 20
"""Kernels remembered."""
_ODD = np.random.default_rng(1).integers(1, 1 << 63, 32, np.uint64) | np.uint64(1)
"""What the numbers of a row are multiplied by."""


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
        self._known: dict[int, int] = {}
        """Times by digest."""

    def __reduce__(self) -> tuple[type[GnnModel], tuple[Weights, dict[str, float], AnalyticModel]]:
        """A copy in another process makes its own tables; what is kept of a graph is for this one."""
        return GnnModel, (self.weights, self._times_ns, self.analytic)

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Time of each node as a kernel of its own, ``[len(graph)]``, launch not included.

        Library calls and loops are the analytical model's; parameters, constants, free nodes and
        all-reduces are 0.
        """
        times = self.analytic.op_ns(graph)
        alone = np.flatnonzero(flat_graph(graph).kind == Kind.FUSIBLE)
        if alone.size:
            place = np.arange(alone.size + 1)
            times[alone] = self.kernels_ns(graph, Kernels.of_arrays(place, alone, place, alone))
        return times

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """Time of each kernel, ``[len(kernels)]``."""
        if not len(kernels):
            return np.zeros(0, np.int64)
        batch = encode(self._features(graph), kernels, self.analytic.scratch(graph))
        found = digests(batch).tolist()
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        new = {digest: place for place, digest in enumerate(found) if digest not in self._known}
        if new:
            times = predicted_ns(self._network, selected(batch, np.array([*new.values()], np.int64)))
            self._known |= zip(new, np.maximum(np.rint(times), 1).astype(np.int64).tolist(), strict=True)
        return np.array([self._known[digest] for digest in found], np.int64)

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        """``[len(graph)]``: equal numbers for nodes that look alike to a kernel that reads them."""
        _, alike = np.unique(self._features(graph).static, axis=0, return_inverse=True)
        return alike.astype(np.int64).ravel()

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
    reason = "no estimator was trained for it"
    try:
        weights = shipped(backend, device_kind)
        if weights is not None:
            return _corrected(weights, BACKENDS[backend].estimator_by_kind, device_kind, local, times_ns)
    except ProfileError as error:
        reason = str(error)
    _say_once(logging.WARNING, f"fused ops on {device_kind} are estimated analytically: {reason}")
    return local


def _corrected(
    weights: Weights,
    by_kind: bool,
    device_kind: str,
    local: AnalyticModel,
    times_ns: Mapping[str, float] | None,
) -> GnnModel:
    # The network has no part in library calls: they go by this device's rates.
    trained = AnalyticModel(weights.device, local.library_flops_per_s)
    if weights.device_kind == device_kind:
        return GnnModel(weights, times_ns, trained)
    # What a GPU's network was trained with fits it better than another GPU's own analytical model, once both are put
    # right by what that GPU's kernels took (docs/estimator.md).
    how = (
        f"estimated as on {weights.device_kind}, put right by what the step's measured kernels take here"
        if by_kind
        else f"the estimator trained on {weights.device_kind} corrects this machine's own analytical estimate"
    )
    _say_once(logging.INFO, f"fused ops on {device_kind}: {how}")
    return GnnModel(weights, times_ns, trained if by_kind else local)


@functools.cache
def _say_once(level: int, line: str) -> None:
    """A search asks for its estimator several times: for the profile, the search, and each look."""
    _LOGGER.log(level, "%s", line)


def digests(batch: Batch) -> NDArray[np.uint64]:
    """``[kernels]``: a hash of each kernel's features, of all numbers in their order."""
    nodes, edges = batch.node_start, batch.edge_start
    node = np.arange(batch.op.size) - np.repeat(nodes[:-1], np.diff(nodes))
    start = np.repeat(np.arange(batch.op.size) - node, np.diff(edges))
    of_nodes = _hashed(batch.node, batch.op, node)
    of_edges = _hashed(
        batch.edge,
        batch.neighbour - start,
        np.arange(batch.neighbour.size) - edges[nodes[:-1]].repeat(np.diff(edges[nodes])),
    )
    found: NDArray[np.uint64] = np.add.reduceat(of_nodes, nodes[:-1])
    found = found * _ODD[0] + np.add.reduceat(of_edges, edges[nodes[:-1]])
    found = found * _ODD[1] + np.add.reduceat(
        _hashed(np.zeros((batch.op.size, 1), np.float32), np.diff(edges), node), nodes[:-1]
    )
    return found * _ODD[2] + _hashed(batch.kernel, np.diff(nodes), np.zeros(len(nodes) - 1, np.int64))


def _hashed(
    numbers: NDArray[np.float32], label: NDArray[Any], place: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """A hash of each row of numbers, with its label and its place among its kernel's."""
    words = numbers.view(np.uint32).astype(np.uint64)
    found = (words * _ODD[: words.shape[1]]).sum(axis=1, dtype=np.uint64)
    found += label.astype(np.uint64) * _ODD[-1] + place.astype(np.uint64) * _ODD[-2]
    found = (found ^ (found >> np.uint64(29))) * _ODD[-3]
    return found ^ (found >> np.uint64(32))
