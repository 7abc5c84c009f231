"""What cost models made up for tests have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.hlo.cost_model import CostModel, Kernels, LinearPieces, by_ring
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.plan import Group
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import unfused

NO_TIME = LinearPieces.of((0, 0.0, 0.0))


@dataclass(frozen=True)
class MadeUpCosts(CostModel):
    """Times by a rule for one kernel (:meth:`kernel_ns`), and a line for all-reduces."""

    line: LinearPieces = NO_TIME

    def kernel_ns(self, graph: Graph, inside: set[int], results: Sequence[int]) -> int:
        """Time of the kernel that computes ``inside``; no results where an op alone is asked for."""
        raise NotImplementedError

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        """By the same rule."""
        executed = (Kind.FUSIBLE, Kind.FIXED)
        times = [self.kernel_ns(graph, {n.id}, ()) if n.kind in executed else 0 for n in graph.nodes]
        return np.array(times, np.int64)

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """One after the other."""
        times = [self.kernel_ns(graph, inside, results) for inside, results in listed(kernels)]
        return np.array(times, np.int64)

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        """The line, of all-reduces; of others what a ring makes of it."""
        return by_ring(kind, self.line)


def listed(kernels: Kernels) -> list[tuple[set[int], list[int]]]:
    """Members and results of each kernel."""
    flat = kernels.flat
    members, results = (
        np.split(flat.members, flat.member_at[1:-1]),
        np.split(flat.results, flat.result_at[1:-1]),
    )
    found = [(set(inside.tolist()), left.tolist()) for inside, left in zip(members, results, strict=True)]
    return found[: len(kernels)]


def kernels_of(graph: Graph, groups: Sequence[Group]) -> Kernels:
    """Groups that may stand in one strategy as what a cost model is asked for."""
    return unit_graph(graph, unfused(graph, groups)).kernels(graph)
