"""Restarts of the joint search in processes of their own.

A child is a fresh interpreter (no fork beside a training process's threads, and none of
``multiprocessing``, which would run the user's script again). It is handed its restart through its
standard input and answers with reports through its standard output; both ends are ours, so pickle is
safe here. A child that fails costs its share of the search, with a line in the log, and nothing else.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import IO

from disco_hlo.elsewhere import command, environment
from disco_hlo.search.interpreter import without_collector
from disco_hlo.search.restart import Report, Restart, reports
from disco_hlo.search.strategies import prepare

LOGGER = logging.getLogger("disco_hlo")


class Children:
    """Restarts that run elsewhere, some of them at a time; :meth:`end` must be called."""

    def __init__(self, restarts: Iterable[Restart]) -> None:
        self._waiting = deque(restarts)
        self._arrived: SimpleQueue[Report] = SimpleQueue()
        self._started: list[_Child] = []
        self._ending = False

    def begin(self, most: int, seconds: float | None) -> list[Restart]:
        """Begin with those that wait, in turn, as long as fewer than ``most`` run.

        Args:
            most: how many may run at once.
            seconds: what is left for those that begin now; None for no limit.

        Returns:
            Restarts that cannot be started, which wait no longer.
        """
        self._release([one for one in self._started if not one.reader.is_alive()])
        not_started: list[Restart] = []
        while self._waiting and len(self._started) < most:
            restart = self._waiting.popleft()
            try:
                self._start(replace(restart, seconds=seconds))
            except (pickle.PicklingError, AttributeError, TypeError, OSError) as error:
                LOGGER.debug("search seed %d runs in this process: %s", restart.number, error)
                not_started.append(restart)
        return not_started

    def _start(self, restart: Restart) -> None:
        task = pickle.dumps((restart, time.perf_counter()))
        with ExitStack() as opened:
            # Not a pipe: who writes more into one than it holds waits until somebody reads it.
            words = opened.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                command(__name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words,
                env=environment(),
            )  # fmt: skip
            opened.pop_all()
        child = _Child(process, words, restart.number)
        child.reader = threading.Thread(target=self._read, args=(child, task), daemon=True)
        child.reader.start()
        self._started.append(child)

    def _read(self, child: _Child, task: bytes) -> None:
        """Feed a child and take what it says, until it ends."""
        process, error = child.process, ""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(task)
            process.stdin.close()
            while True:
                report: Report = pickle.load(process.stdout)  # noqa: S301  our own child
                self._arrived.put(report)
                child.has_reported = True
                if report.stopped:
                    return
        except (EOFError, OSError):
            pass
        except Exception as unread:  # noqa: BLE001  pickle says of bytes that it did not write what it likes
            process.kill()
            error = f"it said what is no report ({unread})"
        # Ctrl-C ends the children, too.
        if process.wait() not in (0, -signal.SIGINT) and not self._ending:
            LOGGER.warning("search seed %d ended early: %s", child.number, error or child.reason())

    def unfinished(self) -> bool:
        """Whether a restart waits, or a child may still report."""
        return bool(self._waiting) or any(one.reader.is_alive() for one in self._started)

    def arrived(self) -> list[Report]:
        """Reports since the last call."""
        found = []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found

    def wait_for_last_reports(self, seconds: float) -> None:
        """Wait so long at most for children whose time is up, too, to check and say what they found last.

        One that has said nothing yet has found nothing: it is not waited for.
        """
        until = time.perf_counter() + seconds
        for one in self._started:
            if one.has_reported:
                one.reader.join(max(0.0, until - time.perf_counter()))

    def end(self) -> None:
        """End all children, at once; none begins any more."""
        self._ending = True
        self._waiting.clear()
        self._release(list(self._started))

    def _release(self, ended: Iterable[_Child]) -> None:
        for child in ended:
            child.process.kill()  # not SIGTERM, which a child ignores where this process does
            child.process.wait()
            child.reader.join()
            for pipe in (child.process.stdin, child.process.stdout, child.words):
                if pipe is not None and not pipe.closed:
                    pipe.close()
            self._started.remove(child)


@dataclass(eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    words: IO[bytes]
    """What it says besides its reports."""
    number: int
    """Of its restart."""
    reader: threading.Thread = field(init=False)
    has_reported: bool = False

    def reason(self) -> str:
        """Why it ended by itself, in its own last words."""
        self.words.seek(0)
        lines = self.words.read().decode(errors="replace").strip().splitlines()
        code = self.process.wait()
        return lines[-1] if lines else f"signal {-code}" if code < 0 else "no reason"


def main() -> None:
    """Search one restart; its description comes in, its reports go out."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what anything prints here is no report
        restart: Restart
        restart, given_at = pickle.load(sys.stdin.buffer)  # noqa: S301  our own parent
        with without_collector():
            starts = prepare(restart.graph, restart.strategies)
        if restart.seconds is not None:  # the clock is one for all processes; this one took its time to begin
            restart = replace(restart, seconds=restart.seconds - (time.perf_counter() - given_at))
        for report in reports(restart, starts, lambda: False):
            pickle.dump(report, out)
            out.flush()
