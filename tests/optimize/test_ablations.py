"""What is measured with the search's plans, for a step of GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.optimize import ablations
from disco_hlo.optimize.ablations import (
    EARLY_COLLECTIVES,
    ONE_BUCKET,
    OUR_KERNELS,
    OUR_ORDER,
    PLAN_BUCKETS,
    candidates,
)
from disco_hlo.optimize.costs import costs_of, shipped_profile
from disco_hlo.optimize.pipeline import Budget, Case, optimize
from disco_hlo.plan.apply import apply
from disco_hlo.plan.legal import bucket_of
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import in_the_order_of, normal_form, one_bucket
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.schedule import Scheduled, with_order
from tests.captured import captured


def case_of(name: str) -> Case:
    """Of a captured step as XLA:GPU runs it, with the shipped profile."""
    source, profile = captured(name), shipped_profile("gpu", None)
    assert profile is not None
    xla = read(source)
    return Case(source, xla, costs_of(profile, source, [xla]))


def test_the_plans_kernels_are_tried_with_xlas_buckets_in_xlas_order() -> None:
    """Where transfers cost kernels more than the simulator knew, that was faster than the plan."""
    case = case_of("h200_models/vgg19")
    source, xla = case.source, case.xla
    found = candidates(optimize(case, SearchSettings(evaluations=2000, seeds=1), Budget.of(None)), 1)
    trials = {name: strategy for name, strategy, _ in found}
    tried, plan = trials[OUR_KERNELS], trials[PLAN]
    assert tried is not None
    assert plan is not None
    assert tried.buckets == xla.buckets
    assert {*tried.groups} <= {*plan.groups}
    assert len(tried.groups) > len(plan.groups) // 2
    assert {*tried.groups} - {*xla.groups}
    in_xlas_order = in_the_order_of(source.graph, tried, xla, asynchronous=True)
    assert tried.order == normal_form(source.graph, in_xlas_order).order
    assert len(unit_graph(source.graph, tried).units) < len(
        unit_graph(source.graph, replace(xla, order=())).units
    )
    verify(source, apply(tried, source), tried)


@pytest.mark.parametrize("name", ["dp_scan", "fsdp_scan"])
def test_xlas_kernels_keep_their_order_and_collectives_start_early(name: str) -> None:
    case = case_of(f"h100_llama/{name}")
    source, xla = case.source, case.xla
    nothing = optimize(case, SearchSettings(evaluations=1, seeds=1), Budget(0.0, 0.0, 0.0))
    found = {one.name: one for one in candidates(nothing, 0)}
    early = found.get(EARLY_COLLECTIVES, found[OUR_ORDER]).strategy  # one candidate where both are the same
    assert early is not None
    verify(source, written := apply(early, source), early)
    assert read(canonicalize(written)) == early
    ours = found[OUR_ORDER].strategy
    assert ours is not None
    verify(source, written := apply(ours, source), ours)
    assert read(canonicalize(written)) == ours
    own = {"entry": xla, **dict(xla.regions)}
    for region, strategy in {"entry": early, **dict(early.regions)}.items():
        graph, theirs = source.computations[region].graph, own[region]
        assert (strategy.groups, strategy.buckets) == (theirs.groups, theirs.buckets)
        computing = {
            unit.token for unit in unit_graph(graph, strategy).units
            if any(graph.nodes[node].opcode in ("custom-call", "while") for node in unit.nodes)
        }  # fmt: skip
        assert [t for t in strategy.order if t in computing] == [t for t in theirs.order if t in computing]
        if any(node.kind is Kind.COLLECTIVE for node in graph.nodes):
            assert strategy.order != theirs.order


def test_loops_have_the_plans_buckets_and_one_bucket_too() -> None:
    """Buckets of the entry alone were tried: in a step whose layers are a loop that is nothing but another order."""
    case = case_of("h100_llama/dp_scan")
    source, xla = case.source, case.xla
    loop = next(name for name, one in xla.regions if one.buckets)
    graph, own = source.computations[loop].graph, dict(xla.regions)[loop]
    apart = Strategy(own.groups, tuple(bucket_of(graph, [node]) for node in graph.collectives))
    ordered = with_order(graph, apart, case.costs_with((), loop), case.costs.machine).strategy
    optimized = optimize(case, SearchSettings(evaluations=50, seeds=1), Budget.of(None))
    best = replace(optimized.best.strategy, regions=tuple({**dict(xla.regions), loop: ordered}.items()))
    optimized = replace(optimized, plans=(replace(optimized.best, strategy=best),))
    found = {one.name: one.strategy for one in candidates(optimized, 1)}
    plan, theirs, single = found[PLAN], found[PLAN_BUCKETS], found[ONE_BUCKET]
    assert plan is not None
    assert theirs is not None
    assert single is not None
    of = {strategy: dict(strategy.regions)[loop] for strategy in (xla, plan, theirs, single)}
    assert {*of[theirs].buckets} == {*of[plan].buckets} != {*of[xla].buckets}
    assert len(of[single].buckets) == 1
    for strategy in (theirs, single):
        assert of[strategy].groups == of[xla].groups
        verify(source, apply(strategy, source), strategy)


def test_a_region_that_cannot_have_other_buckets_keeps_xlas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole candidate was left out, though the entry and other regions could have the plan's buckets."""
    case = case_of("h100_llama/dp_scan")
    source, xla = case.source, case.xla
    optimized = optimize(case, SearchSettings(evaluations=50, seeds=1), Budget.of(None))
    loop = next(name for name, one in xla.regions if one.buckets)
    own, graph = dict(xla.regions)[loop], source.computations[loop].graph
    ordered = ablations.with_order

    def refusing(graph_: Graph, strategy: Strategy, *arguments: Any) -> Scheduled:
        if graph_ is graph and {*strategy.buckets} != {*own.buckets}:
            raise IllegalStrategyError("a circle")
        return ordered(graph_, strategy, *arguments)

    monkeypatch.setattr(ablations, "with_order", refusing)
    found = {one.name: one.strategy for one in candidates(optimized, 1)}
    single = found[ONE_BUCKET]
    assert single is not None
    assert {*dict(single.regions)[loop].buckets} == {*own.buckets}
    assert {*single.buckets} == {*one_bucket(source.graph).buckets}
    verify(source, apply(single, source), single)
