"""What is measured: XLA's default, plans that have only a part of the best one (ablations), and the search's plans.

An ablation wins where the simulator is wrong about the other part, and tells the user what each part gains. So it is
made and measured only where the plan falls short of its prediction, or somebody asks; and beside a training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.pipeline import Case, Optimized, Regions
from disco_hlo.optimize.regions import regions_callees_first
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.plan import DEFAULT, SEARCHED, Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import in_the_order_of, normal_form, one_bucket, without_unfit
from disco_hlo.search.schedule import Scheduled, best_order, with_early_collectives, with_order
from disco_hlo.simulator.costs import MachineModel

NO_FUSION = "no fusion"
ONE_BUCKET = "one bucket, XLA's op fusion"
PLAN_BUCKETS = "plan's buckets, XLA's op fusion"
OUR_ORDER = "our order, XLA's op fusion and buckets"
"""Where collectives overlap with kernels their order alone gains, and nothing but it is changed."""
EARLY_COLLECTIVES = "XLA's op fusion, buckets and kernel order, collectives started early"
"""For what the simulator does not know of an order of kernels: they stay where XLA put them, where each was measured,
and each collective starts as early as its operand allows."""
LOOPS_IN_OUR_ORDER = "plan, loops with XLA's op fusion and buckets"
"""Of the plan the entry alone: loops and branches have XLA's kernels in our order."""
OUR_KERNELS = "our op fusion, XLA's buckets and order"
"""Its collectives overlap with about what XLA's do: for what the simulator does not know of contention."""


Schedule = Callable[[Graph, Strategy, CostModel, MachineModel, int | None], Scheduled]
"""Gives a strategy an order that needs no more than so many bytes, where there is one."""


Bucketed = Callable[[str, Graph, Strategy], Strategy]
"""Gives a region, by its name, graph and XLA's strategy, other buckets."""


class Candidate(NamedTuple):
    """Something to measure."""

    name: str
    strategy: Strategy | None
    """None: XLA's default."""
    predicted_ns: int


def candidates(found: Optimized, finalists: int) -> tuple[Candidate, ...]:
    """XLA's default first, then :func:`parts`, then the best plans.

    Args:
        finalists: most plans of the search.
    """
    default, *best = without_parts(found, finalists)
    return (default, *parts(found), *best)


def without_parts(found: Optimized, finalists: int) -> tuple[Candidate, ...]:
    """XLA's default first, then the best plans, of which there are ``finalists`` at most."""
    named = [Candidate(DEFAULT, None, found.case.default.makespan_ns)]
    for number, one in enumerate(found.plans[:finalists]):
        name = f"{SEARCHED} {number + 1}" if number else SEARCHED
        named.append(Candidate(name, one.strategy, one.predicted_ns))
    return tuple(named)


def parts(found: Optimized) -> list[Candidate]:
    """The ablations of the best plan that are legal in this step. Of one of thousands of ops that takes seconds."""
    case, best = found.case, found.best
    graph, xla = case.source.graph, case.xla
    # Where no search ran its code may not be compiled, and where somebody ended one nobody waits for another.
    climbs = found.result.evaluations > 0 and found.result.stopped not in ("stop", "interrupted")
    in_order = best_order if climbs else with_order
    ordered = scheduled_regions(case, in_order)
    named: list[Candidate] = []
    of_plan = {ENTRY: best.strategy, **dict(best.strategy.regions)}
    in_our_order: tuple[tuple[str, Bucketed], ...] = (
        (ONE_BUCKET, lambda _, graph, own: one_bucket(graph, own.groups)),
        (PLAN_BUCKETS, lambda name, _, own: Strategy(own.groups, of_plan.get(name, own).buckets)),
    )
    if case.costs.machine.asynchronous:
        named += _orders_of_xlas_kernels(case, in_order, ordered)
    else:
        named.append(Candidate(NO_FUSION, case.unfused.strategy, case.unfused.predicted_ns))
    for name, bucketed in in_our_order:
        with contextlib.suppress(IllegalStrategyError):
            regions = scheduled_regions(case, with_order, bucketed)
            strategy = replace(bucketed(ENTRY, graph, xla), regions=regions)
            one = with_order(graph, strategy, case.costs_with(regions), case.costs.machine)
            named.append(Candidate(name, one.strategy, one.predicted_ns))
    if ordered and ordered != best.strategy.regions:
        other = replace(best.strategy, regions=ordered)
        named.append(Candidate(LOOPS_IN_OUR_ORDER, other, case.simulated(other).predicted_ns))
    if case.costs.machine.asynchronous:
        tried = _our_kernels(case, best.strategy)
        if tried is not None and tried.predicted_ns < case.default.makespan_ns:
            named.append(Candidate(OUR_KERNELS, tried.strategy, tried.predicted_ns))
    return named


def scheduled_regions(case: Case, schedule: Schedule, bucketed: Bucketed | None = None) -> Regions:
    """XLA's kernels in each of the step's regions, in the order that a rule gives them, with its buckets, or with other
    ones where the region can have these."""
    found: dict[str, Strategy] = {}
    for name, source in regions_callees_first(case.source):
        if name != ENTRY:
            costs = case.costs_with(tuple(sorted(found.items())), name)
            own = dict(case.xla.regions)[name]
            one: Scheduled | None = None
            if bucketed is not None:
                with contextlib.suppress(IllegalStrategyError):
                    other = bucketed(name, source.graph, own)
                    one = schedule(source.graph, other, costs, costs.machine, None)
            one = one or schedule(source.graph, own, costs, costs.machine, None)
            found[name] = one.strategy
    return tuple(sorted(found.items()))


def _orders_of_xlas_kernels(case: Case, in_order: Schedule, ordered: Regions) -> list[Candidate]:
    """XLA's kernels and buckets in our order, and in its own with collectives started early; where that is the same,
    one candidate."""
    found: dict[Strategy, Candidate] = {}
    for name, schedule, regions in (
        (OUR_ORDER, in_order, ordered),
        (EARLY_COLLECTIVES, with_early_collectives, scheduled_regions(case, with_early_collectives)),
    ):
        costs, strategy = case.costs_with(regions), replace(case.xla, regions=regions)
        one = schedule(case.source.graph, strategy, costs, costs.machine, case.limit_bytes)
        found.setdefault(one.strategy, Candidate(name, one.strategy, one.predicted_ns))
    return list(found.values())


def _our_kernels(case: Case, plan: Strategy) -> Scheduled | None:
    """The plan's kernels with XLA's buckets in XLA's order; None where that needs too much memory."""
    graph, source = case.source.graph, case.source
    with contextlib.suppress(IllegalStrategyError):
        kernels = without_unfit(source, Strategy(plan.groups, case.xla.buckets, regions=plan.regions))
        in_order = in_the_order_of(graph, kernels, case.xla, case.costs.machine.asynchronous)
        strategy = normal_form(graph, in_order)
        check_strategy(graph, strategy, unit_graph(graph, strategy), attested_groups(source))
        found = case.simulated(strategy)
        if case.limit_bytes is None or found.peak_bytes <= case.limit_bytes:
            return found
    return None
