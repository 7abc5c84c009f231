"""What is asked of anyone who knows how long kernels of a graph take: whether measured, estimated or made up.

The simulator and the search ask; profiler and estimator answer, which know nothing of plans. All times are of a
kernel that runs alone, in whole nanoseconds, launch not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph


class FusedOps(Protocol):
    """What is asked of an op group (``disco_hlo.plan.strategy.Group`` is one)."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """Owned nodes, ascending."""

    @property
    def duplicates(self) -> tuple[int, ...]:
        """Recomputed nodes, ascending."""

    @property
    def kind(self) -> str:
        """Emitter: ``loop``, ``input``, ``output`` or ``triton``."""

    @property
    def config(self) -> str:
        """Emitter settings; empty where the emitter has none."""


class UnitTimes(Protocol):
    """Times of ops and of op groups."""

    def nodes_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Time of each node as a kernel of its own, ``[len(graph)]``; 0 where it takes none."""

    def groups_ns(self, graph: Graph, groups: Sequence[FusedOps]) -> NDArray[np.int64]:
        """Time of each op group as one kernel, ``[len(groups)]``."""


@runtime_checkable
class KernelTimes(Protocol):
    """Times of kernels as flat arrays, with their results: what the search asks by the thousand.

    Asked in place of ``groups_ns`` for every kernel but Triton's. A kernel's results depend on who else reads its
    nodes, that is on the whole strategy, so they are given.
    """

    def kernels_ns(
        self,
        graph: Graph,
        member_at: NDArray[np.int64],
        members: NDArray[np.int64],
        result_at: NDArray[np.int64],
        results: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Time of each kernel i, which computes members[member_at[i] : member_at[i + 1]], ascending, duplicates
        included, and returns results[result_at[i] : result_at[i + 1]]."""


@runtime_checkable
class TellsReadsApart(Protocol):
    """What a cost model may offer beside :class:`KernelTimes` if a kernel's time depends on what made the arrays it
    reads. Without it, kernels alike are taken to cost the same whatever they read."""

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        """``[len(graph)]``: equal numbers where it makes no difference, shapes apart, which of two nodes is read."""
