"""A few calls of a training under JAX's profiler: real steps are the profile (DisCo, section 4.2).

All ranks trace the same calls, on which they agree as on a hold, and none while its script has a trace of its own under
way. Each of these calls is waited for, so that the marks of :mod:`disco_hlo.profiler.trace` tell them apart. Where the
script begins a trace meanwhile, ours is given up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from disco_hlo.errors import ActivationError
from disco_hlo.plugin.calls.trial import LOOK_S, Hold, Over
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.profiler import trace as tracing

_LONGEST_CALL_S = 120.0
"""A trace that goes on for longer, because the script saves or evaluates, or is done with the step, is given up: its
events fill the memory."""


class TracedCalls(Hold):
    """So many calls, the first of which is the one that waits for it; once it is ``due``."""

    def __init__(self, what: str, calls: int, due: Callable[[], bool]) -> None:
        super().__init__(what, contextlib.nullcontext)
        self._due = due
        self.calls = calls
        self.trace = b""
        """A serialized ``XSpace``; empty where there is none."""
        self.error = ""
        """Why not."""
        self.held_s = 0.0
        """What starting and stopping took."""
        self._profiler = jaxlink.OwnTrace()
        self._mark: Any = None
        self._entered_s = 0.0
        """When a call last began; 0 before the first."""

    def ready(self) -> bool:
        """As of :class:`Hold`."""
        return self._due() and super().ready()

    def wait(self) -> None:
        """Before the first call: start."""
        began = time.monotonic()
        try:
            self._profiler.start(tracing.options())
        except Exception as error:  # the calls go on as on the other ranks
            self.error = one_line(error)
        self.held_s += time.monotonic() - began
        self._enter()

    def call_ended(self) -> None:
        """As of :class:`Hold`: what comes now is not of the call, though its module may have the same name."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def after_call(self) -> bool:
        """As of :class:`Hold`: on to the next call, or stop."""
        self.call_ended()
        self.calls -= 1
        if (
            self.calls > 0
        ):  # it is below where Ctrl-C came while the last one was stopped, and the script went on
            self._enter()
            return False
        began = time.monotonic()
        time.sleep(tracing.SETTLE_S)
        self._stop()
        self.held_s += time.monotonic() - began
        self._ended.set()
        return True

    def taken(self, over: Over) -> None:
        """In the other thread: return when the calls are over.

        Raises:
            ActivationError: they will not come.
        """
        try:
            while not self._ended.wait(LOOK_S):
                if over():
                    raise ActivationError(f"{self.what}: the step is not called any more")
                if self._entered_s and time.monotonic() - self._entered_s > _LONGEST_CALL_S:
                    self.error = f"the script did not call the step for {_LONGEST_CALL_S:.0f} s"
                    self._stop()
        finally:
            if not self._ended.is_set():
                self._stop()

    def _enter(self) -> None:
        import jax.profiler

        self._entered_s = time.monotonic()
        self._mark = jax.profiler.TraceAnnotation(tracing.RUN_MARK)
        self._mark.__enter__()

    def _stop(self) -> None:
        try:
            self.trace = self._profiler.stop()
        except Exception as error:
            self.error = one_line(error)
        if not self.trace:
            self.error = self.error or "the script began a profiler trace of its own"
