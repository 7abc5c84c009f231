"""Compiling the finalists, as many as there is time for: of a step of thousands of instructions each takes a minute.

They are compiled the likeliest winners first, as many at a time as there are cores for it, and for as long as the
search may take, or a minute: where the next ones would not be done by then, what is left is not compiled. Rank 0's
clock decides for all ranks.
"""

from __future__ import annotations

import time

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plugin.interruption import Interruption
from disco_hlo.plugin.measuring.candidates import DEFAULT, Trial, compile_trials
from disco_hlo.plugin.measuring.cores import compiles_at_once
from disco_hlo.plugin.phases.beside import NO_FUSION, ONE_BUCKET, OUR_KERNELS, OUR_ORDER, PLAN_BUCKETS
from disco_hlo.plugin.phases.finding import PLAN
from disco_hlo.plugin.phases.outlook import SHORTEST_COMPILING_S
from disco_hlo.plugin.session import Session

_AT_LEAST = 3
"""Modules that are compiled however long that takes: XLA's default, the plan, and the next best."""
_FIRST = (DEFAULT, PLAN, OUR_ORDER, OUR_KERNELS, PLAN_BUCKETS)
_LAST = (ONE_BUCKET, NO_FUSION)
"""Other plans of the search are in between."""


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
        return _FIRST.index(PLAN)
    if trial.name in _LAST:
        return len(_FIRST) + 1 + _LAST.index(trial.name)
    return _FIRST.index(trial.name) if trial.name in _FIRST else len(_FIRST)
