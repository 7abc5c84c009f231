"""One seed of the joint search: a state, and what is done to it in turn.

What is cheap comes first. Buckets and order for the kernels at hand follow by rule (``arrange``), in
milliseconds. Kernels are chosen by the time of all units together, which a move changes in one addition:
there a candidate costs a few dozen microseconds. Then everything is moved at once, and every candidate's
order is simulated. A restart depends on its seed, its start and its budget of evaluations alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.legal import Kernel
from disco_hlo.plan.plan import Strategy
from disco_hlo.search import layout as at
from disco_hlo.search.api import Dropped, Finalist, Improvement, SearchSettings
from disco_hlo.search.climb import Climber
from disco_hlo.search.interpreter import without_collector
from disco_hlo.search.moves.table import MOVES, weights
from disco_hlo.search.state import State, copy_state
from disco_hlo.search.strategies import Starts, checked, kernels_of
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.timeline import simulate

KERNEL_MOVES: Final = weights("kernels")
BUCKET_MOVES: Final = weights("buckets")
ORDER_MOVES: Final = weights("order")
FIRST_MOVES: Final = {number: move.first_weight for number, move in enumerate(MOVES)}
"""Of the very first climb."""
KERNEL_DIVISORS: Final = (16, 64, 256, 0)
"""Each climb begins by allowing a loss of the average unit's time over this; 0: no loss at all."""
ORDER_DIVISORS: Final = (32, 256, 0)
PROPOSALS_PER_OP: Final = 16
FEWEST_PROPOSALS, MOST_PROPOSALS = 2_000, 120_000
FIRST_CHUNK, CHUNK = 250, 4_000
"""Proposals between two looks at the clock, at first and later."""
FIRST_CLIMBS: Final = 8
"""Parts of the first climb for kernels, in which what takes long is proposed more often; after each they are given
buckets and order."""
FIRST_CHECK_PER_OP: Final = 1 / 8
CHECK_FACTOR: Final = 7
CHECK_PER_OP: Final = 16
"""Candidates per op of the step from one check of what was found to the next: at first; so many times those there
were so far; and at most.

A check takes 25 to 50 us an op and a candidate 15 to 300 us, so at the last pace checks take a fifth of the time at
most. It is candidates that are counted, not seconds: where a state is refused the restart goes on from another, and
which one that is must not depend on a clock.
"""
LAST_CHECKS_SHARE: Final = 0.05
"""Of a budget of time: when it is spent, so long are others checked than the best."""
GAIN: Final = 0.0005
IDLE_CYCLES: Final = 2
"""The restart ends after so many cycles in a row that brought less than this share of its best."""


@dataclass(frozen=True)
class Restart:
    """What one seed is given."""

    graph: Graph
    costs: CostModel
    machine: MachineModel
    strategies: tuple[Strategy, ...]
    """Where the search starts from."""
    start: int
    """Which of them this seed begins with. It has all of them, since the kernels of each need no rule."""
    settings: SearchSettings
    number: int
    evaluations: int | None
    """Its share of the budget."""
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """What a restart has found so far."""

    number: int
    evaluations: int
    distinct: int
    seconds: float
    """Since the restart began."""
    best_ns: int
    best: Finalist | None
    """The best so far, where it is new since the last report."""
    trace: tuple[Improvement, ...] = ()
    """How it was reached, since the last report; seconds since the restart began."""
    finalists: tuple[Finalist, ...] = ()
    """Only in the last report: the best distinct strategies."""
    stopped: str = ""
    """Only in the last report: why the restart ended."""
    dropped: Dropped = field(default_factory=Dropped)
    """Only in the last report."""


class _Run:
    def __init__(
        self, restart: Restart, starts: Starts, halted: Callable[[], bool], watched: bool = True
    ) -> None:
        self.restart, self.halted = restart, halted
        self.watch = (lambda: self._time_is_up() or halted()) if watched else None
        """Asked while compiled code runs: whether the time is up, or somebody wants an end."""
        self.began = time.perf_counter()
        self.climber = Climber(
            restart.graph, restart.costs, restart.machine, starts, restart.start,
            restart.settings.seed * 1_000_003 + restart.number,
        )  # fmt: skip
        self.proposals = min(
            max(PROPOSALS_PER_OP * self.climber.fusible.size, FEWEST_PROPOSALS), MOST_PROPOSALS
        )
        self.wanted = max(1, restart.settings.finalists)
        self.found: dict[Strategy, Finalist] = {}
        self.stopped = ""
        self.best: tuple[State, int] | None = None
        """The best state that was checked."""
        self.noted: list[tuple[State, int]] = []
        """The last states that were better than all before them and are still to be checked; the best is last."""
        self.lowest_ns = 2**62
        """Of the best state that was ever noted, refused ones included."""
        self.steps: list[Improvement] = []
        """How the last of them was reached."""
        self.checked_at = 0
        """Candidates that had been looked at when something was checked last."""
        self.news: Finalist | None = None
        self.trace: tuple[Improvement, ...] = ()
        self.dropped = Dropped()

    @cached_property
    def attested(self) -> set[Kernel]:
        """The kernels of all starts, which need no rule."""
        return set().union(*(kernels_of(self.restart.graph, one) for one in self.restart.strategies))

    def reports(self) -> Iterator[Report]:
        self._note()
        yield self._report()
        idle, improved_at = 0, 0
        while not self.stopped:
            before_ns, began_at = (self.lowest_ns, self.checked_ns), self.climber.evaluations
            for _ in self._cycle(idle):
                self._offer()
                yield self._report()
                if self.stopped:
                    break
            idle = 0 if self._gained(*before_ns) else idle + 1
            ended_at = self.climber.evaluations
            improved_at = improved_at if idle else ended_at
            patient = began_at < ended_at < improved_at + self.restart.settings.unchanged
            if idle >= IDLE_CYCLES and not patient and not self.stopped:
                self.stopped = "unchanged"
        self._offer()
        yield self._report()

    @property
    def best_ns(self) -> int:
        """Of the best state so far, checked or not."""
        if self.noted:
            return self.noted[-1][1]
        return self.checked_ns

    @property
    def checked_ns(self) -> int:
        """Of the best state that was checked."""
        return self.best[1] if self.best else 2**62

    def _gained(self, lowest_ns: int, checked_ns: int) -> bool:
        """Whether a round brought what it must. To come again to what was refused before is no gain, but to come to
        something that is not refused is one, though it takes longer."""
        if self.lowest_ns < lowest_ns * (1 - GAIN):
            return True
        return self.lowest_ns < self.checked_ns < checked_ns * (1 - GAIN)

    def _cycle(self, turn: int) -> Iterator[None]:
        """One round of everything, from the best state; stops for breath after every phase."""
        blocking = not self.restart.machine.asynchronous
        self._adopt_best()
        if blocking:
            for divisor in (0, *KERNEL_DIVISORS):
                self._climb({**KERNEL_MOVES, **BUCKET_MOVES}, divisor, ordered=False)
                yield
            return
        # A round that begins with a loss in every kernel finds others; every other round keeps them.
        everything = {**KERNEL_MOVES, **BUCKET_MOVES, **ORDER_MOVES}
        if self.climber.evaluations == 0:
            yield from self._first()
        for divisors in ((0,), KERNEL_DIVISORS) if turn % 2 == 0 else ((0,),):
            for divisor in divisors:
                self._climb(KERNEL_MOVES, divisor, ordered=False)
            if self.stopped == "stop":
                return
            if turn % 2 == 0:
                self._reschedule(small_last=True)
            else:  # the rule makes many small buckets where these are in time; from there few large ones are far
                self.climber.take_given_buckets()
            yield
        for _ in range(2):
            for divisor in ORDER_DIVISORS:
                self._climb(everything, divisor, ordered=True)
                yield
            self._reschedule(small_last=True)
            yield
            self._adopt_best()

    def _first(self) -> Iterator[None]:
        """Most of the gain lies in what takes least time: buckets and order by rule, kernels that only get better."""
        self._reschedule()
        yield
        for part in range(FIRST_CLIMBS):
            self.climber.draw_by_time()
            self._climb(FIRST_MOVES if part == 0 else KERNEL_MOVES, 0, ordered=False, share=FIRST_CLIMBS)
            self._reschedule()
            yield
            if self.stopped:
                return
        self.climber.draw_alike()
        yield from self._while_it_pays({**KERNEL_MOVES, **BUCKET_MOVES, **ORDER_MOVES})

    def _while_it_pays(self, moves: Mapping[int, int]) -> Iterator[None]:
        """Climb without a loss, each order simulated, until that brings less than a round must."""
        wanted_ns = self.best_ns + 1
        while not self.stopped and self.best_ns < wanted_ns:
            wanted_ns = int(self.best_ns * (1 - GAIN))
            self._climb(moves, 0, ordered=True)
            yield

    def _reschedule(self, *, small_last: bool = False) -> None:
        self.climber.reschedule(small_last=small_last, halted=self.watch)
        self._note()

    def _climb(self, moves: Mapping[int, int], divisor: int, *, ordered: bool, share: int = 1) -> None:
        climber, budget = self.climber, self.restart.evaluations
        units = max(1, int(climber.state.word[at.TOTAL, at.UNITS]))
        threshold = climber.total() // units // divisor if divisor else 0
        left = (self.proposals // 4 if ordered else self.proposals) // share
        while left > 0 and not self._ended():
            chunk = min(left, CHUNK, max(FIRST_CHUNK, climber.evaluations))
            if budget is not None:
                chunk = min(chunk, budget - climber.evaluations)
            climber.climb(moves, chunk, threshold, ordered=ordered, halted=self.watch)
            self._note()
            left -= chunk

    def _time_is_up(self) -> bool:
        seconds = self.restart.seconds
        return seconds is not None and time.perf_counter() - self.began >= seconds

    def _ended(self) -> bool:
        budget = self.restart.evaluations
        if budget is not None and self.climber.evaluations >= budget:
            self.stopped = self.stopped or "evaluations"
        elif self._time_is_up():
            self.stopped = self.stopped or "seconds"
        elif self.halted():
            self.stopped = self.stopped or "stop"
        return bool(self.stopped)

    def _adopt_best(self) -> None:
        if self.noted:
            self.climber.state = copy_state(self.noted[-1][0])
        elif self.best is not None:
            self.climber.state = copy_state(self.best[0])

    def _note(self) -> None:
        """Keep the state if it is the best so far."""
        climber = self.climber
        predicted_ns = climber.makespan_ns()
        if predicted_ns >= self.best_ns:
            return
        self.lowest_ns = min(self.lowest_ns, predicted_ns)
        self.noted = [*self.noted, (copy_state(climber.state), predicted_ns)][-self.wanted :]
        seconds = time.perf_counter() - self.began
        self.steps.append(Improvement(climber.evaluations, seconds, predicted_ns))

    def _offer(self) -> None:
        """Write down and check what was noted, if the last check was long enough ago or nothing comes after."""
        ops = len(self.restart.graph)
        pause = min(max(FIRST_CHECK_PER_OP * ops, CHECK_FACTOR * self.checked_at), CHECK_PER_OP * ops)
        if not self.noted or not (self.stopped or self.climber.evaluations >= self.checked_at + pause):
            return
        self.checked_at = self.climber.evaluations
        noted, self.noted, steps, self.steps = self.noted, [], self.steps, []
        best_ns = self.best_ns
        began = time.perf_counter()
        for state, _ in reversed(noted):
            try:
                found = self._checked(state)
            except DiscoError as error:
                self.dropped += Dropped(1, " ".join(str(error).split()))
                continue
            if found is None:
                continue
            self.found[found.strategy] = found
            if found.predicted_ns < best_ns:
                best_ns = found.predicted_ns
                self.best, self.news = (state, found.predicted_ns), found
            seconds = self.restart.seconds
            late = seconds is not None and time.perf_counter() - began > LAST_CHECKS_SHARE * max(seconds, 0.0)
            if not self.stopped or late:
                break
        if self.best is not None and self.best[0] is not noted[-1][0]:
            self._adopt_best()
        self.trace += tuple(step for step in steps if step.cost_ns >= best_ns)
        self.found = dict(sorted(self.found.items(), key=lambda item: item[1].predicted_ns)[: self.wanted])

    def _checked(self, state: State) -> Finalist | None:
        """What a state stands for, if it is small enough.

        Raises:
            DiscoError: it is no strategy of the step, or not a legal one.
        """
        climber, restart = self.climber, self.restart
        written = climber.strategy(state)
        strategy = checked(restart.graph, written, restart.machine.asynchronous, self.attested)
        timeline = simulate(build(restart.graph, strategy, restart.costs, restart.machine).problem)
        limit = restart.settings.memory_limit_bytes
        if limit is not None and timeline.peak_bytes > limit:
            return None
        return Finalist(strategy, timeline.makespan_ns)

    def _report(self) -> Report:
        news, self.news = self.news, None
        trace, self.trace = self.trace, ()
        finalists = tuple(sorted(self.found.values(), key=lambda one: one.predicted_ns))
        return Report(
            self.restart.number, self.climber.evaluations, self.climber.distinct,
            time.perf_counter() - self.began, self.best_ns, news, trace,
            finalists if self.stopped else (), self.stopped, self.dropped if self.stopped else Dropped(),
        )  # fmt: skip


def reports(
    restart: Restart, starts: Starts, halted: Callable[[], bool], *, watched: bool = True
) -> Iterator[Report]:
    """Search; says what was found after every phase. The last report has the finalists.

    Args:
        starts: :func:`~disco_hlo.search.strategies.prepare` of the restart's strategies.
        halted: asked a few times a second; the restart ends once it answers True.
        watched: whether it is asked inside compiled code, too; no need where no clock runs and nobody interrupts.
    """
    with without_collector():
        run = _Run(restart, starts, halted, watched)
    return run.reports()
