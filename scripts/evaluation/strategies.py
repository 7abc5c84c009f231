"""Strategies of a step that no search finds: buckets by hand and by a threshold, and legal plans by dice."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import or_

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.hlo.opcodes import PRODUCTS
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.legal import bucket_of, check_strategy, started_late
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph
from disco_hlo.plan.variants import collective_depths, in_the_order_of
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
    """Collectives in the order in which ``strategy`` transfers them."""
    members = {f"b{number}": bucket.collectives for number, bucket in enumerate(strategy.buckets)}
    found = [node for token in strategy.order for node in members.get(token.removesuffix(".start"), ())]
    return list(dict.fromkeys([*found, *graph.collectives]))


def bucketed_per_block(source: CanonicalModule, xla: Strategy) -> Strategy:
    """XLA's kernels in its order with the buckets that people make by hand: of each kind of collective one for a block
    of the model (:func:`per_block`), in the entry, in loop bodies and in branches.

    Raises:
        IllegalStrategyError: the entry cannot have them; a region that cannot keeps XLA's.
    """
    asynchronous = BACKENDS[source.graph.backend].asynchronous
    regions = []
    for name, own in xla.regions:
        region = source.computations[name]
        other = Strategy(own.groups, per_block(region.graph))
        with contextlib.suppress(IllegalStrategyError):
            own = check(region, in_the_order_of(region.graph, other, own, asynchronous))
        regions.append((name, own))
    entry = Strategy(xla.groups, per_block(source.graph), regions=tuple(regions))
    return check(source, in_the_order_of(source.graph, entry, xla, asynchronous))


def per_block(graph: Graph) -> tuple[Bucket, ...]:
    """Of each kind of collective a bucket for a block of the model: what lies between two equal shapes, where shapes
    repeat in the order in which their operands are made; what repeats nowhere is together, and so is a body of one
    layer. What needs another one's result is in a bucket of its own. Several arrays are one instruction, as XLA's own
    combiner makes it."""
    awaited: list[int] = []
    long = 0
    for one in graph.nodes:
        awaited.append(reduce(or_, (awaited[read] | 1 << read for read in one.operands), 0))
        if one.kind is Kind.COLLECTIVE or one.opcode in PRODUCTS:
            long |= 1 << one.id
    kinds: dict[object, list[int]] = {}
    for node in sorted(graph.collectives, key=lambda each: (awaited[each] & long).bit_count()):
        kinds.setdefault((graph.nodes[node].collective, graph.nodes[node].shape.dtype), []).append(node)
    buckets: list[Bucket] = []
    for nodes in kinds.values():
        for begin, end in pairwise(block_cuts([graph.nodes[node].shape for node in nodes])):
            apart: list[list[int]] = []
            for node in nodes[begin:end]:
                free = [
                    members for members in apart if not any(awaited[node] >> other & 1 for other in members)
                ]
                if free:
                    free[0].append(node)
                else:
                    apart.append([node])
            buckets += [bucket_of(graph, members, "variadic") for members in apart]
    return tuple(buckets)


def block_cuts(shapes: Sequence[object]) -> list[int]:
    """Where blocks begin, and the end: by the period with which most shapes come again; what follows the last of them
    begins a piece of its own."""
    count = len(shapes)

    def again(period: int) -> list[bool]:
        return [shapes[i] == shapes[i + period] for i in range(count - period)]

    period = max(range(1, count // 2 + 1), key=lambda one: (sum(again(one)), -one), default=0)
    same = again(period) if period else []
    if 3 * sum(same) < count:  # two equal matrices make no model of many layers
        return sorted({0, count})
    cuts, position = {0, count}, 0
    while position < len(same):
        if not same[position]:
            position += 1
            continue
        end = next((i for i in range(position, len(same)) if not same[i]), len(same))
        if end - position >= period:
            cuts |= set(range(position, end + period + 1, period))
        position = end
    return sorted(cuts)


def combined_up_to(graph: Graph, strategy: Strategy, threshold_bytes: int) -> tuple[Bucket, ...]:
    """Neighbouring gradients together, as many as stay below the threshold: what XLA's combiner does."""
    depth = collective_depths(graph)
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
    return tuple(bucket_of(graph, run) for run in runs)


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
    asynchronous = BACKENDS[source.graph.backend].asynchronous
    order = _random_order(unit_graph(source.graph, strategy), asynchronous, dice)
    return replace(strategy, order=started_late(strategy.buckets, order))


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
