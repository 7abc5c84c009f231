"""Islands of the joint search in processes of their own.

A child is a fresh interpreter (no fork beside a training process's threads, and none of
``multiprocessing``, which would run the user's script again). It is handed its island through its
standard input and answers with reports through its standard output; both ends are ours, so pickle is
safe here. A child that fails costs its share of the search, with a line in the log, and nothing else.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from queue import SimpleQueue

from disco_hlo.search.boundary.starts import prepare
from disco_hlo.search.methods.island import Island, Report, reports
from disco_hlo.search.undisturbed import without_collector

LOGGER = logging.getLogger("disco_hlo")
_COMMAND = (sys.executable, "-P", "-m", "disco_hlo.search.methods.child")


def environment() -> dict[str, str]:
    """What a fresh interpreter needs to import what this one does, and not to search itself."""
    kept = {name: value for name, value in os.environ.items() if name != "ENABLE_SEARCH"}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Children:
    """Islands that run elsewhere, some of them at a time; :meth:`end` must be called."""

    def __init__(self, islands: Iterable[Island]) -> None:
        self._waiting = deque(islands)
        self._arrived: SimpleQueue[Report] = SimpleQueue()
        self._started: list[tuple[subprocess.Popen[bytes], threading.Thread]] = []

    def begin(self, most: int, seconds: float | None) -> list[Island]:
        """Begin with those that wait, in turn, as long as fewer than ``most`` run.

        Args:
            most: how many may run at once.
            seconds: what is left for those that begin now; None for no limit.

        Returns:
            Islands that cannot be started, which wait no longer.
        """
        self._release([one for one in self._started if not one[1].is_alive()])
        not_started: list[Island] = []
        while self._waiting and len(self._started) < most:
            island = self._waiting.popleft()
            try:
                self._start(replace(island, seconds=seconds))
            except (pickle.PicklingError, AttributeError, TypeError, OSError) as error:
                LOGGER.debug("search seed %d runs in this process: %s", island.number, error)
                not_started.append(island)
        return not_started

    def _start(self, island: Island) -> None:
        task = pickle.dumps(island)
        child = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        reader = threading.Thread(target=self._read, args=(child, task, island.number), daemon=True)
        reader.start()
        self._started.append((child, reader))

    def _read(self, child: subprocess.Popen[bytes], task: bytes, number: int) -> None:
        """Feed a child and take what it says, until it ends."""
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            child.stdin.write(task)
            child.stdin.close()
            while True:
                report: Report = pickle.load(child.stdout)  # noqa: S301  our own child
                self._arrived.put(report)
                if report.stopped:
                    return
        except (EOFError, OSError, pickle.UnpicklingError):
            if child.wait() > 0:
                words = child.stderr.read().decode(errors="replace").strip().splitlines()
                LOGGER.warning("search seed %d ended early: %s", number, words[-1] if words else "no reason")

    def unfinished(self) -> bool:
        """Whether an island waits, or a child may still report."""
        return bool(self._waiting) or any(reader.is_alive() for _, reader in self._started)

    def arrived(self) -> list[Report]:
        """Reports since the last call."""
        found = []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found

    def end(self) -> None:
        """End all children, at once; none begins any more."""
        self._waiting.clear()
        self._release(list(self._started))

    def _release(self, ended: Iterable[tuple[subprocess.Popen[bytes], threading.Thread]]) -> None:
        for child, reader in ended:
            child.terminate()
            child.wait()
            reader.join()
            for pipe in (child.stdin, child.stdout, child.stderr):
                if pipe is not None and not pipe.closed:
                    pipe.close()
            self._started.remove((child, reader))


def main() -> None:
    """Search one island; its description comes in, its reports go out."""
    island: Island = pickle.load(sys.stdin.buffer)  # noqa: S301  our own parent
    with without_collector():
        starts = prepare(island.graph, island.strategies)
    for report in reports(island, starts, lambda: False):
        pickle.dump(report, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
