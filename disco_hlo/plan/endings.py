"""Notes how this process ends, in files that were opened before: by which fatal signal, or told to by which other one.

A handler in machine code does it (``ending_code.py``), since nothing of Python may run in a process that crashes. It
writes two digits at a known place of each watched file and hands the signal on to whoever had it before:
``faulthandler``, the user's own handler, the default action. It says nothing in a forked child.

Where there is no such handler (another system than Linux on x86-64 or ARM, a llvmlite that cannot make it) nothing is
noted, and :func:`watched` does nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from disco_hlo.plan.ending_code import ACTION_BYTES, MOST_FILES, MOST_THREADS, Action, State, machine_code

FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""What a process does to itself: a crash of machine code, or an abort on an error that is not to be survived."""
TOLD = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
"""By what a user, a launcher or a scheduler ends a process, or warns it of its end."""

_SA_SIGINFO, _SA_ONSTACK, _SA_RESTART, _SA_RESETHAND = 4, 0x08000000, 0x10000000, 0x80000000
_IGNORE = 1
_CANNOT = (ImportError, OSError, AttributeError, RuntimeError)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Places:
    """At which bytes of a file is noted what; two digits each, one for ``ours``."""

    fatal: int
    told: int
    ours: int
    """Whether the fatal signal came in a thread of Python's or of a pool of XLA's (named ``tf_...``): 1 or 0."""


class _Handlers:
    """The two handlers, and which files they write into."""

    def __init__(self, places: Places) -> None:
        """Make them; raises as :func:`machine_code`."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._state = state = State()
        state.places[:] = (places.fatal, places.told, places.ours)
        state.files[:] = [-1] * MOST_FILES
        # Raw, since a field of characters is cut at the first zero when it is read, not when it is written.
        state.digits = b"".join(b"%02d" % number for number in range(65))
        self._lock = threading.Lock()
        self._engine, (fatal, told) = machine_code(state)
        self._handlers = {**dict.fromkeys(FATAL, fatal), **dict.fromkeys(TOLD, told)}

    def told(self) -> int:
        """What this process was told while it was watched, and lives on; a warning may have been no more than that."""
        number = int(self._state.told) if self._state.process == os.getpid() else 0
        return 0 if number in (signal.SIGUSR1, signal.SIGUSR2) else number

    @contextlib.contextmanager
    def watching(self, file: int) -> Iterator[None]:
        """Note the end of the process in ``file`` as long as the body runs; not where too many are watched."""
        state = self._state
        with self._lock:
            if state.process != os.getpid():  # what a forked child has of its parent's is not its own
                state.files[:] = [-1] * MOST_FILES
            slot = next((i for i, one in enumerate(state.files) if one < 0), None)
            if slot is not None:
                self._begin(slot, file)
        try:
            yield
        finally:
            if slot is not None:
                with self._lock:
                    state.files[slot] = -1
                    if all(one < 0 for one in state.files):
                        self._restore()

    def _begin(self, slot: int, file: int) -> None:
        state = self._state
        first = all(one < 0 for one in state.files)
        state.process = os.getpid()
        known = [thread.ident or 0 for thread in threading.enumerate()][:MOST_THREADS]
        state.threads[: len(known)] = known
        state.threads[len(known) :] = [0] * (MOST_THREADS - len(known))
        state.files[slot] = file
        if first:
            for number, handler in self._handlers.items():
                self._install(number, handler)

    def _install(self, number: int, handler: int) -> None:
        current = self._action(number)
        if current is None or current.handler == handler:  # who had noted it as the former one put it back
            return
        if number in TOLD and current.handler == _IGNORE:
            return
        ctypes.pointer(self._state.previous[number])[0] = current
        self._state.entered[number] = 0
        mine = Action()
        ctypes.pointer(mine)[0] = current
        mine.handler = handler
        flags = current.flags if current.handler else _SA_RESTART
        mine.flags = (flags | _SA_SIGINFO | _SA_ONSTACK) & ~_SA_RESETHAND
        self._libc.sigaction(number, ctypes.byref(mine), None)

    def _restore(self) -> None:
        """Give back what is still ours. What somebody has set meanwhile stays, and may hand on to us: so do we."""
        for number, handler in self._handlers.items():
            current = self._action(number)
            if current is not None and current.handler == handler:
                self._libc.sigaction(number, ctypes.byref(self._state.previous[number]), None)

    def _action(self, number: int) -> Action | None:
        found = Action()
        return found if self._libc.sigaction(number, None, ctypes.byref(found)) == 0 else None


@functools.cache
def _handlers(places: Places) -> _Handlers | None:
    """Made once a process, and kept as long as it lives: whoever was told of them may call them."""
    known = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    if not known or ctypes.sizeof(Action) != ACTION_BYTES:
        return None
    try:
        return _Handlers(places)
    except _CANNOT as error:  # no plan and no training depends on it
        log.debug("how this process ends is not noted: %s: %s", type(error).__name__, error)
        return None


_making = threading.Lock()


def watched(file: int, places: Places) -> contextlib.AbstractContextManager[None]:
    """Note in the open file how the process ends while the body runs, at these places of it.

    Args:
        file: a descriptor that can be written to.
        places: the same in every call of a process.
    """
    handlers = _made(places)
    return contextlib.nullcontext() if handlers is None else handlers.watching(file)


def told(places: Places) -> int:
    """By which signal this process was told to end in an earlier :func:`watched`, and has not ended; 0 for none."""
    handlers = _made(places)
    return 0 if handlers is None else handlers.told()


def _made(places: Places) -> _Handlers | None:
    with _making:
        return _handlers(places)
