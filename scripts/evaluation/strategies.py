"""Strategies that are measured beside the plan: parts of it, thresholds, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph
from disco_hlo.plan.variants import all_reduce_depths, in_the_order_of
from disco_hlo.search.schedule import with_order
from disco_hlo.simulator.costs import MachineModel


def check(source: CanonicalModule, strategy: Strategy) -> Strategy:
    """``strategy``, where it is legal.

    Raises:
        IllegalStrategyError: it is not.
    """
    graph = source.graph
    check_strategy(graph, strategy, unit_graph(graph, strategy), attested_groups(source))
    return strategy


def gradients_in_order(graph: Graph, strategy: Strategy) -> list[int]:
    """All-reduces in the order in which ``strategy`` transfers them."""
    members = {f"b{number}": bucket.all_reduces for number, bucket in enumerate(strategy.buckets)}
    found = [node for token in strategy.order for node in members.get(token.removesuffix(".start"), ())]
    return list(dict.fromkeys([*found, *graph.all_reduces]))


def combined_up_to(graph: Graph, strategy: Strategy, threshold_bytes: int) -> tuple[Bucket, ...]:
    """Neighbouring gradients together, as many as stay below the threshold: what XLA's combiner does."""
    depth = all_reduce_depths(graph)
    runs: list[list[int]] = []
    kinds: list[object] = []
    size = 0
    for node in gradients_in_order(graph, strategy):
        one = graph.nodes[node]
        kind = (one.collective, one.shape.dtype, depth[node])
        if runs and kinds[-1] == kind and size + one.shape.size_bytes <= threshold_bytes:
            runs[-1].append(node)
            size += one.shape.size_bytes
            continue
        runs.append([node])
        kinds.append(kind)
        size = one.shape.size_bytes
    return tuple(Bucket(tuple(run)) for run in runs)


def random_strategy(
    source: CanonicalModule,
    seed: int,
    bases: Sequence[Strategy],
    costs: CostModel,
    machine: MachineModel,
    attempts: int = 20,
) -> Strategy:
    """A legal strategy by dice: some kernels of one of ``bases`` taken apart, gradients cut into random
    runs, and a list schedule or one of the bases' orders. A function of its arguments.

    Raises:
        IllegalStrategyError: none of the attempts was legal.
    """
    graph = source.graph
    dice = random.Random(seed)
    for _ in range(attempts):
        base = dice.choice(list(bases))
        kept = dice.choice([0.3, 0.6, 0.9, 1.0])
        groups = tuple(group for group in base.groups if dice.random() < kept)
        threshold_bytes = 1 << dice.randrange(18, 28)
        strategy = Strategy(groups, combined_up_to(graph, base, threshold_bytes))
        try:
            if dice.random() < 0.5:
                ordered = with_order(graph, strategy, costs, machine).strategy
            else:
                ordered = in_the_order_of(graph, strategy, dice.choice(list(bases)), machine.asynchronous)
            return check(source, ordered)
        except IllegalStrategyError:
            continue
    raise IllegalStrategyError(f"none of {attempts} random strategies was legal (seed {seed})")


def in_random_order(source: CanonicalModule, strategy: Strategy, seed: int) -> Strategy:
    """``strategy`` in an order by dice, in the entry, in loop bodies and in branches; kernels and buckets stay. A
    function of its arguments.

    Raises:
        IllegalStrategyError: the strategy does not fit the step.
    """
    dice = random.Random(seed)
    regions = []
    for name, own in strategy.regions:
        region = source.computations[name]
        regions.append((name, check(region, _shuffled(region, own, dice))))
    return check(source, replace(_shuffled(source, strategy, dice), regions=tuple(regions)))


def _shuffled(source: CanonicalModule, strategy: Strategy, dice: random.Random) -> Strategy:
    units = unit_graph(source.graph, strategy)
    return replace(strategy, order=_random_order(units, source.graph.backend == "gpu", dice))


def _random_order(units: UnitGraph, asynchronous: bool, dice: random.Random) -> tuple[str, ...]:
    """Each next token is drawn from all that wait for nothing any more. How long collectives stay under way differs
    from order to order: else none of them would hide any."""
    patience = dice.choice((0.0, 0.5, 0.9, 0.99))
    missing = [len(needed) for needed in units.dependencies]
    ready = [(index, False) for index, count in enumerate(missing) if not count]
    order: list[str] = []
    while ready:
        drawn = dice.randrange(len(ready))
        ready[drawn], ready[-1] = ready[-1], ready[drawn]
        index, done = ready.pop()
        if done and not all(waits for _, waits in ready) and dice.random() < patience:
            ready.append((index, done))
            continue
        unit = units.units[index]
        order.append(unit.done_token(asynchronous) if done else unit.start_token(asynchronous))
        if unit.is_bucket and asynchronous and not done:
            ready.append((index, True))
            continue
        for dependent in units.dependents[index]:
            missing[dependent] -= 1
            if not missing[dependent]:
                ready.append((dependent, False))
    return tuple(order)
