"""Traces of XLA's default and of the winner, taken once the winner is known, for people to look at.

They decide nothing. What cannot be traced is left out with a line in the log.
"""

from __future__ import annotations

from collections.abc import Sequence

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ProfileError
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.candidates import Trial, compile_trials
from disco_hlo.plugin.measuring.lockstep import FirstRuns
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.traced_modules import traced_on_all
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.step import Step
from disco_hlo.plugin.xla import executables
from disco_hlo.profiler.timeline import MeasuredStep, measured_step

_RUNS = 5
"""Steps in a trace, of which one is kept."""


def take_timelines(session: Session, step: Step, trials: Sequence[Trial]) -> tuple[MeasuredStep, ...]:
    """One measured step of each trial, in their order, on rank 0; all ranks run them. Empty if one fails."""
    try:
        taken = []
        inputs_of: Runner | None = None
        first_runs = FirstRuns(session, "inputs for the timelines")
        for trial in _with_names(session, step, trials):
            with session.stage(f"inputs for the timeline of {trial.name}"):
                seed = session.settings.seed
                inputs_of = Runner(
                    session.request, trial.executable, seed, inputs_of=inputs_of, together=first_runs
                )
            with session.stage(f"timeline of {trial.name}"):
                trace, _ = traced_on_all(session, trial.name, inputs_of, _RUNS, first_runs)
                executed = executables.read_executable(trial.executable)
                taken.append(measured_step(trial.name, trace, executed))
    except (
        Exception
    ) as error:  # also what jax raises: the others go on with the winner, and so must this rank
        session.say("no measured timelines: %s", one_line(error))
        return ()
    return tuple(taken)


def _with_names(session: Session, step: Step, trials: Sequence[Trial]) -> Sequence[Trial]:
    """The trials, on a GPU compiled again without command buffers, inside which no kernel has a name."""
    options = BACKENDS[session.facts.backend].naming_options
    if not options:
        return trials
    again = [
        Trial(
            one.name, one.strategy, one.predicted_ns,
            marks=one.marks, restructured=one.restructured, options=options,
        )
        for one in trials
    ]  # fmt: skip
    compile_trials(session, step.source, again, tag="timelines")
    for trial in again:
        if trial.error:
            raise ProfileError(f"{trial.name}: {trial.error}")
    return again
