"""Where a search starts and which plans come out of it: the same for the plugin and the command line."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence

from disco_hlo.errors import CircleError, IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.legal import Kernel, check_strategy, refused_groups
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import groups_with_own_copies, unit_graph
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.search.api import Dropped, SearchResult
from disco_hlo.search.boundary.finalists import kernels_of
from disco_hlo.search.boundary.state import as_searched, kept_as_given, signatures
from disco_hlo.search.schedule import Scheduled, best_buckets, with_order
from disco_hlo.simulator.bound import Bound
from disco_hlo.simulator.build import resident_bytes
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.timeline import Timeline

MEMORY_SHARE = 0.1
"""How much more memory than XLA's own plan a plan may be predicted to need."""


def starting_point(graph: Graph, xla: Strategy, machine: MachineModel) -> Strategy:
    """XLA's plan on GPU, where its fusions are tuned (Triton tiles and all); elsewhere no fusion."""
    return searchable(graph, xla) if machine.asynchronous else unfused(graph)


def searchable(graph: Graph, xla: Strategy) -> Strategy:
    """XLA's plan as the search can take it up: without the kernels whose place in the order it would misjudge, and
    without those that then wait for themselves or return what no rule allows; no fusion where XLA's kernels cannot be
    told apart in its terms."""
    start = _without(xla, groups_with_own_copies(graph, xla.groups))
    try:
        known = kernels_of(graph, xla)
        while unfit := _circle_as_searched(graph, start) or _illegal(graph, start, known):
            start = _without(start, unfit)
    except IllegalStrategyError as error:
        LOGGER.debug("the search starts without XLA's kernels: %s", one_line(error))
        return unfused(graph)
    return start


def _without(strategy: Strategy, groups: Collection[int]) -> Strategy:
    if not groups:
        return strategy
    kept = tuple(group for i, group in enumerate(strategy.groups) if i not in groups)
    return Strategy(kept, strategy.buckets)


def _circle_as_searched(graph: Graph, strategy: Strategy) -> frozenset[int]:
    """Positions of groups that wait for each other, as they are or in the terms of the search."""
    positions = list(range(len(strategy.groups)))
    try:
        unit_graph(graph, strategy)
        positions = [i for i, (owned, _) in enumerate(signatures(graph, strategy)) if owned]
        unit_graph(graph, as_searched(graph, strategy))
    except CircleError as error:
        waiting = frozenset(positions[int(token[1:])] for token in error.tokens if token[0] == "g")
        if not waiting:
            raise
        return waiting
    return frozenset()


def _illegal(graph: Graph, strategy: Strategy, known: Collection[Kernel]) -> frozenset[int]:
    """Positions of groups that are no legal kernels and none of XLA's any more: others read more of them, or the search
    writes them in another way."""
    found = {i for i, _ in refused_groups(graph, strategy, unit_graph(graph, strategy), known)}
    searched = as_searched(graph, strategy)
    positions = [i for i, (owned, _) in enumerate(signatures(graph, strategy)) if owned]
    refused = [positions[i] for i, _ in refused_groups(graph, searched, unit_graph(graph, searched), known)]
    if refused:
        found.update(set(refused) - kept_as_given(graph, strategy))
    return frozenset(found)


def memory_limit_bytes(
    graph: Graph, xla: Strategy, costs: CostModel, machine: MachineModel, room_bytes: int | None = None
) -> int | None:
    """Most memory that a plan may be predicted to need on each device; None where nobody knows.

    On GPU that is a little more than XLA's own plan needs, on CPU what the host has.

    Args:
        room_bytes: what each device has left beside the training's own arrays (CPU).
    """
    if not machine.asynchronous and room_bytes is None:
        return None
    needed_bytes = with_order(graph, xla, costs, machine).peak_bytes
    if machine.asynchronous or room_bytes is None:
        return int(needed_bytes * (1 + MEMORY_SHARE))
    return max(needed_bytes, resident_bytes(graph) + room_bytes)


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
    room_bytes: int | None = None,
    *,
    until: float | None = None,
) -> list[Scheduled]:
    """Plans worth measuring, best first: what the search found, and for its kernels and XLA's the best
    buckets and order; with them those of ``also``. All are legal, and none is predicted to need more memory
    than :func:`memory_limit_bytes` says.

    Args:
        until: when the time is up (``time.monotonic``): then what was looked at is ranked, one plan at least.
    """
    graph, attested = source.graph, attested_groups(source)
    limit_bytes = memory_limit_bytes(graph, xla, costs, machine, room_bytes)
    found: dict[Strategy, Scheduled] = {}
    dropped = Dropped()
    longest_s, of_search = 0.0, len(result.finalists) + len(also)
    for number, make in enumerate(
        (
            *(functools.partial(with_order, graph, one.strategy) for one in result.finalists),
            *(functools.partial(with_order, graph, one) for one in also),
            functools.partial(best_buckets, graph, result.strategy.groups),
            functools.partial(best_buckets, graph, xla.groups),
            functools.partial(best_buckets, graph, xla.groups, form="variadic"),
        )
    ):
        began = time.monotonic()
        if found and until is not None and began + longest_s > until:
            break
        try:
            one = make(costs, machine)
            check_strategy(graph, one.strategy, unit_graph(graph, one.strategy), attested)
        except IllegalStrategyError as error:
            LOGGER.debug("left out: %s", one_line(error))
            dropped += Dropped(int(number < of_search), one_line(error) if number < of_search else "")
            continue
        finally:
            longest_s = max(longest_s, time.monotonic() - began)
        if limit_bytes is None or one.peak_bytes <= limit_bytes:
            found.setdefault(one.strategy, one)
    if dropped.count:
        LOGGER.warning("%s", dropped.sentence())
    return sorted(found.values(), key=lambda one: one.predicted_ns) or [
        with_order(graph, xla, costs, machine)
    ]
