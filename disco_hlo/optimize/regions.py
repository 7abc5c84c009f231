"""What the regions of a step take, and what they cost the regions that call them.

A loop is one op of its caller: it takes as many executions of its body as it has turns. So each region is simulated and
searched by itself, those without calls first, and its caller goes by what was found for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.regions import ENTRY, Call
from disco_hlo.optimize.costs import Costs, Inner
from disco_hlo.optimize.predict import Predicted, predict
from disco_hlo.plan.read import read, repeats
from disco_hlo.plan.strategy import Strategy
from disco_hlo.simulator.bound import Bound
from disco_hlo.simulator.step_bound import lowest_bound


@dataclass(frozen=True, eq=False)
class StepTimes:
    """The regions of a step under one strategy, the entry among them."""

    predicted: Mapping[str, Predicted]
    """By name, callees first."""
    costs: Mapping[str, Costs]
    """In which each was simulated: ops that run other regions take what these take."""
    executions: Mapping[str, float]
    """How often each runs in a step, as far as that is known."""

    def share(self, name: str) -> float:
        """The part of the step that the executions of a region take, what it calls included."""
        step_ns = self.predicted[ENTRY].timeline.makespan_ns
        return self.executions[name] * self.predicted[name].timeline.makespan_ns / max(1, step_ns)


def step_times(source: CanonicalModule, strategy: Strategy, costs: Costs, *, as_compiled: bool = False) -> StepTimes:
    """Simulate a step region by region. What the strategy does not name runs as XLA compiled it.

    Args:
        as_compiled: whether it is XLA's own module, with the kernels that only repeat others.

    Raises:
        IllegalStrategyError: the strategy does not fit the step.
    """
    planned = dict(strategy.regions)
    called = calls_by_caller(source)
    predicted: dict[str, Predicted] = {}
    of_region: dict[str, Costs] = {}
    for name, region in regions_callees_first(source):
        of_region[name] = costs.around(region.graph, _inner(region, called[name], predicted))
        own = strategy if name == ENTRY else planned.get(name)
        again = repeats(region) if own is None or as_compiled else ()
        predicted[name] = predict(region.graph, own or read(region), of_region[name], again)
    executions = {ENTRY: 1.0}
    for name in reversed(predicted):
        for region, call in called[name]:
            executions[region] = executions.get(region, 0.0) + executions[name] * (call.trips or 1)
    return StepTimes(predicted, of_region, executions)


def lower_bound(source: CanonicalModule, strategies: Sequence[Strategy], costs: Costs) -> Bound:
    """The lowest bound over the kernels of these strategies, whatever their buckets and order, of every region and so of
    the step."""
    called = calls_by_caller(source)
    bounds: dict[str, Bound] = {}
    for name, region in regions_callees_first(source):
        inner = {
            call.node: Inner(call.trips * bounds[callee].makespan_ns, 0)
            for callee, call in called[name]
            if call.trips is not None
        }
        own = strategies if name == ENTRY else [dict(one.regions).get(name) or read(region) for one in strategies]
        around = costs.around(region.graph, inner)
        bounds[name] = lowest_bound(region.graph, (one.groups for one in own), around, around.machine)
    return bounds[ENTRY]


def calls_by_caller(source: CanonicalModule) -> Mapping[str, list[tuple[str, Call]]]:
    """For the entry and each region the regions that its ops run."""
    found: dict[str, list[tuple[str, Call]]] = {name: [] for name in (ENTRY, *(one.name for one in source.regions))}
    for region in source.regions:
        for call in region.calls:
            found[call.caller].append((region.name, call))
    return found


def regions_callees_first(source: CanonicalModule) -> Iterator[tuple[str, CanonicalModule]]:
    """The regions of a step, each after those that it calls; the entry last."""
    sources = {ENTRY: source, **{region.name: region.source for region in source.regions}}
    called = calls_by_caller(source)
    seen: set[str] = set()
    pending = [(ENTRY, False)]
    while pending:
        name, are_callees_done = pending.pop()
        if are_callees_done:
            yield name, sources[name]
        elif name not in seen:
            seen.add(name)
            pending.append((name, True))
            pending += [(callee, False) for callee, _ in called[name]]


def _inner(
    source: CanonicalModule, calls: list[tuple[str, Call]], predicted: Mapping[str, Predicted]
) -> dict[int, Inner]:
    """By op that runs regions what it takes: of branches the longest. Where nobody knows how often, nothing is said."""
    found: dict[int, Inner] = {}
    unknown = {call.node for _, call in calls if call.trips is None}
    for name, call in calls:
        if call.node in unknown:
            continue
        timeline = predicted[name].timeline
        one = Inner(
            (call.trips or 0) * timeline.makespan_ns,
            max(0, timeline.peak_bytes - predicted[name].built.problem.resident_bytes),
        )
        other = found.get(call.node, Inner(0, 0))
        found[call.node] = Inner(
            max(one.takes_ns, other.takes_ns), max(one.temporary_bytes, other.temporary_bytes)
        )
    return found
