"""The cost model that a profile makes: measured where it has the key, else estimated.

DisCo, section 4.2: op times are looked up, all-reduces follow T = C x + D, and what nobody measured
(most fused kernels a search proposes) is estimated. Times are of kernels running alone, launch cost
not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.collectives import CollectiveKind, collective_bytes, collective_kind
from disco_hlo.hlo.cost_model import CostModel, Kernels, LinearPieces
from disco_hlo.hlo.graph import Graph, Kind, Node, flat_graph
from disco_hlo.hlo.opcodes import COLLECTIVES, PRODUCTS
from disco_hlo.profiler.corrections import NONE, Corrections
from disco_hlo.profiler.holds import AT_ONCE_NS, LEAST_NS
from disco_hlo.profiler.instructions import InstructionTimes
from disco_hlo.profiler.kernel_keys import GROUP_PREFIX, kernel_keys
from disco_hlo.profiler.profile import OpTime, Profile, merged

_TIMED = (Kind.FUSIBLE, Kind.FIXED)
"""What takes time as a single op."""


class MeasuredCosts(CostModel):
    """Times from a profile, completed by an estimator. Integer ns; same inputs, same times. Serves one thread
    at a time: what it works in is kept from call to call.

    Estimates of fused kernels are multiplied by what measured kernels tell of them (``corrections``).
    """

    def __init__(self, profile: Profile, estimator: CostModel, corrections: Corrections = NONE) -> None:
        self.profile = profile
        self.estimator = estimator
        self.corrections = corrections
        self._lines: dict[CollectiveKind, LinearPieces] = {}
        self._kernels = {
            key: time.median_ns for key, time in profile.ops.items() if key.startswith(GROUP_PREFIX)
        }
        self._ops: tuple[ref[Graph], NDArray[np.int64]] | None = None
        """Of the graph asked for last: a search asks for each of its plans."""
        self._known: tuple[ref[Graph], NDArray[np.float64]] | None = None

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Time of each node as a kernel of its own, ``[len(graph)]``; 0 where it takes none."""
        if self._ops is None or self._ops[0]() is not graph:
            measured_ns = self._measured_ns(graph)
            is_timed = np.isin(flat_graph(graph).kind, _TIMED)
            # Estimating takes longest, and often nothing is left to it.
            missing = is_timed & (measured_ns < 0)
            times = self.estimator.op_ns(graph) if missing.any() else np.zeros(len(graph), np.int64)
            times = np.where(is_timed & ~missing, measured_ns, times)
            if self.profile.transfers is not None:
                for x in np.flatnonzero(missing).tolist():
                    if graph.nodes[x].opcode in COLLECTIVES:
                        line = self.collective(collective_kind(graph.nodes[x]))
                        times[x] = line(collective_bytes(graph, x))
            self._ops = (ref(graph), times)
        return self._ops[1].copy()

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """Time of each kernel, ``[len(kernels)]``."""
        if not self._kernels:
            return self._estimates(graph, kernels)
        times = np.array([self._kernels.get(key, -1) for key in kernel_keys(graph, kernels)], np.int64)
        missing = np.flatnonzero(times < 0)
        if missing.size == times.size:
            return self._estimates(graph, kernels)
        if missing.size:  # before the first estimate of a step its tables are made
            times[missing] = self._estimates(graph, kernels.chosen(missing))
        return times

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        """The kind's own lines, as the profiled step has them, else what a ring makes of the all-reduce's;
        :class:`ProfileError` where no sweep was measured."""
        if kind not in self._lines:
            line = self.profile.line(kind)
            if line is None:
                raise ProfileError(
                    f"the profile of {self.profile.platform} holds no all-reduce sweep; "
                    "measure one on the job's devices"
                )
            self._lines[kind] = line
        return self._lines[kind]

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        """Nodes by what they are to the estimate of a kernel that reads them, ``[len(graph)]``; what was measured goes
        by shapes alone."""
        return self.estimator.read_classes(graph)

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        """Of each node as a kernel of its own, the share of its time that must be done before a collective begins
        during it, ``[len(graph)]``: what was measured, else for products what others show."""
        flat, contention = flat_graph(graph), self.profile.contention
        otherwise = 0.0 if contention is None else contention.hold
        found = [
            self.profile.holds.get(node.key, otherwise) if node.opcode in PRODUCTS else 0.0
            for node in (graph.nodes[x] for x in flat.example.tolist())
        ]
        times_ns, shares = self.op_ns(graph), np.array(found, np.float64)[flat.of_key]
        # Older profiles have launches for holds: a few us of kernels during which collectives begin at once.
        return np.where((times_ns >= LEAST_NS) & (shares * times_ns > AT_ONCE_NS), shares, 0.0)

    def _estimates(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        times_ns = self.estimator.kernels_ns(graph, kernels)
        if not self.corrections.weight or not times_ns.size:
            return times_ns
        if self._known is None or self._known[0]() is not graph:
            self._known = (ref(graph), self.corrections.of_nodes(graph))
        factors = self.corrections.factors(self._known[1], kernels.flat.member_at, kernels.flat.members)
        return np.rint(times_ns * factors).astype(np.int64)

    def __getstate__(self) -> dict[str, object]:
        """A copy in another process makes its own times and weights of nodes."""
        return {**self.__dict__, "_ops": None, "_known": None}

    def unmeasured(self, graph: Graph) -> tuple[Node, ...]:
        """Nodes whose time as a single op is the estimator's, for the report to the user."""
        missing = np.isin(flat_graph(graph).kind, _TIMED) & (self._measured_ns(graph) < 0)
        return tuple(graph.nodes[x] for x in np.flatnonzero(missing).tolist())

    def _measured_ns(self, graph: Graph) -> NDArray[np.int64]:
        """What each node took, ``[len(graph)]``; -1 where its key was not measured."""
        flat = flat_graph(graph)
        first, of_key = flat.example, flat.of_key
        found = [self.profile.ops.get(graph.nodes[x].key) for x in first.tolist()]
        times_ns = [-1 if time is None else time.median_ns for time in found]
        return np.array(times_ns, np.int64)[of_key]


def kernel_times(graph: Graph, kernels: Kernels, times: Mapping[str, InstructionTimes]) -> dict[str, OpTime]:
    """Measured times of a plan's kernels by their keys.

    Args:
        graph: the plan's graph.
        kernels: of the plan's op groups.
        times: by instruction; the kernel of group 3 is the instruction whose name begins with ``g3_``.
    """
    keys = kernel_keys(graph, kernels)
    found: dict[str, list[OpTime]] = {}
    for name, measured in times.items():
        token, _, rest = name.partition("_")
        if rest and token[:1] == "g" and token[1:].isdigit() and int(token[1:]) < len(keys):
            time = OpTime(measured.median_ns, measured.spread_ns, measured.samples)
            found.setdefault(keys[int(token[1:])], []).append(time)
    return {key: merged(found[key]) for key in sorted(found)}
