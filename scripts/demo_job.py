"""Run one job of several processes with its output in a log, and end all of it however that goes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

TAIL_LINES = 15

Watch = Callable[[Path], None]
"""Called while a job runs, with its log."""


def run_job(argv: Sequence[str], env: dict[str, str], log: Path, limit_s: float, watch: Watch) -> int | None:
    """Run ``argv`` with its output in ``log``; its exit status, None where it took longer than ``limit_s``.

    However this ends, no process of the job is left.
    """
    deadline = time.monotonic() + limit_s
    with log.open("wb") as out:
        # Its own session, so that Ctrl-C comes here first and the whole job can be ended at once.
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(0.2)
                watch(log)
            return None
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a job: mpiexec passes SIGTERM on to its ranks and waits for them. What a job's first process leaves behind is
    killed."""
    with _deaf(), contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """A second Ctrl-C must not leave half a job behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_when_told() -> None:
    """Let SIGTERM and SIGHUP end this program as Ctrl-C does, so that it ends its job as well."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines that say something of a log's last 64 KiB, fit to be printed."""
    end = b""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - (64 << 10)))
        end = file.read()
    return [line for line in map(printable, end.decode(errors="replace").splitlines()) if line.strip()][
        -count:
    ]


def log_tail(log: Path) -> str:
    """The end of a log, to be put under a message."""
    lines = last_lines(log, TAIL_LINES)
    if not lines:
        return f"; it printed nothing ({from_here(log)})"
    return f"; the end of {from_here(log)}:\n" + "\n".join(f"  | {line}" for line in lines)


def free_port() -> int:
    """A port that nobody listens on now, on any address of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def printable(line: str) -> str:
    """``line`` without what a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in line)


def from_here(path: Path) -> str:
    """``path`` as short as it can be typed in the current folder."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
