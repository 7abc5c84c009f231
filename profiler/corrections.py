"""What measured kernels tell of those that nobody measured: how far the estimator is off, op by op.

An estimator errs alike on kernels that do alike things: where it takes XLA's kernel around a transpose for a third of
what it is, it will take a new kernel around that transpose for too little as well. DisCo (section 4.3) leaves an
estimate as it is. Here each kind of op (its cost key: opcode, shapes, attributes) keeps by how much the kernels that
hold it took longer than estimated, and an estimate is multiplied by the mean over the kernel's ops. What counts of an
op is the share of time that falls on it where it was seen, and that it is rare: an op that all kernels hold tells
little of any. Alike kernels are corrected alike, wherever in the step they are.

A search takes of all kernels that never ran those whose estimates err on the low side, so what it chose takes longer
than estimated even where estimates are right on average: the optimizer's curse (Smith and Winkler, "The Optimizer's
Curse: Skepticism and Postdecision Surprise in Decision Analysis", Management Science 52(3), 2006). By how much kernels
of plans fell behind, each corrected by what all others tell, is what the next choice has to expect as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph, flat_graph

_MOST = 4.0
"""Of the ratio of measured to estimated time; beyond it the estimate was of something else."""
_HIGHEST_SHORTFALL = 2.0
_RARITY = 2
"""An op that so many times as many kernels hold counts as many times less, to this power."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A kernel that was measured."""

    members: tuple[int, ...]
    """All nodes that it computes, at least one, duplicates included, bitcasts left out."""
    estimated_ns: int
    measured_ns: int
    chosen: bool
    """By a search, when only its estimate was known."""


@dataclass(frozen=True)
class Corrections:
    """By what estimates of kernels are multiplied."""

    log_ratio: Mapping[str, float] = field(default_factory=dict)
    """By an op's cost key: log of measured over estimated time of the kernels that hold it."""
    weight: Mapping[str, float] = field(default_factory=dict)
    shortfall: float = 1.0
    """By how much kernels that a search chose took longer than corrected, from 1 to 2."""

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
        """Of each kernel, ``[kernels]``, where anything was seen; the shortfall alone where none of its ops was.

        Args:
            of_nodes: :meth:`of_nodes` of their graph.
            member_at: kernel i computes ``members[member_at[i] : member_at[i + 1]]``, at least one.
            members: see above.
        """
        weight, weighted = np.add.reduceat(of_nodes[:, members], member_at[:-1], axis=1)
        logs = np.divide(weighted, weight, out=np.zeros(weight.size), where=weight > 0)
        factors: NDArray[np.float64] = self.shortfall * np.exp(np.clip(logs, -np.log(_MOST), np.log(_MOST)))
        return factors


NONE = Corrections()
"""Nothing was measured: estimates stay as they are."""


class _Told(NamedTuple):
    """What was seen: pairs of a kernel and a kind of op that it holds, then sums over kernels and kinds."""

    kernel: NDArray[np.int64]
    """``[pairs]``."""
    kind: NDArray[np.int64]
    """``[pairs]``."""
    ops: NDArray[np.int64]
    """``[pairs]``: ops of the kind in the kernel."""
    time: NDArray[np.float64]
    """``[pairs]``: what of the kernel's estimate falls on them, ns."""
    estimated: NDArray[np.float64]
    """``[kernels]``, ns."""
    log: NDArray[np.float64]
    """``[kernels]``: of measured over estimated time."""
    kernels_of: NDArray[np.int64]
    """``[kinds]``: kernels that hold it."""
    time_of: NDArray[np.float64]
    """``[kinds]``: sum of ``time``."""
    late_of: NDArray[np.float64]
    """``[kinds]``: sum of ``time`` times ``log``."""


def corrections(graph: Graph, seen: Sequence[Seen]) -> Corrections:
    """What these kernels of ``graph``, no two alike, tell of others."""
    seen = [kernel for kernel in seen if kernel.measured_ns > 0]
    if not seen:
        return NONE
    flat = flat_graph(graph)
    told = _told(flat.of_key, flat.example.size, seen)
    known = np.flatnonzero(told.kernels_of)
    keys = [graph.nodes[x].key for x in flat.example[known].tolist()]
    weight = _weight(told.time_of, told.kernels_of)
    return Corrections(
        dict(zip(keys, (told.late_of / np.maximum(told.time_of, 1e-9))[known].tolist(), strict=True)),
        dict(zip(keys, weight[known].tolist(), strict=True)),
        _shortfall(told, np.array([kernel.chosen for kernel in seen])),
    )


def _told(of_key: NDArray[np.int64], kinds: int, seen: Sequence[Seen]) -> _Told:
    sizes = np.array([len(one.members) for one in seen])
    of_members = of_key[np.concatenate([np.array(one.members, np.int64) for one in seen])]
    both, ops = np.unique(np.repeat(np.arange(sizes.size) * kinds, sizes) + of_members, return_counts=True)
    kernel, kind = np.divmod(both, kinds)
    estimated = np.array([max(1, one.estimated_ns) for one in seen], np.float64)
    log = np.log(np.array([one.measured_ns for one in seen]) / estimated)
    time = ops * (estimated / sizes)[kernel]
    return _Told(
        kernel, kind, ops, time, estimated, log, np.bincount(kind, minlength=kinds),
        np.bincount(kind, time, kinds), np.bincount(kind, time * log[kernel], kinds),
    )  # fmt: skip


def _weight(time: NDArray[np.float64], kernels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of an op in so many kernels, that spend so much time on it all together."""
    many = np.maximum(kernels, 1)
    weight: NDArray[np.float64] = np.where(kernels > 0, time / many / many**_RARITY, 0.0)
    return weight


def _shortfall(told: _Told, chosen: NDArray[np.bool_]) -> float:
    """What chosen kernels took, all together, of what they are estimated at when all others correct them."""
    if not chosen.any():
        return 1.0
    kernels, kind = told.log.size, told.kind
    others_time = np.maximum(told.time_of[kind] - told.time, 0.0)
    others_late = told.late_of[kind] - told.time * told.log[told.kernel]
    ratio = np.divide(others_late, others_time, out=np.zeros(kind.size), where=others_time > 0)
    weight = told.ops * _weight(others_time, told.kernels_of[kind] - 1)
    total = np.bincount(told.kernel, weight, kernels)
    log = np.bincount(told.kernel, weight * ratio, kernels)
    log = np.clip(
        np.divide(log, total, out=np.zeros(kernels), where=total > 0), -np.log(_MOST), np.log(_MOST)
    )
    took = (told.estimated * np.exp(told.log))[chosen].sum()
    return float(min(max(took / (told.estimated * np.exp(log))[chosen].sum(), 1.0), _HIGHEST_SHORTFALL))
