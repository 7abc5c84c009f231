"""What no plan of a cell can beat, and what that consists of, ms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Group
from disco_hlo.simulator.step_bound import bound_of_kernels, lowest_bound
from evaluation.step import Costs, FoundPlans


def bounds_of(source: CanonicalModule, known: Costs, plans: FoundPlans) -> dict[str, Any]:
    """The search's own word, and C, r, M and q of the bound over XLA's kernels and over the plan's."""
    return {
        "full_overlap_ms": plans.prediction.full_overlap_ns / 1e6,
        "bound_ms": plans.prediction.bound_ns / 1e6,
        "predicted_plan_ms": plans.prediction.plan_ns / 1e6,
        "predicted_default_ms": plans.prediction.default_ns / 1e6,
        "of XLA's kernels": _parts(source, known, read(source).groups),
        "of the plan's kernels": _parts(source, known, plans.searched[0].groups),
    }


def lowest_of(source: CanonicalModule, known: Costs, plans: FoundPlans) -> dict[str, float]:
    """The bound and full overlap of XLA's kernels or the plan's, whichever allow less."""
    kernels = (read(source).groups, plans.searched[0].groups)
    found = lowest_bound(source.graph, kernels, known.model, known.machine, known.model.pieces)
    return {"bound_ms": found.makespan_ns / 1e6, "full_overlap_ms": found.full_overlap_ns / 1e6}


def _parts(source: CanonicalModule, known: Costs, kernels: Sequence[Group]) -> dict[str, float]:
    found = bound_of_kernels(source.graph, kernels, known.model, known.machine, known.model.pieces)
    return {
        "compute_ms": found.compute_ns / 1e6,
        "before_ms": found.before_ns / 1e6,
        "communication_ms": found.communication_ns / 1e6,
        "after_ms": found.after_ns / 1e6,
        "bound_ms": found.makespan_ns / 1e6,
        "full_overlap_ms": found.full_overlap_ns / 1e6,
    }
