"""The normal form of a strategy: two strategies that execute alike are equal in it, whoever wrote them."""

from __future__ import annotations

from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.strategy import Group, Strategy
from disco_hlo.plan.units import unit_graph


def normal_form(graph: Graph, strategy: Strategy) -> Strategy:
    """The same strategy with ownership settled, and groups and buckets numbered by their nodes.

    An op that several groups compute and none returns could be owned by any of them: it goes to
    the group whose ops come first. Strategies of regions are sorted by name, and each stands as it is.

    Raises:
        IllegalStrategyError: as :func:`~disco_hlo.plan.units.unit_graph`.
    """
    groups = _settled(strategy.groups, {*unit_graph(graph, strategy).result.tolist()})
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
