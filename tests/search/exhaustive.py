"""The true optimum of a small step: every legal strategy, every order. The yardstick of the search.

It shares no code with the search: groups are set partitions with any
duplicates, buckets are set partitions, and legality is asked of ``plan`` and ``hlo``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, product
from random import Random

from disco_hlo.errors import CircleError, DiscoError
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.hlo.walks import reached
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.units import groups_with_own_copies, unit_graph
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.problem import Problem
from tests.search.steps import random_step

MOST_FUSIBLE = 6
"""Above it there are too many strategies."""


def small_steps(count: int, backend: str) -> list[Graph]:
    """Random steps of four to six ops that may be fused and one to three all-reduces."""
    found: list[Graph] = []
    seed = 0
    while len(found) < count:
        graph = random_step(Random(seed), 15, backend=backend, ties=False)
        seed += 1
        fusible = len(fusible_ops(graph))
        if 4 <= fusible <= MOST_FUSIBLE and 1 <= len(graph.collectives) <= 3:
            found.append(graph)
    return found


def fusible_ops(graph: Graph) -> list[int]:
    """Ops that may share a kernel."""
    return [node.id for node in graph.nodes if node.kind is Kind.FUSIBLE]


def least_ns(graph: Graph, costs: CostModel, machine: MachineModel) -> int:
    """Makespan of the best strategy there is; without contention and one channel."""
    best_ns = 2**62
    for strategy in legal_strategies(graph):
        problem = build(graph, strategy, costs, machine).problem
        if sum(problem.duration_ns[~(problem.resource > 0)]) < best_ns:
            best_ns = best_order_ns(problem, best_ns)
    return best_ns


def legal_strategies(graph: Graph) -> Iterator[Strategy]:
    """Every strategy that the search reckons with, without an order: all legal ones but those with a
    kernel that recomputes what another overwrites, in order to run after it. Only XLA makes these."""
    fusible = fusible_ops(graph)
    buckets = [tuple(Bucket(tuple(part)) for part in parts) for parts in partitions(list(graph.collectives))]
    for parts in partitions(fusible):
        choices = [list(_groups(graph, part)) for part in parts]
        for groups in product(*choices):
            real = tuple(group for group in groups if group is not None)
            for chosen in buckets:
                strategy = Strategy(real, chosen)
                if groups_with_own_copies(graph, real):
                    continue
                try:
                    check_strategy(graph, strategy, unit_graph(graph, strategy), ())
                except DiscoError:
                    continue
                yield strategy


def _groups(graph: Graph, owned: Sequence[int]) -> Iterator[Group | None]:
    """Groups that own these ops: with every set of duplicates that they read; None for a single op."""
    fusible = fusible_ops(graph)
    goes_on = {*owned, *fusible, *(node.id for node in graph.nodes if node.kind is Kind.FREE)}
    read = reached(owned, lambda x: graph.nodes[x].operands if x in goes_on else ())
    copied = sorted(read.keys() & {*fusible} - {*owned})
    for copies in chain.from_iterable(combinations(copied, n) for n in range(len(copied) + 1)):
        if len(owned) == 1 and not copies:
            yield None
            continue
        group = Group(tuple(sorted(owned)), copies)
        try:
            unit_graph(graph, Strategy((group,), tuple(Bucket((x,)) for x in graph.collectives)))
        except CircleError:
            pass  # What waits for itself here may not once another group recomputes what is between.
        except DiscoError:
            continue
        yield group


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All set partitions."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in partitions(rest):
        yield [[first], *parts]
        for i in range(len(parts)):
            yield [*parts[:i], [first, *parts[i]], *parts[i + 1 :]]


def best_order_ns(problem: Problem, best_ns: int) -> int:
    """Least makespan of any order of the tasks, or ``best_ns`` where none is below it."""
    count = len(problem)
    duration = problem.duration_ns.tolist()
    transfers = (problem.resource > 0).tolist()
    needed = [frozenset(problem.predecessors[task].tolist()) for task in range(count)]

    def go(done: frozenset[int], now: int, free: int, arrived: dict[int, int], left: int) -> None:
        nonlocal best_ns
        if max(now + left, free) >= best_ns:
            return
        if len(done) == count:
            best_ns = max(now, free)
            return
        for task in range(count):
            if task in done or not needed[task] <= done:
                continue
            if transfers[task]:
                end = max(now, free) + duration[task]
                go(done | {task}, now, end, {**arrived, task: end}, left)
                continue
            begin = max([now, *(arrived[other] for other in needed[task] if other in arrived)])
            go(done | {task}, begin + duration[task], free, arrived, left - duration[task])

    go(frozenset(), 0, 0, {}, sum(time for time, away in zip(duration, transfers, strict=True) if not away))
    return best_ns
