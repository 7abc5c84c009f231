"""A state is turned from any candidate of Algorithm 1 into any other, and back into the start."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.plan.baselines import unfused
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.backtracking import Backtracking
from disco_hlo.search.explore import CANDIDATES, QUEUED, go_to, grown, new_tree
from disco_hlo.search.ready_queue import schedule
from tests.machines import GPU
from tests.search.cost_models import TrafficCosts
from tests.search.random_steps import random_step


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


def test_a_grown_tree_has_what_it_had() -> None:
    graph = random_step(Random(3), 40, backend="gpu")
    chosen = SearchSettings(method="backtracking", evaluations=50)
    run = Backtracking(graph, TrafficCosts(), GPU, unfused(graph), chosen)
    while not run.explore():
        pass
    larger = grown(run.tree)
    count = int(run.tree.number[CANDIDATES])
    assert larger.cost_ns[:count].tolist() == run.tree.cost_ns[:count].tolist()
    assert larger.writes_at[: count + 1].tolist() == run.tree.writes_at[: count + 1].tolist()
    assert larger.parent.size == larger.writes_at.size - 1 == 2 * run.tree.parent.size
