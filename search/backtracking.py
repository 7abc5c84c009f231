"""Algorithm 1 of the paper, backtracking search, as published (section 4.5).

Where the pseudo-code leaves room: HOpt starts as Hin; n is drawn from 0 to beta, both included;
the counter of line 17 counts candidates; random proposals that are illegal are drawn again, so
every candidate is valid. Candidates wait in the queue as the moves that made them from their
parent, not as copies, and are rebuilt when their turn comes.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from disco_hlo.search import layout as at
from disco_hlo.search.api import (
    Finalist,
    Improvement,
    OnBest,
    OnProgress,
    Progress,
    SearchResult,
    SearchSettings,
    Stop,
)
from disco_hlo.search.board import State, copy_state, new_scratch
from disco_hlo.search.costing import UnitCosts
from disco_hlo.search.entries import evaluate, propose, replay, schedule, undo
from disco_hlo.search.finalists import checked, kernels_of
from disco_hlo.search.proposals import METHODS
from disco_hlo.search.rng import draw, seeded
from disco_hlo.search.starts import prepare
from disco_hlo.search.state import to_strategy
from disco_hlo.search.step import production_order
from disco_hlo.search.table import new_table, with_room
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.strategy import Strategy
from disco_hlo.simulator.costs import CostModel, MachineModel

_KEPT_STATES = 64
_PROGRESS_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class _Candidate:
    parent: int
    moves: NDArray[np.int64]
    cost_ns: int
    digest: int


def backtracking_search(
    graph: Graph,
    costs: CostModel,
    machine: MachineModel,
    *,
    start: Strategy,
    settings: SearchSettings,
    on_progress: OnProgress | None = None,
    on_best: OnBest | None = None,
    stop: Stop | None = None,
) -> SearchResult:
    """Run Algorithm 1 from ``start``. Interrupting it (Ctrl-C) returns the best so far.

    Raises:
        IllegalStrategyError: ``start`` does not fit the graph.
    """
    del on_best  # its candidates are few and its best is at hand when it ends, however it ends
    return _Search(graph, costs, machine, start, settings, on_progress, stop).run()


class _Search:
    def __init__(
        self,
        graph: Graph,
        costs: CostModel,
        machine: MachineModel,
        start: Strategy,
        settings: SearchSettings,
        on_progress: OnProgress | None,
        stop: Stop | None,
    ) -> None:
        self.began = time.perf_counter()
        self.graph, self.machine, self.settings = graph, machine, settings
        self.on_progress, self.stop = on_progress, stop
        self.start = start
        starts = prepare(graph, [start])
        self.step, self.kept = starts.step, starts.kept
        self.costs = UnitCosts(graph, self.step, costs, machine, self.kept)
        self.scratch = new_scratch(self.step)
        self.generator = seeded(settings.seed)
        fusible = np.flatnonzero(self.step.node[at.FLAGS, : len(graph)] & at.FUSIBLE)
        sources = [list(self._sources(x)) for x in range(len(graph))]
        ranked = production_order(graph, sources)
        self.pools = (fusible.astype(np.int64), np.array(ranked, np.int64))
        self.started = np.zeros(4 * len(graph) + 4, np.int64)
        self.speed_ppm = machine.speed_ppm()
        self.seen = new_table(1)
        self.moves = np.zeros((settings.beta, 3), np.int64)
        self.evaluations = 0
        self.unchanged = 0
        self.trace: list[Improvement] = []
        self.candidates: list[_Candidate] = []
        self.states: OrderedDict[int, State] = OrderedDict()
        root = starts.states[0]
        self.costs.price_all(root, self.scratch)
        self.root = root
        self.start_ns, digest = self._cost(root)
        self.candidates.append(_Candidate(-1, np.zeros((0, 3), np.int64), self.start_ns, digest))
        self.queue = [(self.start_ns, 0)]
        self.best = 0
        self.reported = self.began

    def _sources(self, x: int) -> list[int]:
        first, last = self.step.node[at.SOURCES_AT, x : x + 2]
        return [int(s) for s in self.step.edge[first:last]]

    def run(self) -> SearchResult:
        stopped = "empty"
        try:
            while self.queue and not (reason := self._ended()):
                self._explore(heapq.heappop(self.queue)[1])
            stopped = reason if self.queue else "empty"
        except KeyboardInterrupt:
            stopped = "interrupted"
        return self._result(stopped)

    def _ended(self) -> str:
        settings = self.settings
        if self.unchanged >= settings.unchanged:
            return "unchanged"
        if settings.evaluations is not None and self.evaluations >= settings.evaluations:
            return "evaluations"
        if settings.seconds is not None and time.perf_counter() - self.began >= settings.seconds:
            return "seconds"
        return "stop" if self.stop is not None and self.stop() else ""

    def _explore(self, number: int) -> None:
        state = self._state(number)
        for name in self.settings.moves:
            if self.settings.evaluations is not None and self.evaluations >= self.settings.evaluations:
                return
            self._candidate(number, state, METHODS[name])
        self._report()

    def _candidate(self, parent: int, state: State, method: int) -> None:
        """Lines 9 to 22 of the pseudo-code for one method."""
        settings, scratch = self.settings, self.scratch
        times = draw(self.generator, settings.beta + 1)
        made, unknown = propose(
            self.step, state, scratch, self.generator, self.pools, method, times, settings.tries,
            self.moves, self.costs.prices, self.costs.unknown,
        )  # fmt: skip
        self.costs.ask(unknown)
        self.costs.price_changed(state, scratch)
        cost, digest = self._cost(state)
        self.evaluations += 1
        best_ns = self.candidates[self.best].cost_ns
        improved = cost < best_ns
        if improved or cost <= settings.alpha * best_ns:
            self.candidates.append(_Candidate(parent, self.moves[:made].copy(), cost, digest))
            heapq.heappush(self.queue, (cost, len(self.candidates) - 1))
        if improved:
            self.best = len(self.candidates) - 1
            self.unchanged = 0
            self.trace.append(Improvement(self.evaluations, time.perf_counter() - self.began, cost))
        else:
            self.unchanged += 1
        undo(self.step, state, scratch, 0)

    def _cost(self, state: State) -> tuple[int, int]:
        self.seen = with_room(self.seen, 1)
        cost, digest = evaluate(self.step, state, self.scratch, self.speed_ppm, self.seen, self.started)
        assert cost >= 0, "the moves left units that wait for each other"
        return cost, digest

    def _state(self, number: int) -> State:
        """Rebuild a candidate from its nearest ancestor at hand. The caller must leave it as it is."""
        path = []
        at_hand = number
        while at_hand != 0 and at_hand not in self.states:
            path.append(at_hand)
            at_hand = self.candidates[at_hand].parent
        if not path:
            if at_hand:
                self.states.move_to_end(at_hand)
            return self.states[at_hand] if at_hand else self.root
        state = copy_state(self.states[at_hand] if at_hand else self.root)
        for ancestor in reversed(path):
            done = replay(self.step, state, self.scratch, self.candidates[ancestor].moves)
            assert done, "a move that was legal is refused when repeated"
            self.costs.price_changed(state, self.scratch)
            self.scratch.number[at.LOGGED] = 0
        self.states[number] = state
        if len(self.states) > _KEPT_STATES:
            self.states.popitem(last=False)
        return state

    def _report(self) -> None:
        now = time.perf_counter()
        if self.on_progress is None or now - self.reported < _PROGRESS_EVERY_S:
            return
        self.reported = now
        best_ns = self.candidates[self.best].cost_ns
        self.on_progress(Progress(self.evaluations, now - self.began, self.start_ns, best_ns, self.unchanged))

    def _result(self, stopped: str) -> SearchResult:
        finalists = self._finalists() or [Finalist(self.start, self.start_ns)]
        return SearchResult(
            strategy=finalists[0].strategy,
            predicted_ns=finalists[0].predicted_ns,
            start_ns=self.start_ns,
            trace=tuple(self.trace),
            evaluations=self.evaluations,
            distinct_evaluations=int(self.seen.used[0]),
            wall_s=time.perf_counter() - self.began,
            stopped=stopped,
            finalists=tuple(finalists),
        )

    def _finalists(self) -> list[Finalist]:
        """The best distinct candidates that pass the last check, best first."""
        found: list[Finalist] = []
        seen: set[int] = set()
        attested = kernels_of(self.graph, self.start)
        for number in sorted(range(len(self.candidates)), key=lambda i: (self.candidates[i].cost_ns, i)):
            candidate = self.candidates[number]
            if len(found) == max(1, self.settings.finalists):
                break
            if candidate.digest in seen:
                continue
            seen.add(candidate.digest)
            strategy = checked(self.graph, self._strategy(number), self.machine.asynchronous, attested)
            if strategy is not None:
                found.append(Finalist(strategy, candidate.cost_ns))
        return found

    def _strategy(self, number: int) -> Strategy:
        state = self._state(number)
        _, count = schedule(self.step, state, self.scratch, self.speed_ppm, self.started)
        return to_strategy(
            self.graph, self.step, state, self.kept, self.started[:count], self.machine.asynchronous
        )
