"""What a step takes under a strategy, on the simulator and region by region.

A loop is one op of its caller: it takes as many executions of its body as it has trips. So each region is simulated and
searched by itself, those without calls first, and its caller goes by what was found for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from disco_hlo.backends import BACKENDS
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.regions import ENTRY, Call
from disco_hlo.hlo.walks import needed_first
from disco_hlo.optimize.costs import Costs, Inner, estimates_ns
from disco_hlo.plan.legal import planned_regions
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import Repeat, read, repeats
from disco_hlo.plan.units import unit_graph
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.profiler.profile import LoopTime
from disco_hlo.simulator.bound import Bound, lowest_bound
from disco_hlo.simulator.build import Built, build
from disco_hlo.simulator.timeline import Timeline, simulate

_HIDES_A_LAUNCH_NS = 20_000
"""Kernels of so much on average hide what launching them by themselves takes the host, which does so ahead of them."""
_REWRITING_NS, _LAUNCHING_NS = 14_000, 1_100
"""For each kernel: of the entry, what rewriting its recording takes in each call; of all, what a step takes longer
where the host launches each by itself (``docs/benchmarks/llama.md``)."""


@dataclass(frozen=True, eq=False)
class Predicted:
    """A strategy and its simulated execution."""

    strategy: Strategy
    built: Built
    timeline: Timeline
    again: Sequence[Repeat] = ()


def predict(graph: Graph, strategy: Strategy, costs: Costs, again: Sequence[Repeat] = ()) -> Predicted:
    """Simulate one strategy. Of a whole step, with what its loops take: :func:`disco_hlo.optimize.regions.step_times`.

    Args:
        again: what a module of XLA's executes besides (:func:`~disco_hlo.plan.read.repeats`).

    Raises:
        IllegalStrategyError: it does not fit the graph.
    """
    built = build(graph, strategy, costs, costs.machine, repeats=again)
    return Predicted(strategy, built, simulate(built.problem), again)


def first_collective_ns(predicted: Predicted) -> int | None:
    """When the first collective begins, one inside an op counted; None where none overlaps with kernels."""
    problem, begins_ns = predicted.built.problem, predicted.timeline.spans_ns[0]
    on_channel = np.flatnonzero(problem.resource > 0).tolist()
    return min((int(begins_ns[task]) for task in (*on_channel, *predicted.built.calls)), default=None)


@dataclass(frozen=True, eq=False)
class StepTimes:
    """The regions of a step under one strategy, the entry among them."""

    predicted: Mapping[str, Predicted]
    """By name, callees first."""
    costs: Mapping[str, Costs]
    """In which each was simulated: ops that run other regions take what these take."""
    executions: Mapping[str, float]
    """How often each runs in a step, as far as that is known."""

    @property
    def makespan_ns(self) -> int:
        """Of the step."""
        return self.predicted[ENTRY].timeline.makespan_ns

    @property
    def communication_ns(self) -> float:
        """Time of all collectives of the step, those of regions as often as they run."""
        return sum(
            self.executions[name] * one.timeline.communication_ns for name, one in self.predicted.items()
        )

    def share(self, name: str) -> float:
        """The part of the step that the executions of a region take, what it calls included."""
        return self.executions[name] * self.predicted[name].timeline.makespan_ns / max(1, self.makespan_ns)

    @property
    def exposed_ns(self) -> int:
        """Communication of a step during which nothing is computed, in all executions of all regions."""
        return round(
            sum(self.executions[name] * one.timeline.exposed_ns for name, one in self.predicted.items())
        )


def unmeasured_share(source: CanonicalModule, times: StepTimes) -> float:
    """The part of a step that kernels take which no trace has shown, as they are estimated."""
    unmeasured_ns = 0.0
    for name, region in regions_callees_first(source):
        costs, plan = times.costs[name], times.predicted[name].strategy
        keys = kernel_keys(region.graph, unit_graph(region.graph, plan).kernels(region.graph))
        new = [number for number, key in enumerate(keys) if key not in costs.profile.ops]
        if new:
            unmeasured_ns += times.executions[name] * int(estimates_ns(costs, region.graph, plan)[new].sum())
    return unmeasured_ns / max(1, times.makespan_ns)


def step_times(
    source: CanonicalModule, strategy: Strategy, costs: Costs, *, as_compiled: bool = False
) -> StepTimes:
    """Simulate a step region by region. What the strategy does not name runs as XLA compiled it.

    Args:
        as_compiled: whether it is XLA's own module, with the kernels that only repeat others.

    Raises:
        IllegalStrategyError: the strategy does not fit the step.
    """
    planned = planned_regions(source, strategy)
    called = calls_by_caller(source)
    loops = measured_loops(source, costs)
    executions = _executions(source, loops)
    predicted: dict[str, Predicted] = {}
    of_region: dict[str, Costs] = {}
    for name, region in regions_callees_first(source):
        so_far = StepTimes(predicted, of_region, executions)
        taken_ns = {callee: one.timeline.makespan_ns for callee, one in predicted.items()}
        of_region[name] = costs.around(region.graph, inner_costs(called[name], so_far, taken_ns, loops))
        own = strategy if name == ENTRY else planned.get(name)
        again = repeats(region) if own is None or as_compiled else ()
        predicted[name] = predict(region.graph, own or read(region), of_region[name], again)
    return StepTimes(predicted, of_region, executions)


def measured_loops(source: CanonicalModule, costs: Costs) -> dict[str, LoopTime]:
    """What was measured of the step's loops, by the names of their bodies."""
    known = costs.profile.loops
    return {
        region.name: known[region.source.graph.key]
        for region in source.regions
        if region.source.graph.key in known
    }


def _executions(source: CanonicalModule, loops: Mapping[str, LoopTime]) -> dict[str, float]:
    """How often each region runs in a step: where a loop does not say how many turns it has, as often as was
    measured, else once."""
    called = calls_by_caller(source)
    found = {ENTRY: 1.0}
    for caller in reversed([name for name, _ in regions_callees_first(source)]):
        for name, call in called[caller]:
            trips = turns(name, call, loops, found[caller])
            found[name] = found.get(name, 0.0) + found[caller] * (1 if trips is None else trips)
    return found


def launched_singly(source: CanonicalModule, strategy: Strategy, predicted_ns: int) -> bool:
    """Whether the host shall launch each kernel of a plan by itself, and not many by one recording
    (:attr:`~disco_hlo.backends.Backend.singly_options`): the same wherever it is asked.

    XLA rewrites a recording in each call whose arrays lie elsewhere than in the one before, and launches nothing
    meanwhile: of 731 kernels that took 10 ms, in each step of a training. Those of a loop's body it seems to leave: no
    step with loops gained anything without them. A launch by itself takes the host a few us, which nobody sees behind a
    kernel that takes longer, but the next kernel begins a little later. So a step whose kernels are mostly in loops is
    faster recorded.

    Args:
        source: what the strategy is for.
        predicted_ns: what a step takes by it; 0 where that is not known.
    """
    calls = [call for region in source.regions for call in region.calls]
    if not BACKENDS[source.graph.backend].singly_options or any(call.trips is None for call in calls):
        return False
    kernels = _kernels(source, strategy)
    launches = sum(kernels.values())
    pays = kernels[ENTRY] * _REWRITING_NS > launches * _LAUNCHING_NS
    return pays and predicted_ns > launches * _HIDES_A_LAUNCH_NS


def launching_ns(source: CanonicalModule, strategy: Strategy) -> int:
    """What a step takes longer where its kernels are :func:`launched_singly` than it is predicted to: profiled and
    simulated are recorded ones."""
    return round(sum(_kernels(source, strategy).values()) * _LAUNCHING_NS)


def _kernels(source: CanonicalModule, strategy: Strategy) -> dict[str, float]:
    """How many kernels each region launches in a step."""
    executions, own = _executions(source, {}), {ENTRY: strategy, **dict(strategy.regions)}
    return {
        name: executions[name] * len(unit_graph(region.graph, own.get(name) or read(region)).units)
        for name, region in regions_callees_first(source)
    }


def turns(region: str, call: Call, loops: Mapping[str, LoopTime], executions: float) -> float | None:
    """How often an op runs a region each time, by the module or as measured; None where nobody knows.

    Args:
        executions: of the op, in a step.
    """
    if call.trips is not None or region not in loops:
        return call.trips
    return loops[region].executions / max(1.0, executions)


def lower_bound(
    source: CanonicalModule, strategies: Sequence[Strategy], costs: Costs, of: str = ENTRY
) -> Bound:
    """The lowest bound over the kernels of these strategies, whatever their buckets and order, of the step or of one
    execution of a region; what it runs is bounded likewise."""
    called = calls_by_caller(source)
    loops = measured_loops(source, costs)
    executions = _executions(source, loops)
    bounds: dict[str, Bound] = {}
    for name, region in regions_callees_first(source):
        inner: dict[int, Inner] = {}
        for callee, call in called[name]:
            trips = turns(callee, call, loops, executions[name])
            if trips is None:
                continue
            loop = loops.get(callee)
            first_ns = 0 if loop is None or not trips else min(0, loop.first_more_ns)
            least_ns = max(0, round(trips * bounds[callee].makespan_ns + first_ns))
            longest_ns = inner[call.node].takes_ns if call.node in inner else 0
            inner[call.node] = Inner(max(least_ns, longest_ns), 0)
        own = (
            strategies
            if name == ENTRY
            else [dict(one.regions).get(name) or read(region) for one in strategies]
        )
        around = costs.around(region.graph, inner)
        bounds[name] = lowest_bound(region.graph, (one.groups for one in own), around, around.machine)
    return bounds[of]


def calls_by_caller(source: CanonicalModule) -> Mapping[str, list[tuple[str, Call]]]:
    """For the entry and each region the regions that its ops run."""
    found: dict[str, list[tuple[str, Call]]] = {
        name: [] for name in (ENTRY, *(one.name for one in source.regions))
    }
    for region in source.regions:
        for call in region.calls:
            found[call.caller].append((region.name, call))
    return found


def regions_callees_first(source: CanonicalModule) -> list[tuple[str, CanonicalModule]]:
    """The regions of a step, each after those that it calls; the entry last."""
    called = calls_by_caller(source)
    order = needed_first([ENTRY], lambda name: (callee for callee, _ in reversed(called[name])))
    return [(name, source.computations[name]) for name in order]


def inner_costs(
    calls: Sequence[tuple[str, Call]],
    times: StepTimes,
    taken_ns: Mapping[str, int],
    loops: Mapping[str, LoopTime],
) -> dict[int, Inner]:
    """By op that runs regions what it takes: of branches the longest, of loops with what they cost themselves. Where
    nobody knows how often, nothing is said.

    Args:
        taken_ns: one execution of each region that is called.
    """
    found: dict[int, Inner] = {}
    for name, call in calls:
        trips = turns(name, call, loops, times.executions[call.caller])
        if trips is None:
            continue
        predicted, loop = times.predicted[name], loops.get(name)
        first = first_collective_ns(predicted) if trips else None
        own_ns, first_ns = (0, 0) if loop is None else (loop.own_ns, loop.first_more_ns)
        one = Inner(
            max(0, round(trips * (taken_ns[name] + own_ns) + (first_ns if trips else 0))),
            max(0, predicted.timeline.peak_bytes - predicted.built.problem.resident_bytes),
            first,
        )
        other = found.get(call.node, Inner(0, 0))
        firsts = [ns for ns in (first, other.first_collective_ns) if ns is not None]
        found[call.node] = Inner(
            max(one.takes_ns, other.takes_ns),
            max(one.temporary_bytes, other.temporary_bytes),
            min(firsts, default=None),
        )
    return found
