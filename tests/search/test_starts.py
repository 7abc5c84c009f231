"""Kernels that a start brings along stand as they came, whatever our own rules would say of them."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from disco_hlo.core.reasons import LEGAL
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.optimize.costs import costs_for
from disco_hlo.plan.apply import apply
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Group, Strategy
from disco_hlo.plan.verify import verify
from disco_hlo.profiler.profile import load
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.costs import UnitCosts
from disco_hlo.search.run import search
from disco_hlo.search.segments import new_segments, run_order
from disco_hlo.search.state import new_scratch
from disco_hlo.search.strategies import prepare, to_strategy
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate
from tests.machines import CPU, GPU
from tests.search.cost_models import ResultCosts
from tests.search.entries import refusal_of
from tests.search.states import Bench, ranked
from tests.search.steps import chain

ROOT = Path(__file__).parents[2]
TILED = '{"tiles":4}'


@pytest.fixture(scope="module")
def h200() -> CanonicalModule:
    return canonicalize(
        gzip.decompress((ROOT / "tests/data/h200_transformer_default.hlo.pb.gz").read_bytes())
    )


def bench_with(group: Group, graph=None) -> Bench:
    graph = graph or chain("param\nnegate 0\nexponential 1\nnegate 1\ntuple 2 3", backend="gpu")
    return Bench(graph, GPU, ResultCosts(), Strategy((group,)))


def test_a_kernel_of_triton_may_not_return_anything_else() -> None:
    # 3 is the reader for which 1 is a result; once it recomputes 1, the tiles would fit another kernel.
    bench = bench_with(Group((1, 2), kind="triton", config=TILED))
    assert refusal_of(bench.step, bench.state, bench.scratch, 1) == LEGAL
    assert not bench.move(1, 3, 1)
    assert bench.strategy().groups == (Group((1, 2), kind="triton", config=TILED),)


def test_the_same_kernel_made_by_loops_may() -> None:
    bench = bench_with(Group((1, 2)))
    assert bench.move(1, 3, 1)


def test_a_kernel_that_the_rules_refuse_stands_while_it_returns_what_it_did() -> None:
    # Two results of different shapes, which the rules of XLA:CPU forbid.
    graph = chain("param\nnegate 0\nexponential 1\nnegate 1\ntuple 2 3")
    wide = replace(graph.nodes[2], shape=replace(graph.nodes[2].shape, dims=(4,)))
    graph = replace(graph, nodes=(*graph.nodes[:2], wide, *graph.nodes[3:]))
    given = Bench(graph, start=Strategy((Group((1, 2)),)))
    assert refusal_of(given.step, given.state, given.scratch, 1) == LEGAL
    made = Bench(graph)
    assert not made.move(0, 2, 1)


@pytest.mark.parametrize("link", ["nvlink", "staged", "sockets"])
def test_the_plan_of_xla_takes_what_the_simulator_says(h200: CanonicalModule, link: str) -> None:
    costs = costs_for(h200, load(ROOT / f"disco_hlo/data/profiles/nvidia-h200-{link}.json"), None)
    graph, machine = h200.graph, costs.machine
    starts = prepare(graph, [read(h200)])
    (state,) = starts.states
    scratch = new_scratch(starts.step)
    UnitCosts(graph, starts.step, costs, machine, starts.kept).price_all(state, scratch)
    segments = new_segments(starts.step, ranked(starts.step, graph), machine)
    predicted, entries = run_order(starts.step, state, scratch, segments)
    started = segments.started[:entries]
    strategy = to_strategy(graph, starts.step, state, starts.kept, started, machine.asynchronous)
    assert simulate(build(graph, strategy, costs, machine).problem).makespan_ns == predicted


def test_a_search_from_the_plan_of_xla_promises_what_the_simulator_says(h200: CanonicalModule) -> None:
    costs = costs_for(h200, load(ROOT / "disco_hlo/data/profiles/nvidia-h200-staged.json"), None)
    chosen = SearchSettings(method="backtracking", evaluations=60, finalists=2)
    result = search(h200.graph, costs, costs.machine, start=read(h200), settings=chosen)
    assert result.predicted_ns < result.start_ns
    for found in result.finalists:
        timeline = simulate(build(h200.graph, found.strategy, costs, costs.machine).problem)
        assert timeline.makespan_ns == found.predicted_ns


def test_plans_found_from_the_plan_of_xla_on_cpu_are_executed_as_they_say() -> None:
    module = Path(__file__).parents[1] / "data" / "demo_plan" / "default.hlo.pb.gz"
    source = canonicalize(gzip.decompress(module.read_bytes()))
    settings = SearchSettings(evaluations=4000, seeds=1)
    found = search(source.graph, ResultCosts(), CPU, start=read(source), settings=settings)
    for one in found.finalists:
        verify(source, apply(one.strategy, source), one.strategy)
