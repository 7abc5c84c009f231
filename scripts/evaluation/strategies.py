"""Strategies that are measured beside the plan: parts of it, thresholds, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.baselines import all_reduce_depths
from disco_hlo.plan.fitting import in_the_order_of
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.strategy import Bucket, Strategy
from disco_hlo.plan.units import unit_graph
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
