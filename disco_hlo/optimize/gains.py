"""What a step would gain from mechanisms that it does not have, simulated one at a time.

* order: the same kernels and buckets in the best order at hand.
* rotation: each collective overlaps the iteration before or after, wherever there is compute: a bound, no schedule.
* fused kernels (CoCoNet, section 5.4; paper 004): a collective whose last operand a matmul computes begins with that
  matmul. Behind it remains what must see the last tile: half an all-reduce (its all-gather) of one buffer tile, of a
  reduce-scatter one device's chunk. Overlap costs what it costs on the machine.
  Sends go in shards, and these and their gather overlap buffer tile by buffer tile (CoCoNet, section 6.3).
* sliced sends: in shards alike, one after the other: what a plan does (``slice-sends``). Where nothing is sent there is
  no such row.
* T3: the reduce-scatter alone begins with its matmul; an all-reduce's all-gather follows. All collectives go by DMA
  engines, as T3's do (its section 7.2): none of them slows kernels down.

A bucket of several gradients is packed first, so that no matmul computes its operand. Both are therefore tried with the
buckets as they are and with one for each gradient; the faster counts.

Each mechanism is simulated region by region: a loop takes as many executions of its body as it has trips, with what the
mechanism makes of the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import numpy as np

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import collective_bytes
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.costs import Costs
from disco_hlo.optimize.regions import (
    Predicted,
    StepTimes,
    calls_by_caller,
    inner_costs,
    measured_loops,
    predict,
    regions_callees_first,
)
from disco_hlo.optimize.sends import Sends, in_shards, sent_by_groups
from disco_hlo.plan.plan import Bucket
from disco_hlo.printable import counted
from disco_hlo.search.schedule import with_order
from disco_hlo.simulator.bound import lowest_bound
from disco_hlo.simulator.build import Built
from disco_hlo.simulator.costs import COMPUTE, PPM, PRODUCT
from disco_hlo.simulator.problem import Lists, Problem
from disco_hlo.simulator.timeline import simulate
from disco_hlo.whatif.coconet import BUFFER_BYTES


@dataclass(frozen=True, slots=True)
class Gain:
    """One mechanism in one region."""

    step_ns: int
    """One execution of the region; ops that run other regions take what the mechanism makes of these."""
    told: str
    """What it is, in a few words."""


def gains(source: CanonicalModule, times: StepTimes, devices: int) -> dict[str, dict[str, Gain]]:
    """What each mechanism makes of each region of a step that was simulated: by region, callees first, by mechanism.

    A region that calls none is simulated once for all mechanisms, others once more for each.
    """
    called, loops = calls_by_caller(source), measured_loops(source, times.costs[ENTRY])
    sent = sent_by_groups(source)
    mechanisms = {name: one for name, one in MECHANISMS.items() if sent or one is not _sliced}
    found: dict[str, dict[str, Gain]] = {}
    for name, region in regions_callees_first(source):
        of_region: dict[str, Gain] = {}
        for mechanism, simulated in mechanisms.items():
            predicted, costs = times.predicted[name], times.costs[name]
            if called[name]:
                taken_ns = {callee: of[mechanism].step_ns for callee, of in found.items()}
                costs = costs.around(region.graph, inner_costs(called[name], times, taken_ns, loops))
                predicted = predict(region.graph, predicted.strategy, costs, predicted.again)
            gain = simulated(region.graph, predicted, costs, devices, sent.get(name))
            of_region[mechanism] = replace(gain, step_ns=min(gain.step_ns, predicted.timeline.makespan_ns))
        found[name] = of_region
    return found


def _ordered(graph: Graph, predicted: Predicted, costs: Costs, *_: object) -> Gain:
    best = with_order(graph, predicted.strategy, costs, costs.machine)
    return Gain(best.predicted_ns, "the best order at hand")


def _rotated(graph: Graph, predicted: Predicted, costs: Costs, *_: object) -> Gain:
    bound = lowest_bound(graph, [predicted.strategy.groups], costs, costs.machine)
    return Gain(bound.full_overlap_ns, "at best: collectives overlap the iteration next to them")


def _sliced(graph: Graph, predicted: Predicted, costs: Costs, _: int, sends: Sends | None) -> Gain:
    if sends is None:
        return Gain(predicted.timeline.makespan_ns, "no sends here")
    sharded, told = in_shards(graph, costs, sends, overlapped=False)
    again = predict(graph, predicted.strategy, sharded, predicted.again)
    return Gain(again.timeline.makespan_ns, told)


def _joined(
    graph: Graph, predicted: Predicted, costs: Costs, devices: int, sends: Sends | None, *, is_t3: bool
) -> Gain:
    told = ""
    if not is_t3 and sends is not None:
        costs, told = in_shards(graph, costs, sends, overlapped=True)
        predicted = predict(graph, predicted.strategy, costs, predicted.again)
    tried, buckets = [predicted.built], one_by_one(predicted.strategy.buckets)
    if buckets != predicted.strategy.buckets:
        apart = replace(predicted.strategy, buckets=buckets, order=())
        tried.append(predict(graph, apart, costs, predicted.again).built)
    best = min((_begun_early(graph, one, devices, is_t3) for one in tried), key=lambda gain: gain.step_ns)
    return replace(best, told=f"{best.told}; {told}") if told else best


def _begun_early(graph: Graph, built: Built, devices: int, is_t3: bool) -> Gain:
    pairs = producers(built.problem)
    step_ns = simulate(with_producers(graph, built, pairs, devices, is_t3=is_t3)).makespan_ns
    told = f"{len(pairs)} of {counted(int(built.problem.communicates.sum()), 'collective')} follow a matmul"
    return Gain(step_ns, f"{told}; none slows kernels down" if is_t3 else told)


MECHANISMS: Mapping[str, Callable[[Graph, Predicted, Costs, int, Sends | None], Gain]] = {
    "order": _ordered,
    "rotation": _rotated,
    "sliced sends": _sliced,
    "fused kernels": partial(_joined, is_t3=False),
    "T3": partial(_joined, is_t3=True),
}


def one_by_one(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """A bucket for each gradient."""
    return tuple(Bucket((member,)) for bucket in buckets for member in bucket.collectives)


def producers(problem: Problem) -> dict[int, int]:
    """For each collective on a channel the matmul that its last operand comes from, where one does."""
    place: dict[int, int] = {}  # behind which it has ended
    for at, entry in enumerate(problem.order.tolist()):
        if entry < 0 or problem.resource[entry] == 0:
            place.setdefault(~entry if entry < 0 else entry, at)
    found = {}
    for task in np.flatnonzero(problem.resource > 0).tolist():
        last = max(problem.predecessors[task].tolist(), key=place.__getitem__, default=None)
        if last is not None and problem.products[last]:
            found[task] = last
    return found


def with_producers(
    graph: Graph, built: Built, producer: dict[int, int], devices: int, *, is_t3: bool
) -> Problem:
    """The step with each of these collectives begun when its matmul begins, and its rest behind the matmul."""
    problem = built.problem
    unit = problem.unit_ns
    rest_of, duration = {}, problem.duration_ns.tolist()
    names, resource = list(problem.names), problem.resource.tolist()
    rows = [row.tolist() for row in map(problem.predecessors.__getitem__, range(len(problem)))]
    begun: dict[int, list[int]] = {}
    for task, matmul in producer.items():
        share = _rest(graph, built, task, devices, is_t3=is_t3)
        rest_ns = int(share * duration[task]) // unit * unit
        duration[task] -= rest_ns
        duration.append(rest_ns)
        resource.append(resource[task])
        rest_of[task] = len(names)
        names.append(f"{names[task]}.rest")
        rows[task] = [one for one in rows[task] if one != matmul]
        rows.append([matmul])  # and its channel is first in, first out
        begun.setdefault(matmul, []).append(task)
    order: list[int] = []
    for entry in problem.order.tolist():
        if entry in rest_of:
            order.append(rest_of[entry])
        elif ~entry in rest_of:
            order += [entry, ~rest_of[~entry]]
        else:
            order += [*begun.get(entry, ()), entry]
    more = len(names) - len(problem)
    speed_ppm = problem.speed_ppm.copy()
    if is_t3:
        speed_ppm[[COMPUTE, PRODUCT]] = PPM
    rows = [sorted(rest_of.get(one, one) for one in row) for row in rows]
    return replace(
        problem,
        names=tuple(names),
        duration_ns=np.array(duration, np.int64),
        resource=np.array(resource, np.int32),
        predecessors=Lists.of(rows),
        communicates=np.append(problem.communicates, np.ones(more, np.bool_)),
        products=np.append(problem.products, np.zeros(more, np.bool_)),
        hold_ns=np.append(problem.hold_ns, np.zeros(more, np.int64)),
        speed_ppm=speed_ppm,
        order=np.array(order, np.int32),
    )


def _rest(graph: Graph, built: Built, task: int, devices: int, *, is_t3: bool) -> float:
    """The share of a collective that cannot begin before its matmul has ended."""
    nodes = built.units.units[built.unit_of[task]].nodes
    if any(graph.nodes[node].opcode != "all-reduce" for node in nodes):
        return 1 / devices
    tiles = ceil(sum(collective_bytes(graph, node) for node in nodes) / BUFFER_BYTES)
    return 0.5 if is_t3 else 0.5 / max(1, tiles)
