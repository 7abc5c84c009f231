"""A search within a budget that covers what is around it: the same for the plugin and the command line.

The user waits for the search's code, for the search, and for what becomes of its plans. So the search gets what is left
of the budget, less what the rest will take; where nothing is left, the plan is XLA's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin.phases.ranking import ranked
from disco_hlo.search.api import OnBest, OnProgress, SearchResult, SearchSettings
from disco_hlo.search.run import search
from disco_hlo.search.schedule import Scheduled
from disco_hlo.search.warm import warm_up_in_time
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.timeline import simulate

_FINISHING_S: Final = 0.25e-3
"""What comes behind a search takes so long for each op of the step, on a processor that does nothing else."""
_WORTH_A_SEARCH: Final = 0.25
"""Where less than this share of it is left, no search begins: its first plan alone would take as long."""
_AFTER_RANKING: Final = 0.6
"""This share of it comes behind the ranking: predicting and writing the plan."""
_MOST_SHARE: Final = 0.6
"""Of what is left, kept for that: the search gets the rest at least."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Wall time, counted from the beginning of what the user waits for."""

    seconds: float | None
    """None: no limit."""
    began: float
    """``time.monotonic`` at its beginning."""
    began_cpu: float
    """``time.process_time`` at its beginning."""

    @staticmethod
    def of(seconds: float | None) -> Budget:
        """A budget that begins now."""
        return Budget(seconds, time.monotonic(), time.process_time())

    def longer_by(self, seconds: float) -> Budget:
        """A budget in which so much of what was spent does not count."""
        return replace(self, began=self.began + seconds)

    @property
    def left_s(self) -> float | None:
        """What is left; below 0 where it was exceeded."""
        return None if self.seconds is None else self.seconds - self.spent_s

    @property
    def spent_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    @property
    def load(self) -> float:
        """How much longer everything takes than a processor of its own would need, 1 to 8."""
        return min(8.0, max(1.0, self.spent_s / max(time.process_time() - self.began_cpu, 1e-3)))


@dataclass(frozen=True)
class Searched:
    """What a search found."""

    result: SearchResult
    plans: tuple[Scheduled, ...]
    """Worth measuring, best first."""
    notes: tuple[str, ...]
    """What to tell the user, one line each."""


def search_within(
    budget: Budget,
    source: CanonicalModule,
    xla: Strategy,
    costs: CostModel,
    machine: MachineModel,
    settings: SearchSettings,
    *,
    begin: Callable[[], Strategy],
    also: Sequence[Strategy] = (),
    room_bytes: int | None = None,
    on_progress: OnProgress | None = None,
    on_best: OnBest | None = None,
    stop: Callable[[], bool],
) -> Searched:
    """Search from ``begin()`` and rank what is found, as long as the budget lasts.

    Args:
        also: plans to be ranked with those of this search.
        room_bytes: what each device has left for a plan (CPU); None where nobody knows.
        stop: asked now and then; what was found so far is ranked once it answers True.
    """
    graph = source.graph
    if (left_s := budget.left_s) is not None and left_s <= _WORTH_A_SEARCH * _finishing_s(budget, source):
        spent = f"preparing the search took {budget.spent_s:.1f} s of a budget of {budget.seconds:g} s"
        rest = f"writing a plan takes about {_finishing_s(budget, source):.1f} s"
        return _nothing(
            source, xla, costs, machine, also, f"{spent}, {rest}: XLA's own plan is kept; give it more time"
        )
    if not warm_up_in_time(graph, costs, machine, settings, left_s, stop):
        return _nothing(
            source, xla, costs, machine, also,
            "the search's code is still being compiled, which takes minutes once: XLA's own plan is kept; search again "
            "in a while",
        )  # fmt: skip
    until = None
    if (left_s := budget.left_s) is not None:
        finishing_s = min(_finishing_s(budget, source), _MOST_SHARE * max(left_s, 0.0))
        settings = replace(settings, seconds=left_s - finishing_s)
        until = time.monotonic() + left_s - _AFTER_RANKING * finishing_s
    result = search(
        graph, costs, machine, start=begin(), settings=settings,
        on_progress=on_progress, on_best=on_best, stop=stop,
    )  # fmt: skip
    if stop():
        until = time.monotonic()
    plans = ranked(source, xla, result, costs, machine, also, room_bytes, until=until)
    return Searched(result, tuple(plans), (result.dropped.sentence(),) if result.dropped.count else ())


def _finishing_s(budget: Budget, source: CanonicalModule) -> float:
    """What comes behind a search will take on this machine as it is now."""
    return len(source.graph) * _FINISHING_S * budget.load


def _nothing(
    source: CanonicalModule,
    xla: Strategy,
    costs: CostModel,
    machine: MachineModel,
    also: Sequence[Strategy],
    why: str,
) -> Searched:
    """XLA's own plan, and those found before."""
    plans = []
    for strategy in (*also, xla):
        timeline = simulate(build(source.graph, strategy, costs, machine).problem)
        plans.append(Scheduled(strategy, timeline.makespan_ns, timeline.peak_bytes))
    plans.sort(key=lambda one: one.predicted_ns)
    best = plans[0]
    result = SearchResult(best.strategy, best.predicted_ns, best.predicted_ns, (), 0, 0, 0.0, "seconds")
    return Searched(result, tuple(plans), (why,))
