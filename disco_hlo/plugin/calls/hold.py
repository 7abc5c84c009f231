"""Holding the training between two calls, for work that needs its devices.

Another thread asks for it. Once the threads of all ranks have, each rank holds the same call until its own is done.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from disco_hlo.errors import ActivationError

_LOOK_S = 0.5
"""Between two looks whether a call may still come, or a signal came."""
_AFTER_S = 0.05
"""After a call that outlasted a signal, until that is sent again: the script has its results by then."""


class Hold:
    """One piece of work, and the call that waits for it."""

    def __init__(
        self, what: str, while_held: Callable[[], contextlib.AbstractContextManager[object]]
    ) -> None:
        """Nothing is held yet.

        Args:
            what: the work, in words; equal on all ranks.
            while_held: around the waiting of the call, in its thread.
        """
        self.what = what
        self._while_held = while_held
        self._begun = threading.Event()
        self._ended = threading.Event()
        self.outlasts = False
        """Whether the call must not be left by a signal: what it takes is elsewhere."""

    def wait(self) -> None:
        """In the call: let the work begin, and return when it has ended."""
        late = False
        with self._while_held():
            self._begun.set()
            # Time and again: a signal that comes as a thread begins to wait is heard when that ends.
            while not self._ended.is_set():
                try:
                    self._ended.wait(_LOOK_S)
                except KeyboardInterrupt:
                    if not self.outlasts:
                        raise
                    late = True
        if late:
            again = threading.get_ident(), signal.SIGINT
            threading.Timer(_AFTER_S, signal.pthread_kill, again).start()

    @contextlib.contextmanager
    def held(self, over: Callable[[], bool]) -> Iterator[None]:
        """In the other thread: do the body while the call waits.

        Args:
            over: whether no call will come any more.

        Raises:
            ActivationError: none came.
        """
        try:
            while not self._begun.wait(_LOOK_S):
                if over():
                    raise ActivationError(f"{self.what}: the step is not called any more")
            yield
        finally:
            self._ended.set()
