"""Compiled code ends: by itself, when a clock says so, and when the user does; and the collector is left as it was."""

from __future__ import annotations

import gc
import time
from random import Random

import numpy as np
import pytest

from disco_hlo.compiled import compiled
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.plan.plan import Group, Strategy
from disco_hlo.plan.variants import unfused
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.arrange import MOST_GRADIENTS, contiguous_buckets
from disco_hlo.search.backtracking import Backtracking
from disco_hlo.search.climb import Climber
from disco_hlo.search.costs import unit_of_step
from disco_hlo.search.hashing import Table, claim, find, new_table, seeded
from disco_hlo.search.interpreter import interruptible, without_collector
from disco_hlo.search.layout import open_draws, open_views
from disco_hlo.search.moves.move import random_unit
from disco_hlo.search.ordering import sort_runs
from disco_hlo.search.restart import KERNEL_MOVES
from disco_hlo.search.strategies import prepare
from tests.graphs import graph_of
from tests.machines import CPU, GPU
from tests.search.cost_models import TrafficCosts
from tests.search.states import Bench
from tests.search.steps import random_step


@compiled
def sorted_values(values, spare, count):
    sort_runs(values, spare, count)
    return values


@compiled
def found_and_claimed(table, there, missing):
    return find(table, there), find(table, missing), claim(table, missing)


@compiled
def drawn_unit(step, state, scratch, generator, pools):
    _, s, _ = open_views(step, state, scratch)
    source, pool = open_draws(generator, pools)
    return random_unit(s, source, pool.fusible, pool.fusibles)


@pytest.mark.parametrize("values", [[], [3], [2, 1], [1, 2, 3], [5, 4, 3, 2, 1], [1, 5, 2, 4, 3, 0]])
def test_whatever_is_sorted_is_sorted_at_once(values: list[int]) -> None:
    """None of them, as of two units that return nothing together, took for ever."""
    given = np.array([*values, -1], np.int64)
    found = sorted_values(given, np.zeros_like(given), len(values))
    assert found.tolist() == [*sorted(values), -1]


def test_a_unit_is_drawn_where_none_begins_with_what_is_drawn_from() -> None:
    """A kernel of XLA's may begin with an op that may not be fused, and be the only one."""
    graph = graph_of("param\nnegate 0\nexponential 1\ntuple 2")
    bench = Bench(graph, start=Strategy((Group((1, 2)),)))
    pools = np.array([2], np.int64), np.zeros(0, np.int64)
    assert drawn_unit(bench.step, bench.state, bench.scratch, seeded(1), pools) == 1


def test_a_full_table_is_looked_through_once() -> None:
    table = new_table(1, 4)
    full = Table(np.array([5, 9, 13, 17], np.int64), table.value, table.used)
    there, missing, claimed = found_and_claimed(full, 13, 21)
    assert there >= 0
    assert missing < 0
    assert full.key[claimed] == 21


def test_somebody_looks_at_the_clock_while_code_runs() -> None:
    control = np.zeros(2, np.int64)

    def run() -> str:
        while not control[1]:
            time.sleep(0.001)
        return "ended"

    looks = iter([False, False, True])
    assert interruptible(run, control, 1, lambda: next(looks, True)) == "ended"


def test_ctrl_c_ends_code_before_it_goes_on() -> None:
    control, ended = np.zeros(1, np.int64), []

    def run() -> None:
        while not control[0]:
            time.sleep(0.001)
        ended.append(True)

    def interrupted() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interruptible(run, control, 0, interrupted)
    assert ended == [True]


def test_what_the_code_raises_is_raised() -> None:
    def run() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        interruptible(run, np.zeros(1, np.int64), 0, lambda: False)


def test_a_climb_ends_amid_its_proposals() -> None:
    graph = random_step(Random(3), 300)
    climber = Climber(graph, TrafficCosts(), CPU, prepare(graph, [unfused(graph)]), 0, 1)
    climber.climb(KERNEL_MOVES, 5_000_000, 0, ordered=False, halted=lambda: True)
    assert climber.evaluations < 4_000_000
    before = climber.total()
    climber.climb(KERNEL_MOVES, 2_000, 0, ordered=False)  # and its state is one to go on from
    assert climber.total() <= before


def test_algorithm_1_ends_amid_a_candidate_of_a_million_moves() -> None:
    graph = random_step(Random(3), 300)
    settings = SearchSettings(method="backtracking", beta=10**6, seconds=0.001)
    found = Backtracking(graph, TrafficCosts(), CPU, unfused(graph), settings).run()
    assert found.stopped == "seconds"


def test_a_step_of_hours_is_counted_in_microseconds() -> None:
    graph = random_step(Random(5), 60, backend="gpu")
    short = TrafficCosts()
    long = TrafficCosts(LinearPieces.of((0, 1.0, 1e12)))
    assert unit_of_step(graph, short) == 1
    assert unit_of_step(graph, long) > 1
    climber = Climber(graph, long, GPU, prepare(graph, [unfused(graph)]), 0, 1)
    before_ns = climber.makespan_ns()
    assert before_ns > 10**12
    climber.climb(KERNEL_MOVES, 2_000, 0, ordered=True)
    assert climber.makespan_ns() <= before_ns


def test_ten_thousand_gradients_are_put_into_buckets_by_neighbourhood() -> None:
    count = 10_000
    line = LinearPieces.of((0, 0.1, 1000.0))
    runs = contiguous_buckets(range(count), [10] * count, ["sum"] * count, line)
    assert [i for run in runs for i in run] == list(range(count))
    assert len(runs) < MOST_GRADIENTS
    alternating = contiguous_buckets(range(count), [10] * count, [i % 2 for i in range(count)], line)
    assert [len(run) for run in alternating] == [1] * count


@pytest.mark.parametrize("count", [MOST_GRADIENTS, MOST_GRADIENTS + 1])
def test_the_last_transfer_ends_as_early_where_neighbours_are_taken_together(count: int) -> None:
    line = LinearPieces.of((0, 0.0, 500.0))
    runs = contiguous_buckets([7 * i for i in range(count)], [1] * count, ["sum"] * count, line)
    finish = 0
    for run in runs:
        finish = max(finish, 7 * run[-1]) + 500
    assert finish == 7 * (count - 1) + 500


def fail_undisturbed() -> None:
    with without_collector():
        assert not gc.isenabled()
        raise KeyError


def test_the_collector_rests_meanwhile_and_goes_on_even_after_an_error() -> None:
    with pytest.raises(KeyError):
        fail_undisturbed()
    assert gc.isenabled()


def test_a_collector_that_the_user_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
