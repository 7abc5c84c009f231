"""The joint search: op fusion, buckets and order together, from XLA's plan and from the unfused step.

Several restarts (``restart``), each with a seed of its own, share the budget and nothing else; so it does
not matter where they run, how many at once, or which of them ends first. The first runs here, the others
in processes of their own (``child``), whose best so far is at hand whenever the search is ended. As many
run at once as there are cores; when one ends, the next begins. On the small graphs where starting a
process takes longer than searching all run here, one after the other.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from functools import cached_property

from disco_hlo.cores import own_cores
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.variants import unfused
from disco_hlo.search.api import (
    Dropped,
    Finalist,
    Improvement,
    OnBest,
    OnProgress,
    Progress,
    SearchResult,
    SearchSettings,
    Stop,
)
from disco_hlo.search.child import Children
from disco_hlo.search.interpreter import without_collector
from disco_hlo.search.restart import Report, Restart, reports
from disco_hlo.search.strategies import prepare
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.timeline import simulate

WORTH_A_PROCESS = 500
"""Ops of a step from which on restarts run in processes of their own."""
UNFUSED_EVERY = 4
"""Of so many restarts the last begins with the unfused step."""
_POLL_S = 0.1
_LAST_REPORTS_S = 5.0
"""The longest that restarts elsewhere are waited for whose time is up: one of 20,000 ops has up to four strategies to
check then, each of which takes a second."""
_LAST_REPORTS_SHARE = 0.05
"""But no more than this of the budget, and a second."""


class Joint:
    """One joint search, with every fourth seed from the unfused step."""

    def __init__(
        self,
        graph: Graph,
        costs: CostModel,
        machine: MachineModel,
        start: Strategy,
        settings: SearchSettings,
        on_progress: OnProgress | None,
        on_best: OnBest | None,
        stop: Stop | None,
    ) -> None:
        self.began = time.perf_counter()
        self.settings, self.on_progress, self.on_best, self.stop = settings, on_progress, on_best, stop
        strategies: tuple[Strategy, ...] = (start,)
        if settings.seeds >= UNFUSED_EVERY and start != unfused(graph):
            strategies = (start, unfused(graph))
        with without_collector():
            self.starts = prepare(graph, strategies)
        self.found: Finalist | None = None
        self.latest: dict[int, Report] = {}
        self.finalists: dict[int, list[Finalist]] = {}
        self.trace: list[tuple[float, int, int, int]] = []
        self.stopped = ""
        self.restarts = [
            Restart(
                graph, costs, machine, strategies, _start_of(number, strategies), settings, number, share,
                settings.seconds,
            )
            for number, share in enumerate(_shares(settings))
        ]  # fmt: skip
        self.processes = settings.processes or len(own_cores())
        here, away = self._divided()
        self.here = deque(here)
        """Restarts that are still to run in this process, one after the other."""
        self.children = Children(away)

    @cached_property
    def start_ns(self) -> int:
        """Predicted time of the start. Not asked for before the first plan: that needs no simulation of this one."""
        restart = self.restarts[0]
        with without_collector():
            built = build(restart.graph, restart.strategies[0], restart.costs, restart.machine)
            return simulate(built.problem).makespan_ns

    @property
    def best(self) -> Finalist:
        """The best of all restarts, the start to begin with."""
        return self.found or Finalist(self.restarts[0].strategies[0], self.start_ns)

    def run(self) -> SearchResult:
        """Search until it is over. Interrupting it (Ctrl-C) returns the best so far."""
        try:
            self._halted(busy=True)
            self._search_here()  # however little time there is: its first plan takes milliseconds
            while (self.here or self.children.unfinished()) and not self._halted(busy=bool(self.here)):
                if self.here:
                    self._search_here()
                else:
                    time.sleep(_POLL_S)
                    self._note_arrived()
            if self.stopped == "seconds":
                share_s = _LAST_REPORTS_SHARE * max(0.0, self.settings.seconds or 0.0)
                self.children.wait_for_last_reports(min(_LAST_REPORTS_S, 1.0 + share_s))
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        finally:
            self.children.end()
        self._note_arrived()
        return self._result()

    def _divided(self) -> tuple[list[Restart], list[Restart]]:
        """Restarts to run in this process, and in others."""
        if self.processes < 2 or len(self.restarts[0].graph) < WORTH_A_PROCESS:
            return self.restarts, []
        return self.restarts[:1], self.restarts[1:]

    def _search_here(self) -> None:
        """Run the next restart of this process, which gets its part of the time that is left."""
        left_s = self._left_s()
        seconds = None if left_s is None else left_s / len(self.here)
        restart = replace(self.here.popleft(), seconds=seconds)
        watched = self.stop is not None or seconds is not None
        for report in reports(restart, self.starts, lambda: self._halted(busy=True), watched=watched):
            self._note(report)
            self._note_arrived()

    def _halted(self, *, busy: bool) -> bool:
        """Whether the search has to end; if not, restarts that wait for a process begin, as many as may.

        Args:
            busy: a restart runs in this process, too; where none does, one more may elsewhere.
        """
        left_s = self._left_s()
        if self.stop is not None and self.stop():
            self.stopped = "stop"
        elif left_s is not None and left_s <= 0:
            self.stopped = "seconds"
        if not self.stopped:
            self.here += self.children.begin(self.processes - busy, left_s)
        return bool(self.stopped)

    def _left_s(self) -> float | None:
        if self.settings.seconds is None:
            return None
        return self.settings.seconds - (time.perf_counter() - self.began)

    def _note_arrived(self) -> None:
        for report in self.children.arrived():
            self._note(report)

    def _note(self, report: Report) -> None:
        self.latest[report.number] = report
        found = self.finalists.setdefault(report.number, [])
        found += [*report.finalists, *([report.best] if report.best else [])]
        began = time.perf_counter() - self.began - report.seconds
        self.trace += [
            (began + step.seconds, step.evaluation, report.number, step.cost_ns) for step in report.trace
        ]
        if report.best is not None and report.best.predicted_ns < self.best.predicted_ns:
            self.found = report.best
            if self.on_best is not None:
                self.on_best(report.best)
        if self.on_progress is not None:
            self.on_progress(Progress(self._evaluations(), self.start_ns, self.best.predicted_ns))

    def _evaluations(self) -> int:
        return sum(report.evaluations for report in self.latest.values())

    def _result(self) -> SearchResult:
        merged: dict[Strategy, int] = {}
        for number in sorted(self.finalists):
            for one in self.finalists[number]:
                merged.setdefault(one.strategy, one.predicted_ns)
        ranked = sorted(merged, key=lambda strategy: merged[strategy])  # stable: by restart among equals
        chosen = [Finalist(one, merged[one]) for one in ranked[: max(1, self.settings.finalists)]]
        if not chosen or chosen[0].predicted_ns > self.start_ns:
            chosen.insert(0, Finalist(self.restarts[0].strategies[0], self.start_ns))
        ends = {report.stopped for report in self.latest.values()} - {""}
        return SearchResult(
            strategy=chosen[0].strategy,
            predicted_ns=chosen[0].predicted_ns,
            start_ns=self.start_ns,
            trace=self._trace(),
            evaluations=self._evaluations(),
            distinct_evaluations=sum(report.distinct for report in self.latest.values()),
            wall_s=time.perf_counter() - self.began,
            stopped=self.stopped or min(ends, default="stop"),
            finalists=tuple(chosen),
            dropped=sum((report.dropped for report in self.latest.values()), Dropped()),
        )

    def _trace(self) -> tuple[Improvement, ...]:
        """Improvements of the best of all restarts; evaluations are those of all, had they run abreast."""
        found: list[Improvement] = []
        for evaluations, cost_ns, seconds in sorted(
            (evaluations * len(self.restarts), cost_ns, seconds)
            for seconds, evaluations, _, cost_ns in self.trace
        ):
            if cost_ns < (found[-1].cost_ns if found else self.start_ns):
                found.append(Improvement(evaluations, seconds, cost_ns))
        return tuple(found)


def _start_of(number: int, strategies: tuple[Strategy, ...]) -> int:
    """Which of the strategies a restart begins with: the unfused step is the last, where it is not the only one."""
    return len(strategies) - 1 if number % UNFUSED_EVERY == UNFUSED_EVERY - 1 else 0


def _shares(settings: SearchSettings) -> list[int | None]:
    """The budget of evaluations, divided among the seeds."""
    seeds = max(1, settings.seeds)
    if settings.evaluations is None:
        return [None] * seeds
    return [(settings.evaluations + number) // seeds for number in range(seeds)]
