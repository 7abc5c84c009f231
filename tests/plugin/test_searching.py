"""A budget covers what is around the search, and what is dropped on the way is told."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.optimize.costs import costs_for
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin.phases import searching
from disco_hlo.plugin.phases.ranking import ranked, searchable
from disco_hlo.plugin.phases.searching import Budget, Searched, search_within
from disco_hlo.search import warm
from disco_hlo.search.api import Dropped, SearchSettings
from disco_hlo.search.methods import island
from disco_hlo.search.schedule import with_order

pytestmark = pytest.mark.product_only

MODULE = Path(__file__).parents[1] / "data" / "cases" / "search_never_returns.hlo.pb"
FEW = SearchSettings(evaluations=500, seeds=1)


@pytest.fixture(scope="module")
def source() -> CanonicalModule:
    return canonicalize(MODULE.read_bytes())


def searched(source: CanonicalModule, budget: Budget, *, stopped: bool = False) -> Searched:
    xla = read(source)
    costs = costs_for(source.graph, None, None, [xla])
    return search_within(
        budget, source, xla, costs, costs.machine, FEW,
        begin=lambda: searchable(source.graph, xla), stop=lambda: stopped,
    )  # fmt: skip


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
    monkeypatch.setattr(warm, "_COMMAND", ("sleep", "30"))
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

    monkeypatch.setattr(searching, "search", noting)
    monkeypatch.setattr(searching, "warm_up_in_time", lambda *_: True)
    monkeypatch.setattr(searching, "_FINISHING_S", 1.0)
    with pytest.raises(KeyboardInterrupt):
        searched(source, Budget.of(1000.0))
    assert given[0] is not None
    assert 399 < given[0] < 1000 - len(source.graph)


def test_when_the_time_is_up_one_plan_is_ranked(source: CanonicalModule) -> None:
    xla = read(source)
    costs = costs_for(source.graph, None, None, [xla])
    result = searched(source, Budget.of(None)).result
    assert len(result.finalists) > 1
    plans = ranked(source, xla, result, costs, costs.machine, until=time.monotonic())
    assert plans == [with_order(source.graph, result.strategy, costs, costs.machine)]


def test_what_the_search_drops_is_counted_and_told(
    source: CanonicalModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(graph: object, strategy: Strategy, *_: object) -> Strategy:
        if strategy.groups:
            raise IllegalStrategyError("g0 is\nno kernel")
        return strategy

    monkeypatch.setattr(island, "checked", refusing)
    found = searched(source, Budget.of(None))
    assert found.result.dropped.count > 0
    assert found.notes == (found.result.dropped.sentence(),)
    assert found.notes[0].endswith("left out, being no plan of this step: g0 is no kernel")


def test_of_several_that_are_dropped_the_first_is_told() -> None:
    both = Dropped() + Dropped(1, "first") + Dropped(2, "second")
    assert both.sentence() == "3 candidates of the search are left out, being no plan of this step: first"
