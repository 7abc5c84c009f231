"""Notes how this process ends, in files that were opened before: by which fatal signal, or told to by which other one.

A handler in machine code does it, written in LLVM's language and made by llvmlite, numba's compiler, since nothing of
Python may run in a process that crashes. It calls only what a signal handler may call, writes two digits at a known
place of each watched file and hands the signal on to whoever had it before: ``faulthandler``, the user's own handler,
the default action. It says nothing in a forked child.

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
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""What a process does to itself: a crash of machine code, or an abort on an error that is not to be survived."""
TOLD = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
"""By what a user, a launcher or a scheduler ends a process, or warns it of its end."""
_SA_SIGINFO, _SA_ONSTACK, _SA_RESTART, _SA_RESETHAND = 4, 0x08000000, 0x10000000, 0x80000000
_IGNORE = 1
_CANNOT = (ImportError, OSError, AttributeError, RuntimeError)
MOST_FILES = 64
MOST_THREADS = 256
ACTION_BYTES = 152
"""``struct sigaction`` of Linux: the handler, a mask of 1024 bits, flags, one more pointer."""
log = logging.getLogger(__name__)
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class Places:
    """At which bytes of a file is noted what; two digits each, one for ``ours``."""

    fatal: int
    told: int
    ours: int
    """Whether the fatal signal came in a thread of Python's or of a pool of XLA's (named ``tf_...``): 1 or 0."""


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


# The handlers and the memory that they read -----------------------------------------------------


class Action(ctypes.Structure):
    """``struct sigaction``."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_uint),
        ("restorer", ctypes.c_void_p),
    )


class State(ctypes.Structure):
    """What the handler reads; all of it is written from Python. ``_CODE`` names the fields by their offsets."""

    _fields_ = (
        ("process", ctypes.c_int32),
        ("told", ctypes.c_int32),
        ("files", ctypes.c_int32 * MOST_FILES),
        ("threads", ctypes.c_uint64 * MOST_THREADS),
        ("places", ctypes.c_int64 * 3),
        ("entered", ctypes.c_int8 * 65),
        ("digits", ctypes.c_char * (2 * 65)),
        ("previous", Action * 65),
        ("default", Action),
    )


_CODE = """
declare i32 @getpid()
declare i64 @pthread_self()
declare i32 @prctl(i32, ...)
declare i64 @pwrite(i32, ptr, i64, i64)
declare i32 @sigaction(i32, ptr, ptr)
declare i32 @raise(i32)
declare ptr @__errno_location()

define private void @write_all(ptr %what, i64 %length, i32 %place) {{
start:
  %at = getelementptr i64, ptr inttoptr (i64 {places} to ptr), i32 %place
  %offset = load volatile i64, ptr %at
  br label %next
next:
  %i = phi i32 [ 0, %start ], [ %more, %step ]
  %slot = getelementptr i32, ptr inttoptr (i64 {files} to ptr), i32 %i
  %file = load volatile i32, ptr %slot
  %open = icmp sge i32 %file, 0
  br i1 %open, label %write, label %step
write:
  %written = call i64 @pwrite(i32 %file, ptr %what, i64 %length, i64 %offset)
  br label %step
step:
  %more = add i32 %i, 1
  %end = icmp eq i32 %more, {most_files}
  br i1 %end, label %done, label %next
done:
  ret void
}}

define private ptr @digits_of(i32 %number) {{
  %twice = mul i32 %number, 2
  %at = getelementptr i8, ptr inttoptr (i64 {digits} to ptr), i32 %twice
  ret ptr %at
}}

define private i1 @is_ours() {{
start:
  %self = call i64 @pthread_self()
  br label %next
next:
  %i = phi i32 [ 0, %start ], [ %more, %step ]
  %slot = getelementptr i64, ptr inttoptr (i64 {threads} to ptr), i32 %i
  %thread = load volatile i64, ptr %slot
  %same = icmp eq i64 %thread, %self
  br i1 %same, label %yes, label %step
step:
  %more = add i32 %i, 1
  %end = icmp eq i32 %more, {most_threads}
  br i1 %end, label %by_name, label %next
by_name:
  %name = alloca [16 x i8], align 8
  store i64 0, ptr %name
  %got = call i32 (i32, ...) @prctl(i32 16, ptr %name)
  %first = load i32, ptr %name
  %three = and i32 %first, 16777215
  %pool = icmp eq i32 %three, 6252148
  ret i1 %pool
yes:
  ret i1 true
}}

define private i1 @in_this_process() {{
  %now = call i32 @getpid()
  %expected = load volatile i32, ptr inttoptr (i64 {process} to ptr)
  %same = icmp eq i32 %now, %expected
  ret i1 %same
}}

define private ptr @previous_of(i32 %number) {{
  %at = getelementptr [{action_bytes} x i8], ptr inttoptr (i64 {previous} to ptr), i32 %number
  ret ptr %at
}}

define void @on_fatal(i32 %number, ptr %info, ptr %context) {{
start:
  %errno = call ptr @__errno_location()
  %kept = load i32, ptr %errno
  %code_at = getelementptr i8, ptr %info, i32 8
  %code = load i32, ptr %code_at
  %sender_at = getelementptr i8, ptr %info, i32 16
  %sender = load i32, ptr %sender_at
  %process = call i32 @getpid()
  %raised = icmp sle i32 %code, 0
  %another = icmp ne i32 %sender, %process
  %outside = and i1 %raised, %another
  %here = call i1 @in_this_process()
  br i1 %here, label %note, label %hand_on
note:
  %text = call ptr @digits_of(i32 %number)
  br i1 %outside, label %told, label %crashed
told:
  call void @write_all(ptr %text, i64 2, i32 1)
  br label %hand_on
crashed:
  %ours = call i1 @is_ours()
  %one = zext i1 %ours to i32
  %digit = call ptr @digits_of(i32 %one)
  %units = getelementptr i8, ptr %digit, i32 1
  call void @write_all(ptr %units, i64 1, i32 2)
  call void @write_all(ptr %text, i64 2, i32 0)
  br label %hand_on
hand_on:
  %seen_at = getelementptr i8, ptr inttoptr (i64 {entered} to ptr), i32 %number
  %seen = load volatile i8, ptr %seen_at
  store volatile i8 1, ptr %seen_at
  %again = icmp ne i8 %seen, 0
  %before = call ptr @previous_of(i32 %number)
  %action = select i1 %again, ptr inttoptr (i64 {default} to ptr), ptr %before
  %set = call i32 @sigaction(i32 %number, ptr %action, ptr null)
  store i32 %kept, ptr %errno
  br i1 %raised, label %raise, label %done
raise:
  %sent = call i32 @raise(i32 %number)
  br label %done
done:
  ret void
}}

define void @on_told(i32 %number, ptr %info, ptr %context) {{
start:
  %errno = call ptr @__errno_location()
  %kept = load i32, ptr %errno
  %here = call i1 @in_this_process()
  br i1 %here, label %note, label %hand_on
note:
  store volatile i32 %number, ptr inttoptr (i64 {told} to ptr)
  %text = call ptr @digits_of(i32 %number)
  call void @write_all(ptr %text, i64 2, i32 1)
  br label %hand_on
hand_on:
  store i32 %kept, ptr %errno
  %before = call ptr @previous_of(i32 %number)
  %handler = load volatile ptr, ptr %before
  %address = ptrtoint ptr %handler to i64
  %calls = icmp ugt i64 %address, 1
  br i1 %calls, label %call, label %act
call:
  call void %handler(i32 %number, ptr %info, ptr %context)
  br label %done
act:
  %default = icmp eq i64 %address, 0
  br i1 %default, label %end, label %done
end:
  %set = call i32 @sigaction(i32 %number, ptr %before, ptr null)
  %sent = call i32 @raise(i32 %number)
  br label %done
done:
  ret void
}}
"""
"""The handlers, in LLVM's language. Of ``siginfo_t`` they read ``si_code`` (not above 0: sent by a process) and
``si_pid``. A fault goes on by happening again when the handler returns, what was sent by being sent again. A second
fatal signal of one number is for the default action: a handler before ours may have us as the one before it."""


def machine_code(state: State) -> tuple[Any, tuple[int, int]]:
    """Who owns the code, and where ``on_fatal`` and ``on_told`` begin.

    Raises:
        ImportError, OSError, AttributeError, RuntimeError: it cannot be made here.
    """
    import llvmlite.binding as llvm

    libc = ctypes.CDLL(None)
    for name in re.findall(r"^declare .* @(\w+)\(", _CODE, re.MULTILINE):
        getattr(libc, name)  # LLVM ends the process where it misses one
    base = ctypes.addressof(state)
    fields = {name: base + getattr(State, name).offset for name, *_ in State._fields_}
    text = _CODE.format(**fields, most_files=MOST_FILES, most_threads=MOST_THREADS, action_bytes=ACTION_BYTES)
    with contextlib.suppress(RuntimeError):  # newer ones do it by themselves, and say so
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
    engine.finalize_object()
    return engine, (engine.get_function_address("on_fatal"), engine.get_function_address("on_told"))
