"""One training step in our hands: the compile request, the ranks that share it, who speaks for them, and Ctrl-C.

In a job of several processes every rank goes through the same stages in lockstep. A stage that fails on one rank fails
on all of them, with one message that says where, so that no rank waits for another that has given up.

The first Ctrl-C, on whichever rank, ends on all of them what is profiled, searched and measured
(:class:`Interruption`). A user's Ctrl-C in a terminal reaches every rank, a ``kill -INT`` or a scheduler's signal one.
Rank 0 searches, and tells the others at the next place where they meet whether to go on (:meth:`Session.tell`). So
another rank that is interrupted leaves a note in the job's key-value store, for which rank 0 looks now and then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import UnsetType

from disco_hlo import __version__
from disco_hlo.activation.agree import settle
from disco_hlo.activation.channel import (
    Channel,
    CoordinationStore,
    Gone,
    LocalChannel,
    key_part,
    name_ranks,
    nobody_gone,
)
from disco_hlo.activation.choose import open_channel
from disco_hlo.activation.kvstore import KvChannel, Pulse
from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ActivationError, shared
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Target
from disco_hlo.plan.store import PlanSlot, PlanStore
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.job import DeviceFacts, device_facts

_channels: dict[tuple[int, tuple[int, ...]], tuple[Channel, Pulse | None]] = {}
"""By the job and the processes that take part. A channel belongs to its job's coordinator, and ends with it."""


Alone = Callable[[str], contextlib.AbstractContextManager[object]]
_TOLD_AFTER_S = 20.0
"""A user who waits for another rank is told."""
_LOOK_S = 0.5
"""Between two looks for notes."""


class OnCalls(Protocol):
    """What a training that goes on lends a search."""

    def lend(self, loan: Any) -> contextlib.AbstractContextManager[Any]:
        """Hold a call for the body, which runs on its arguments (:func:`disco_hlo.plugin.measuring.lending.lent`).
        Raises UnsupportedError: there is no room; ActivationError: no call comes; on all ranks alike."""

    def trace(self, calls: int) -> tuple[bytes, list[int], int]:
        """A profiler trace of so many calls, what each took the devices in it, and what one takes outside of it, ns.
        Raises ProfileError: there is none on this rank."""


@dataclass(frozen=True)
class Session:
    """What every stage of a phase needs."""

    request: CompileRequest
    settings: Settings
    facts: DeviceFacts
    channel: Channel
    between_steps: Alone | None = None
    """Where a training goes on: has the devices on all ranks for what a body does, between two of its steps. None: the
    devices are ours all the time."""
    on_calls: OnCalls | None = None
    """And its calls."""
    over: Gone = nobody_gone
    """Whether that training, this process or the search is ended from outside."""
    compiles_at_once: int = 16
    """The most modules that are compiled at once."""
    compiles_between_steps: bool = False
    """Whether they may take memory that the devices lack beside a step of the training that goes on."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which searches, saves and speaks."""
        return self.channel.rank == 0

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for the others."""
        return self.settings.timeout_s

    def alone(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Around whatever runs something over all devices; entered by all ranks at once.

        Args:
            what: it is, in words; the same on all ranks.
        """
        return contextlib.nullcontext() if self.between_steps is None else self.between_steps(what)

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Around compiles of as many modules as may be compiled at once, on all ranks, ``what`` in words: while these
        hold a call, where they must. All go on at once, as a rank that did so earlier would wait for the others in a
        collective."""
        if not self.compiles_between_steps:
            yield
            return
        with self.alone(f"compiling: {what}"), self.stage(f"{what}, compiled while a call is held"):
            yield

    def slot(self, key: str) -> PlanSlot:
        """Where the plan of the step with this key lies for a job like this one."""
        facts = self.facts
        return PlanStore(self.settings.directory).slot(
            key, facts.backend, facts.device_kind, facts.device_count, facts.process_count
        )

    def say(self, message: str, *values: object) -> None:
        """One line for the user, from rank 0 alone."""
        LOGGER.log(20 if self.leads else 10, message, *values)

    def say_failed(self, message: str, *values: object) -> None:
        """One line on what could not be done, from rank 0 alone; for the finest level where the end of a training is
        why."""
        LOGGER.log(20 if self.leads and not self.over() else 10, message, *values)

    @contextlib.contextmanager
    def stage(self, name: str, *, takes_s: float = 0.0, logged: bool = True) -> Iterator[None]:
        """Do the body on every rank; if any rank fails, all do.

        Args:
            takes_s: how long the body may keep rank 0 while the others wait, beyond the timeout.
            logged: whether the log's finest level says how long it took.

        Raises:
            ActivationError: another rank failed; names it and its reason. This rank's own error
                passes through.
        """
        failure: BaseException | None = None
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            failure = error
        if logged:
            LOGGER.debug("%s: %.2f s", name, time.monotonic() - started)
        reason = "" if failure is None else (one_line(failure) or type(failure).__name__)
        # Rank 0 has no reason to wait longer: those that have waited for it are there, or are gone.
        patience_s = self.timeout_s + (0.0 if self.leads else takes_s)
        try:
            verdict = settle(self.channel, reason, patience_s, tag=name)
            if failure is not None:
                raise shared(failure)
        finally:
            failure = None  # whose traceback has this frame: in a circle it would keep arrays on the devices
        if verdict:
            raise shared(ActivationError(verdict))

    def tell(self, value: Any, tag: str) -> Any:
        """Rank 0's JSON value, on every rank."""
        payload = json.dumps(value).encode() if self.leads else None
        return json.loads(self.channel.broadcast(payload, tag=tag, timeout_s=self.timeout_s))

    def gathered(self, value: Any, tag: str) -> list[Any]:
        """Every rank's JSON value, on every rank. Raises ActivationError: ranks were silent."""
        payload = json.dumps(value).encode()
        answers = self.channel.all_gather(payload, tag=tag, timeout_s=self.timeout_s)
        return [json.loads(answer) for answer in answers]


def join(request: CompileRequest, settings: Settings) -> Session:
    """Join the ranks that compile this module.

    Raises:
        ActivationError: the module runs on a part of the job's processes, ranks are missing, or they
            are set to do different things.
    """
    facts = device_facts(request)
    processes = request.process_indices
    if len(processes) > 1 and processes != tuple(range(len(processes))):
        raise ActivationError(f"{request.module_name} runs on processes {processes} of the job only")
    with _told_if_long(request, settings):
        channel = _channel(processes, facts.process_index, settings)
        request.wait = channel.wait if isinstance(channel, KvChannel) else None
        session = Session(request, settings, facts, channel)
        _check_alike(session)
    return session


def join_beside(request: CompileRequest, settings: Settings, tag: str, gone: Gone) -> Session:
    """Join the ranks in another thread than the one that trains, which has the job's own channel to itself.

    Args:
        tag: tells this search from others of the job.
        gone: whether the training or this process ends, so that nobody waits any more.
    """
    facts, size = device_facts(request), len(request.process_indices)
    job = jaxlink.distributed_job()
    if size == 1 or job is None:
        return Session(request, settings, facts, LocalChannel())
    store = CoordinationStore(job.client)
    channel = KvChannel(facts.process_index, size, f"{job.address} {tag}", store, gone)
    request.wait = channel.wait
    return Session(request, settings, facts, channel)


def _channel(processes: tuple[int, ...], process_index: int, settings: Settings) -> Channel:
    """The channel between these processes in the job that this one is in now."""
    job = jaxlink.distributed_job()
    number = 0 if job is None else job.number
    for ended in [one for one in _channels if one[0] != number]:
        del _channels[ended]
    if (number, processes) not in _channels:
        store = None if job is None else CoordinationStore(job.client)
        pulse = None
        if job is not None and store is not None and len(processes) > 1:
            pulse = Pulse(process_index, len(processes), job.address, store)
        opened = open_channel(
            rank=process_index if len(processes) > 1 else 0,
            size=len(processes),
            job_id="" if job is None else job.address,
            store=store,
            environ=os.environ,
            preference="" if settings.channel == "auto" else settings.channel,
            timeout_s=settings.timeout_s,
            gone=nobody_gone if pulse is None else pulse,
        )
        _channels[number, processes] = opened, pulse
    channel, pulse = _channels[number, processes]
    if pulse is not None:
        pulse.start()
    return channel


def leave() -> None:
    """At the end of a phase: the others may hear nothing of this rank until its next one."""
    for _, pulse in _channels.values():
        if pulse is not None:
            pulse.stop()


def _check_alike(session: Session) -> None:
    """Ranks in different phases would wait for each other, and other seeds lead into other branches."""
    settings = session.settings
    mine = {
        "disco-hlo": __version__, "ENABLE_SEARCH": int(settings.search), "DISCO_SEED": settings.seed,
        "DISCO_STRUCTURE": settings.structure, "DISCO_WHEN": settings.when,
        "DISCO_EXPLAIN": settings.explain,
    }  # fmt: skip
    theirs = session.gathered(mine, "join")
    for what in mine:
        _refuse_difference(what, [str(one.get(what)) for one in theirs])


@contextlib.contextmanager
def _told_if_long(request: CompileRequest, settings: Settings) -> Iterator[None]:
    """A rank without the switch does not come, and does not say so."""
    waits = threading.Timer(
        _TOLD_AFTER_S, LOGGER.warning,
        ("waiting for up to %.0f s (DISCO_TIMEOUT_S) for all ranks to compile %s: is ENABLE_SEARCH set on each?",
         settings.timeout_s, request.module_name),
    )  # fmt: skip
    waits.daemon = True
    if len(request.process_indices) > 1:
        waits.start()
    try:
        yield
    finally:
        waits.cancel()


def _refuse_difference(what: str, values: list[str]) -> None:
    if len(set(values)) == 1:
        return
    ranks = {value: [r for r, theirs in enumerate(values) if theirs == value] for value in values}
    listed = "; ".join(f"{name_ranks(theirs)}: {value}" for value, theirs in ranks.items())
    raise shared(ActivationError(f"the ranks differ in {what} ({listed})"))


def interruption(session: Session, fingerprint: str) -> Interruption:
    """Ctrl-C while the ranks search for the step with this fingerprint, which they do once."""
    job = jaxlink.distributed_job()
    if job is None or session.channel.size == 1:
        return Interruption()
    directory = f"disco/{key_part(job.address)}/interrupted/{fingerprint}"
    notes = Notes(CoordinationStore(job.client), directory, session.channel.rank)
    return Interruption(notes, leads=session.leads)


def target(graph: Graph, facts: DeviceFacts) -> Target:
    """What a plan or capture of this step is for."""
    return Target(
        key=graph.key,
        fingerprint=graph.fingerprint,
        module_name=graph.module_name,
        backend=facts.backend,
        device_kind=facts.device_kind,
        device_count=facts.device_count,
        process_count=facts.process_count,
    )


def launch_options(session: Session, singly: bool | UnsetType) -> Mapping[str, str]:
    """With which a plan's module is compiled: ``singly`` is ``launched_singly`` of a plan or a trial."""
    return BACKENDS[session.facts.backend].singly_options if singly is True else {}


def versions(facts: DeviceFacts) -> dict[str, str]:
    """Software that a plan or profile was made with."""
    found = {"disco_hlo": __version__, "jax": facts.jax_version, "jaxlib": facts.jaxlib_version}
    if BACKENDS[facts.backend].names_devices:
        found["runtime"] = facts.runtime_version
    return found


def warn_of_lost_donation(session: Session, step: Step) -> None:
    """Say once, where a step that donates is rewritten under a jax that then forgets it."""
    donates = bool(step.source.module.input_output_alias.entries)
    if session.leads and donates and not step.again and not jaxlink.keeps_donation():
        LOGGER.warning(
            "jax %s loses buffer donation in a rewritten step: it needs more memory; jax 0.11 keeps it",
            session.facts.jax_version,
        )


@dataclass(frozen=True)
class Notes:
    """That a rank was interrupted, in the job's key-value store."""

    store: CoordinationStore
    directory: str
    rank: int

    def leave(self) -> None:
        """Say that this rank was interrupted.

        Raises:
            ActivationError: nobody takes the note.
        """
        self.store.put(f"{self.directory}/{self.rank}", b"1")

    def found(self) -> bool:
        """Whether any rank has said so; raises as :meth:`leave`."""
        return bool(self.store.names(self.directory))


class Interruption:
    """The first Ctrl-C asks what runs to end early, the second ends the program.

    Args:
        leads: this is rank 0, which asks for notes; the others leave them.
        notes: None in a job of one process.
    """

    def __init__(self, notes: Notes | None = None, *, leads: bool = True) -> None:
        self.wanted = False
        self._notes = notes
        self._leads = leads
        self._next_look_s = 0.0

    def __bool__(self) -> bool:
        if (
            not self.wanted
            and self._leads
            and self._notes is not None
            and time.monotonic() >= self._next_look_s
        ):
            with contextlib.suppress(ActivationError):  # in the end the ranks meet, and somebody says why not
                self.wanted = self._notes.found()
            self._next_look_s = time.monotonic() + _LOOK_S
        return self.wanted

    @contextlib.contextmanager
    def watched(self) -> Iterator[Interruption]:
        """Take Ctrl-C over for the time of the body. Only the main thread can, and only from Python: where a program
        that embeds Python has a handler of its own (None), nobody here could give it back. Else nothing changes."""
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or previous is None:
            yield self
            return

        def note(_number: int, _frame: types.FrameType | None) -> None:
            self.wanted = True
            signal.signal(signal.SIGINT, previous)
            # Not here: the main thread may be in the midst of a line, and the store in a process that is gone.
            threading.Thread(target=self._tell, name="disco-interrupted", daemon=True).start()

        signal.signal(signal.SIGINT, note)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, previous)

    def _tell(self) -> None:
        LOGGER.info("interrupted: the search is ended; another Ctrl-C ends the program")
        try:
            if self._notes is not None and not self._leads:
                self._notes.leave()
        except ActivationError as error:
            LOGGER.warning("rank 0 cannot be told of the interruption: %s", one_line(error))
