"""The search phase, ``ENABLE_SEARCH=1`` (DisCo, section 3.1), run while the step's compile waits.

Capture the step, profile it, search on rank 0, measure the finalists beside XLA's default, save the
fastest as a plan, and hand its executable to JAX, so that the training goes on with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence

import msgspec

from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin.callbacks import refuse_callbacks
from disco_hlo.plugin.interruption import Interruption
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.candidates import Trial, measure
from disco_hlo.plugin.measuring.inputs.arguments import fit_inputs
from disco_hlo.plugin.measuring.measured_times import measured_times
from disco_hlo.plugin.measuring.profiling import profile_step
from disco_hlo.plugin.measuring.room import room_bytes
from disco_hlo.plugin.measuring.timelines import take_timelines
from disco_hlo.plugin.phases.compiling import compile_finalists
from disco_hlo.plugin.phases.enact_phase import enact
from disco_hlo.plugin.phases.finding import PLAN, Found, find
from disco_hlo.plugin.phases.one_step import may_be_run, refuse_others
from disco_hlo.plugin.phases.outlook import MEASURE_BUDGET_S, looks
from disco_hlo.plugin.phases.rehearsal import rehearsed
from disco_hlo.plugin.phases.saving import Outcome, save, save_interrupted, save_timelines
from disco_hlo.plugin.phases.second_look import look_again
from disco_hlo.plugin.phases.structure_search import Best, restructured_trials
from disco_hlo.plugin.phases.winner import winning
from disco_hlo.plugin.session import Session, interruption, join, warn_of_lost_donation
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step, training_step
from disco_hlo.plugin.switches import refuse_switched_on
from disco_hlo.plugin.tuner_results import exchange
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest

AROUND_SEARCH_S = 300.0
"""How long rank 0 may be busy beside the search's own time: compiling its code, ranking what it found."""


def handle(request: CompileRequest, settings: Settings) -> LoadedExecutable | None:
    """Search for the request if it is the training step, once; None leaves it to XLA."""
    if not may_be_run(request):
        return None
    step = training_step(request, settings)
    if step is None:
        return None
    if step.again:
        return enact(request, settings, step)
    refuse_callbacks(step.module, request.module_name)
    session = join(request, settings)
    refuse_others(session, step.source.graph.fingerprint)
    with session.stage("switches"):
        refuse_switched_on()
    fit_inputs(request, step.source)
    slot = session.slot(step.source.graph.key)
    with _only_search(session, slot):
        return _search_and_measure(session, step, slot)


@contextlib.contextmanager
def _only_search(session: Session, slot: PlanSlot) -> Iterator[None]:
    """Hold the slot's lock on rank 0; all ranks give up together where another search has it."""
    held = None
    try:
        with session.stage("plan directory"):
            if session.leads:
                held = slot.search_lock().acquire()
        yield
    finally:
        if held is not None:
            held.remove()


def _search_and_measure(session: Session, step: Step, slot: PlanSlot) -> LoadedExecutable | None:
    source = step.source
    xla = read(source)
    stop = interruption(session, source.graph.fingerprint)
    with stop.watched(), rehearsed(session, step) as wait_for_code:
        session.say("profiling the step; the training waits until the search is over")
        started = time.monotonic()
        with measured_times(session) as store:
            profiled = profile_step(session, source, xla, store, slot)
        profile_s = time.monotonic() - started
        if session.tell(bool(stop), "interrupted"):
            session.say("interrupted before the search; this run goes on with XLA's default")
            return None
        if profiled is not None:
            session.say("profiled %s in %.1f s", profiled.measured, profile_s)
        room = room_bytes(session)
        takes_s = session.settings.budget_s + AROUND_SEARCH_S
        with session.stage("search", takes_s=takes_s):
            wait_for_code(stop)
            found = (
                find(session, step, xla, profiled.profile, stop, room_bytes=room)
                if profiled is not None
                else None
            )
        for _ in range(looks(session)):
            found = look_again(session, step, xla, found, slot, stop, search_takes_s=takes_s, room_bytes=room)
        trials = _trials(session, found, slot)
        if not session.tell(bool(stop), "interrupted"):
            with measured_times(session) as store:
                trials += restructured_trials(session, step, slot, store, _best(found))
        started = time.monotonic()
        complete = _measure(session, step, trials, stop)
    measure_s = time.monotonic() - started
    exchange(session)
    forced = session.settings.forced_structure
    winner = trials[session.tell(_chosen(trials, forced) if session.leads and complete else 0, "winner")]
    saved = False
    if found is not None:
        outcome = Outcome(session, step, slot, found, trials, profile_s, measure_s)
        if complete:
            saved = save(outcome, winner)
        else:
            save_interrupted(outcome)
    if winner.strategy is None:
        return None
    timelines = take_timelines(session, step, (trials[0], winner))
    if saved and timelines:
        save_timelines(slot, winner, timelines)
    with session.stage("taking the winner"):
        executable = winner.executable
    for trial in trials:  # their code lies on the devices as long as they live
        trial.executable = None
    digest = hashlib.sha256(winner.module).hexdigest()
    LOGGER.debug("rank %d executes module %s", session.channel.rank, digest)
    warn_of_lost_donation(session, step)
    return executable


# --- finalists, on all ranks ----------------------------------------------------------------------


def _best(found: Found | None) -> Best | None:
    """The search's first, and XLA's default in the same prediction."""
    if found is None:
        return None
    plan = next(strategy for name, strategy, _ in found.trials if name == PLAN)
    assert plan is not None
    return Best(plan, found.prediction.plan_ns, found.profile)


def _trials(session: Session, found: Found | None, slot: PlanSlot) -> list[Trial]:
    """The candidates by name; on ranks other than 0 their strategies arrive as JSON."""
    raw = None
    if found is not None:
        raw = [[name, msgspec.to_builtins(strategy), ns] for name, strategy, ns in found.trials]
    told = session.tell(raw, "finalists")
    return [
        Trial(name, None if strategy is None else msgspec.convert(strategy, Strategy), ns, marks=slot)
        for name, strategy, ns in told
    ]


def _measure(session: Session, step: Step, trials: list[Trial], stop: Interruption) -> bool:
    """Compile and time the trials, less those that there is no time to compile; whether that was not interrupted."""
    if session.tell(bool(stop), "interrupted"):
        return False
    session.say("compiling and measuring XLA's default and %d candidates", len(trials) - 1)
    if not compile_finalists(session, step.source, trials, stop):
        return False
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


def _chosen(trials: Sequence[Trial], forced: str | None) -> int:
    """Index of the trial that is ``forced`` by its name, if it ran; else of the winner."""
    for i, trial in enumerate(trials):
        if forced is not None and trial.name == forced and trial.times_ns and not trial.error:
            return i
    return winning(trials)
