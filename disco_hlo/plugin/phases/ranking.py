"""Where a search starts and which plans come out of it: the same for the plugin and the command line."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import groups_with_own_copies, unit_graph
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.search.api import SearchResult
from disco_hlo.search.boundary.state import as_searched
from disco_hlo.search.schedule import Scheduled, best_buckets, with_order
from disco_hlo.simulator.bound import Bound
from disco_hlo.simulator.costs import CostModel, MachineModel
from disco_hlo.simulator.timeline import Timeline

MEMORY_SHARE = 0.1
"""How much more memory than XLA's own plan a plan may be predicted to need."""


def starting_point(graph: Graph, xla: Strategy, machine: MachineModel) -> Strategy:
    """XLA's plan on GPU, where its fusions are tuned (Triton tiles and all); elsewhere no fusion."""
    return searchable(graph, xla) if machine.asynchronous else unfused(graph)


def searchable(graph: Graph, xla: Strategy) -> Strategy:
    """XLA's plan as the search can take it up: without the kernels whose place in the order it would
    misjudge; no fusion where XLA's kernels cannot be told apart in its terms."""
    left_out = groups_with_own_copies(graph, xla.groups)
    kept = tuple(group for i, group in enumerate(xla.groups) if i not in left_out)
    start = Strategy(kept, xla.buckets) if left_out else xla
    try:
        unit_graph(graph, as_searched(graph, start))
    except IllegalStrategyError as error:
        LOGGER.debug("the search starts without XLA's kernels: %s", one_line(error))
        return unfused(graph)
    return start


def memory_limit_bytes(graph: Graph, xla: Strategy, costs: CostModel, machine: MachineModel) -> int | None:
    """Most memory that a plan may be predicted to need; None on CPU, where XLA orders buffers itself."""
    if not machine.asynchronous:
        return None
    return int(with_order(graph, xla, costs, machine).peak_bytes * (1 + MEMORY_SHARE))


def prediction(
    *, plan_ns: int, peak_bytes: int, default: Timeline, unfused_ns: int, limit: Bound
) -> plans.Prediction:
    """What a plan says of itself: its step beside XLA's, one without fusion, and what none could beat."""
    return plans.Prediction(
        plan_ns=plan_ns,
        default_ns=default.makespan_ns,
        unfused_ns=unfused_ns,
        full_overlap_ns=limit.full_overlap_ns,
        bound_ns=limit.makespan_ns,
        peak_memory_bytes=peak_bytes,
    )


def ranked(
    source: CanonicalModule,
    xla: Strategy,
    result: SearchResult,
    costs: CostModel,
    machine: MachineModel,
    also: Sequence[Strategy] = (),
) -> list[Scheduled]:
    """Plans worth measuring, best first: what the search found, and for its kernels and XLA's the best
    buckets and order; with them those of ``also``. All are legal, and none is predicted to need more memory
    than XLA's plan by more than a tenth."""
    graph, attested = source.graph, attested_groups(source)
    limit_bytes = memory_limit_bytes(graph, xla, costs, machine)
    found: dict[Strategy, Scheduled] = {}
    for make in (
        *(functools.partial(with_order, graph, one.strategy) for one in result.finalists),
        *(functools.partial(with_order, graph, one) for one in also),
        functools.partial(best_buckets, graph, result.strategy.groups),
        functools.partial(best_buckets, graph, xla.groups),
        functools.partial(best_buckets, graph, xla.groups, form="variadic"),
    ):
        try:
            one = make(costs, machine)
            check_strategy(graph, one.strategy, unit_graph(graph, one.strategy), attested)
        except IllegalStrategyError as error:
            LOGGER.debug("left out: %s", one_line(error))
            continue
        if limit_bytes is None or one.peak_bytes <= limit_bytes:
            found.setdefault(one.strategy, one)
    return sorted(found.values(), key=lambda one: one.predicted_ns) or [
        with_order(graph, xla, costs, machine)
    ]
