"""Algorithm 1 of the paper, backtracking search (section 4.5). Published otherwise is which bucket one merges with: one
whose gradient comes from an op next to the producer in the graph; here it is the nearest in the order of production.

Where the pseudo-code leaves room: HOpt starts as Hin; n is drawn from 0 to beta, both included;
the counter of line 17 counts candidates; random proposals that are illegal are drawn again, so
every candidate is valid. The loop is ``explore``, the candidates are kept in ``tree``.
"""

from __future__ import annotations

import time

import numpy as np

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Strategy
from disco_hlo.search import explore as ex
from disco_hlo.search import layout as at
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
from disco_hlo.search.costs import UnitCosts, unit_of_step
from disco_hlo.search.explore import BEST, CANDIDATES, QUEUED, go_to, grown, new_tree
from disco_hlo.search.hashing import new_table, seeded, with_room
from disco_hlo.search.interpreter import interruptible
from disco_hlo.search.moves.table import NUMBERS, in_algorithm_1
from disco_hlo.search.ready_queue import schedule
from disco_hlo.search.state import new_scratch
from disco_hlo.search.strategies import checked, kernels_of, prepare, to_strategy
from disco_hlo.simulator.build import build
from disco_hlo.simulator.contention import new_progress
from disco_hlo.simulator.costs import MachineModel, coarse
from disco_hlo.simulator.timeline import simulate

_PROGRESS_EVERY_S = 0.2
_LAST_CHECKS_S = 1.0
"""When the time is up, so long are others checked than the best."""
_PARENTS = 16
"""Candidates explored between two looks at the clock."""


class Backtracking:
    """One run of Algorithm 1, a few candidates at a time."""

    def __init__(
        self,
        graph: Graph,
        costs: CostModel,
        machine: MachineModel,
        start: Strategy,
        settings: SearchSettings,
        on_progress: OnProgress | None = None,
        on_best: OnBest | None = None,
        stop: Stop | None = None,
    ) -> None:
        del on_best  # its candidates are few and its best is at hand when it ends, however it ends
        self.began = time.perf_counter()
        self.graph, self.model, self.machine, self.settings = graph, costs, machine, settings
        self.unit_ns = unit_of_step(graph, costs)
        counted, in_units = coarse(costs, machine, self.unit_ns)
        self.on_progress, self.stop = on_progress, stop
        self.start = start
        starts = prepare(graph, [start])
        self.step, self.kept, self.state = starts.step, starts.kept, starts.states[0]
        self.costs = UnitCosts(graph, self.step, counted, in_units, self.kept)
        self.scratch = new_scratch(self.step)
        self.generator = seeded(settings.seed)
        node = self.step.node
        fusible = np.flatnonzero(node[at.FLAGS, : len(graph)] & at.FUSIBLE).astype(np.int64)
        ranked = np.array(sorted(graph.collectives, key=lambda x: node[at.RANK, x]), np.int64)
        self.pools = (fusible, ranked)
        moves = settings.moves or in_algorithm_1()
        self.methods = np.array([NUMBERS[name] for name in moves], np.int64)
        self.made = np.zeros(self.methods.size, np.int64)
        self.moves = np.zeros((self.methods.size, settings.beta, 3), np.int64)
        self.started = np.zeros(4 * len(graph) + 4, np.int64)
        self.progress = new_progress(len(graph), in_units.pace())
        self.trace: list[Improvement] = []
        self.dropped = Dropped()
        self.fresh = np.zeros((self.methods.size * (_PARENTS + 1), 2), np.int64)
        self.seen = new_table(1)
        self.costs.price_all(self.state, self.scratch)
        cost, digest = ex.evaluate(
            self.step, self.state, self.scratch, self.progress, self.seen, self.started
        )
        self.start_ns = int(cost) * self.unit_ns
        self.tree = new_tree(self.state)
        self.tree.cost_ns[0], self.tree.digest[0], self.tree.number[QUEUED] = cost, digest, 1
        self.control = np.zeros(ex.CONTROLS, np.int64)
        budget = 2**62 if settings.evaluations is None else settings.evaluations
        self.control[[ex.MOST_UNCHANGED, ex.BUDGET, ex.BETA]] = settings.unchanged, budget, settings.beta
        self.reported = self.began

    def run(self) -> SearchResult:
        """Explore until the search is over. Interrupting it (Ctrl-C) returns the best so far."""
        stopped = ""
        try:
            while not stopped:
                stopped = self.explore() or self._halted()
                self._report()
        except KeyboardInterrupt:
            stopped = "interrupted"
        return self._result(stopped)

    def explore(self) -> str:
        """Go on for a few candidates; why the search is over, where it is."""
        self.control[[ex.LEFT, ex.TRACED, ex.HALT]] = _PARENTS, 0, 0
        self.seen = with_room(self.seen, len(self.fresh))
        watched = self.settings.seconds is not None or self.stop is not None
        watch = (lambda: bool(self._halted())) if watched else None
        # Ends: each time kernels are asked for that never are again, or the tree is larger.
        while True:
            outcome = interruptible(self._explored, self.control, ex.HALT, watch)
            assert outcome != ex.CIRCLE, "the moves left units that wait for each other"
            if outcome == ex.ASK:
                self.costs.ask(int(self.control[ex.LISTED]))
                self.control[ex.LISTED] = 0
            elif outcome == ex.FULL:
                self.tree = grown(self.tree)
            else:
                break
        seconds = time.perf_counter() - self.began
        improved = self.fresh[: self.control[ex.TRACED]].tolist()
        self.trace += [Improvement(evaluation, seconds, cost * self.unit_ns) for evaluation, cost in improved]
        return self._reason() if outcome == ex.ENDED else ""

    def _explored(self) -> int:
        outcome: int = ex.explore(
            self.step, self.state, self.scratch, self.generator, self.pools, self.methods, self.settings.alpha,
            self.costs.prices, self.costs.unknown, self.progress, self.seen, self.started, self.tree, self.made,
            self.moves, self.fresh, self.control,
        )  # fmt: skip
        return outcome

    def _reason(self) -> str:
        if self.control[ex.UNCHANGED] >= self.settings.unchanged:
            return "unchanged"
        return "evaluations" if self.control[ex.EVALUATED] >= self.control[ex.BUDGET] else "empty"

    def _halted(self) -> str:
        seconds = self.settings.seconds
        if seconds is not None and time.perf_counter() - self.began >= seconds:
            return "seconds"
        return "stop" if self.stop is not None and self.stop() else ""

    @property
    def best_ns(self) -> int:
        """Cost of the best candidate."""
        return int(self.tree.cost_ns[self.tree.number[BEST]]) * self.unit_ns

    def _report(self) -> None:
        now = time.perf_counter()
        if self.on_progress is None or now - self.reported < _PROGRESS_EVERY_S:
            return
        self.reported = now
        self.on_progress(Progress(int(self.control[ex.EVALUATED]), self.start_ns, self.best_ns))

    def _result(self, stopped: str) -> SearchResult:
        finalists = self._finalists() or [Finalist(self.start, self.start_ns)]
        return SearchResult(
            strategy=finalists[0].strategy,
            predicted_ns=finalists[0].predicted_ns,
            start_ns=self.start_ns,
            trace=tuple(self.trace),
            evaluations=int(self.control[ex.EVALUATED]),
            distinct_evaluations=int(self.seen.used[0]),
            wall_s=time.perf_counter() - self.began,
            stopped=stopped,
            finalists=tuple(finalists),
            dropped=self.dropped,
        )

    def _finalists(self) -> list[Finalist]:
        """The best distinct candidates that pass the last check, best first."""
        found: list[Finalist] = []
        seen: set[int] = set()
        began = time.perf_counter()
        attested = kernels_of(self.graph, self.start)
        count = int(self.tree.number[CANDIDATES])
        for number in np.argsort(self.tree.cost_ns[:count], kind="stable").tolist():
            if len(found) == max(1, self.settings.finalists):
                break
            digest = int(self.tree.digest[number])
            if digest in seen:
                continue
            seen.add(digest)
            try:
                strategy = checked(self.graph, self._strategy(number), self.machine.asynchronous, attested)
            except DiscoError as error:
                self.dropped += Dropped(1, " ".join(str(error).split()))
                continue
            # The queue slices a bucket apart in one go; what is predicted is what the simulator says.
            timeline = simulate(build(self.graph, strategy, self.model, self.machine).problem)
            found.append(Finalist(strategy, timeline.makespan_ns))
            if self._halted() and time.perf_counter() - began > _LAST_CHECKS_S:
                break
        return sorted(found, key=lambda one: one.predicted_ns)

    def _strategy(self, number: int) -> Strategy:
        go_to(self.tree, self.state, number)
        _, count = schedule(self.step, self.state, self.scratch, self.progress, self.started)
        return to_strategy(
            self.graph, self.step, self.state, self.kept, self.started[:count], self.machine.asynchronous
        )
