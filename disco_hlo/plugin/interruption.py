"""Ctrl-C while a step is profiled, searched and measured: the first one, on whichever rank, ends that on all of them.

A user's Ctrl-C in a terminal reaches every rank, a ``kill -INT`` or a scheduler's signal one. Rank 0 searches, and
tells the others at the next place where they meet whether to go on (``session.tell``). So a rank other than 0 that is
interrupted leaves a note in the job's key-value store, for which rank 0 looks now and then.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import types
from collections.abc import Iterator
from typing import Protocol

from disco_hlo.errors import ActivationError
from disco_hlo.plugin.logs import LOGGER, one_line

_LOOK_S = 0.5
"""Between two looks for notes."""


class Notes(Protocol):
    """What ranks tell each other outside of their meetings."""

    def leave(self) -> None:
        """Say that this rank was interrupted.

        Raises:
            ActivationError: nobody takes the note.
        """

    def found(self) -> bool:
        """Whether any rank has said so.

        Raises:
            ActivationError: nobody knows.
        """


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
