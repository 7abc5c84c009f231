"""Who owns what several kernels compute and none returns.

A node that is recomputed in several groups and read outside none of them has no natural owner: with
any of them as its owner the same kernels run. :func:`settled` chooses one by structure alone, so that
strategies which execute alike are equal, whoever made them and in whatever order they run.
"""

from __future__ import annotations

from dataclasses import replace

from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.strategy import Group, Strategy, normalized
from disco_hlo.plan.units import unit_graph


def settled(graph: Graph, strategy: Strategy) -> Strategy:
    """The same strategy, normalized, where inner nodes belong to the first group that computes them.

    First is the group with the smallest results. Results keep their owners.

    Raises:
        IllegalStrategyError: as :func:`disco_hlo.plan.units.unit_graph`.
    """
    units = unit_graph(graph, strategy)
    results: dict[int, list[int]] = {}
    for value in units.values:
        results.setdefault(value.producer, []).append(value.node)
    returned = [tuple(results[units.index[f"g{number}"]]) for number in range(len(strategy.groups))]
    owner = {node: number for number, nodes in enumerate(returned) for node in nodes}
    for number in sorted(range(len(strategy.groups)), key=returned.__getitem__):
        group = strategy.groups[number]
        for node in (*group.nodes, *group.duplicates):
            owner.setdefault(node, number)
    groups = tuple(_owning(group, number, owner) for number, group in enumerate(strategy.groups))
    return normalized(replace(strategy, groups=groups))


def _owning(group: Group, number: int, owner: dict[int, int]) -> Group:
    members = sorted((*group.nodes, *group.duplicates))
    return replace(
        group,
        nodes=tuple(node for node in members if owner[node] == number),
        duplicates=tuple(node for node in members if owner[node] != number),
    )
