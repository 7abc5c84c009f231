"""Strategies go into the arrays and come out as they were; kernels of a start stand as they came."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disco_hlo.core.reasons import LEGAL
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.optimize.costs import costs_for
from disco_hlo.optimize.pipeline import searchable
from disco_hlo.plan.apply import apply
from disco_hlo.plan.legal import check_order, check_strategy
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import normal_form, unfused
from disco_hlo.profiler.profile import load
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.costs import UnitCosts
from disco_hlo.search.run import search
from disco_hlo.search.segments import new_segments, run_order
from disco_hlo.search.state import new_scratch
from disco_hlo.search.strategies import Signature, kernels_of, members_of, prepare, to_strategy
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.timeline import simulate
from tests.captured import captured
from tests.graphs import graph_of
from tests.machines import CPU, GPU
from tests.search.cost_models import ResultCosts
from tests.search.states import MACHINES, Bench, check_consistent, check_legal, moved, ranked, refusal_of
from tests.search.steps import random_step


@pytest.fixture(scope="module")
def h200() -> CanonicalModule:
    return captured("h200_models/vgg19")


def without_order(strategy: Strategy) -> tuple[object, object]:
    return strategy.groups, strategy.buckets


def with_matmuls(random: Random, graph: Graph, strategy: Strategy) -> Strategy:
    """A strategy with kernels as only XLA has them: they hold ops that no rule allows in a kernel."""
    groups = list(strategy.groups)
    for node in graph.nodes:
        readers = [i for i, one in enumerate(groups) if reads(graph, one, node.id)]
        if node.kind is not Kind.FIXED or random.random() < 0.5:
            continue
        for i in random.sample(readers, len(readers)):
            tried = list(groups)
            if random.random() < 0.5:
                tried[i] = replace(groups[i], nodes=tuple(sorted((*groups[i].nodes, node.id))))
            else:
                tried[i] = replace(groups[i], duplicates=tuple(sorted((*groups[i].duplicates, node.id))))
            try:
                unit_graph(graph, replace(strategy, groups=tuple(tried), order=()))
            except IllegalStrategyError:
                continue
            groups = tried
    return replace(strategy, groups=tuple(groups), order=())


def reads(graph: Graph, group: Group, node: int) -> bool:
    return any(node in graph.nodes[x].operands for x in (*group.nodes, *group.duplicates))


def as_xla_writes(random: Random, graph: Graph, strategy: Strategy) -> Strategy:
    """A strategy with kernels of Triton's and buckets of several operands."""
    groups = strategy.groups
    if graph.backend == "gpu":
        groups = tuple(replace(one, kind="triton") if random.random() < 0.2 else one for one in groups)
    buckets = tuple(
        Bucket(one.collectives, "variadic") if len(one.collectives) > 1 and random.random() < 0.5 else one
        for one in strategy.buckets
    )
    return Strategy(groups, buckets)


@settings(max_examples=60, deadline=None)
@example(seed=246, count=60, machine=CPU)
@example(seed=320, count=40, machine=CPU)
@given(seed=st.integers(0, 2**32), count=st.integers(8, 90), machine=st.sampled_from(MACHINES))
def test_every_state_is_written_down(seed: int, count: int, machine: MachineModel) -> None:
    made, random = moved(seed, count, machine)
    check_written_down(random, made, as_xla_writes(random, made.graph, made.strategy()), count)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(8, 60), machine=st.sampled_from(MACHINES))
def test_every_state_with_kernels_that_only_xla_has_is_written_down(
    seed: int, count: int, machine: MachineModel
) -> None:
    random = Random(seed)
    graph = random_step(random, count, backend=machine.name, turned=True)
    made = Bench(graph, machine)
    made.random_moves(random, count)
    held = with_matmuls(random, graph, made.strategy())
    check_written_down(random, made, as_xla_writes(random, graph, held), count)


def check_written_down(random: Random, made: Bench, xla: Strategy, count: int) -> None:
    """Whatever moves a search from these kernels makes, each state is a legal strategy, and comes out of it again."""
    graph, machine = made.graph, made.machine
    start = searchable(graph, xla)
    bench, attested = Bench(graph, machine, start=start), kernels_of(graph, start) | kernels_of(graph, xla)
    for _ in range(4):
        strategy = bench.strategy()
        units = unit_graph(graph, strategy)
        check_order(units, strategy.order, machine.asynchronous)
        check_strategy(graph, strategy, units, attested)
        normal = normal_form(graph, strategy)
        again = Bench(graph, machine, start=strategy)
        assert without_order(normal_form(graph, again.strategy())) == without_order(normal)
        if len(units.units) == len(bench.heads()):  # nothing is left over that nobody runs
            assert members(again) == members(bench)
        bench.random_moves(random, count // 2)


def members(bench: Bench) -> list[Signature]:
    return [members_of(bench.state, head) for head in bench.heads()]


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
    graph = graph_of("param\nnegate 0\nexponential 1\nnegate 1\ntuple 2 3")
    start = Strategy((Group((2,), (1,)), Group((3,), (1,))))
    bench = Bench(graph, start=start)
    assert bench.heads() == [1, 3]
    assert normal_form(graph, bench.strategy()).groups == (Group((1, 2)), Group((3,), (1,)))


def test_emitter_settings_and_forms_come_out_as_they_went_in() -> None:
    graph = graph_of("param\nnegate 0\nexponential 1\nall-reduce 2\nall-reduce 1\ntuple 3 4")
    start = Strategy((Group((1, 2), kind="triton", config='{"tiles":4}'),), (Bucket((4, 3), "variadic"),))
    assert without_order(Bench(graph, start=start).strategy()) == without_order(start)


def test_a_start_may_duplicate_more_ops_than_the_step_has() -> None:
    # Five readers recompute the same four ops: 20 duplicates, 11 nodes.
    ops = "param\nnegate 0\nnegate 1\nnegate 2\nnegate 3"
    readers = "\n".join("exponential 4" for _ in range(5))
    graph = graph_of(f"{ops}\n{readers}\ntuple 5 6 7 8 9")
    bench = Bench(graph, start=Strategy(tuple(Group((x,), (1, 2, 3, 4)) for x in range(5, 10))))
    assert normal_form(graph, bench.strategy()).groups[1:] == tuple(
        Group((x,), (1, 2, 3, 4)) for x in range(6, 10)
    )
    check_consistent(bench)


def test_a_kernel_takes_along_the_bitcasts_through_which_it_reads() -> None:
    graph = graph_of("param\nnegate 0\nbitcast 1\nexponential 2\ndot 2\ntuple 3 4")
    bench = Bench(graph)
    assert bench.move(0, 3, 1)
    bench.costs.price_changed(bench.state, bench.scratch)
    assert normal_form(graph, bench.strategy()).groups == (Group((1, 3)),)
    check_legal(bench)
    check_consistent(bench)


ROOT = Path(__file__).parents[2]
TILED = '{"tiles":4}'


def bench_with(group: Group, graph=None) -> Bench:
    graph = graph or graph_of("param\nnegate 0\nexponential 1\nnegate 1\ntuple 2 3", backend="gpu")
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
    graph = graph_of("param\nnegate 0\nexponential 1\nnegate 1\ntuple 2 3")
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
    source = captured("demo_plan/default")
    settings = SearchSettings(evaluations=1500, seeds=1, finalists=2)
    found = search(source.graph, ResultCosts(), CPU, start=read(source), settings=settings)
    for one in found.finalists:
        verify(source, apply(one.strategy, source), one.strategy)
