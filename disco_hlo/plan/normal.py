"""The normal form of a strategy: two strategies that execute alike are equal in it, whoever wrote them."""

from __future__ import annotations

from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.names import named_once
from disco_hlo.plan.strategy import Group, Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph


def normal_form(graph: Graph, strategy: Strategy) -> Strategy:
    """The same strategy with ownership settled, and groups and buckets numbered by their nodes.

    A node that several groups compute and none returns could be owned by any of them: it goes to
    the group whose nodes come first. A bitcast that something outside reads too stands there by
    itself, at no cost, and is a duplicate in all of them. Strategies of regions are sorted by name, and each stands
    as it is.

    Raises:
        IllegalStrategyError: as :func:`~disco_hlo.plan.units.unit_graph`.
    """
    strategy = named_once(graph, strategy)
    units = unit_graph(graph, strategy)
    groups = _settled(
        strategy.groups, {value.node for value in units.values}, _standing_bitcasts(graph, units)
    )
    group_rank = sorted(range(len(groups)), key=lambda i: (groups[i].nodes, groups[i].duplicates))
    bucket_rank = sorted(range(len(strategy.buckets)), key=lambda i: strategy.buckets[i].all_reduces)
    renamed = {f"g{old}": f"g{new}" for new, old in enumerate(group_rank)}
    renamed |= {f"b{old}": f"b{new}" for new, old in enumerate(bucket_rank)}

    def token(name: str) -> str:
        unit, dot, part = name.partition(".")
        return renamed.get(unit, unit) + dot + part

    return Strategy(
        tuple(groups[i] for i in group_rank),
        tuple(strategy.buckets[i] for i in bucket_rank),
        tuple(map(token, strategy.order)),
        tuple(sorted(strategy.regions)),
    )


def _standing_bitcasts(graph: Graph, units: UnitGraph) -> set[int]:
    """Free nodes that no unit returns and that some reader takes from outside its own kernel: another unit, or another
    such node, which stands outside of all."""
    homes: dict[int, set[int]] = {}
    for number, unit in enumerate(units.units):
        for node in (*unit.nodes, *unit.duplicates):
            homes.setdefault(node, set()).add(number)
    returned = {value.node for value in units.values}
    standing: set[int] = set()
    for free in reversed(graph.nodes):  # readers before what they read
        if free.kind is not Kind.FREE or free.id in returned:
            continue
        home = homes.get(free.id, set())
        if any(user in standing or homes.get(user, {-1}) - home for user in graph.users[free.id]):
            standing.add(free.id)
    return standing


def _settled(groups: tuple[Group, ...], returned: set[int], standing: set[int]) -> list[Group]:
    computed = [tuple(sorted((*group.nodes, *group.duplicates))) for group in groups]
    owner: dict[int, int] = {}
    for number, group in enumerate(groups):
        owner.update({node: number for node in group.nodes if node in returned})
    for number in sorted(range(len(groups)), key=lambda i: computed[i]):
        for node in computed[number]:
            if node not in returned and node not in standing:
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
