"""The search phase (DisCo, section 3.1), run while the step's compile waits: ``ENABLE_SEARCH=1`` as
``DISCO_WHEN=compile`` has it.

Capture the step, profile it, search on rank 0, measure the finalists beside XLA's default, compare the fastest with it,
save that as a plan, and hand its executable to JAX, so that the training goes on with it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from disco_hlo.elsewhere import here, quick_switches
from disco_hlo.optimize.ablations import parts
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.inputs.arguments import fit_inputs
from disco_hlo.plugin.measuring.known_times import measured_times
from disco_hlo.plugin.measuring.profiling import profile_step
from disco_hlo.plugin.measuring.room import interpreter, limited_bytes, room_bytes
from disco_hlo.plugin.measuring.traced_modules import take_timelines
from disco_hlo.plugin.phases.enact_phase import enact, note_enacted
from disco_hlo.plugin.phases.finalists import (
    Outcome,
    begin_with_likeliest,
    measured_winner,
    save,
    save_interrupted,
    save_timelines,
    trials_of,
)
from disco_hlo.plugin.phases.finding import (
    Found,
    code_compiled_beside,
    find,
    longest_s,
    search_structure_apart,
)
from disco_hlo.plugin.phases.making_structures import Ahead, Making
from disco_hlo.plugin.phases.structure_search import StructureSearch
from disco_hlo.plugin.refusals import may_be_run, refuse_callbacks, refuse_others, refuse_switched_on
from disco_hlo.plugin.session import Interruption, Session, interruption, join, warn_of_lost_donation
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step, training_step
from disco_hlo.plugin.tuner_results import exchange
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest

_AROUND_S = 300.0
"""How long rank 0 may be busy with the plans that it found."""


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
        refuse_switched_on(request)
    fit_inputs(request, step.source)
    slot = session.slot(step.source.graph.key)
    with only_search(session, slot), quick_switches():  # structures are made beside the search
        return _search_and_measure(session, step, slot)


@contextlib.contextmanager
def only_search(session: Session, slot: PlanSlot) -> Iterator[None]:
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
    source, began = step.source, time.monotonic()
    stop = interruption(session, source.graph.fingerprint)
    with stop.watched():
        with code_compiled_beside(session, step.module, stop.__bool__) as code:
            searched = _search(session, step, slot, stop, code)
        if searched is None:
            return None
        profile_s, found, making = searched
        searched_s = time.monotonic() - began
        trials, compiling = trials_of(session, None if found is None else found.candidates, slot), None
        if not session.tell(bool(stop), "interrupted"):
            compiling = begin_with_likeliest(session, source, trials)
        run = interpreter(source)
        predicting = ThreadPoolExecutor(1, "disco-prediction")
        predicted = None if found is None else predicting.submit(found.plans, session.settings, run)
        predicting.shutdown(wait=False)
        if compiling is not None:
            with measured_times(session) as store:
                unchanged = None if found is None else found.search
                apart = functools.partial(search_structure_apart, session.settings, stop)
                search = None if run is here else apart
                trials += StructureSearch(session, slot, store, unchanged, making, search).trials(compiling)
            compiling.finish()
        making.end()
        with session.stage("what the plan is predicted to take", takes_s=_AROUND_S):
            plans = None if predicted is None else predicted.result()
        started = time.monotonic()
        structures_s = started - began - searched_s
        compared = measured_winner(
            session, source, trials, stop, slot, lambda: [] if found is None else parts(found.search)
        )
    measure_s = time.monotonic() - started
    if found is not None:
        session.say(
            "the training was held for %.0f s: profiling %.0f, search %.0f, other structures %.0f, candidates %.0f",
            time.monotonic() - began, profile_s, searched_s - profile_s, structures_s, measure_s,
        )  # fmt: skip
    exchange(session)
    winner, saved = compared or trials[0], False
    if found is not None and plans is not None:
        outcome = Outcome(session, step, slot, plans, found.profile, trials, profile_s, measure_s)
        if compared is not None:
            saved = save(outcome, winner)
        else:
            save_interrupted(outcome)
    if winner.strategy is None:
        return None
    if session.settings.explain:
        timelines = take_timelines(session, step, (trials[0], winner))
        if saved and timelines:
            save_timelines(slot, winner, timelines)
    with session.stage("taking the winner"):
        executable = winner.executable
    for trial in trials:  # their code lies on the devices as long as they live
        trial.executable = trial.finer = None
    digest = hashlib.sha256(winner.module).hexdigest()
    note_enacted(session.request, digest, winner.launched_singly, executable)
    LOGGER.debug("rank %d executes module %s", session.channel.rank, digest)
    warn_of_lost_donation(session, step)
    return executable


def _search(
    session: Session, step: Step, slot: PlanSlot, stop: Interruption, code: Callable[[], None]
) -> tuple[float, Found | None, Making] | None:
    """How long profiling took, on rank 0 what was found, and the structures that are made meanwhile; None where
    somebody interrupted before the search. ``code`` waits for the search's code."""
    source, xla = step.source, read(step.source)
    session.say("profiling the step; the training waits until the search is over")
    started = time.monotonic()
    ahead = Ahead(session, source)
    with measured_times(session) as store:
        profiled = profile_step(session, source, xla, store, slot, beside=ahead.beside_compiles)
    profile_s = time.monotonic() - started
    if session.tell(bool(stop), "interrupted"):
        session.say("interrupted before the search; this run goes on with XLA's default")
        return None
    room = limited_bytes(session.settings, room_bytes(session), source.graph)
    profile = None if profiled is None else profiled.profile
    making = Making(session, source, profile, profile_s, ahead.early)
    found = None
    if profiled is not None:
        session.say("profiled %s in %.1f s", profiled.measured, profile_s)
    with session.stage("search", takes_s=longest_s(session.settings)):
        if profiled is not None:
            code()
            found = find(
                session.settings, session.say, source, xla, profiled.profile, stop,
                room_bytes=room, with_parts=session.settings.explain,
            )  # fmt: skip
    return profile_s, found, making
