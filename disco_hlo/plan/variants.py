"""Strategies made of a graph or of other strategies: plain ones, the normal form, and kernels fitted to other buckets.

Plain strategies are starting points of the search, and what a found plan is compared with. In normal form two
strategies that execute alike are equal, whoever wrote them. A plan's kernels go with other buckets, or in another order
than they were made for, as many and as near as can be.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from disco_hlo.errors import CircleError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.legal import bucket_of, default_order, refused_groups, started_late
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph


def unfused(graph: Graph, groups: Sequence[Group] = ()) -> Strategy:
    """Every collective by itself, and every op that is in none of ``groups``."""
    return Strategy(tuple(groups), tuple(Bucket((node,)) for node in graph.collectives))


def one_bucket(graph: Graph, groups: Sequence[Group] = (), form: str = "concat") -> Strategy:
    """As few buckets as can be: collectives travel together unless one has to wait for the other, or is over
    other devices, of another kind or of another type."""
    depth = collective_depths(graph)

    def lot(node: int) -> tuple[str, str, int]:
        return graph.nodes[node].collective, graph.nodes[node].shape.dtype, depth[node]

    lots = [tuple(members) for _, members in groupby(sorted(graph.collectives, key=lot), key=lot)]
    buckets = tuple(bucket_of(graph, members, form) for members in lots)
    return Strategy(tuple(groups), buckets)


def collective_depths(graph: Graph) -> list[int]:
    """For each node, how many collectives lie one behind the other on the way to it."""
    depth: list[int] = []
    behind: list[int] = []  # for each node, how many lie on the way to what reads it
    for node in graph.nodes:
        read = node.operands
        depth.append(behind[read[0]] if len(read) == 1 else max([behind[x] for x in read], default=0))
        behind.append(depth[-1] + (node.kind is Kind.COLLECTIVE))
    return depth


def normal_form(graph: Graph, strategy: Strategy) -> Strategy:
    """The same strategy with ownership settled, groups and buckets numbered by their nodes, and collectives started as
    late as XLA starts them (:func:`~disco_hlo.plan.legal.started_late`).

    An op that several groups compute and none returns could be owned by any of them: it goes to
    the group whose ops come first. Strategies of regions are sorted by name, and each stands as it is.

    Raises:
        IllegalStrategyError: as :func:`~disco_hlo.plan.units.unit_graph`.
    """
    groups = _settled(strategy.groups, {*unit_graph(graph, strategy).result.tolist()})
    group_rank = sorted(range(len(groups)), key=lambda i: (groups[i].nodes, groups[i].duplicates))
    bucket_rank = sorted(range(len(strategy.buckets)), key=lambda i: strategy.buckets[i].collectives)
    renamed = {f"g{old}": f"g{new}" for new, old in enumerate(group_rank)}
    renamed |= {f"b{old}": f"b{new}" for new, old in enumerate(bucket_rank)}

    def token(name: str) -> str:
        unit, dot, part = name.partition(".")
        return renamed.get(unit, unit) + dot + part

    buckets = tuple(strategy.buckets[i] for i in bucket_rank)
    return Strategy(
        tuple(groups[i] for i in group_rank),
        buckets,
        started_late(buckets, tuple(map(token, strategy.order))),
        tuple(sorted(strategy.regions)),
    )


def _settled(groups: tuple[Group, ...], returned: set[int]) -> list[Group]:
    computed = [group.ops for group in groups]
    owner: dict[int, int] = {}
    for number, group in enumerate(groups):
        owner.update({node: number for node in group.nodes if node in returned})
    for number in sorted(range(len(groups)), key=lambda i: computed[i]):
        for node in computed[number]:
            if node not in returned:
                owner.setdefault(node, number)
    return [
        Group(
            tuple(node for node in computed[number] if owner.get(node) == number),
            tuple(node for node in computed[number] if owner.get(node) != number),
            group.kind,
            group.config,
        )
        for number, group in enumerate(groups)
    ]


# Changed alike in every region ------------------------------------------------------------------


def by_graph(source: CanonicalModule, strategy: Strategy) -> list[tuple[Graph, Strategy]]:
    """The entry with its strategy, and each region that the strategy names with its own."""
    named = ((source.computations[name].graph, one) for name, one in strategy.regions)
    return [(source.graph, strategy), *named]


def in_every_region(
    source: CanonicalModule, strategy: Strategy, change: Callable[[Graph, Strategy], Strategy]
) -> Strategy:
    """The strategies of the entry and of each named region, changed alike."""
    regions = tuple((name, change(source.computations[name].graph, one)) for name, one in strategy.regions)
    return replace(change(source.graph, strategy), regions=regions)


def varied(source: CanonicalModule, strategy: Strategy) -> Strategy:
    """:func:`varied_buckets` in the entry and in every named region."""
    return in_every_region(source, strategy, lambda _, one: varied_buckets(one))


def varied_buckets(strategy: Strategy) -> Strategy:
    """The same kernels, with every other of the buckets of several taken apart; no order.

    For measuring what collectives of different sizes take: buckets that were filled up to a threshold are all of one.
    """
    buckets: list[Bucket] = []
    several = 0
    for bucket in strategy.buckets:
        several += len(bucket.collectives) > 1
        apart = len(bucket.collectives) > 1 and several % 2
        buckets += [Bucket((node,)) for node in bucket.collectives] if apart else [bucket]
    return Strategy(strategy.groups, tuple(buckets))


def one_at_a_time(graph: Graph, strategy: Strategy) -> Strategy:
    """The same kernels and buckets in an order that ends every collective before anything else runs.

    For measuring: no kernel is slowed by a collective, nor a collective by a kernel. On a backend whose
    collectives are asynchronous; elsewhere nothing overlaps with them anyway.
    """
    order: list[str] = []
    for token in default_order(unit_graph(graph, strategy), asynchronous=False):
        order += [f"{token}.start", f"{token}.done"] if token[0] == "b" else [token]
    return replace(strategy, order=tuple(order))


# Kernels with other buckets and in another order ------------------------------------------------


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
            nodes = {number: strategy.groups[number].nodes for number in waiting}
            unplaced = max(waiting, key=lambda number: max(nodes[number]) - min(nodes[number]))
            kept = (group for number, group in enumerate(strategy.groups) if number != unplaced)
            strategy = replace(strategy, groups=tuple(kept), order=())
        else:
            return strategy


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
