"""Buckets and order for fixed kernels: by rule, by local search, and in the arrays as for strategies."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Shape
from disco_hlo.plan.legal import check_order
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.search import layout as at
from disco_hlo.search.arrange import contiguous_buckets, list_order, regroup
from disco_hlo.search.climb import Climber
from disco_hlo.search.schedule import best_buckets, best_of, best_order, with_order
from disco_hlo.search.state import copy_state
from disco_hlo.search.strategies import prepare
from disco_hlo.simulator.build import build
from disco_hlo.simulator.orders import list_schedule
from disco_hlo.simulator.timeline import simulate
from tests.graphs import graph_of
from tests.machines import CPU, GPU
from tests.search.cost_models import OneDevice, ResultCosts
from tests.search.states import check_consistent, check_topological, moved
from tests.search.steps import random_step
from tests.simulator.random_steps import TableCosts


def line(size_bytes: int) -> int:
    """10 ns an all-reduce and 1 ns a byte."""
    return 10 + size_bytes


def finish(runs: list[list[int]], ready: list[int], sizes: list[int]) -> int:
    clock = 0
    for run in runs:
        clock = max(clock, ready[run[-1]]) + line(sum(sizes[i] for i in run))
    return clock


def test_gradients_that_are_all_ready_travel_together() -> None:
    assert contiguous_buckets([0, 0, 0], [1, 1, 1], "aaa", line) == [[0, 1, 2]]


def test_a_late_gradient_does_not_hold_up_the_early_ones() -> None:
    # Alone: 0-30, then 100-111. Together: 100-131.
    assert contiguous_buckets([0, 0, 100], [10, 10, 1], "aaa", line) == [[0, 1], [2]]


def test_where_each_transfer_waits_fewer_travel() -> None:
    # Apart: 0-20, then to 50. Together: 11-51. With 15 of waiting each: to 80 and 66.
    assert contiguous_buckets([0, 11], [10, 20], "aa", line) == [[0], [1]]
    assert contiguous_buckets([0, 11], [10, 20], "aa", line, wait_ns=15) == [[0, 1]]


def test_two_kinds_never_share_a_run() -> None:
    assert contiguous_buckets([0, 0, 0], [1, 1, 1], "aba", line) == [[0], [1], [2]]


def test_no_gradient_no_run() -> None:
    assert contiguous_buckets([], [], [], line) == []


def test_a_step_on_one_device_is_ordered_without_all_reduce_times() -> None:
    found = best_buckets(graph_of("param\nexp 0\nneg 1\ntuple 2"), (), OneDevice(), GPU)
    assert found.strategy.buckets == ()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=7))
def test_no_other_cut_ends_earlier(gradients: list[tuple[int, int]]) -> None:
    ready = sorted(time for time, _ in gradients)
    sizes = [size for _, size in gradients]
    count = len(ready)
    cuts = [cut for n in range(count) for cut in combinations(range(1, count), n)]
    every = [[list(range(a, b)) for a, b in zip((0, *cut), (*cut, count), strict=True)] for cut in cuts]
    best = min(finish(runs, ready, sizes) for runs in every)
    found = contiguous_buckets(ready, sizes, [0] * count, line)
    assert finish(found, ready, sizes) == best
    assert [i for run in found for i in run] == list(range(count))


# A weight (1) is gathered (b0, 17 ns) for two matmuls (3, 4), the second of which makes a gradient (b1, 29 ns). Two
# kernels wait for nothing: n6 takes not quite as long as the first collective, n7 as long as the last.
STEP = graph_of(
    "param\nconvert 0\nall-reduce 1\ndot 2\ndot 3\nall-reduce 4\nexp 0\nexp 0\ntuple 5 6 7", elements=None
)
COSTS = TableCosts((0, 10, 0, 20, 20, 0, 12, 30, 0))
BUCKETS = (Bucket((2,)), Bucket((5,)))


def test_kernels_run_during_the_collectives_that_they_hide() -> None:
    """By rule both run during the first collective, so as not to wait for it, and nothing hides the last."""
    by_rule = with_order(STEP, Strategy(buckets=BUCKETS), COSTS, GPU)
    assert " ".join(by_rule.strategy.order) == "n1 b0.start n6 n7 b0.done n3 n4 b1.start b1.done"
    assert by_rule.predicted_ns == 10 + 12 + 30 + 20 + 20 + 29
    found = best_order(STEP, Strategy(buckets=BUCKETS), COSTS, GPU)
    check_order(unit_graph(STEP, found.strategy), found.strategy.order, True)
    assert " ".join(found.strategy.order) == "n1 b0.start n6 b0.done n3 n4 b1.start n7 b1.done"
    assert found.predicted_ns == 10 + 17 + 20 + 20 + 30


def test_where_collectives_block_the_order_is_that_of_the_rules() -> None:
    strategy = Strategy(buckets=BUCKETS)
    assert best_order(STEP, strategy, COSTS, CPU) == with_order(STEP, strategy, COSTS, CPU)


def test_an_order_within_the_memory_limit_is_taken() -> None:
    """What runs during the collective leaves results that lie there until they are read."""
    step = graph_of("param\nall-reduce 0\nexp 0\nexp 0\ndot 1\ndot 2 4\ndot 3 5\ntuple 6", elements=None)
    strategy, costs = Strategy(buckets=(Bucket((1,)),)), TableCosts((0, 0, 10, 10, 10, 10, 10, 0))
    fast = ("b0.start", "n2", "n3", "b0.done", "n4", "n5", "n6")
    small = ("b0.start", "b0.done", "n4", "n2", "n5", "n3", "n6")
    either = best_of(step, strategy, [small, fast], costs, GPU)
    assert (either.strategy.order, either.predicted_ns) == (fast, 50)
    limited = best_of(step, strategy, [fast, small], costs, GPU, either.peak_bytes - 1)
    assert (limited.strategy.order, limited.predicted_ns) == (small, 13 + 50)
    assert limited.peak_bytes < either.peak_bytes
    assert best_of(step, strategy, [fast, small], costs, GPU, 0) == limited


MACHINE = replace(GPU, launch_ns=3, memory_bytes_per_us=2000)
SEEDS = st.integers(0, 2**32)


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 50))
def test_the_order_is_that_of_the_list_schedule(seed: int, count: int) -> None:
    bench, _ = moved(seed, count, MACHINE)
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


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 50))
def test_all_reduces_made_into_other_buckets_leave_a_whole_state(seed: int, count: int) -> None:
    bench, _ = moved(seed, count, MACHINE)
    bench.scratch.number[at.LOGGED] = 0
    alone = np.array(bench.graph.collectives, np.int64)
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
    graph = graph_of(small, backend="gpu")
    large = Shape("f32", (1 << 19,), (0,))
    nodes = [replace(node, shape=large) if node.id in (4, 5) else node for node in graph.nodes]
    graph = replace(graph, nodes=tuple(nodes))
    # A transfer takes 10 and 100 more for 2 MiB.
    costs = TableCosts((0, 10, 30, 0, 50, 0, 1, 0, 0), line=LinearPieces.of((0, 100 / (1 << 21), 10.0)))

    def arranged_ns(small_last: bool) -> int:
        climber = Climber(graph, costs, GPU, prepare(graph, [unfused(graph)]), 0, 0)
        climber.reschedule(small_last=small_last)
        return climber.makespan_ns()

    # 10 and 30 for the first small one, 50 for the large one, 1 for the last, which travels with it: nothing hides 110.
    assert arranged_ns(False) == 10 + 30 + 50 + 1 + 110
    # The large one after 10 and 50; 30 and 1 run beside its transfer, and both small ones travel together behind it.
    assert arranged_ns(True) == 10 + 50 + 110 + 10
