"""Buckets and order made in the arrays are those that the rules for strategies make."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Graph, Shape
from disco_hlo.plan.baselines import unfused
from disco_hlo.search import layout as at
from disco_hlo.search.arrange import list_order, regroup
from disco_hlo.search.climb import Climber
from disco_hlo.search.state import copy_state
from disco_hlo.search.strategies import prepare
from disco_hlo.simulator.build import build
from disco_hlo.simulator.orders import list_schedule
from disco_hlo.simulator.timeline import simulate
from tests.machines import GPU
from tests.search.cost_models import ResultCosts, TrafficCosts
from tests.search.random_steps import random_step
from tests.search.states import Bench, check_consistent, check_topological
from tests.search.steps import chain

MACHINE = replace(GPU, launch_ns=3, memory_bytes_per_us=2000)
SEEDS = st.integers(0, 2**32)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 50))
def test_the_order_is_that_of_the_list_schedule(seed: int, count: int) -> None:
    random = Random(seed)
    bench = Bench(random_step(random, count, backend="gpu"), MACHINE)
    bench.random_moves(random, count)
    strategy = bench.strategy()
    built = build(bench.graph, strategy, bench.model, MACHINE)
    durations, transfers = [0] * len(built.units.units), [0] * len(built.units.units)
    for task, unit in enumerate(built.unit_of):
        times = transfers if built.problem.communicates[task] else durations
        times[unit] += int(built.problem.duration_ns[task])
    wanted = list_schedule(built.units, durations, transfers, asynchronous=True)
    assert list_order(bench.step, bench.state, bench.scratch)
    check_topological(bench)
    heads = [x for x in bench.state.word[at.ORDER].tolist() if x != -1]
    starts = [token.removesuffix(".start") for token in wanted if not token.endswith(".done")]
    smallest = {unit.token: min(unit.nodes) for unit in built.units.units}
    assert heads == [smallest[token] for token in starts]


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 50))
def test_all_reduces_made_into_other_buckets_leave_a_whole_state(seed: int, count: int) -> None:
    random = Random(seed)
    bench = Bench(random_step(random, count, backend="gpu"), MACHINE)
    bench.random_moves(random, count)
    bench.scratch.number[at.LOGGED] = 0
    alone = np.array(bench.graph.all_reduces, np.int64)
    regroup(bench.step, bench.state, bench.scratch, alone, np.arange(alone.size + 1))
    bench.costs.price_changed(bench.state, bench.scratch)
    assert list_order(bench.step, bench.state, bench.scratch)
    check_consistent(bench)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 50))
def test_a_state_is_never_arranged_worse_and_takes_what_the_simulator_says(seed: int, count: int) -> None:
    graph, costs = random_step(Random(seed), count, backend="gpu"), ResultCosts()
    climber = Climber(graph, costs, MACHINE, prepare(graph, [unfused(graph)]), 0, seed)
    before_ns, before = climber.makespan_ns(), copy_state(climber.state)
    climber.reschedule()
    assert climber.makespan_ns() <= before_ns
    assert (climber.state.word == before.word).all() or climber.makespan_ns() < before_ns
    strategy = climber.strategy(climber.state)
    assert simulate(build(graph, strategy, costs, MACHINE).problem).makespan_ns == climber.makespan_ns()


@dataclass(frozen=True)
class _Times(TrafficCosts):
    """Of each node, ns; a transfer takes 10 and 100 more for 2 MiB."""

    ns: tuple[int, ...] = ()
    line: LinearPieces = field(default_factory=lambda: LinearPieces.of((0, 100 / (1 << 21), 10.0)))

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        return np.array(self.ns, np.int64)


def test_what_computes_small_gradients_runs_beside_the_last_large_one() -> None:
    small = """
        param
        dot 0
        dot 1
        all-reduce 2
        dot 1
        all-reduce 4
        dot 4
        all-reduce 6
        tuple 3 5 7
    """
    graph = chain(small, backend="gpu")
    large = Shape("f32", (1 << 19,), (0,))
    nodes = [replace(node, shape=large) if node.id in (4, 5) else node for node in graph.nodes]
    graph = replace(graph, nodes=tuple(nodes))
    costs = _Times(ns=(0, 10, 30, 0, 50, 0, 1, 0, 0))

    def arranged_ns(small_last: bool) -> int:
        climber = Climber(graph, costs, GPU, prepare(graph, [unfused(graph)]), 0, 0)
        climber.reschedule(small_last=small_last)
        return climber.makespan_ns()

    # 10 and 30 for the first small one, 50 for the large one, 1 for the last, which travels with it: nothing hides 110.
    assert arranged_ns(False) == 10 + 30 + 50 + 1 + 110
    # The large one after 10 and 50; 30 and 1 run beside its transfer, and both small ones travel together behind it.
    assert arranged_ns(True) == 10 + 50 + 110 + 10
