"""The cost model that a profile makes: measured where it has the key, else estimated.

DisCo, section 4.2: op times are looked up, all-reduces follow T = C x + D, and what nobody measured
(most fused kernels a search proposes) is estimated. Times are of units running alone, launch cost
not included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol
from weakref import ref

import numpy as np
from numpy.typing import ArrayLike, NDArray

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.flat_graph import chosen_lists, flat_graph, flat_lists
from disco_hlo.hlo.graph import Graph, Kind, Node
from disco_hlo.hlo.kernel_times import FusedOps, KernelTimes, TellsReadsApart, UnitTimes
from disco_hlo.hlo.opcodes import PRODUCTS
from disco_hlo.profiler.corrections import NONE, Corrections
from disco_hlo.profiler.holds import AT_ONCE_NS, LEAST_NS
from disco_hlo.profiler.instructions import InstructionTimes
from disco_hlo.profiler.kernel_keys import KeyTexts, kernel_keys, key_texts
from disco_hlo.profiler.keys import GROUP_PREFIX, group_key, results_of, triton_emitter
from disco_hlo.profiler.profile import OpTime, Profile, merged

_TIMED = (Kind.FUSIBLE, Kind.FIXED)
"""What takes time as a single op."""


class Estimator(UnitTimes, KernelTimes, Protocol):
    """An estimate of what was not measured: the analytical model, or the GNN."""


class MeasuredCosts:
    """Times from a profile, completed by an estimator. Integer ns; same inputs, same times. Serves one thread
    at a time: what it works in is kept from call to call.

    Estimates of fused kernels are multiplied by what measured kernels tell of them (``corrections``).
    """

    def __init__(self, profile: Profile, estimator: Estimator, corrections: Corrections = NONE) -> None:
        self.profile = profile
        self.estimator = estimator
        self.corrections = corrections
        self._lines = profile.transfers
        prefix = len(GROUP_PREFIX)
        self._kernels = {
            key[prefix:]: time.median_ns for key, time in profile.ops.items() if key.startswith(GROUP_PREFIX)
        }
        self._texts: tuple[ref[Graph], KeyTexts] | None = None
        self._nodes: tuple[ref[Graph], NDArray[np.int64]] | None = None
        """Of the graph asked for last: a search asks for each of its plans."""
        self._known: tuple[ref[Graph], NDArray[np.float64]] | None = None

    def nodes_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Time of each node as a kernel of its own, ``[len(graph)]``; 0 where it takes none."""
        if self._nodes is None or self._nodes[0]() is not graph:
            measured_ns = self._measured_ns(graph)
            is_timed = np.isin(flat_graph(graph).kind, _TIMED)
            missing = is_timed & (
                measured_ns < 0
            )  # estimating takes longest, and often nothing is left to it
            times = self.estimator.nodes_ns(graph) if missing.any() else np.zeros(len(graph), np.int64)
            times = np.where(is_timed & ~missing, measured_ns, times)
            self._nodes = (ref(graph), times)
        return self._nodes[1].copy()

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        """Of each node as a kernel of its own, the share of its time that must be done before a transfer begins beside
        it, ``[len(graph)]``: what was measured, else for products what others show."""
        flat, contention = flat_graph(graph), self.profile.contention
        otherwise = 0.0 if contention is None else contention.hold
        found = [
            self.profile.holds.get(node.key, otherwise) if node.opcode in PRODUCTS else 0.0
            for node in (graph.nodes[x] for x in flat.example.tolist())
        ]
        times_ns, shares = self.nodes_ns(graph), np.array(found, np.float64)[flat.of_key]
        # Older profiles have launches for holds: a few us of kernels beside which transfers begin at once.
        return np.where((times_ns >= LEAST_NS) & (shares * times_ns > AT_ONCE_NS), shares, 0.0)

    def groups_ns(self, graph: Graph, groups: Sequence[FusedOps]) -> NDArray[np.int64]:
        """Time of each op group as one kernel, ``[len(groups)]``."""
        measured = [self.profile.ops.get(fused_key(graph, group)) for group in groups]
        missing = [position for position, time in enumerate(measured) if time is None]
        times = np.array([0 if time is None else time.median_ns for time in measured], np.int64)
        if missing:  # before the first estimate of a step its tables are made
            unknown = [groups[position] for position in missing]
            member_at, members = flat_lists([group.nodes + group.duplicates for group in unknown])
            estimates = self.estimator.groups_ns(graph, unknown)
            times[missing] = self._corrected(estimates, graph, member_at, members)
        return times

    def kernels_ns(
        self,
        graph: Graph,
        member_at: NDArray[np.int64],
        members: NDArray[np.int64],
        result_at: NDArray[np.int64],
        results: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Time of many kernels in one call, with their results (see ``KernelTimes``)."""
        if not self._kernels:
            return self._estimates(graph, member_at, members, result_at, results)
        keys = kernel_keys(self._texts_of(graph), member_at, members, result_at, results)
        times = np.array([self._kernels.get(key, -1) for key in keys], np.int64)
        missing = np.flatnonzero(times < 0)
        if missing.size == times.size:
            return self._estimates(graph, member_at, members, result_at, results)
        if missing.size:
            kernels = *chosen_lists(member_at, members, missing), *chosen_lists(result_at, results, missing)
            times[missing] = self._estimates(graph, *kernels)
        return times

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        """Nodes by what they are to the estimate of a kernel that reads them, ``[len(graph)]``; what was measured goes
        by shapes alone (see ``hlo.kernel_times.TellsReadsApart``)."""
        if isinstance(self.estimator, TellsReadsApart):
            return self.estimator.read_classes(graph)
        return np.zeros(len(graph), np.int64)

    def _estimates(
        self,
        graph: Graph,
        member_at: NDArray[np.int64],
        members: NDArray[np.int64],
        result_at: NDArray[np.int64],
        results: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        times_ns = self.estimator.kernels_ns(graph, member_at, members, result_at, results)
        return self._corrected(times_ns, graph, member_at, members)

    def _corrected(
        self,
        times_ns: NDArray[np.int64],
        graph: Graph,
        member_at: NDArray[np.int64],
        members: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        if not self.corrections.weight:
            return times_ns
        if self._known is None or self._known[0]() is not graph:
            self._known = (ref(graph), self.corrections.of_nodes(graph))
        factors = self.corrections.factors(self._known[1], member_at, members)
        return np.rint(times_ns * factors).astype(np.int64)

    def _texts_of(self, graph: Graph) -> KeyTexts:
        if self._texts is None or self._texts[0]() is not graph:
            self._texts = (ref(graph), key_texts(graph))
        return self._texts[1]

    def __getstate__(self) -> dict[str, object]:
        """A copy in another process makes its own texts, times and weights of nodes."""
        return {**self.__dict__, "_texts": None, "_nodes": None, "_known": None}

    def all_reduce_ns(self, sizes_bytes: ArrayLike) -> NDArray[np.int64]:
        """Time of an all-reduce of each size; :class:`ProfileError` where no sweep was measured."""
        if self._lines is None:
            raise ProfileError(
                f"the profile of {self.profile.platform} holds no all-reduce sweep; "
                "measure one on the job's devices"
            )
        return self._lines.predict_ns(sizes_bytes)

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


def fused_key(graph: Graph, group: FusedOps) -> str:
    """Cost key by which a group is asked for without the rest of its plan.

    Which of its nodes leave a kernel depends on what other groups recompute for themselves; here every
    owned node that anything else reads is taken for a result. :func:`group_times` puts measured
    kernels under these keys too.
    """
    emitter = triton_emitter(group.config) if group.kind == "triton" else ""
    members = {*group.nodes, *group.duplicates}
    return group_key(graph, members, results_of(graph, group.nodes, group.duplicates), emitter)


def group_times(
    graph: Graph, groups: Sequence[FusedOps], times: Mapping[str, InstructionTimes]
) -> dict[str, OpTime]:
    """Measured times of a plan's kernels by :func:`fused_key`.

    Args:
        graph: the plan's graph.
        groups: the plan's op groups.
        times: by instruction; the kernel of group 3 is the instruction whose name begins with ``g3_``.
    """
    found: dict[str, list[OpTime]] = {}
    for name, measured in times.items():
        token, _, rest = name.partition("_")
        if rest and token[:1] == "g" and token[1:].isdigit() and int(token[1:]) < len(groups):
            key = fused_key(graph, groups[int(token[1:])])
            time = OpTime(measured.median_ns, measured.spread_ns, measured.samples)
            found.setdefault(key, []).append(time)
    return {key: merged(found[key]) for key in sorted(found)}
