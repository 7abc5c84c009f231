"""Algorithm 1: what it finds on fixed seeds, its tree of candidates, and its queue, which is the slow simulator's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.collectives import ALL_REDUCE
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.plan.legal import check_order
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import collective_depths, unfused
from disco_hlo.search.api import SearchResult, SearchSettings
from disco_hlo.search.backtracking import Backtracking
from disco_hlo.search.explore import CANDIDATES, QUEUED, evaluate, go_to, new_tree
from disco_hlo.search.hashing import new_table
from disco_hlo.search.ready_queue import schedule
from disco_hlo.search.run import search
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate
from tests.graphs import graph_of
from tests.machines import CPU, GPU
from tests.search.cost_models import ResultCosts, TrafficCosts
from tests.search.states import Bench, moved
from tests.search.steps import random_step
from tests.simulator.random_steps import TableCosts
from tests.simulator.reference import simulate_slowly

ROOT = Path(__file__).parents[2]
PAPER = SearchSettings(method="backtracking")
GOLDEN = [(1, 1297024), (4, 1264256), (10, 1198720), (13, 805804), (19, 739968)]
GOLDEN_END = (300, 45, "evaluations")


def run(seed: int = 1, **changes: object) -> SearchResult:
    """Algorithm 1 on one random step of 40 ops."""
    graph = random_step(Random(7), 40, backend="gpu")
    chosen = replace(PAPER, seed=seed, **changes)
    return search(graph, TrafficCosts(), GPU, start=unfused(graph), settings=chosen)


def trace(result: SearchResult) -> list[tuple[int, int]]:
    return [(step.evaluation, step.cost_ns) for step in result.trace]


def test_the_same_seed_accepts_the_same_candidates_for_ever() -> None:
    result = run(evaluations=300)
    assert trace(result) == GOLDEN
    assert (result.evaluations, result.distinct_evaluations, result.stopped) == GOLDEN_END


def test_two_processes_find_the_same() -> None:
    script = "from tests.search.test_backtracking import run, trace; r = run(3); print(trace(r), r.strategy)"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip
    result = run(3)
    assert found == f"{trace(result)} {result.strategy}\n"


def test_another_seed_takes_another_way() -> None:
    assert trace(run(1, evaluations=200)) != trace(run(2, evaluations=200))


def test_it_stops_after_so_many_candidates_without_improvement() -> None:
    result = run(unchanged=50)
    assert result.stopped == "unchanged"
    beyond = result.evaluations - result.trace[-1].evaluation - 50
    assert 0 <= beyond < 3  # the three candidates of one parent are judged before it is asked


def test_nothing_to_fuse_ends_at_once_with_the_start() -> None:
    graph = graph_of("param\ndot 0\ntuple 1", backend="gpu")
    result = search(graph, TrafficCosts(), GPU, start=unfused(graph), settings=replace(PAPER, unchanged=5))
    assert result.predicted_ns == result.start_ns
    assert result.strategy.groups == ()


def test_two_all_reduces_of_fixed_cost_travel_together() -> None:
    # 1000 ns a transfer whatever its size, and nothing else takes time worth mentioning.
    graph = graph_of("param\ndot 0\ndot 1\nall-reduce 1\nall-reduce 2\ntuple 3 4", backend="gpu")
    costs = TrafficCosts(LinearPieces.of((0, 0.0, 1000.0)))
    result = search(graph, costs, GPU, start=unfused(graph), settings=replace(PAPER, evaluations=60))
    assert [sorted(bucket.collectives) for bucket in result.strategy.buckets] == [[3, 4]]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), machine=st.sampled_from([CPU, replace(GPU, launch_ns=7)]))
def test_its_promise_is_what_the_simulator_says(seed: int, machine) -> None:
    graph = random_step(Random(seed), 40, backend=machine.name)
    costs = ResultCosts()
    result = search(
        graph, costs, machine, start=unfused(graph), settings=replace(PAPER, seed=seed, evaluations=60)
    )
    again = search(
        graph, costs, machine, start=result.strategy, settings=replace(PAPER, seed=seed, evaluations=60)
    )
    for found in (*result.finalists, *again.finalists):
        check_order(unit_graph(graph, found.strategy), found.strategy.order, machine.asynchronous)
        timeline = simulate(build(graph, found.strategy, costs, machine).problem)
        assert timeline.makespan_ns == found.predicted_ns


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(DiscoError, match="expected one of"):
        run(method="magic")


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(8, 50))
def test_every_candidate_is_what_it_was(seed: int, count: int) -> None:
    random = Random(seed)
    graph = random_step(random, count, backend="gpu")
    chosen = SearchSettings(method="backtracking", evaluations=200, seed=seed)
    run = Backtracking(graph, TrafficCosts(), replace(GPU, launch_ns=3), unfused(graph), chosen)
    start = run.state.word.tobytes()
    run.tree = new_tree(run.state, candidates=4, writes=1 << 10)  # too small, so that it has to grow
    run.tree.cost_ns[0], run.tree.number[QUEUED] = run.start_ns, 1
    while not run.explore():
        pass
    numbers = list(range(run.tree.number[CANDIDATES]))
    for number in random.sample(numbers, len(numbers)):
        go_to(run.tree, run.state, number)
        cost, _ = schedule(run.step, run.state, run.scratch, run.progress, run.started)
        assert cost == run.tree.cost_ns[number]
    go_to(run.tree, run.state, 0)
    assert run.state.word.tobytes() == start


BUSY = replace(
    GPU, launch_ns=3, compute_speed_ppm=800_000, transfer_speed_ppm=900_000, memory_bytes_per_us=2000
)
WAITING = replace(BUSY, transfer_wait_ns=40)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(8, 50),
    machine=st.sampled_from([CPU, GPU, BUSY, WAITING]),
)
def test_the_queue_of_the_search_is_that_of_the_reference(seed: int, count: int, machine) -> None:
    bench, _ = moved(seed, count, machine)
    built = build(bench.graph, bench.strategy(), bench.model, machine)
    if any(".unpack" in name for name in built.problem.names):
        return  # the search slices a bucket apart in one go
    assert bench.makespan_ns() == simulate_slowly(built.problem, ready_queue=True).now


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(8, 50), machine=st.sampled_from([GPU, BUSY, WAITING]))
def test_the_order_written_down_takes_as_long_as_the_queue(seed: int, count: int, machine) -> None:
    bench, _ = moved(seed, count, machine)
    built = build(bench.graph, bench.strategy(), bench.model, machine)
    depths = collective_depths(bench.graph)
    if any(".unpack" in name for name in built.problem.names) or any(
        depths[x] for x in bench.graph.collectives
    ):
        return  # a transfer that waits for a transfer is issued by the device, after the op it is busy with
    assert bench.makespan_ns() == simulate(built.problem).makespan_ns


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(8, 50))
def test_where_collectives_block_the_cost_is_the_sum(seed: int, count: int) -> None:
    bench, _ = moved(seed, count, replace(CPU, launch_ns=3, memory_bytes_per_us=2000))
    table = new_table(1)
    cost, _ = evaluate(bench.step, bench.state, bench.scratch, bench.progress, table, bench.started)
    assert cost == bench.makespan_ns()
    assert (
        cost == simulate(build(bench.graph, bench.strategy(), bench.model, bench.machine).problem).makespan_ns
    )


def test_a_gradient_travels_while_the_device_computes() -> None:
    # exp (8 elements: 32 + 8 ns) makes the gradient, dot works on meanwhile.
    graph = graph_of("param\nexponential 0\nall-reduce 1\ndot 0\nnegate 2\ntuple 3 4", backend="gpu")
    bench = Bench(graph, GPU)
    transfer = int(bench.model.collective(ALL_REDUCE)(np.array([32]))[0])
    assert transfer == 332
    assert bench.makespan_ns() == 40 + 332 + 40
    assert bench.strategy().order == ("n1", "b0.start", "n3", "b0.done", "n4")


def queued(text: str, *ns: int) -> tuple[int, tuple[str, ...]]:
    """Makespan and order of an unfused step by the ready queue; nodes take ``ns``, transfers 2."""
    costs = TableCosts(ns, line=LinearPieces.of((0, 0.0, 2.0)))
    bench = Bench(graph_of(text, backend="gpu"), GPU, costs)
    return bench.makespan_ns(), bench.strategy().order


@pytest.mark.parametrize(
    ("step", "ns", "makespan_ns", "order"),
    [
        # The reader 5 of the gradient is ready at 4, the dot 4 at 5.
        ("param\ndot 0\nall-reduce 1\ndot 1\ndot 3\ndot 2\ntuple 4 5", (0, 2, 0, 3, 3, 2, 0), 10,
         "n1 b0.start n3 b0.done n5 n4"),
        # Ids say 3 before 4, but the gradient of 4 is there first: 2 to 4, then 5 to 7.
        ("param\ndot 0\ndot 1\nall-reduce 2\nall-reduce 1\ntuple 3 4", (0, 2, 3, 0, 0, 0), 7,
         "n1 b1.start n2 b1.done b0.start b0.done"),
        # At 4 both the transfer and the dot 3 end.
        ("param\ndot 0\nall-reduce 1\ndot 1\ndot 2\ndot 3\ntuple 4 5", (0, 2, 0, 2, 1, 1, 0), 6,
         "n1 b0.start n3 b0.done n4 n5"),
    ],
    ids=["what became ready first", "gradients as they are produced", "what becomes ready at once, by node"],
)  # fmt: skip
def test_the_ready_queue_takes_first(step: str, ns: tuple[int, ...], makespan_ns: int, order: str) -> None:
    assert queued(step, *ns) == (makespan_ns, tuple(order.split()))
