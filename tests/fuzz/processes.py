"""A worker process in our hands: asked for one task at a time, and told apart by how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.fuzz.worker import environment

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 120.0
"""Until a process has imported jax and found its devices."""
_LAST_BYTES = 2000


@dataclass(frozen=True, slots=True)
class End:
    """How a task ended."""

    how: str
    """``done``, ``aborted``, ``hung``, ``stopped``, or with which status the process ended by itself."""
    trying: str = ""
    """What was being tried."""
    said: str = ""
    """The last that was written to standard error."""


class Worker:
    """One process at a time, started anew where it died or has had its share of tasks.

    Args:
        jobs: how many workers share the machine; of a GPU's memory each has a part.
        pair_limit_s: a pair that takes longer hangs.
        tasks: so many are given to one process, which bounds its memory.
        command: what to start; speaks as ``worker`` does.
    """

    def __init__(
        self,
        platform: str,
        devices: int,
        jobs: int = 1,
        pair_limit_s: float = 60.0,
        tasks: int = 200,
        command: Sequence[str] = (sys.executable, "-m", "tests.fuzz.worker"),
    ) -> None:
        self.command = command
        self.environment = environment(platform, devices, jobs)
        self.pair_limit_s, self.most_tasks = pair_limit_s, tasks
        self.process: subprocess.Popen[bytes] | None = None
        self.tasks = 0
        self.unread = b""
        self.errors: IO[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(
        self,
        task: Mapping[str, Any],
        hear: Callable[[dict[str, Any]], None],
        deadline: float = float("inf"),
        limit_s: float | None = None,
    ) -> End:
        """Give the process a task, and hand on what it says until it is done.

        Args:
            deadline: on ``time.monotonic``; what is under way then is given up.
        """
        self._ready(deadline)
        trying, what = "", ""
        if self.process is None:
            return End("stopped")
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as is read below
            self.process.stdin.write(json.dumps(dict(task)).encode() + b"\n")
            self.process.stdin.flush()
        self.tasks += 1
        while True:
            message, ended = self._message(min(time.monotonic() + (limit_s or self.pair_limit_s), deadline))
            if message is None:
                what = "stopped" if time.monotonic() >= deadline else ended
                break
            trying = message.get("trying", trying)
            hear(message)
            if message.get("done"):
                return End("done")
        said = self._last_words()
        self.stop()
        return End(what, trying, said)

    def kill(self) -> None:
        """End what the process does, from another thread than the one that asks it."""
        process = self.process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """End the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        if self.errors is not None:
            self.errors.close()
        self.process, self.errors, self.unread, self.tasks = None, None, b"", 0

    def _ready(self, deadline: float) -> None:
        if self.process is not None and self.tasks >= self.most_tasks:
            self.stop()
        if self.process is not None:
            return
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [*self.command], cwd=ROOT, env=self.environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True,
        )  # fmt: skip
        message, ended = self._message(min(time.monotonic() + START_LIMIT_S, deadline))
        if message is not None:
            return
        said = self._last_words()
        self.stop()
        if time.monotonic() < deadline:
            raise RuntimeError(f"a worker of the fuzzer did not start ({ended}): {said}")

    def _message(self, until: float) -> tuple[dict[str, Any] | None, str]:
        """The next line, or None and how the process ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], min(left, 3600.0))[0]:
                return None, "hung"
            read = os.read(pipe, 1 << 16)
            if not read:
                code = self.process.wait()
                return None, "aborted" if code < 0 or code == 128 + signal.SIGABRT else f"ended with {code}"
            self.unread += read
        line, _, self.unread = self.unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message, ""

    def _last_words(self) -> str:
        assert self.errors is not None
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - 20_000))
        lines = [one for one in self.errors.read().decode("utf-8", "replace").splitlines() if one.strip()]
        telling = [
            one for one in lines if one.startswith("F") or "Error" in one or "Check fail" in one
        ] or lines[-3:]
        return " | ".join(telling)[-_LAST_BYTES:]
