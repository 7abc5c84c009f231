"""The calls of one loaded executable: counted, timed, and each run by what a rule says.

What a call returns is the training's, whichever executable computed it. So all of them compute the same step, take the
same arguments and hand the same storage on; :meth:`Watch.offer` refuses others. Whether they compute the same numbers
is for whoever made them to show.

How long the devices took for a call is found without making the training wait. Every execution has a token that is
ready when it has ended on all local devices; a thread waits for them in the order of dispatch (:class:`DeviceTimes`).
The devices run one execution after the other: one that was dispatched while another ran has the time since that ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

from disco_hlo.backends import backend_of
from disco_hlo.errors import UnsupportedError
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.xla import executables
from disco_hlo.plugin.xla.executables import LoadedExecutable, call_signature
from disco_hlo.plugin.xla.jaxlink import CompileRequest, LoadedModule
from disco_hlo.plugin.xla.own_programs import run_nothing

Choose = Callable[[int], str]
"""From the number of a call, counted from 0, to the name of what runs it."""

LEAST_SHARE = 0.05
"""Of the devices' time: what takes less is not worth a search."""


class UnderWay(NamedTuple):
    """A call that has not ended."""

    watch: Watch
    number: int
    name: str
    """Of what runs it."""


Report = Callable[[int | None], None]
"""Told of an execution's time on the devices in ns; None where it failed there."""
_QUEUE: object = "what the devices had in their queue"
_END_S = 5.0
"""How long the end of the process waits for executions under way."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One call that was timed."""

    index: int
    """Of the call, from 0."""
    name: str
    """Of what ran it."""
    device_ns: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one module's calls."""

    calls: int
    device_ns: int
    """Of all calls that were timed."""
    of_ns: int
    """Of the calls of all modules since this one was loaded: a step may come late, after another."""

    @property
    def share(self) -> float:
        """Of the devices' time, what its calls took."""
        return self.device_ns / self.of_ns if self.of_ns else 0.0


class FromScript(BaseException):
    """What a signal handler of the script's raised in a call that waited: the script's to see, whatever it is."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Watch:
    """The calls of one module that JAX loaded. Calls may come from several threads."""

    def __init__(self, module: LoadedModule, times: DeviceTimes) -> None:
        self._module = module
        self._times = times
        self._executables: dict[str, LoadedExecutable] = {DEFAULT: module.executable}
        self._devices = [device.id for device in module.executable.local_devices()]
        self._queues = backend_of(module.request.backend.platform).queues
        self._choosing = threading.RLock()
        self._reporting = threading.Lock()
        self._failures: dict[str, str] = {}
        self._settled: str | None = None
        self._choose: Choose | None = None
        self.calls = 0
        """How many calls began, until it was settled."""
        self.ended = 0
        """How many did until one that was told to have ended."""
        self._dispatched: tuple[UnderWay | None, int] = None, 0
        """While it is handed to the devices, which for some takes until it has ended; and the thread that does so."""
        self._before_ns = self._latest_ns = times.total_ns
        self.device_ns = 0
        """Of all calls that were timed."""
        self.timed = 0
        """How many were."""
        self.on_sample: Callable[[Sample], None] | None = None
        """Told of each, in the thread that times."""
        self.on_settled: Callable[[str, LoadedExecutable], None] | None = None
        """Told of what runs all calls from now on."""
        self.arguments: list[Any] = []
        """Of the call that waits to be told what runs it: whoever holds it may put equal ones in their place."""

    @property
    def request(self) -> CompileRequest:
        """The compile that it came from."""
        return self._module.request

    @property
    def module_name(self) -> str:
        """Of the module, for instance ``jit_train_step``."""
        return self._module.request.module_name

    @property
    def module(self) -> bytes:
        """What XLA's default runs, as :func:`~disco_hlo.plugin.xla.executables.read_executable` gives it."""
        return executables.read_executable(self._module.executable)

    @property
    def names(self) -> tuple[str, ...]:
        """Of what can run a call: XLA's default and the candidates offered."""
        return tuple(self._executables)

    @property
    def failures(self) -> Mapping[str, str]:
        """Candidates that raised an error, and which."""
        return dict(self._failures)

    @property
    def seen(self) -> Seen:
        """What its calls show so far."""
        return Seen(self.calls, self.device_ns, self._times.total_ns - self._before_ns)

    @property
    def is_forgotten(self) -> bool:
        """Whether the devices were busy for longer since its last call than with all of its calls."""
        return self._times.total_ns - self._latest_ns > self.device_ns

    @property
    def under_way(self) -> UnderWay | None:
        """The call of this module that the devices are at; None where they are at something else that is watched, or
        may be at what the script had them do before, or the script's handler of a signal runs in the call."""
        at = self._times.at
        if at is None:
            call, thread = self._dispatched
            return None if call is None or _handles_signal(thread) else call
        return at if isinstance(at, UnderWay) and at.watch is self else None

    @property
    def settled(self) -> str | None:
        """What runs all calls from now on, out of our sight; None while they are watched."""
        return self._settled

    def offer(self, name: str, executable: LoadedExecutable) -> None:
        """Let calls be run by ``executable`` under this name.

        Raises:
            UnsupportedError: it cannot be called in the place of XLA's default, the name is taken, or it is too late.
        """
        if self._settled is not None:
            raise UnsupportedError(f"{self.module_name} is not watched any more: it runs {self._settled}")
        if name in self._executables:
            raise UnsupportedError(f"{self.module_name} has {name} already")
        check_same_signature(self._module.executable, executable)
        with self._choosing:
            self._executables[name] = executable

    def drain(self) -> None:
        """Return when every call so far has ended and was timed."""
        self._times.drain()

    def drain_queue(self) -> None:
        """As :meth:`drain`, and when whatever else the script has queued for the devices has ended."""
        self._note_queue()
        self._times.drain()

    def drain_before_next(self) -> None:
        """Have the next call, of any module that is watched with this one, wait as :meth:`drain` does."""
        self._times.drains_next = True

    def beside(self, run: Callable[[threading.Event], object]) -> None:
        """Run this in a thread of its own. It ends soon after the event that it is given is set, at the end of the
        process."""
        self._times.beside(run)

    def swap(self, choose: Choose | None) -> None:
        """From the next call on ``choose`` says what runs it, asked of one at a time; None: XLA's default."""
        with self._choosing:
            self._choose = choose

    def settle(self, name: str) -> None:
        """Give the calls back to JAX: all run ``name`` from now on, as fast as if nobody had watched.

        Raises:
            KeyError: nothing of this name was offered.
        """
        with self._choosing:
            if self._settled is not None:
                return
            executable = self._executables[name]
            self._settled = name
            self._choose = None
            self._executables = {name: executable}
            self._module.settle(executable)
            if self.on_settled is not None:
                self.on_settled(name, executable)

    def execute(self, arguments: Sequence[Any]) -> tuple[Any, Any]:
        """Run one call; see :data:`disco_hlo.plugin.xla.jaxlink.Execute`."""
        self._times.drain_if_asked()
        with self._choosing:
            index, self.calls = self.calls, self.calls + 1
            self.arguments = list(arguments)
            try:
                name = self._name(index)
            finally:
                arguments, self.arguments = self.arguments, []
            executable = self._executables[name]
            default = self._executables.get(DEFAULT)
        call = (
            UnderWay(self, index, name) if len(self._executables) > 1 and self._is_seen_to_begin() else None
        )
        dispatched_ns, thread = time.perf_counter_ns(), threading.get_ident()
        try:
            self._dispatched = call, thread
            results = executables.execute(executable, arguments)
        except Exception as error:
            if of_signal_handler(error) or not self._may_run_again(name, arguments, error) or default is None:
                raise
            name, call = DEFAULT, None
            self._dispatched = call, thread
            results = executables.execute(default, arguments)
        finally:
            self._dispatched = None, thread
        token = executables.token_of(results)
        self._times.note(token, dispatched_ns, self._devices, lambda ns: self._report(index, name, ns), call)
        return results, token

    def _is_seen_to_begin(self) -> bool:
        """Whether the next call is under way only once the devices are done with programs of the script's that nobody
        watches, such as a long evaluation: a call that waits for them does not hang. Devices without a queue tell
        nobody what they wait for, so there must be nothing that is not ready."""
        return self._note_queue() if self._queues else executables.is_all_ready(self.request.backend)

    def _note_queue(self) -> bool:
        """Have it seen when devices that have a queue are done with what is in it. Whether it will be."""
        if not self._queues:
            return False
        noted_ns = time.perf_counter_ns()
        try:
            token = run_nothing(self.request.local_devices)
        except Exception as error:  # no failure of ours may stop the training
            if of_signal_handler(error):
                raise
            return False
        self._times.note(token, noted_ns, self._devices, lambda _: None, _QUEUE)
        return True

    def _name(self, index: int) -> str:
        if self._settled is not None:
            return self._settled
        if self._choose is None:
            return DEFAULT
        try:
            return self._choose(index)
        except FromScript as passed:
            raise passed.error from None
        except Exception as error:  # no failure of ours may stop the training
            LOGGER.warning("%s goes on with XLA's default: %s", self.module_name, one_line(error))
            self.settle(DEFAULT)
            if of_signal_handler(error):
                raise
            return DEFAULT

    def _may_run_again(self, name: str, arguments: Sequence[Any], error: Exception) -> bool:
        """Whether XLA's default may run a call that a candidate did not: its arguments are there, and no other process
        runs the candidate meanwhile, whose collectives would meet the default's."""
        if name == DEFAULT or name == self._settled:
            return False
        self._failures[name] = one_line(error)
        alone = len(self.request.process_indices) == 1
        return alone and not any(argument.is_deleted() for argument in arguments)

    def _report(self, index: int, name: str, device_ns: int | None) -> None:
        self.ended = index + 1
        if device_ns is None:
            if name not in (DEFAULT, self._settled):
                self._failures[name] = f"call {index} failed on the devices"
            return
        with self._reporting:
            self.device_ns += device_ns
            self.timed += 1
            self._latest_ns = self._times.total_ns
        if self.on_sample is not None:
            self.on_sample(Sample(index, name, device_ns))


@dataclass(frozen=True, slots=True)
class _Execution:
    token: Any
    dispatched_ns: int
    devices: Sequence[int]
    report: Report
    what: object


def device_ns(done_ns: int, dispatched_ns: int, ended_ns: Mapping[int, int], devices: Sequence[int]) -> int:
    """Time that an execution had on its devices.

    Args:
        done_ns: when it ended.
        dispatched_ns: when it was handed to the devices.
        ended_ns: when the last execution before it ended, by device.
        devices: that it ran on.
    """
    return done_ns - max(dispatched_ns, *(ended_ns.get(device, 0) for device in devices))


class DeviceTimes:
    """Times executions in a thread of its own, which the first one starts."""

    def __init__(self) -> None:
        self._executions: queue.Queue[_Execution | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.total_ns = 0
        """Of all executions that were timed."""
        self.drains_next = False
        """See :meth:`Watch.drain_before_next`."""
        self.at: object | None = None
        """What is waited for now."""
        self._closing = threading.Event()
        self._beside: list[threading.Thread] = []

    def drain_if_asked(self) -> None:
        """Before a call is dispatched."""
        if self.drains_next:
            self.drains_next = False
            self.drain()

    def note(
        self,
        token: Any,
        dispatched_ns: int,
        devices: Sequence[int],
        report: Report,
        what: object = None,
    ) -> None:
        """Have ``report`` told, in the other thread, how long the execution with this token took.

        Args:
            token: of the execution; nobody else waits for it.
            dispatched_ns: ``time.perf_counter_ns()`` before it was dispatched.
            devices: identities of the local devices it runs on.
            what: it is, for :attr:`at`.
        """
        if self._thread is None:
            self._start()
        self._executions.put(_Execution(token, dispatched_ns, devices, report, what))

    def drain(self) -> None:
        """Return when every execution noted so far has ended and was reported."""
        self._executions.join()

    def close(self) -> None:
        """End the thread once the executions noted so far have ended, or go on without it after 5 s."""
        self._closing.set()
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():  # in a fork of the process it is not
            atexit.unregister(self.close)
            self._executions.put(None)
            for one in (thread, *self._beside):
                join_uninterrupted(one, _END_S)

    def beside(self, run: Callable[[threading.Event], object]) -> None:
        """See :meth:`Watch.beside`."""
        thread = threading.Thread(target=run, args=(self._closing,), name="disco-beside", daemon=True)
        self._beside = [*(one for one in self._beside if one.is_alive()), thread]
        thread.start()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._closing.clear()
                thread = threading.Thread(target=self._time, name="disco-device-times", daemon=True)
                thread.start()
                # Before JAX takes its clients down: a thread must not wait inside of one then.
                atexit.register(self.close)
                self._thread = thread

    def _time(self) -> None:
        ended_ns: dict[int, int] = {}
        while (one := self._executions.get()) is not None:
            self.at = one.what
            try:
                one.token.block_until_ready()
                done_ns = time.perf_counter_ns()
                taken_ns = device_ns(done_ns, one.dispatched_ns, ended_ns, one.devices)
                if one.what is not _QUEUE:  # seen too late to tell when a call began
                    ended_ns.update(dict.fromkeys(one.devices, done_ns))
                    self.total_ns += taken_ns
            except Exception:  # the training meets the same error where it reads the results
                taken_ns = None
            one.report(taken_ns)
            self.at = None
            del one
            self._executions.task_done()
        self._executions.task_done()


def join_uninterrupted(thread: threading.Thread, longest_s: float) -> None:
    """Wait at the end of the process until ``thread`` has ended, or for so long. Another Ctrl-C, or what a handler of
    the script's raises, would leave the thread to a dying interpreter, which ends the process by SIGABRT where that
    finds it inside of XLA."""
    end_s = time.monotonic() + longest_s
    while thread.is_alive() and (left_s := end_s - time.monotonic()) > 0:
        with contextlib.suppress(BaseException):
            thread.join(left_s)


def of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the script's raised it, wherever the signal came."""
    codes = _handlers()
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _handles_signal(thread: int) -> bool:
    """Whether this thread is in a signal handler of the script's, which may take its time, and save the training."""
    frame, codes = sys._current_frames().get(thread), _handlers()
    return frame is not None and any(one.f_code in codes for one, _ in traceback.walk_stack(frame))


def _handlers() -> set[CodeType | None]:
    handlers = [_unwrapped(signal.getsignal(number)) for number in signal.valid_signals()]
    methods = [one if hasattr(one, "__code__") else getattr(one, "__call__", one) for one in handlers]  # noqa: B004
    return {getattr(one, "__code__", None) for one in methods}


def _unwrapped(handler: Any) -> Any:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return handler


def check_same_signature(default: LoadedExecutable, candidate: LoadedExecutable) -> None:
    """Refuse a candidate that takes or returns anything else than ``default``, or otherwise.

    Raises:
        UnsupportedError: shapes, shardings, layouts, memories, devices or donated storage differ; says which and how.
    """
    expected, found = call_signature(default), call_signature(candidate)
    for what in expected:
        if expected[what] != found[what]:
            raise UnsupportedError(
                f"the candidate cannot be called as the default is: expected {what} {expected[what]}, "
                f"got {found[what]}"
            )
