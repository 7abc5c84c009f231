"""One seed of the joint search: a state, and what is done to it in turn.

Kernels are chosen first, by the time of all units together, which a move changes in one addition: there
a candidate costs a few dozen microseconds. With these kernels buckets and order follow by dynamic
programming and list schedules (``schedule``). Then everything is moved at once, and every candidate's
order is simulated. An island depends on its seed, its start and its budget of evaluations alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from disco_hlo.search import climb as cl
from disco_hlo.search import layout as at
from disco_hlo.search.api import Finalist, SearchSettings
from disco_hlo.search.board import State, copy_state, new_scratch
from disco_hlo.search.costing import UnitCosts
from disco_hlo.search.entries import run_order
from disco_hlo.search.finalists import checked, kernels_of
from disco_hlo.search.proposals import (
    ABSORB,
    DUPLICATE,
    FUSE,
    HAND_OVER,
    KINDS,
    MERGE,
    REORDER,
    SIBLING,
    SPLIT,
    UNFUSE,
)
from disco_hlo.search.rng import mix, seeded
from disco_hlo.search.schedule import Scheduled, best_buckets, with_order
from disco_hlo.search.starts import Starts
from disco_hlo.search.state import from_strategy, to_strategy
from disco_hlo.search.table import new_table, with_room
from disco_hlo.search.timeline import new_stage

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.legal import Kernel
from disco_hlo.plan.strategy import Strategy
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import CostModel, MachineModel
from disco_hlo.simulator.timeline import simulate

LOGGER = logging.getLogger("disco_hlo")

KERNEL_MOVES: Final[Mapping[int, int]] = {FUSE: 4, DUPLICATE: 3, ABSORB: 2, UNFUSE: 2, SIBLING: 2}
"""How often each move is proposed, in proportion."""
BUCKET_MOVES: Final[Mapping[int, int]] = {MERGE: 2, SPLIT: 1, HAND_OVER: 1}
ORDER_MOVES: Final[Mapping[int, int]] = {REORDER: 4}
KERNEL_DIVISORS: Final = (16, 64, 256, 0)
"""Each climb begins by allowing a loss of the average unit's time over this; 0: no loss at all."""
ORDER_DIVISORS: Final = (32, 256, 0)
PROPOSALS_PER_OP: Final = 16
FEWEST_PROPOSALS, MOST_PROPOSALS = 2_000, 120_000
CHUNK: Final = 4_000
"""Proposals between two looks at the clock."""
GAIN: Final = 0.0005
IDLE_CYCLES: Final = 2
"""The island ends after so many cycles in a row that brought less than this share of its best."""


@dataclass(frozen=True)
class Island:
    """What one seed is given."""

    graph: Graph
    costs: CostModel
    machine: MachineModel
    strategies: tuple[Strategy, ...]
    """Where searches start from; this one takes number ``number`` modulo their count."""
    settings: SearchSettings
    number: int
    evaluations: int | None
    """Its share of the budget."""
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """What an island has found so far."""

    number: int
    evaluations: int
    distinct: int
    seconds: float
    """Since the island began."""
    best_ns: int
    best: Finalist | None
    """The best so far, where it is new since the last report."""
    finalists: tuple[Finalist, ...] = ()
    """Only in the last report: the best distinct strategies."""
    stopped: str = ""
    """Only in the last report: why the island ended."""


class Climber:
    """A state with everything that climbs need."""

    def __init__(self, island: Island, starts: Starts) -> None:
        self.graph, self.machine, self.model = island.graph, island.machine, island.costs
        self.step, self.kept = starts.step, starts.kept
        self.costs = UnitCosts(self.graph, self.step, self.model, self.machine, self.kept)
        self.scratch = new_scratch(self.step)
        self.generator = seeded(int(mix(np.uint64(island.settings.seed * 1_000_003 + island.number))))
        node = self.step.node
        self.fusible = np.flatnonzero(node[at.FLAGS, : len(self.graph)] & at.FUSIBLE).astype(np.int64)
        ranked = np.array(sorted(self.graph.all_reduces, key=lambda x: node[at.RANK, x]), np.int64)
        self.pools = (self.fusible, ranked)
        self.seen = {ordered: new_table(1) for ordered in (False, True)}
        self.waiting = np.zeros((cl.MOST_WAITING, 3), np.int64)
        self.stage = new_stage(len(self.graph), self.machine)
        self.control = np.zeros(cl.CONTROLS, np.int64)
        self.state = self.priced(copy_state(starts.states[island.number % len(starts.states)]))

    @property
    def evaluations(self) -> int:
        """Candidates looked at."""
        return int(self.control[cl.EVALUATED])

    @property
    def distinct(self) -> int:
        """Candidates that had not been looked at before."""
        return int(self.control[cl.DISTINCT])

    def priced(self, state: State) -> State:
        """The state itself, its times filled in."""
        self.costs.price_all(state, self.scratch)
        return state

    def total_ns(self) -> int:
        """Time of all units one after the other."""
        total = self.state.word[at.TOTAL]
        return int(total[at.COMPUTE_NS] + total[at.TRANSFER_NS])

    def makespan_ns(self) -> int:
        """Time of the state in its order."""
        if not self.machine.asynchronous:
            return self.total_ns()
        return int(run_order(self.step, self.state, self.scratch, self.stage, self.pools[1])[0])

    def strategy(self) -> Strategy:
        """What the state stands for, with its order."""
        _, count = run_order(self.step, self.state, self.scratch, self.stage, self.pools[1])
        order = self.stage.order[:count].astype(np.int64)
        return to_strategy(self.graph, self.step, self.state, self.kept, order, self.machine.asynchronous)

    def climb(self, moves: Mapping[int, int], proposals: int, threshold_ns: int, *, ordered: bool) -> None:
        """Make proposals; the state becomes the best that was met."""
        control, scratch = self.control, self.scratch
        self.seen[ordered] = with_room(self.seen[ordered], proposals + cl.MOST_WAITING)
        scratch.number[at.LOGGED] = 0
        score = self.total_ns()
        if ordered:
            compute_ns = int(self.state.word[at.TOTAL, at.COMPUTE_NS])
            score = self.makespan_ns() + compute_ns // cl.COMPUTE_SHARE
        control[[cl.LEFT, cl.THRESHOLD, cl.ORDERED]] = proposals, threshold_ns, ordered
        control[[cl.CURRENT, cl.BEST]] = score
        control[[cl.LISTED, cl.WAITING, cl.RETRIES, cl.RETRIED]] = 0
        weights = np.zeros(KINDS, np.int64)
        for kind, weight in moves.items():
            weights[kind] = weight
        while listed := cl.climb(
            self.step, self.state, scratch, self.generator, self.pools, weights, self.costs.prices,
            self.costs.unknown, self.waiting, self.seen[ordered], self.stage, control,
        ):  # fmt: skip
            self.costs.ask(listed)
            control[cl.RETRIES] = control[cl.WAITING]
            control[[cl.LISTED, cl.WAITING, cl.RETRIED]] = 0

    def reschedule(self) -> None:
        """Give the state's kernels the best buckets and order at hand, if these are better than its own."""
        before_ns, own = self.makespan_ns(), self.state
        found: list[Scheduled] = []
        with contextlib.suppress(IllegalStrategyError):
            strategy = self.strategy()
            found.append(with_order(self.graph, strategy, self.model, self.machine))
            found.append(best_buckets(self.graph, strategy.groups, self.model, self.machine))
        if not found:
            return
        best = min(found, key=lambda one: one.predicted_ns)
        self.state = self.priced(from_strategy(self.graph, self.step, best.strategy))
        if self.makespan_ns() >= before_ns:
            self.state = own


class _Run:
    def __init__(self, island: Island, starts: Starts, halted: Callable[[], bool]) -> None:
        self.island, self.halted = island, halted
        self.began = time.perf_counter()
        self.climber = Climber(island, starts)
        self.proposals = min(
            max(PROPOSALS_PER_OP * self.climber.fusible.size, FEWEST_PROPOSALS), MOST_PROPOSALS
        )
        self.attested: set[Kernel] = set()
        for strategy in island.strategies:
            self.attested |= kernels_of(island.graph, strategy)
        self.found: dict[Strategy, Finalist] = {}
        self.offered: set[bytes] = set()
        self.stopped = ""
        self.best: tuple[State, int] | None = None
        self.news: Finalist | None = None

    def reports(self) -> Iterator[Report]:
        self._offer()
        yield self._report()
        idle, improved_at = 0, 0
        while not self.stopped:
            before_ns, began_at = self.best_ns, self.climber.evaluations
            for _ in self._cycle(idle):
                self._offer()
                yield self._report()
                if self.stopped:
                    break
            idle = 0 if self.best_ns < before_ns * (1 - GAIN) else idle + 1
            ended_at = self.climber.evaluations
            improved_at = improved_at if idle else ended_at
            patient = began_at < ended_at < improved_at + self.island.settings.unchanged
            if idle >= IDLE_CYCLES and not patient and not self.stopped:
                self.stopped = "unchanged"
        yield self._report()

    @property
    def best_ns(self) -> int:
        return self.best[1] if self.best else 2**62

    def _cycle(self, turn: int) -> Iterator[None]:
        """One round of everything, from the best state; stops for breath after every phase."""
        climber, blocking = self.climber, not self.island.machine.asynchronous
        self._adopt_best()
        if blocking:
            for divisor in (0, *KERNEL_DIVISORS):
                self._climb({**KERNEL_MOVES, **BUCKET_MOVES}, divisor, ordered=False)
                yield
            return
        # A round that begins with a loss in every kernel finds others; every other round keeps them.
        everything = {**KERNEL_MOVES, **BUCKET_MOVES, **ORDER_MOVES}
        if self.climber.evaluations == 0:
            # What is there is put in order and improved first: that takes a second, and most of the gain is there.
            climber.reschedule()
            yield
            self._climb(everything, 0, ordered=True)
            yield
        for divisors in ((0,), KERNEL_DIVISORS) if turn % 2 == 0 else ((0,),):
            for divisor in divisors:
                self._climb(KERNEL_MOVES, divisor, ordered=False)
            if self.stopped == "stop":
                return
            climber.reschedule()
            yield
        for _ in range(2):
            for divisor in ORDER_DIVISORS:
                self._climb(everything, divisor, ordered=True)
                yield
            climber.reschedule()
            yield
            self._adopt_best()

    def _climb(self, moves: Mapping[int, int], divisor: int, *, ordered: bool) -> None:
        climber, budget = self.climber, self.island.evaluations
        units = max(1, int(climber.state.word[at.TOTAL, at.UNITS]))
        threshold_ns = climber.total_ns() // units // divisor if divisor else 0
        left = self.proposals // 4 if ordered else self.proposals
        while left > 0 and not self._ended():
            chunk = min(left, CHUNK)
            if budget is not None:
                chunk = min(chunk, budget - climber.evaluations)
            climber.climb(moves, chunk, threshold_ns, ordered=ordered)
            left -= chunk

    def _ended(self) -> bool:
        budget, seconds = self.island.evaluations, self.island.seconds
        if budget is not None and self.climber.evaluations >= budget:
            self.stopped = self.stopped or "evaluations"
        elif seconds is not None and time.perf_counter() - self.began >= seconds:
            self.stopped = self.stopped or "seconds"
        elif self.halted():
            self.stopped = self.stopped or "stop"
        return bool(self.stopped)

    def _adopt_best(self) -> None:
        if self.best is not None:
            self.climber.state = copy_state(self.best[0])

    def _offer(self) -> None:
        """Keep the state if it is among the best, legal and small enough."""
        climber, island = self.climber, self.island
        predicted_ns = climber.makespan_ns()
        wanted = max(1, island.settings.finalists)
        worst_ns = max((one.predicted_ns for one in self.found.values()), default=0)
        key = climber.state.word[at.ORDER].tobytes()
        if key in self.offered or (len(self.found) >= wanted and predicted_ns >= worst_ns):
            return
        self.offered.add(key)
        try:
            written = climber.strategy()
        except IllegalStrategyError as error:
            LOGGER.debug("a state of the search is no strategy: %s", error)
            written = None
        strategy = written and checked(island.graph, written, island.machine.asynchronous, self.attested)
        if strategy is None:
            self._adopt_best()
            return
        timeline = simulate(build(island.graph, strategy, island.costs, island.machine).problem)
        limit = island.settings.memory_limit_bytes
        if limit is not None and timeline.peak_bytes > limit:
            self._adopt_best()
            return
        found = Finalist(strategy, timeline.makespan_ns)
        self.found[strategy] = found
        if len(self.found) > wanted:
            del self.found[max(self.found, key=lambda one: self.found[one].predicted_ns)]
        if found.predicted_ns < self.best_ns:
            self.best, self.news = (copy_state(climber.state), found.predicted_ns), found

    def _report(self) -> Report:
        news, self.news = self.news, None
        finalists = tuple(sorted(self.found.values(), key=lambda one: one.predicted_ns))
        return Report(
            self.island.number, self.climber.evaluations, self.climber.distinct,
            time.perf_counter() - self.began, self.best_ns, news,
            finalists if self.stopped else (), self.stopped,
        )  # fmt: skip


def reports(island: Island, starts: Starts, halted: Callable[[], bool]) -> Iterator[Report]:
    """Search; says what was found after every phase. The last report has the finalists.

    Args:
        starts: :func:`~disco_hlo.search.starts.prepare` of the island's strategies.
        halted: asked a few times a second; the island ends once it answers True.
    """
    return _Run(island, starts, halted).reports()
