"""Buckets and order for given kernels: what is left to decide once the op fusion is fixed.

DisCo leaves the order to a ready queue and combines neighbouring all-reduces at random (sections 4.4
and 4.5). With the kernels fixed both can be computed. A list schedule brings the gradients forward;
its compute order fixes when each gradient exists; for that order the best buckets of neighbouring
gradients follow by dynamic programming over the finishing time of the channel; and with the buckets
the order is made again, since a bucket waits for its last member.

A rule sees one collective at a time; which kernels should run during which is a matter of all of them. So the best
order by rule is where a climb begins that moves one kernel at a time to another place, and simulates what comes of it
(:func:`best_order`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.cost_model import CostModel, on_one_line
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.opcodes import moves_data
from disco_hlo.plan.legal import bucket_of, default_order, late_waits, started_late
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import collective_depths, normal_form, unfused
from disco_hlo.search.arrange import contiguous_buckets
from disco_hlo.search.climb import Climber
from disco_hlo.search.restart import ORDER_DIVISORS, ORDER_MOVES
from disco_hlo.search.strategies import prepare
from disco_hlo.simulator.build import Built, build, in_orders, ready_ns
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.orders import Prefetch, list_schedule
from disco_hlo.simulator.timeline import simulate

MOST_AHEAD = (4, 16, 1 << 20)
"""How many all-gathers may be ahead of their readers: orders with each of these are tried."""
MOVES_PER_UNIT: Final = 300
MOST_MOVES: Final = 10_000
"""Proposals of each climb."""
SEEDS: Final = 3


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A strategy with its order written out."""

    strategy: Strategy
    predicted_ns: int
    peak_bytes: int


def with_order(
    graph: Graph,
    strategy: Strategy,
    costs: CostModel,
    machine: MachineModel,
    limit_bytes: int | None = None,
) -> Scheduled:
    """``strategy`` in normal form with the best of the orders at hand: its own, the default, a list schedule; and where
    collectives overlap with kernels, its kernels as they come with collectives started early.

    Args:
        limit_bytes: most memory that an order may be predicted to need, if any needs no more.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    normal, built, own = _posed(graph, strategy, costs, machine)
    listed = list_schedule(built.units, *_unit_times(built), asynchronous=machine.asynchronous)
    orders = [listed, default_order(built.units, machine.asynchronous), own]
    if machine.asynchronous:
        orders += _early_collectives(graph, built, own)
    return best_of(graph, normal, orders, costs, machine, limit_bytes)


def with_early_collectives(
    graph: Graph,
    strategy: Strategy,
    costs: CostModel,
    machine: MachineModel,
    limit_bytes: int | None = None,
) -> Scheduled:
    """``strategy`` in normal form, its kernels in the order that it gives them, and every collective started as early
    as its operand allows; on a machine whose collectives overlap with kernels.

    What is known of a kernel's time holds for the order in which it was measured: no estimate of another decides here.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    normal, built, own = _posed(graph, strategy, costs, machine)
    return best_of(graph, normal, _early_collectives(graph, built, own), costs, machine, limit_bytes)


def _posed(
    graph: Graph, strategy: Strategy, costs: CostModel, machine: MachineModel
) -> tuple[Strategy, Built, tuple[str, ...]]:
    """A strategy in normal form, its tasks, and the order that it has, or the default."""
    normal = normal_form(graph, strategy)
    built = build(graph, replace(normal, order=()), costs, machine)
    return normal, built, normal.order or default_order(built.units, machine.asynchronous)


def best_order(
    graph: Graph,
    strategy: Strategy,
    costs: CostModel,
    machine: MachineModel,
    limit_bytes: int | None = None,
) -> Scheduled:
    """``strategy`` in normal form, its kernels and buckets in the best order found.

    Args:
        limit_bytes: most memory that an order may be predicted to need, if one by rule needs no more either.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    by_rule = with_order(graph, strategy, costs, machine, limit_bytes)
    if not machine.asynchronous or not graph.collectives:
        return by_rule
    starts, orders = prepare(graph, [by_rule.strategy]), [by_rule.strategy.order]
    units = len(unit_graph(graph, by_rule.strategy).units)
    proposals = min(MOVES_PER_UNIT * units, MOST_MOVES)
    for seed in range(SEEDS):
        climber = Climber(graph, costs, machine, starts, 0, seed)
        for divisor in ORDER_DIVISORS:
            threshold = climber.total() // units // divisor if divisor else 0
            climber.climb(ORDER_MOVES, proposals, threshold, ordered=True)
        found = normal_form(graph, climber.strategy(climber.state))
        if (found.groups, found.buckets) == (by_rule.strategy.groups, by_rule.strategy.buckets):
            orders.append(found.order)
    return best_of(graph, by_rule.strategy, orders, costs, machine, limit_bytes)


def best_of(
    graph: Graph,
    strategy: Strategy,
    orders: Sequence[tuple[str, ...]],
    costs: CostModel,
    machine: MachineModel,
    limit_bytes: int | None = None,
) -> Scheduled:
    """A strategy in the fastest of some orders that needs no more memory than the limit; if all do, in that which needs
    least. Asynchronous copies are waited for where they are read, collectives start as late as XLA starts them."""
    units = unit_graph(graph, strategy)
    late = list(
        dict.fromkeys(started_late(strategy.buckets, late_waits(graph, units, order)) for order in orders)
    )
    found = []
    for order, built in zip(late, in_orders(graph, strategy, late, costs, machine), strict=True):
        timeline = simulate(built.problem)
        found.append(Scheduled(replace(strategy, order=order), timeline.makespan_ns, timeline.peak_bytes))
    fitting = [one for one in found if limit_bytes is None or one.peak_bytes <= limit_bytes]
    if not fitting:
        return min(found, key=lambda one: one.peak_bytes)
    return min(fitting, key=lambda one: one.predicted_ns)


def _early_collectives(graph: Graph, built: Built, own: Sequence[str]) -> list[tuple[str, ...]]:
    units, (durations, collectives) = built.units, _unit_times(built)
    kernels = [units.index[token] for token in own if token[0] != "b"]
    gathers = [unit.is_bucket and graph.nodes[unit.nodes[0]].opcode == "all-gather" for unit in units.units]
    moves = [
        all(moves_data(graph.nodes[node]) for node in (*unit.nodes, *unit.duplicates)) for unit in units.units
    ]
    windows = MOST_AHEAD if any(gathers) else MOST_AHEAD[-1:]
    rule = Prefetch(units, kernels, durations, collectives, moves, gathers, windows[0])
    return [rule.with_ahead(most).order() for most in windows]


def best_buckets(
    graph: Graph,
    groups: Sequence[Group],
    costs: CostModel,
    machine: MachineModel,
    *,
    form: str = "concat",
) -> Scheduled:
    """The best buckets and order found for these kernels.

    Args:
        form: how a bucket of several travels (see ``Bucket``).

    Raises:
        IllegalStrategyError: the groups do not fit the graph.
    """
    best = with_order(graph, unfused(graph, groups), costs, machine)
    current = best
    for _ in range(2):  # the second time for the order that the first ones led to
        built = build(graph, current.strategy, costs, machine)
        ready = ready_ns(graph, built, simulate(built.problem).spans_ns)
        buckets = _neighbours_together(graph, ready, costs, machine, form)
        try:
            current = with_order(graph, Strategy(tuple(groups), buckets), costs, machine)
        except IllegalStrategyError:
            # A kernel both reads one member and makes another: these gradients cannot wait for each other.
            break
        best = min(best, current, key=lambda one: one.predicted_ns)
    return best


def _unit_times(built: Built) -> tuple[list[int], list[int]]:
    """For each unit, its time on the compute stream and on a channel."""
    durations = [0] * len(built.units.units)
    transfers = [0] * len(built.units.units)
    for task, unit in enumerate(built.unit_of):
        times = transfers if built.problem.communicates[task] else durations
        times[unit] += int(built.problem.duration_ns[task])
    return durations, transfers


def _neighbours_together(
    graph: Graph, ready: dict[int, int], costs: CostModel, machine: MachineModel, form: str
) -> tuple[Bucket, ...]:
    if not ready:  # a step on one device, whose profile knows no transfers
        return ()
    depth = collective_depths(graph)
    ranked = sorted(ready, key=lambda node: (ready[node], node))
    line, size_bytes = on_one_line(graph, costs)
    sizes = size_bytes[ranked].tolist()
    kinds = [(graph.nodes[node].collective, graph.nodes[node].shape.dtype, depth[node]) for node in ranked]
    # Where collectives block the compute stream it does not matter when a gradient is ready.
    times = [ready[node] if machine.asynchronous else 0 for node in ranked]
    runs = contiguous_buckets(times, sizes, kinds, line, machine.pace().wait_ns)
    return tuple(bucket_of(graph, [ranked[i] for i in run], form) for run in runs)
