"""The candidates on all ranks: handed out, compiled, measured, and one of them chosen and compared.

A step of thousands of instructions takes a minute to compile. So the likeliest winners are compiled first, as many at a
time as there are cores for it, and for as long as the search may take, or a minute: where the next ones would not be
done by then, what is left is not compiled. Rank 0's clock decides for all ranks.

What the clock puts first is compared with XLA's default, element by element. Where it computes something else, it is
out, and the next is chosen. So nothing is enacted or saved as measured that was not compared, and the others cost no
more than their timing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.optimize.ablations import NO_FUSION, ONE_BUCKET, OUR_KERNELS, OUR_ORDER, PLAN_BUCKETS
from disco_hlo.optimize.select import winning
from disco_hlo.plan.plan import DEFAULT, SEARCHED, Strategy
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plugin.interruption import Interruption
from disco_hlo.plugin.measuring.candidates import (
    Trial,
    compare_with_default,
    compile_trials,
    measure,
)
from disco_hlo.plugin.measuring.cores import compiles_at_once
from disco_hlo.plugin.phases.finding import MEASURE_BUDGET_S, SHORTEST_COMPILING_S, FoundPlans
from disco_hlo.plugin.session import Session

_AT_LEAST = 3
"""Modules that are compiled however long that takes: XLA's default, the plan, and the next best."""
_FIRST = (DEFAULT, SEARCHED, OUR_ORDER, OUR_KERNELS, PLAN_BUCKETS)
_LAST = (ONE_BUCKET, NO_FUSION)
"""Other plans of the search are in between."""


def trials_of(session: Session, found: FoundPlans | None, slot: PlanSlot) -> list[Trial]:
    """The candidates by name; on ranks other than 0 their strategies arrive as JSON."""
    raw = None if found is None else msgspec.to_builtins(found.candidates)
    return [
        Trial(name, None if strategy is None else msgspec.convert(strategy, Strategy), ns, marks=slot)
        for name, strategy, ns in session.tell(raw, "finalists")
    ]


def likeliest(trials: Sequence[Trial], most: int) -> list[Trial]:
    """Those that may win first, without XLA's default, the likeliest winner first."""
    return sorted((trial for trial in trials if trial.strategy is not None), key=_rank)[:most]


def compile_and_measure(
    session: Session, source: CanonicalModule, trials: list[Trial], stop: Interruption
) -> bool:
    """Compile and time the trials, less those that there is no time to compile; whether that was not interrupted."""
    if session.tell(bool(stop), "interrupted"):
        return False
    session.say("compiling and measuring XLA's default and %d candidates", len(trials) - 1)
    if not compile_finalists(session, source, trials, stop):
        return False
    compiled = sum(not trial.error for trial in trials)
    session.say("timing the %d that are compiled in turn, for up to %.0f s", compiled, MEASURE_BUDGET_S)
    if not measure(session, trials, budget_s=MEASURE_BUDGET_S, stop=lambda: bool(stop)):
        return False
    for trial in trials:
        if trial.error:
            session.say("%s: not measured: %s", trial.name, trial.error)
        else:
            session.say(
                "%s: %.2f ms (predicted %.2f)", trial.name, trial.median_ns / 1e6, trial.predicted_ns / 1e6
            )
    return True


def winner_of(session: Session, trials: Sequence[Trial], stop: Interruption) -> Trial | None:
    """What to go on with, of trials that :func:`compile_and_measure` has timed: the fastest, once it is seen to compute
    what XLA's default computes, or the default; None where somebody interrupted before that was seen. The same on all
    ranks.

    Raises:
        DiscoError: XLA's default cannot be compared with.
    """
    forced = session.settings.forced_structure
    while not session.tell(bool(stop), "interrupted"):
        first = session.tell(chosen(trials, forced) if session.leads else None, "winner")
        winner: Trial = trials[first]
        if winner.strategy is None:
            return winner
        session.say(
            "%s is first; comparing its numbers with those of XLA's default, element by element, on two sets of inputs",
            winner.name,
        )
        started = time.monotonic()
        compare_with_default(session, trials[0], [winner])
        if winner.compared:
            session.say(
                "%s computes what XLA's default computes (%.1f s)", winner.name, time.monotonic() - started
            )
            return winner
        session.say("%s: timed, and then left out: %s", winner.name, winner.error)
    return None


def compile_finalists(
    session: Session, source: CanonicalModule, trials: list[Trial], stop: Interruption
) -> bool:
    """Compile ``trials`` on every rank; those that there is no time for are taken out of the list, and one line
    says which. What else goes wrong is noted in them.

    Returns:
        Whether it was not interrupted.

    Raises:
        As :func:`~disco_hlo.plugin.measuring.candidates.compile_trials`.
    """
    started = time.monotonic()
    waiting = sorted(trials, key=_rank)
    at_once = compiles_at_once(session)
    budget_s = max(session.settings.budget_s, SHORTEST_COMPILING_S)
    done = 0
    while waiting:
        began_s = time.monotonic() - started
        some, waiting = waiting[:at_once], waiting[at_once:]
        compile_trials(session, source, some, tag=f"candidates from {done}")
        done += len(some)
        spent_s = time.monotonic() - started
        late = done >= _AT_LEAST and 2 * spent_s - began_s > budget_s
        interrupted, late = session.tell([bool(stop), late], "candidates compiled")
        if interrupted:
            return False
        if waiting and late:
            _leave_out(session, trials, waiting, spent_s / done * at_once)
            break
    return True


def chosen(trials: Sequence[Trial], forced: str | None) -> int:
    """Index of the trial that is ``forced`` by its name, if it ran; else of the winner."""
    times = [() if trial.error else trial.times_ns for trial in trials]
    for i, trial in enumerate(trials):
        if forced is not None and trial.name == forced and times[i]:
            return i
    return winning(times, [trial.predicted_ns for trial in trials])


def _leave_out(session: Session, trials: list[Trial], late: list[Trial], each_s: float) -> None:
    session.say(
        "not compiled, as there is no time left for it (DISCO_BUDGET_S; one takes %.0f s): %s",
        each_s,
        "; ".join(trial.name for trial in late),
    )
    names = {trial.name for trial in late}
    trials[:] = [trial for trial in trials if trial.name not in names]


def _rank(trial: Trial) -> int:
    """Place in the order of compiling: what may win first, what only explains a gain last."""
    if trial.restructured is not None:  # it is here because it is predicted to beat the plan
        return _FIRST.index(SEARCHED)
    if trial.name in _LAST:
        return len(_FIRST) + 1 + _LAST.index(trial.name)
    return _FIRST.index(trial.name) if trial.name in _FIRST else len(_FIRST)
