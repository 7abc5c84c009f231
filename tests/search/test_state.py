"""Strategies go into the arrays and come out as they were."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.optimize.pipeline import searchable
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.normal import normal_form
from disco_hlo.plan.order import check_order
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Bucket, Group, Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.search.strategies import Signature, kernels_of, members_of
from disco_hlo.simulator.costs import MachineModel
from tests.machines import CPU
from tests.search.random_steps import random_step
from tests.search.states import MACHINES, Bench, check_consistent, check_legal
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
    bench.random_moves(random, 2 * count)
    strategy = normal_form(bench.graph, bench.strategy())
    again = Bench(bench.graph, start=strategy)
    assert without_order(normal_form(bench.graph, again.strategy())) == without_order(strategy)
    check_consistent(again)


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
        replace(one, form="variadic") if len(one.all_reduces) > 1 and random.random() < 0.5 else one
        for one in strategy.buckets
    )
    return Strategy(groups, buckets)


@settings(max_examples=150, deadline=None)
@example(seed=246, count=60, machine=CPU)
@example(seed=320, count=40, machine=CPU)
@given(seed=st.integers(0, 2**32), count=st.integers(8, 90), machine=st.sampled_from(MACHINES))
def test_every_state_is_written_down(seed: int, count: int, machine: MachineModel) -> None:
    random = Random(seed)
    graph = random_step(random, count, backend=machine.name)
    made = Bench(graph, machine)
    made.random_moves(random, count)
    check_written_down(random, made, as_xla_writes(random, graph, made.strategy()), count)


@settings(max_examples=100, deadline=None)
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
    graph = chain("param\nnegate 0\nexponential 1\nnegate 1\ntuple 2 3")
    start = Strategy((Group((2,), (1,)), Group((3,), (1,))))
    bench = Bench(graph, start=start)
    assert bench.heads() == [1, 3]
    assert normal_form(graph, bench.strategy()).groups == (Group((1, 2)), Group((3,), (1,)))


def test_emitter_settings_and_forms_come_out_as_they_went_in() -> None:
    graph = chain("param\nnegate 0\nexponential 1\nall-reduce 2\nall-reduce 1\ntuple 3 4")
    start = Strategy((Group((1, 2), kind="triton", config='{"tiles":4}'),), (Bucket((4, 3), "variadic"),))
    assert without_order(Bench(graph, start=start).strategy()) == without_order(start)


def test_a_start_may_duplicate_more_ops_than_the_step_has() -> None:
    # Five readers recompute the same four ops: 20 duplicates, 11 nodes.
    ops = "param\nnegate 0\nnegate 1\nnegate 2\nnegate 3"
    readers = "\n".join("exponential 4" for _ in range(5))
    graph = chain(f"{ops}\n{readers}\ntuple 5 6 7 8 9")
    bench = Bench(graph, start=Strategy(tuple(Group((x,), (1, 2, 3, 4)) for x in range(5, 10))))
    assert normal_form(graph, bench.strategy()).groups[1:] == tuple(
        Group((x,), (1, 2, 3, 4)) for x in range(6, 10)
    )
    check_consistent(bench)


def test_a_kernel_takes_along_the_bitcasts_through_which_it_reads() -> None:
    graph = chain("param\nnegate 0\nbitcast 1\nexponential 2\ndot 2\ntuple 3 4")
    bench = Bench(graph)
    assert bench.move(0, 3, 1)
    bench.costs.price_changed(bench.state, bench.scratch)
    assert normal_form(graph, bench.strategy()).groups == (Group((1, 3)),)
    check_legal(bench)
    check_consistent(bench)
