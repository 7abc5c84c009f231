"""Random legal strategies by seed, for tests."""

from __future__ import annotations

import random
from dataclasses import replace

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph, Kind, behind_bitcasts
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.plan import Group, Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph
from disco_hlo.plan.variants import one_bucket, unfused


def random_strategy(source: CanonicalModule, seed: int, attempts: int = 150) -> Strategy:
    """A legal strategy made by random fusions (half of them duplicating) and random buckets."""
    dice = random.Random(seed)
    graph = source.graph
    form = dice.choice(["concat", "variadic"])
    strategy = unfused(graph) if dice.random() < 0.5 else one_bucket(graph, form=form)
    groups: list[Group] = []
    for _ in range(attempts):
        grown = _grow(graph, groups, dice)
        if grown is None:
            continue
        candidate = replace(strategy, groups=tuple(grown))
        try:
            check_strategy(graph, candidate, unit_graph(graph, candidate), attested_groups(source))
        except IllegalStrategyError:
            continue
        groups = grown
    return replace(strategy, groups=tuple(groups))


def _grow(graph: Graph, groups: list[Group], dice: random.Random) -> list[Group] | None:
    """Fuse a random op with a random operand of it; None where they cannot be grouped at all."""
    reader = graph.nodes[dice.randrange(len(graph))]
    if reader.kind is not Kind.FUSIBLE or not reader.operands:
        return None
    producer = graph.nodes[behind_bitcasts(graph)[dice.choice(reader.operands)]]
    if producer.kind is not Kind.FUSIBLE:
        return None
    owner = {node: group for group in groups for node in group.nodes}
    ours, theirs = owner.get(reader.id, Group((reader.id,))), owner.get(producer.id, Group((producer.id,)))
    if ours is theirs or producer.id in ours.duplicates:
        return None
    others = [group for group in groups if group is not ours and group is not theirs]
    if dice.random() < 0.5:
        grown = Group(ours.nodes, tuple(sorted({*ours.duplicates, producer.id})))
        return [*others, grown, *([theirs] if theirs in groups else [])]
    nodes = tuple(sorted({*ours.nodes, *theirs.nodes}))
    duplicates = tuple(sorted({*ours.duplicates, *theirs.duplicates} - set(nodes)))
    return [*others, Group(nodes, duplicates)]


def random_order(units: UnitGraph, asynchronous: bool, dice: random.Random) -> tuple[str, ...]:
    """One of all orders that ``check_order`` lets pass; half of them late: what can wait does."""
    waits: dict[str, list[str]] = {}
    for i, unit in enumerate(units.units):
        start, done = unit.start_token(asynchronous), unit.done_token(asynchronous)
        waits[start] = [units.units[j].done_token(asynchronous) for j in units.dependencies[i]]
        if done != start:
            waits[done] = [start]
    order: list[str] = []
    placed: set[str] = set()
    last_first = dice.random() < 0.5
    while waits:
        ready = [token for token, before in waits.items() if placed.issuperset(before)]
        token = ready[-1] if last_first and dice.random() < 0.7 else dice.choice(ready)
        order.append(token)
        placed.add(token)
        del waits[token]
    return tuple(order)
