"""The cost model that a profile makes: measured where it has the key, else estimated and corrected.

DisCo, section 4.2: op times are looked up, all-reduces follow T = C x + D, and what nobody measured
(most fused kernels a search proposes) is estimated. Times are of kernels running alone, launch cost
not included.

An estimator errs alike on kernels that do alike things: where it takes XLA's kernel around a transpose for a third of
what it is, it will take a new kernel around that transpose for too little as well. DisCo (section 4.3) leaves an
estimate as it is. Here each kind of op (its cost key: opcode, shapes, attributes) keeps by how much the kernels that
hold it took longer than estimated, and an estimate is multiplied by the mean over the kernel's ops. What counts of an
op is the share of time that falls on it where it was seen, and that it is rare: an op that all kernels hold tells
little of any. Alike kernels are corrected alike, wherever in the step they are. None is corrected to less than it takes
to move its bytes, where that is known (GPU).

Triton's kernels neither correct nor are corrected: they compute each value once, tile by tile, so that estimates of
them err in another way. In a step of nanodo they were estimated at up to three times what they took, and other kernels
of the same ops right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.collectives import CollectiveKind, collective_bytes, collective_kind
from disco_hlo.hlo.cost_model import CostModel, Kernels, LinearPieces
from disco_hlo.hlo.graph import Graph, Kind, Node, flat_graph
from disco_hlo.hlo.opcodes import COLLECTIVES, PRODUCTS
from disco_hlo.profiler.collectives import later
from disco_hlo.profiler.contention import AT_ONCE_NS, LEAST_NS
from disco_hlo.profiler.instructions import InstructionTimes
from disco_hlo.profiler.keys import GROUP_PREFIX, kernel_keys
from disco_hlo.profiler.profile import OpTime, Profile, merged

_TIMED = (Kind.FUSIBLE, Kind.FIXED)
"""What takes time as a single op."""
_MOST = 4.0
"""Of the ratio of measured to estimated time, either way; beyond it the estimate was of something else."""
_RARITY = 2
"""An op that so many times as many kernels hold counts as many times less, to this power."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A kernel that was measured."""

    members: tuple[int, ...]
    """All nodes that it computes, at least one, duplicates included, bitcasts left out."""
    estimated_ns: int
    measured_ns: int


@dataclass(frozen=True)
class Corrections:
    """By what estimates of kernels are multiplied."""

    log_ratio: Mapping[str, float] = field(default_factory=dict)
    """By an op's cost key: log of measured over estimated time of the kernels that hold it."""
    weight: Mapping[str, float] = field(default_factory=dict)

    def of_nodes(self, graph: Graph) -> NDArray[np.float64]:
        """Weight of each node, and log ratio times weight, ``[2, len(graph)]``."""
        flat = flat_graph(graph)
        keys = [graph.nodes[x].key for x in flat.example.tolist()]
        weight = np.array([self.weight.get(key, 0.0) for key in keys])
        logs = np.array([self.log_ratio.get(key, 0.0) for key in keys])
        of_nodes: NDArray[np.float64] = np.stack([weight, weight * logs])[:, flat.of_key]
        return of_nodes

    def factors(
        self, of_nodes: NDArray[np.float64], member_at: NDArray[np.int64], members: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Of each kernel, ``[kernels]``, 1 where none of its ops was seen.

        Args:
            of_nodes: :meth:`of_nodes` of their graph.
            member_at: kernel i computes ``members[member_at[i] : member_at[i + 1]]``, at least one.
            members: see above.
        """
        weight, weighted = np.add.reduceat(of_nodes[:, members], member_at[:-1], axis=1)
        logs = np.divide(weighted, weight, out=np.zeros(weight.size), where=weight > 0)
        factors: NDArray[np.float64] = np.exp(np.clip(logs, -np.log(_MOST), np.log(_MOST)))
        return factors


NONE = Corrections()
"""Nothing was measured: estimates stay as they are."""


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
        """The kind's own lines, as the profiled step has them, else what a ring makes of the all-reduce's, with what
        lies before a collective in line; :class:`ProfileError` where no sweep was measured."""
        if kind not in self._lines:
            line = self.profile.line(kind)
            if line is None:
                raise ProfileError(
                    f"the profile of {self.profile.platform} holds no all-reduce sweep; "
                    "measure one on the job's devices"
                )
            contention = self.profile.contention
            self._lines[kind] = line if contention is None else later(line, contention.transfer_launch_ns)
        return self._lines[kind]

    def moving_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """The least it takes each kernel to read and write memory, ``[len(kernels)]``: the estimator's business."""
        return self.estimator.moving_ns(graph, kernels)

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
        factors[kernels.flat.tiled] = 1
        corrected_ns = np.rint(times_ns * factors).astype(np.int64)
        lower = np.flatnonzero(factors < 1)
        if lower.size:
            least_ns = np.minimum(times_ns[lower], self.estimator.moving_ns(graph, kernels.chosen(lower)))
            corrected_ns[lower] = np.maximum(corrected_ns[lower], least_ns)
        return corrected_ns

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


def corrections(graph: Graph, seen: Sequence[Seen]) -> Corrections:
    """What these kernels of ``graph``, no two alike and none of Triton's, tell of others.

    One that took less than a fourth of its estimate tells nothing: the estimate was of something else, such as all
    of an array that is updated in place. By the weight that so long an estimate has it would outweigh all others.
    """
    seen = [one for one in seen if one.measured_ns > 0 and one.estimated_ns <= _MOST * one.measured_ns]
    if not seen:
        return NONE
    flat = flat_graph(graph)
    kinds, sizes = flat.example.size, np.array([len(one.members) for one in seen])
    of_members = flat.of_key[np.concatenate([np.array(one.members, np.int64) for one in seen])]
    both, ops = np.unique(np.repeat(np.arange(sizes.size) * kinds, sizes) + of_members, return_counts=True)
    kernel, kind = np.divmod(both, kinds)  # pairs of a kernel and a kind of op that it holds
    estimated_ns = np.array([max(1, one.estimated_ns) for one in seen], np.float64)
    log = np.log(np.array([one.measured_ns for one in seen]) / estimated_ns)
    time_ns = ops * (estimated_ns / sizes)[kernel]
    kernels_of, time_of_ns = np.bincount(kind, minlength=kinds), np.bincount(kind, time_ns, kinds)
    late_of_ns, known = np.bincount(kind, time_ns * log[kernel], kinds), np.flatnonzero(kernels_of)
    keys = [graph.nodes[x].key for x in flat.example[known].tolist()]
    ratio = late_of_ns[known] / np.maximum(time_of_ns[known], 1e-9)
    # What falls on it in a kernel on average.
    weight = time_of_ns[known] / kernels_of[known] / kernels_of[known] ** _RARITY
    return Corrections(
        dict(zip(keys, ratio.tolist(), strict=True)), dict(zip(keys, weight.tolist(), strict=True))
    )
