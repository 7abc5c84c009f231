"""Where a search starts, what its budget covers, and that what is dropped on the way is told."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.optimize import pipeline
from disco_hlo.optimize.costs import Costs, costs_for
from disco_hlo.optimize.pipeline import (
    Budget,
    Case,
    Optimized,
    RegionFound,
    optimize,
    ranked,
    search_record,
    searchable,
)
from disco_hlo.plan.apply import apply
from disco_hlo.plan.check_module import faults
from disco_hlo.plan.plan import Group, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.search import restart, warm
from disco_hlo.search.api import Dropped, Improvement, SearchResult, SearchSettings
from disco_hlo.search.schedule import with_order
from disco_hlo.simulator.build import resident_bytes
from tests.captured import CPU_MODULE, captured
from tests.graphs import graph_of
from tests.report import plans

FEW = SearchSettings(evaluations=500, seeds=1)


@pytest.fixture(scope="module")
def source() -> CanonicalModule:
    return canonicalize(CPU_MODULE.read_bytes())


def case_of(source: CanonicalModule) -> Case:
    xla = read(source)
    return Case(source, xla, costs_for(source, None, None, [xla]))


def searched(source: CanonicalModule, budget: Budget) -> Optimized:
    return optimize(case_of(source), FEW, budget)


def test_without_a_budget_the_search_is_made(source: CanonicalModule) -> None:
    """With costs like these a sort of nothing went on for ever."""
    found = searched(source, Budget.of(None))
    assert found.result.evaluations > 0
    assert found.notes == ()


def test_where_preparing_takes_all_the_time_xlas_plan_is_kept(source: CanonicalModule) -> None:
    late = replace(Budget.of(5.0), began=time.monotonic() - 6.0)
    found = searched(source, late)
    assert found.result.evaluations == 0
    assert [one.strategy for one in found.plans] == [read(source)]
    (note,) = found.notes
    assert note.startswith("preparing the search took 6.0 s of a budget of 5 s, writing a plan takes about")
    assert "\n" not in note


def test_where_compiling_takes_all_the_time_xlas_plan_is_kept(
    source: CanonicalModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "is_ready", lambda *_: False)
    monkeypatch.setattr(warm, "command", lambda _: ("sleep", "30"))
    found = searched(source, Budget.of(0.5))
    left = warm.LEFT_BEHIND.pop()
    assert left.poll() is None
    left.kill()
    left.wait()
    assert [one.strategy for one in found.plans] == [read(source)]
    assert "is still being compiled" in found.notes[0]


def test_the_search_leaves_time_for_what_comes_behind_it(
    source: CanonicalModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float | None] = []

    def noting(*arguments: object, settings: SearchSettings, **named: object) -> object:
        given.append(settings.seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "search", noting)
    monkeypatch.setattr(pipeline, "warm_up_in_time", lambda *_: True)
    monkeypatch.setattr(pipeline, "LEAST_SHARE", 2.0)  # the entry alone is searched
    monkeypatch.setattr(pipeline, "_FINISHING_S", 1.0)
    with pytest.raises(KeyboardInterrupt):
        searched(source, Budget.of(1000.0))
    assert given[0] is not None
    assert 399 < given[0] < 1000 - len(source.graph)


def test_when_the_time_is_up_one_plan_is_ranked(source: CanonicalModule) -> None:
    case, result = case_of(source), searched(source, Budget.of(None)).result
    assert len(result.finalists) > 1
    found, _ = ranked(case, result, until=time.monotonic())
    costs = case.costs_with(())
    assert found == [with_order(source.graph, result.strategy, costs, costs.machine)]


def test_what_the_search_drops_is_counted_and_told(
    source: CanonicalModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(graph: object, strategy: Strategy, *_: object) -> Strategy:
        if strategy.groups:
            raise IllegalStrategyError("g0 is\nno kernel")
        return strategy

    monkeypatch.setattr(restart, "checked", refusing)
    found = searched(source, Budget.of(None))
    assert found.result.dropped.count > 0
    assert found.notes == (found.result.dropped.sentence(),)
    assert found.notes[0].endswith("left out, being no plan of this step: g0 is no kernel")


def test_of_several_that_are_dropped_the_first_is_told() -> None:
    both = Dropped() + Dropped(1, "first") + Dropped(2, "second")
    assert both.sentence() == "3 candidates of the search are left out, being no plan of this step: first"


def test_a_plan_may_need_what_is_free_and_always_what_xlas_own_needs() -> None:
    """There was no limit, and what goes beyond is killed with the training."""
    case = case_of(plans.cpu())
    own = with_order(case.source.graph, case.xla, case.costs, case.costs.machine).peak_bytes
    assert case.limit_bytes is None
    assert replace(case, room_bytes=0).limit_bytes == own
    assert replace(case, room_bytes=1 << 30).limit_bytes == resident_bytes(case.source.graph) + (1 << 30)
    graph, device = case.source.graph, AnalyticModel(DeviceModel(4e12, 4e14, hoists=False))
    on_gpu = replace(case, xla=unfused(graph), costs=Costs(plans.sockets_profile(), device))
    needed = with_order(graph, on_gpu.xla, on_gpu.costs, on_gpu.costs.machine).peak_bytes
    assert on_gpu.limit_bytes == int(needed * 1.25)
    assert replace(on_gpu, room_bytes=0).limit_bytes == needed
    assert replace(on_gpu, room_bytes=1 << 33).limit_bytes == resident_bytes(graph) + (1 << 33)


def test_a_plan_says_of_its_search_what_it_read() -> None:
    result = SearchResult(Strategy(), 90, 100, (Improvement(3, 0.1, 90),), 10, 10, 0.1, "seconds")
    region = RegionFound("loop1", 16.0, 9, 8, 5, None)
    found = Optimized(None, result, (), regions=(region,))  # type: ignore[arg-type]
    record = search_record(SearchSettings(memory_limit_bytes=7), found)
    assert (record.evaluations, record.improvements) == (15, ((3, 90),))
    assert {"alpha", "beta", "moves", "memory_limit_bytes"}.isdisjoint(record.settings)
    alone = search_record(SearchSettings(method="backtracking"), found)
    assert (alone.settings["alpha"], alone.settings["moves"]) == (1.05, "fuse duplicate merge")


def test_kernels_that_wait_for_themselves_without_xlas_recomputing_one_are_left_out_and_no_others() -> None:
    """4 writes over what 3 reads. XLA's kernel of 3 recomputes that and may run after 4. The search never lets it: 3 by
    itself comes before 4, so the kernel of 2 and 5 would have to run before 3 and after 4."""
    step = graph_of(
        "param\nexp 0\nabs 0\nmul 1 2\ndot 1\nneg 4\nabs 0\nneg 6\ntuple 3 5 7",
        before=((3, 4),),
        inplace=((1, 4),),
    )
    across, recomputing, elsewhere = Group((2, 5)), Group((3,), duplicates=(1,)), Group((6, 7))
    assert searchable(step, Strategy((across, recomputing, elsewhere))) == Strategy((elsewhere,))
    assert searchable(step, Strategy((elsewhere,))) == Strategy((elsewhere,))


def test_a_kernel_that_others_read_more_of_without_xlas_recomputing_one_is_left_out_where_no_rule_allows_it() -> (
    None
):
    """3 reads 2, which XLA's kernel of 3 recomputes. By itself it has the other kernel return 2, a matmul, as well."""
    step = graph_of(
        "param\nexp 0\ndot 0\nmul 1 2\ndot 1\nneg 2\nneg 4\ntuple 3 5 6", before=((3, 4),), inplace=((1, 4),)
    )
    xla = Strategy((Group((2, 5)), Group((3,), duplicates=(1, 2))))
    assert unit_graph(step, xla).results_of_groups == ((5,), (3,))
    assert searchable(step, xla) == Strategy()


@pytest.mark.parametrize(("executions", "told"), [(16, "16 times"), (1, "1 time"), (0.5, "0.5 times")])
def test_a_short_region_says_its_times(executions: float, told: str) -> None:
    found = RegionFound("branch10", executions, 4_200, 3_900, 15765, None)
    assert str(found) == (
        f"searched 15765 candidates for branch10, which runs {told} a step: the best is predicted to take 3.9 µs, "
        "XLA's default 4.2 µs"
    )


@pytest.mark.parametrize(
    ("stopped", "evaluations", "told"), [("seconds", 0, 1), ("seconds", 1, 0), ("empty", 0, 0)]
)
def test_a_search_without_time_for_a_candidate_says_so(
    stopped: str, evaluations: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log said "searched 0 candidates in 5.1 s", and not why."""
    case = case_of(captured("branch_with_its_callers_buffer"))
    xla = case.xla
    monkeypatch.setattr(pipeline, "warm_up_in_time", lambda *_: True)
    monkeypatch.setattr(pipeline, "_optimize_regions", lambda *_: ())
    found = SearchResult(xla, 1, 1, (), evaluations, evaluations, 0.0, stopped)
    monkeypatch.setattr(pipeline, "search", lambda *_, **__: found)

    notes = optimize(case, SearchSettings(seeds=1), Budget.of(60.0)).notes
    assert notes == ("no time was left for a single candidate; give the search more",) * told


def test_no_plan_has_what_the_last_check_refuses_in_a_branch() -> None:
    """The fastest for the branch of `optax.apply_if_finite` wrote over what it was given, and all plans had it."""
    source = captured("branch_with_its_callers_buffer")
    found = optimize(case_of(source), SearchSettings(unchanged=20, processes=1), Budget.of(None))
    [region] = found.regions
    assert region.strategy is not None
    assert region.plan_ns < region.default_ns
    assert [faults(apply(one.strategy, source), "cpu") for one in found.plans] == [[]] * len(found.plans)
