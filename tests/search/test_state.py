"""Strategies go into the arrays and come out as they were."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.normal import normal_form
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Bucket, Group, Strategy
from tests.search.random_steps import random_step
from tests.search.states import Bench, check_consistent
from tests.search.steps import chain

H200 = Path(__file__).parents[1] / "data" / "h200_transformer_default.hlo.pb.gz"


@pytest.fixture(scope="module")
def h200() -> CanonicalModule:
    return canonicalize(gzip.decompress(H200.read_bytes()))


def without_order(strategy: Strategy) -> tuple[object, object]:
    return strategy.groups, strategy.buckets


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(8, 60))
def test_a_strategy_survives_the_round_trip(seed: int, count: int) -> None:
    random = Random(seed)
    bench = Bench(random_step(random, count))
    bench.random_moves(random, 2 * count, methods=8)
    strategy = normal_form(bench.graph, bench.strategy())
    again = Bench(bench.graph, start=strategy)
    assert without_order(normal_form(bench.graph, again.strategy())) == without_order(strategy)
    check_consistent(again)


def test_the_plan_of_xla_survives_the_round_trip(h200: CanonicalModule) -> None:
    plan = read(h200)
    assert {group.kind for group in plan.groups} == {"loop", "input", "triton"}
    bench = Bench(h200.graph, start=plan)
    assert without_order(normal_form(h200.graph, bench.strategy())) == without_order(plan)


def test_the_unfused_step_survives_the_round_trip(h200: CanonicalModule) -> None:
    strategy = unfused(h200.graph)
    assert without_order(Bench(h200.graph, start=strategy).strategy()) == without_order(strategy)


def test_an_op_that_every_reader_recomputes_finds_an_owner() -> None:
    # 1 is read by 2 and 3 only, and both recompute it.
    graph = chain("param\nnegate 0\nexponential 1\nnegate 1\ntuple 2 3")
    start = Strategy((Group((2,), (1,)), Group((3,), (1,))))
    bench = Bench(graph, start=start)
    assert bench.heads() == [1, 3]
    assert normal_form(graph, bench.strategy()).groups == (Group((1, 2)), Group((3,), (1,)))


def test_emitter_settings_and_forms_come_out_as_they_went_in() -> None:
    graph = chain("param\nnegate 0\nexponential 1\nall-reduce 2\nall-reduce 1\ntuple 3 4")
    start = Strategy((Group((1, 2), kind="triton", config='{"tiles":4}'),), (Bucket((4, 3), "variadic"),))
    assert without_order(Bench(graph, start=start).strategy()) == without_order(start)


def test_a_bitcast_between_members_is_taken_along() -> None:
    graph = chain("param\nnegate 0\nbitcast 1\nexponential 2\ntuple 3")
    bench = Bench(graph)
    assert bench.move(0, 3, 1)
    assert normal_form(graph, bench.strategy()).groups == (Group((1, 2, 3)),)


def test_a_bitcast_that_others_read_too_stays_outside_for_them() -> None:
    graph = chain("param\nnegate 0\nbitcast 1\nexponential 2\ndot 2\ntuple 3 4")
    bench = Bench(graph)
    assert bench.move(0, 3, 1)
    assert normal_form(graph, bench.strategy()).groups == (Group((1, 3), (2,)),)
