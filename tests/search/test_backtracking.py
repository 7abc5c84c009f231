"""Algorithm 1: what it finds on fixed seeds, that it finds it again, and that its prediction is the simulator's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.plan.legal import check_order, unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.search.api import SearchResult, SearchSettings
from disco_hlo.search.run import search
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate
from tests.machines import CPU, GPU
from tests.search.cost_models import ResultCosts, TrafficCosts
from tests.search.steps import chain, random_step

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
    found = {
        subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": str(ROOT)},
        ).stdout
        for salt in ("1", "2")
    }  # fmt: skip
    result = run(3)
    assert found == {f"{trace(result)} {result.strategy}\n"}


def test_another_seed_takes_another_way() -> None:
    assert trace(run(1, evaluations=200)) != trace(run(2, evaluations=200))


def test_it_stops_after_so_many_candidates_without_improvement() -> None:
    result = run(unchanged=50)
    assert result.stopped == "unchanged"
    beyond = result.evaluations - result.trace[-1].evaluation - 50
    assert 0 <= beyond < 3  # the three candidates of one parent are judged before it is asked


def test_nothing_to_fuse_ends_at_once_with_the_start() -> None:
    graph = chain("param\ndot 0\ntuple 1", backend="gpu")
    result = search(graph, TrafficCosts(), GPU, start=unfused(graph), settings=replace(PAPER, unchanged=5))
    assert result.predicted_ns == result.start_ns
    assert result.strategy.groups == ()


def test_two_all_reduces_of_fixed_cost_travel_together() -> None:
    # 1000 ns a transfer whatever its size, and nothing else takes time worth mentioning.
    graph = chain("param\ndot 0\ndot 1\nall-reduce 1\nall-reduce 2\ntuple 3 4", backend="gpu")
    costs = TrafficCosts(LinearPieces.of((0, 0.0, 1000.0)))
    result = search(graph, costs, GPU, start=unfused(graph), settings=replace(PAPER, evaluations=60))
    assert [sorted(bucket.all_reduces) for bucket in result.strategy.buckets] == [[3, 4]]


@settings(max_examples=25, deadline=None)
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
