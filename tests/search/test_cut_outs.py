"""Gradients that a kernel of XLA's cannot find in a shared bucket: what cuts them out is in the search's clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.estimator.gnn import GnnModel
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Graph
from disco_hlo.optimize.costs import Costs, costs_for
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.read import read
from disco_hlo.profiler.profile import load
from disco_hlo.search import layout as at
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.climb import Climber
from disco_hlo.search.restart import BUCKET_MOVES, KERNEL_MOVES, ORDER_MOVES
from disco_hlo.search.run import search
from disco_hlo.search.strategies import prepare
from disco_hlo.simulator.build import Built, build
from disco_hlo.simulator.costs import PPM
from disco_hlo.simulator.timeline import simulate
from tests.captured import captured
from tests.graphs import graph_of
from tests.machines import GPU
from tests.search.cost_models import HoldingDots, TrafficCosts
from tests.search.states import SPLIT, UNFUSE, Bench, check_consistent, undo
from tests.search.steps import random_step
from tests.search.test_segments import Followed, followed_moves, run

ROOT = Path(__file__).parents[2]
MACHINE = replace(GPU, launch_ns=3, memory_bytes_per_us=1000)
EVERYTHING = {**KERNEL_MOVES, **BUCKET_MOVES, **ORDER_MOVES}


def simulated(bench: Bench) -> tuple[int, list[str]]:
    """What the simulator says of the state, and the kernels that cut gradients out."""
    _, strategy = run(bench)
    built = build(bench.graph, strategy, bench.model, bench.machine)
    return simulate(built.problem).makespan_ns, cut_outs(built)


def cut_outs(built: Built) -> list[str]:
    return [name for name in built.problem.names if ".unpack" in name]


def check(followed: Followed, expected_ns: int, names: list[str]) -> None:
    """Both clocks of the search say what the simulator says, and their sums are right."""
    bench = followed.bench
    bench.costs.price_changed(bench.state, bench.scratch)
    assert followed.follow(0) == followed.count(followed.fresh()) == expected_ns
    assert run(bench)[0] == expected_ns
    assert simulated(bench) == (expected_ns, names)
    check_consistent(bench)


def one_of_tritons() -> Followed:
    """Two gradients in one bucket, read through bitcasts; the kernel that reads the first is Triton's."""
    graph = graph_of(
        "param\nnegate 0\nnegate 0\nall-reduce 1\nall-reduce 2\nbitcast 3\nbitcast 4\n"
        "add 5 0\nnegate 7\nadd 6 0\nnegate 9\ntuple 8 10",
        backend="gpu",
    )
    tiled = Group((7, 8), kind="triton", config='{"tiles":4}')
    start = Strategy((tiled, Group((9, 10))), (Bucket((3, 4)),))
    return Followed(Bench(graph, MACHINE, TrafficCosts(), start))


BEFORE_NS = 43 + 43 + (3 + 2 * 64) + (300 + 64)
"""Two gradients of 32 bytes, packed and transferred."""
CUT_NS = 3 + 2 * 32


def test_a_kernel_of_tritons_has_its_gradient_cut_out() -> None:
    check(one_of_tritons(), BEFORE_NS + CUT_NS + 83 + 83, ["b0.unpack3"])


def test_a_kernel_that_is_taken_apart_has_it_cut_out_no_longer() -> None:
    followed = one_of_tritons()
    mark = int(followed.bench.scratch.number[at.LOGGED])
    assert followed.bench.move(UNFUSE, 7, 8)
    check(followed, BEFORE_NS + 75 + 43 + 83, [])
    undo(followed.bench.step, followed.bench.state, followed.bench.scratch, mark)
    followed.follow(mark)
    check(followed, BEFORE_NS + CUT_NS + 83 + 83, ["b0.unpack3"])


def test_a_gradient_that_travels_alone_is_where_it_lies() -> None:
    followed = one_of_tritons()
    assert followed.bench.move(SPLIT, 3, 1)
    # The second transfer, from 375 to 707, runs beside the first kernel.
    check(followed, 43 + 332 + 332 + 83, [])


def test_what_several_kernels_cannot_find_is_cut_out_once_before_the_first_of_them() -> None:
    graph = graph_of(
        "param\nnegate 0\nnegate 0\nall-reduce 1\nall-reduce 2\n"
        "add 3 0\nnegate 5\nadd 3 0\nnegate 7\nadd 4 0\ntuple 6 8 9",
        backend="gpu",
    )
    tiled = [Group(nodes, kind="triton", config='{"tiles":4}') for nodes in ((5, 6), (7, 8))]
    followed = Followed(Bench(graph, MACHINE, TrafficCosts(), Strategy(tuple(tiled), (Bucket((3, 4)),))))
    both_ns = BEFORE_NS + CUT_NS + 83 + 83 + 75
    check(followed, both_ns, ["b0.unpack3"])
    assert followed.bench.move(UNFUSE, 5, 6)
    check(followed, both_ns + 75 + 43 - 83, ["b0.unpack3"])
    assert followed.bench.move(UNFUSE, 7, 8)
    check(followed, both_ns - CUT_NS + 2 * (75 + 43 - 83), [])


def test_what_the_root_returns_is_cut_out_behind_everything() -> None:
    graph = graph_of(
        "param\nnegate 0\nnegate 0\nall-reduce 1\nall-reduce 2\nadd 3 0\ntuple 3 4 5", backend="gpu"
    )
    followed = Followed(Bench(graph, MACHINE, TrafficCosts(), Strategy((), (Bucket((3, 4)),))))
    check(followed, BEFORE_NS + 75 + 2 * CUT_NS, ["b0.unpack3", "b0.unpack4"])


def test_a_transfer_begins_beside_what_cuts_out_not_beside_the_product_behind_it() -> None:
    # The third gradient's transfer is issued when the bucket has arrived, in front of the dot that reads it.
    graph = graph_of(
        "param\nnegate 0\nnegate 0\nall-reduce 1\nall-reduce 2\nadd 4 0\nall-reduce 5\ndot 3 0\ntuple 6 7",
        backend="gpu",
    )
    costs = HoldingDots(LinearPieces.of((0, 0.0, 200.0)))
    followed = Followed(Bench(graph, MACHINE, costs, Strategy((), (Bucket((3, 4)), Bucket((6,))))))
    issued_ns = 43 + 43 + (3 + 2 * 64) + 200 + 75
    check(followed, issued_ns + max(200, CUT_NS + 75), ["b0.unpack3"])


def as_it_came(random: Random, strategy: Strategy) -> Strategy:
    """Kernels as XLA may have them: some are Triton's."""

    def changed(group: Group) -> Group:
        return replace(group, kind="triton", config='{"tiles":4}') if random.random() < 0.3 else group

    return replace(strategy, groups=tuple(map(changed, strategy.groups)))


def moved(seed: int, count: int, speed_ppm: int) -> Iterator[tuple[Followed, int]]:
    """A state with such kernels and shared buckets, after each of some random moves; the mark in the log before it."""
    random = Random(seed)
    graph = random_step(random, count, backend="gpu")
    made = Bench(graph, MACHINE)
    made.random_moves(random, 3 * count)
    machine = replace(MACHINE, compute_speed_ppm=speed_ppm)
    try:
        bench = Bench(graph, machine, TrafficCosts(), as_it_came(random, made.strategy()))
    except IllegalStrategyError:
        assume(False)
        return
    followed = Followed(bench)
    yield followed, 0
    for mark in followed_moves(followed, random, count):
        yield followed, mark


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(20, 80), speed_ppm=st.sampled_from((PPM, 870_000)))
def test_clocks_follow_what_is_cut_out_through_every_move(seed: int, count: int, speed_ppm: int) -> None:
    for followed, mark in moved(seed, count, speed_ppm):
        bench = followed.bench
        followed.check(followed.follow(mark))
        cost_ns, strategy = run(bench)
        built = build(bench.graph, strategy, bench.model, bench.machine)
        if len(built.units.units) < bench.state.word[at.TOTAL, at.UNITS]:
            continue  # moves by dice may leave an op that all its readers recompute: no strategy runs it
        assert cost_ns == simulate(built.problem).makespan_ns
        runs_on_stream = built.problem.resource == 0
        assert built.problem.duration_ns[runs_on_stream].sum() == bench.state.word[at.TOTAL, at.COMPUTE_NS]


@cache
def step_of(model: str) -> tuple[Graph, Strategy, Costs]:
    """A step that was captured on an H200, XLA's plan of it, and costs over staged links."""
    module = captured(f"h200_models/{model}")
    profile = load(ROOT / "disco_hlo/data/profiles/nvidia-h200-staged.json")
    return module.graph, read(module), costs_for(module, profile, None)


MODELS = pytest.mark.parametrize("model", ["vgg19", "rnnlm"])


@MODELS
def test_the_clock_is_the_simulators_for_xlas_plan_and_plans_near_it(model: str) -> None:
    graph, default, costs = step_of(model)
    # By ops alone, so that a kernel of XLA's that must be written anew takes what it took.
    assert isinstance(costs.estimator, GnnModel)
    costs = Costs(replace(costs.profile, ops={}), costs.estimator.analytic)
    climber = Climber(graph, costs, costs.machine, prepare(graph, [default]), 0, 1)
    for moves, allowed_loss_ns, ordered in (
        ({}, 0, False), (EVERYTHING, 10**7, False), (EVERYTHING, 10**7, True), (EVERYTHING, 0, True),
    ):  # fmt: skip
        if moves:
            climber.climb(moves, 1500, allowed_loss_ns, ordered=ordered)
        built = build(graph, climber.strategy(climber.state), costs, costs.machine)
        if not moves:
            assert bool(cut_outs(built)) == (model == "rnnlm")  # it has Triton kernels that read gradients
        assert simulate(built.problem).makespan_ns == climber.makespan_ns()


@MODELS
def test_the_clock_is_the_simulators_for_the_plan_of_a_search(model: str) -> None:
    graph, default, costs = step_of(model)
    chosen = SearchSettings(evaluations=6000, seeds=1, finalists=1)
    found = search(graph, costs, costs.machine, start=default, settings=chosen)
    built = build(graph, found.strategy, costs, costs.machine)
    assert found.predicted_ns == simulate(built.problem).makespan_ns
    assert found.trace[-1].cost_ns == found.predicted_ns
