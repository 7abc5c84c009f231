"""The search for one step while it trains: ``ENABLE_SEARCH=1`` as ``DISCO_WHEN=training`` has it.

A thread on every rank goes through the same stages: capture, profile, search (in a process of its own), compile,
compare, and try the candidates as real calls. These threads meet over a channel of their own. What runs over the
devices does so between two calls, in slices, while all ranks hold their training; the log says for how long.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from disco_hlo.backends import BACKENDS
from disco_hlo.elsewhere import NICENESS
from disco_hlo.errors import ActivationError, ProfileError, UnsupportedError, is_shared
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Case, Optimized
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plugin.calls import trial as calls
from disco_hlo.plugin.calls.schedule import Round
from disco_hlo.plugin.calls.traced import TracedCalls
from disco_hlo.plugin.calls.trial import Hold
from disco_hlo.plugin.calls.watch import join_uninterrupted
from disco_hlo.plugin.hangs import lasts_alike
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.candidates import compare_with_default, compile_trials
from disco_hlo.plugin.measuring.comparing import HeldPasses, compile_comparison
from disco_hlo.plugin.measuring.inputs.arguments import (
    LentInputs,
    RealInputs,
    fit_inputs,
    share_memory,
)
from disco_hlo.plugin.measuring.known_times import measured_times
from disco_hlo.plugin.measuring.lending import Loan, lent, real_inputs
from disco_hlo.plugin.measuring.lockstep import anywhere
from disco_hlo.plugin.measuring.profiling import profile_step
from disco_hlo.plugin.measuring.room import (
    PASSES,
    beyond_setting,
    compiles_at_once,
    lack_of_memory,
    limited_bytes,
    needed_on_host_bytes,
    passes_on_host,
    room_bytes,
    with_room_to_compile,
)
from disco_hlo.plugin.measuring.trial import Trial, marked
from disco_hlo.plugin.phases.finalists import Outcome, likeliest, save, save_interrupted, shown, trials_of
from disco_hlo.plugin.phases.finding import (
    FoundPlans,
    code_compiled_beside,
    longest_s,
    search_apart,
    search_structure_apart,
)
from disco_hlo.plugin.phases.making_structures import Making
from disco_hlo.plugin.phases.search_phase import only_search
from disco_hlo.plugin.phases.structure_search import (
    MOST_STRUCTURES,
    RIVALS,
    StructureSearch,
)
from disco_hlo.plugin.refusals import refuse_callbacks, refuse_other_threads, switched_on
from disco_hlo.plugin.session import Interruption, Session, join_beside
from disco_hlo.plugin.settings import Settings, before_first_step
from disco_hlo.plugin.step import Step, called_step
from disco_hlo.plugin.structure import gains_alone
from disco_hlo.plugin.tuner_results import exchange
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.executables import memory, parameters
from disco_hlo.plugin.xla.gpu_copies import copies_of
from disco_hlo.plugin.xla.host_memory import MEMORY
from disco_hlo.plugin.xla.job import may_rise_bytes, peak_told, peaks_bytes
from disco_hlo.printable import counted
from disco_hlo.profiler.profile import Profile

_MOST_TRIED = 2
"""Candidates that are compared with XLA's default, and tried. Those of another structure are in the place of the last
of them and besides; where the first of these is predicted to be far ahead (:data:`RIVALS`), in the place of all."""
_LOOK_S = 0.5
_END_S = 10.0
"""How long the end of the process waits for what is under way."""
_ENDED = "the training ended before the search for {} did"
_NEXT = "the next job goes on from there, or {} searches before the first step"
_under_way: weakref.WeakSet[SearchInTraining] = weakref.WeakSet()


def likely_winners(trials: Sequence[Trial], forced: str | None) -> list[Trial]:
    """The candidates that are worth a hold each: the best plans, and the fastest structures, as predicted.

    Args:
        trials: XLA's default first, structures from the fastest on.
        forced: the structure that the user has named.
    """
    structures = [one for one in trials if one.restructured is not None][:MOST_STRUCTURES]
    others = [one for one in trials if one.restructured is None]
    tried = [*likeliest(others, _MOST_TRIED - bool(structures)), *structures]
    if not structures or forced is not None:
        return tried
    most_ns = (1 + RIVALS) * structures[0].predicted_ns
    return [one for one in tried if one.predicted_ns <= most_ns]


class SearchInTraining:
    """The search for one step, in a thread of its own; on every rank one."""

    def __init__(
        self,
        trial: weakref.ref[calls.Trial],
        settings: Settings,
        trains: threading.Thread,
        process_ends: threading.Event,
    ) -> None:
        """Nothing begins yet.

        Args:
            trial: of the step, which belongs to JAX's own executable.
            trains: the thread that calls it.
            process_ends: set once no search begins any more, such as one that waited for that of another step.
        """
        self._process_ends = process_ends
        self._calls = trial
        self._settings = settings
        self._trains = trains
        self._stop = Interruption()
        """By Ctrl-C while a call is held, or at the end of the process."""
        self._ends = False
        self._thread = threading.current_thread()
        self._settled = threading.Event()
        self._rounds: list[Round] = []
        self._winner = DEFAULT
        self._tried = False
        """Whether there was a candidate to be tried."""
        self._saved = False
        """Whether the log has said what was saved, if anything."""
        self._hold: Hold | None = None
        """Under way."""
        self._asked_memory = False
        self._ready_bytes = 0
        """Of the host's memory, for each device."""
        self._passes = PASSES
        """In which candidates are compared, where a call is held around each."""
        self._held_s: list[float] = []
        """How long the training was held, each time since somebody last said so."""

    def run(self) -> None:
        """Go through all stages, with the other ranks; the training goes on whatever happens."""
        trial = self._calls()
        if trial is None:
            return
        self._request = request = trial.watch.request
        if self._process_ends.is_set() or not _end_with_process():
            self.say_nothing_saved()
            return
        trial.on_outcome, trial.share, tag = self._note, self._settings.share, trial.tag
        module, call_ns = trial.watch.module, trial.call_ns
        del trial
        _under_way.add(self)
        try:
            request.call_ns = call_ns if lasts_alike(module) else 0
            request.trains, request.training_peaks_bytes = True, peaks_bytes(request)
            with jaxlink.ours():
                session = join_beside(request, self._settings, f"search {tag}", self._over)
                self._session = session
                self._search(replace(session, between_steps=self._held, on_calls=self, over=self._ended))
        except Exception as error:  # no failure of ours may stop the training
            told = self._ended() or (is_shared(error) and request.backend.process_index() != 0)
            LOGGER.log(
                logging.DEBUG if told else logging.WARNING,
                "the search for %s has ended, and the training goes on: %s", request.module_name, one_line(error),
                exc_info=True,
            )  # fmt: skip
            if (trial := self._calls()) is not None:
                trial.give_up(one_line(error))
            if self._gone():
                self.say_nothing_saved()
        finally:
            MEMORY.clear()
            _under_way.discard(self)

    def end(self) -> None:
        """At the end of the process: what is known is saved, and nothing goes on."""
        self._process_ends.set()
        self._ends = self._stop.wanted = True
        join_uninterrupted(self._thread, _END_S)

    @property
    def _earlier(self) -> str:
        """What would search the step before its first call."""
        return before_first_step(self._request.module_name, len(self._request.devices))

    def say_nothing_saved(self) -> None:
        """One line on rank 0, where none has said what was saved."""
        if not self._saved and self._request.backend.process_index() == 0:
            self._saved = True
            LOGGER.info(
                "%s: no plan is saved, what was measured is kept in %s; %s",
                _ENDED.format(self._request.module_name), shown(self._settings.directory),
                _NEXT.format(self._earlier),
            )  # fmt: skip

    def _search(self, session: Session) -> None:
        session.say(
            "%s is the training step by its calls; it goes on while a plan is searched",
            self._request.module_name,
        )
        session = with_room_to_compile(session)
        with session.stage("step"):
            step = called_step(self._request, self._settings)
            self._refuse(step)
            fit_inputs(self._request, step.source)
        slot = session.slot(step.source.graph.key)
        with only_search(session, slot), contextlib.ExitStack() as stack:
            code = stack.enter_context(code_compiled_beside(session, step.module, self._stop.__bool__))
            profile, profile_s = self._profile(session, step, slot)
            self._get_memory(session)  # before structures are compiled, where nothing was for a profile
            queues = BACKENDS[session.facts.backend].queues
            with self._held("room") if queues else contextlib.nullcontext():
                room = limited_bytes(self._settings, room_bytes(session), step.source.graph)
            found = None
            making = Making(session, step.source)
            stack.callback(making.end)
            with session.stage("search", takes_s=longest_s(self._settings)):
                if profile is not None:
                    code()
                    found = search_apart(
                        self._settings, step.module, profile, room, self._stop, with_parts=True
                    )
            trials = trials_of(session, None if found is None else found.candidates, slot)
            started = time.monotonic()
            failed = True
            try:
                trials += self._structures(session, step, slot, found, profile, room, making)
                started = time.monotonic()
                self._try(session, step, trials)
                failed = False
            finally:
                if found is not None and profile is not None and (self._ended() or not failed):
                    took_s = time.monotonic() - started
                    outcome = Outcome(session, step, slot, found, profile, trials, profile_s, took_s)
                    self._save(outcome, failed)

    def _get_memory(self, session: Session) -> contextlib.AbstractContextManager[None]:
        """Get memory of the host, once, for what is kept there while runs take a call's arguments: before the search
        compiles anything. What comes back does nothing around compiles (``beside`` of :func:`profile_step`)."""
        if not self._asked_memory:
            self._asked_memory = True
            self._wait_for_memory(session)
        return contextlib.nullcontext()

    def _wait_for_memory(self, session: Session) -> None:
        default, room = self._request.call_default(), room_bytes(session, on_host=True)
        devices = self._request.local_devices
        if room is None:
            return
        if share_memory(self._request):
            asked = sum(math.prod(one.shape) * one.dtype.itemsize for one in parameters(default))
            # What runs has no other memory, and without real inputs needs no copy.
            room -= memory(default).total_bytes
        else:
            self._passes = passes_on_host(default, room)
            asked = needed_on_host_bytes(default, self._passes)
        if asked > room:
            return

        def work() -> None:
            began = time.monotonic()
            try:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
                ready = MEMORY.get_ready(asked * len(devices), copies_of(devices[0]), self._over)
                self._ready_bytes = ready // len(devices)
                took_s = time.monotonic() - began
                LOGGER.debug(
                    "%d of %d MiB of the host: %.2f s", ready >> 20, asked * len(devices) >> 20, took_s
                )
            except Exception as error:
                LOGGER.debug("no memory of the host is made ready: %s", one_line(error))

        thread = threading.Thread(target=work, name="disco-memory", daemon=True)
        thread.start()
        thread.join()

    def _refuse(self, step: Step) -> None:
        """Refuse what cannot be tried, before it has cost anything."""
        name = self._request.module_name
        refuse_callbacks(step.module, name)
        if reason := switched_on(self._request):
            raise UnsupportedError(reason)
        try:
            refuse_other_threads(self._request, self._trains)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{error}; {self._earlier} searches it before such threads begin"
            ) from None
        if step.source.module.input_output_alias.entries and not jaxlink.keeps_donation():
            raise UnsupportedError(
                f"this jax loses buffer donation in a rewritten step, so no other one can take a call of {name} over; "
                f"{self._earlier} searches it, and so does jax 0.11"
            )

    def _profile(
        self,
        session: Session,
        step: Step,
        slot: PlanSlot,
    ) -> tuple[Profile | None, float]:
        """The step's profile, on rank 0, and how long it took."""
        xla, started = read(step.source), time.monotonic()
        with peak_told(self._request, "profile"), measured_times(session) as store:
            ready = functools.partial(self._get_memory, session)
            profiled = profile_step(session, step.source, xla, store, slot, beside=ready)
        self._say_held("profiling")
        return None if profiled is None else profiled.profile, time.monotonic() - started

    def _structures(
        self,
        session: Session,
        step: Step,
        slot: PlanSlot,
        found: FoundPlans | None,
        profile: Profile | None,
        room: int | None,
        making: Making,
    ) -> list[Trial]:
        """Candidates of another structure, each searched in a process of its own."""
        settings = self._settings
        overlaps = BACKENDS[session.facts.backend].asynchronous
        if not overlaps and settings.forced_structure is None and not gains_alone(step.source):
            return []
        unchanged: Optimized | None = None
        with session.stage("the step as it is"):
            if found is not None and profile is not None:
                source, xla = step.source, read(step.source)
                costs = costs_of(profile, source, (xla, found.best.strategy))
                unchanged = found.of(Case(source, xla, costs, room))

        search = functools.partial(search_structure_apart, settings, self._stop)
        with peak_told(self._request, "structures"), measured_times(session) as store:
            trials = StructureSearch(session, slot, store, unchanged, making, search).trials()
        self._say_held("profiling structures")
        return sorted(trials, key=lambda one: one.predicted_ns)

    def _try(self, session: Session, step: Step, trials: Sequence[Trial]) -> None:
        """Compile the likeliest winners, compare them with XLA's default, and let them run calls until one has won."""
        tried = likely_winners(trials, self._settings.forced_structure)
        with peak_told(self._request, "candidates"):
            compile_trials(session, step.source, tried, tag="candidates")
        exchange(session)
        trials[0].executable = self._request.call_default()
        at_once = compiles_at_once(session)
        if not share_memory(self._request):
            what = "compiling the comparison"
            with session.stage(what), peak_told(self._request, what):
                compile_comparison(self._request.local_devices, trials[0].executable, at_once)
        with peak_told(self._request, "comparing"):
            self._compare(session, trials[0], tried)
        self._say_held("comparing")
        self._offer([one for one in tried if one.compared])
        for one in (trials[0], *tried):
            one.executable = one.finer = None
            if one.error:
                session.say("%s is not tried: %s", one.name, one.error)
        with peak_told(self._request, "trials"):
            while not self._settled.wait(_LOOK_S):
                if self._over() and not self._settled.is_set():  # which comes before the calls are given back
                    raise ActivationError("no candidate has won so far")

    def _compare(self, session: Session, default: Trial, tried: Sequence[Trial]) -> None:
        """Compare candidates with XLA's default, on the arguments of a call, where the hosts have room for a copy of
        them: each run holds a call. Else all of it holds one."""
        for one in tried:
            one.error = one.error or beyond_setting(session, one.name, one.executable)
        run = default.executable
        loan = Loan.of(run, [run])
        on_host = needed_on_host_bytes(run, 1), needed_on_host_bytes(run, self._passes)
        with self._held("comparing"):
            inputs, taken = self._inputs(session, default, tried, loan, on_host)
            alive = [one for one in tried if not one.error]
            if alive and inputs is None:
                compare_with_default(session, default, alive)
        if alive and inputs is not None:
            each = replace(session, between_steps=self._held_by_all)
            hold = functools.partial(self._giving_way, inputs, taken)
            held = HeldPasses(hold, self._passes, loan.taken_bytes) if taken else None
            compare_with_default(each, default, alive, inputs, held)
        # What ends a hold counts as an error of the candidate that was to run in it.
        if anywhere(session, self._ended(), "interrupted"):
            raise ActivationError("it was interrupted")

    def _inputs(
        self,
        session: Session,
        default: Trial,
        tried: Sequence[Trial],
        loan: Loan,
        kept_bytes: tuple[int, int],
    ) -> tuple[RealInputs | None, frozenset[int]]:
        """A copy of the arguments of the call that is held, None where that has no room; and which of a call's must
        leave the devices for a run, where none is copied yet. Candidates without room are told so.

        Args:
            kept_bytes: what is kept on the host for each device, and what is kept where runs take a call's arguments.
        """
        arguments = self._arguments()
        with session.stage("room for real inputs"):
            run_bytes = memory(default.executable).total_bytes
            beside = may_rise_bytes(self._request)
        gives_way = anywhere(session, beside is not None and run_bytes > beside, "gives way")
        taken = loan.taken if gives_way else frozenset[int]()
        on_host = kept_bytes[bool(taken)] + (run_bytes if beside is None else 0)
        more = max(0, on_host - self._ready_bytes)
        inputs = real_inputs(session, loan.parameters, arguments, more, self._stop.__bool__)
        if inputs is None:
            taken = frozenset()
            session.say(
                "candidates are compared on made-up inputs: the host has no room for the step's own (%d MiB a device), "
                "or no call was held",
                on_host >> 20,
            )
        gives_back = loan.taken_bytes if taken else 0
        # What a plan needs it needs in every call, too: that is held against what is free, as before a first step.
        free = replace(session, on_calls=None)
        for one in (default, *tried):
            one.error = one.error or lack_of_memory(
                free, one.name, one.executable, given_back_bytes=gives_back
            )
        if default.error:
            raise UnsupportedError(f"there is no room to compare candidates: {default.error}")
        if inputs is not None and not taken:
            with session.stage("a copy of the step's inputs"):
                inputs.take(arguments)
        return inputs, taken

    @contextlib.contextmanager
    def _held_by_all(self, what: str) -> Iterator[Hold]:
        """Hold a call for the body, which begins once all ranks hold theirs."""
        with self._held(what) as hold:
            with self._session.stage("a call is held", logged=False):
                if self._calls() is None:
                    raise ActivationError("the step is not called any more")
            yield hold

    @contextlib.contextmanager
    def _giving_way(self, inputs: RealInputs, taken: Collection[int]) -> Iterator[None]:
        """Hold a call for the body, in which the ``inputs`` are its arguments; what it takes over, ``taken``, leaves
        the devices for so long."""
        with self._held_by_all("comparing") as hold, contextlib.ExitStack() as stack:
            hold.outlasts = True
            with self._session.stage("a copy of the step's inputs"):
                stack.enter_context(inputs.taken_from(self._arguments(), taken))
            yield

    def _offer(self, alive: Sequence[Trial]) -> None:
        self._tried = bool(alive)
        trial = self._calls()
        if trial is not None:
            trial.asked_for = self._settings.forced_structure or ""
            for one in alive:
                mark = functools.partial(marked, self._session, one, "run")
                trial.offer(one.name, one.executable, one.predicted_ns, mark)
            trial.complete()

    def _note(self, winner: str, rounds: list[Round]) -> None:
        """In the call from which on the winner runs all."""
        self._winner, self._rounds = winner, rounds
        self._settled.set()

    def _save(self, outcome: Outcome, failed: bool) -> None:
        """Save the plan with the times of real calls; the search's best where none was settled, or XLA's default only
        because the search, on whichever rank, had ``failed`` before any candidate ran."""
        self._saved = True
        if not self._settled.is_set() or ((self._tried or failed) and not self._rounds):
            if self._gone():
                why = _ENDED.format(self._request.module_name)
                save_interrupted(outcome, why, _NEXT.format(self._earlier))
            else:
                save_interrupted(outcome)
            return
        for one in outcome.trials:
            counted = [
                r for r in self._rounds if one.name in r and (one.name != DEFAULT or self._winner in r)
            ]
            one.times_ns[:] = [r[one.name] for r in counted]
        save(outcome, next(one for one in outcome.trials if one.name == self._winner))

    def _gone(self) -> bool:
        """Whether the process ends, or has dropped the step."""
        return self._ends or self._calls() is None

    def _over(self) -> bool:
        """Whether the step is not called any more, or the process ends."""
        trial = self._calls()
        return self._ends or trial is None or trial.is_over

    def _ended(self) -> bool:
        """Whether it was ended from outside."""
        return self._over() or bool(self._stop)

    def _arguments(self) -> list[Any]:
        """Those of the call that is held; none where no call comes any more."""
        trial = self._calls()
        return [] if trial is None else trial.watch.arguments

    @contextlib.contextmanager
    def _held(self, what: str) -> Iterator[Hold]:
        """Hold the training on all ranks for the body, which has the devices to itself; or go on with a hold that is
        under way."""
        if self._hold is not None:
            yield self._hold
            return
        hold = Hold(what, self._stop.watched)
        try:
            with self._asked_for(hold), hold.held(self._over):
                self._hold, started = hold, time.monotonic()
                yield hold
            self._held_s.append(time.monotonic() - started)
        finally:
            self._hold = None
            interrupted = anywhere(self._session, bool(self._stop), "interrupted")
        if interrupted:
            raise ActivationError("it was interrupted")

    @contextlib.contextmanager
    def _asked_for(self, hold: Hold) -> Iterator[None]:
        """For the time of the body, calls are told of ``hold``."""
        if jaxlink.profiler_runs():
            self._session.say("the search waits for the end of the script's own profiler trace")
        self._tell_calls(hold)
        try:
            yield
        finally:
            self._tell_calls(None)

    def _tell_calls(self, hold: Hold | None) -> None:
        if (trial := self._calls()) is not None:
            trial.hold = hold

    @contextlib.contextmanager
    def lend(self, loan: Loan) -> Iterator[LentInputs]:
        """As of :class:`~disco_hlo.plugin.session.OnCalls`."""
        with self._held("profiling") as hold:
            hold.outlasts = True
            session = replace(self._session, on_calls=self)  # so that no more than MAY_RISE counts as room
            with lent(session, loan, self._arguments(), self._ready_bytes) as inputs:
                yield inputs

    def trace(self, calls: int) -> tuple[bytes, list[int], int]:
        """As of :class:`~disco_hlo.plugin.session.OnCalls`."""
        traced = TracedCalls("profiling", calls, lambda: self._call_ns() > 0)
        if (trial := self._calls()) is not None:
            trial.time_anew()
        del trial
        with self._asked_for(traced):
            traced.taken(self._over)
        self._held_s.append(traced.held_s)
        if not traced.trace:
            raise ProfileError(f"calls are not traced: {traced.error}")
        return traced.trace, traced.device_ns, self._call_ns()

    def _call_ns(self) -> int:
        trial = self._calls()
        return 0 if trial is None else trial.call_ns

    def _say_held(self, what: str) -> None:
        """One line about the holds since the last one."""
        if held_s := self._held_s:
            self._session.say(
                "the training was held for %.1f s, in %s of up to %.0f ms: %s",
                sum(held_s), counted(len(held_s), "piece"), 1e3 * max(held_s), what,
            )  # fmt: skip
        self._held_s = []


@functools.cache
def _end_with_process() -> bool:
    """Have searches end before Python waits for the workers of their executors, which may wait for a call themselves;
    and once more after that, where :mod:`atexit` has its turn, as a worker may have been compiling. False where the
    process ends already."""

    def end() -> None:
        for search in list(_under_way):
            search.end()

    def end_late(process: int) -> None:
        if os.getpid() != process:  # a fork of the training
            return
        end()
        for search in list(_under_way):
            search.say_nothing_saved()

    try:  # the last one to be registered is the first to be called
        getattr(threading, "_register_atexit", atexit.register)(end)
    except RuntimeError:
        return False
    atexit.register(end_late, os.getpid())
    return True
