"""A plan's kernels with other buckets and in another order than they were made for: as many, and as near, as go."""

from __future__ import annotations

import heapq
from dataclasses import replace

from disco_hlo.errors import CircleError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.legal import refused_groups
from disco_hlo.plan.strategy import Group, Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph


def without_circles(graph: Graph, strategy: Strategy) -> Strategy:
    """``strategy`` less the kernels that its buckets leave no place for: their ops stand alone.

    A kernel of a plan may join ops before and after a gradient that the plan sends early; where it travels late,
    with others, that kernel would wait for itself.

    Raises:
        IllegalStrategyError: a strategy does not fit the graph, or its buckets wait for each other.
    """
    while True:
        try:
            unit_graph(graph, strategy)
        except CircleError as error:
            waiting = [int(token[1:]) for token in error.tokens if token.startswith("g")]
            if not waiting:
                raise
            # Nodes are numbered in an order of execution: what joins early and late ones is what has no place.
            unplaced = max(waiting, key=lambda number: _span(strategy.groups[number]))
            kept = (group for number, group in enumerate(strategy.groups) if number != unplaced)
            strategy = replace(strategy, groups=tuple(kept), order=())
        else:
            return strategy


def _span(group: Group) -> int:
    return max(group.nodes) - min(group.nodes)


def without_unfit(source: CanonicalModule, strategy: Strategy) -> Strategy:
    """``strategy`` less the kernels that go with neither its buckets nor each other: those of :func:`without_circles`,
    and those that were legal only beside others that it no longer has. A value that the others computed for themselves
    has to be returned, which not every kernel can, or is computed alone, which may close a circle in its turn.
    Without order where any is left out.

    Raises:
        IllegalStrategyError: it does not fit the graph.
    """
    graph, attested = source.graph, attested_groups(source)
    while True:
        strategy = without_circles(graph, strategy)
        units = unit_graph(graph, strategy)
        refused = {number for number, _ in refused_groups(graph, strategy, units, attested)}
        if not refused:
            return strategy
        kept = (group for number, group in enumerate(strategy.groups) if number not in refused)
        strategy = replace(strategy, groups=tuple(kept), order=())


def in_the_order_of(graph: Graph, strategy: Strategy, other: Strategy, asynchronous: bool) -> Strategy:
    """``strategy`` in an order as near to that of ``other`` as its own kernels and buckets allow.

    A kernel comes where the last of its ops came, a collective is started and awaited where the last of
    its members was.

    Raises:
        IllegalStrategyError: a strategy does not fit the graph.
    """
    theirs, mine = unit_graph(graph, other), unit_graph(graph, strategy)
    place = {token: position for position, token in enumerate(other.order)}
    starts: dict[int, int] = {}
    dones: dict[int, int] = {}
    for unit in theirs.units:
        for node in unit.nodes:
            starts[node] = place[unit.start_token(asynchronous)]
            dones[node] = place[unit.done_token(asynchronous)]
    return replace(strategy, order=_ordered(mine, starts, dones, asynchronous))


def _ordered(
    units: UnitGraph, starts: dict[int, int], dones: dict[int, int], asynchronous: bool
) -> tuple[str, ...]:
    """Tokens by position, each as soon as what it waits for stands."""
    missing = [len(needed) for needed in units.dependencies]
    ready: list[tuple[int, int, bool]] = []

    def offer(index: int, done: bool) -> None:
        places = dones if done else starts
        nodes = units.units[index].nodes
        heapq.heappush(ready, (max(places.get(node, 0) for node in nodes), index, done))

    for index, count in enumerate(missing):
        if not count:
            offer(index, False)
    order: list[str] = []
    while ready:
        _, index, done = heapq.heappop(ready)
        unit = units.units[index]
        order.append(unit.done_token(asynchronous) if done else unit.start_token(asynchronous))
        if unit.is_bucket and asynchronous and not done:
            offer(index, True)
            continue
        for dependent in units.dependents[index]:
            missing[dependent] -= 1
            if not missing[dependent]:
                offer(dependent, False)
    return tuple(order)
