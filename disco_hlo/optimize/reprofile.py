"""What is profiled again: the kernels that a search made up, so that the next search goes by their times.

A search over estimates ends where they are too low: of all kernels that never ran it takes those that the estimator
underestimates most. DisCo (section 4.3) leaves it at one estimate. Here the best plan's kernels are run under the
profiler, as XLA's were before the search, and the search is made once more with their times. A plan that it then
prefers must be better by as much as such predictions fell short (``profiler.corrections``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import by_graph
from disco_hlo.profiler.costs import MeasuredCosts
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.profiler.profile import OpTime, Profile
from disco_hlo.simulator.build import groups_ns


@dataclass(frozen=True, slots=True)
class Reprofiled:
    """Kernels of a plan that had only been estimated and were measured then."""

    kernels: int
    estimated_ns: int
    measured_ns: int

    @property
    def ratio(self) -> float:
        """Measured over estimated time; 1 where there is nothing to compare."""
        return self.measured_ns / self.estimated_ns if self.estimated_ns else 1.0


def unknown_kernels(source: CanonicalModule, profile: Profile, plan: Strategy) -> int:
    """How many kernels of ``plan`` no trace has shown, those of its regions included."""
    return sum(
        key not in profile.ops
        for graph, one in by_graph(source, plan)
        for key in kernel_keys(graph, unit_graph(graph, one).kernels(graph))
    )


def with_kernels(
    costs: MeasuredCosts, times: Mapping[str, OpTime], source: CanonicalModule, plan: Strategy
) -> tuple[Profile, Reprofiled]:
    """The profile with ``times`` of what it does not know, and what these tell of the kernels of ``plan``.

    Args:
        costs: what the search went by; the profile is theirs.
    """
    profile = costs.profile
    found = Reprofiled(0, 0, 0)
    for graph, one in by_graph(source, plan):
        keys = kernel_keys(graph, unit_graph(graph, one).kernels(graph))
        new = [i for i, key in enumerate(keys) if key in times and key not in profile.ops]
        if new:
            found = Reprofiled(
                found.kernels + len(new),
                found.estimated_ns + int(estimates_ns(costs, graph, one)[new].sum()),
                found.measured_ns + sum(times[keys[i]].median_ns for i in new),
            )
    return replace(profile, ops={**times, **profile.ops}), found


def estimates_ns(costs: CostModel, graph: Graph, plan: Strategy) -> NDArray[np.int64]:
    """Of each group what a search is told by ``costs``, as the simulator asks for it."""
    return groups_ns(graph, unit_graph(graph, plan), costs, costs.op_ns(graph))
