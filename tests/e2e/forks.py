"""Training runs without a start of Python: copies of one process that has imported what all of them import.

Most of a short run is starting Python, importing JAX and this package, and loading the search's compiled code. One
process does that once, and forks for each run before JAX has a device or a thread. What trains is a copy of a copy: the
one in between waits for it and says how it ended.

    python forks.py --serve SOCKET        (a descriptor; :class:`Forks` starts it)
    python forks.py FOLDER ...            (as observe.py, in this process)
    python forks.py --module NAME ...     (as ``python -m NAME``, with what was imported)
    python forks.py --into FILE --module NAME ...     (the same; all that it says goes there)

Both run a script from one place, as modules that are compared hold the call stack.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1]


class Forked:
    """A run, with what tests ask of a ``subprocess.Popen``; its stdout is dropped."""

    def __init__(self, errors: int, told: int) -> None:
        self.stderr = os.fdopen(errors, encoding="utf-8", errors="replace")
        self._told = os.fdopen(told, encoding="utf-8")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None
        self._waiting = threading.Thread(target=self._note_end, daemon=True)
        self._waiting.start()

    def _note_end(self) -> None:
        with self._told:
            self.returncode = int(self._told.readline())

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._join(self._waiting, timeout)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """What it still says on stderr, until its end."""
        said: list[str] = []
        if not self.stderr.closed:
            reading = threading.Thread(target=lambda: said.append(self.stderr.read()), daemon=True)
            reading.start()
            self._join(reading, timeout)
            self.stderr.close()
        self.wait(timeout)
        return None, "".join(said)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _join(self, thread: threading.Thread, timeout: float | None) -> None:
        thread.join(timeout)
        if thread.is_alive():
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)


class Forks:
    """The process that forks, started when it is first needed."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._one_at_a_time = threading.RLock()

    def prepare(self) -> socket.socket:
        """Start it; the search's code is compiled after that, for other processes, too."""
        with self._one_at_a_time:
            return self._prepare()

    def _prepare(self) -> socket.socket:
        if self._channel is None:
            self._channel, theirs = socket.socketpair()
            command = [sys.executable, __file__, "--serve", str(theirs.fileno())]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
            theirs.close()
            atexit.register(process.wait)
            atexit.register(self._channel.close)
            assert self._channel.recv(1), "forks.py ended before it was ready"
        return self._channel

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        """A run of this file with these arguments, in this environment and a group of its own."""
        channel = self.prepare()
        (errors, their_errors), (told, their_told) = os.pipe(), os.pipe()
        request = json.dumps([list(arguments), dict(environment)]).encode()
        with self._one_at_a_time:
            socket.send_fds(channel, [len(request).to_bytes(8, "big")], [their_errors, their_told])
            channel.sendall(request)
        os.close(their_errors)
        os.close(their_told)
        return Forked(errors, told)


def next_run(channel: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Take requests, and come back with each in a process of its own; the first process ends with the channel."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Else each copy's collector goes through all that was imported, and so copies it.
    gc.freeze()
    while True:
        size, descriptors, _, _ = socket.recv_fds(channel, 8, 2)
        if not size:
            os._exit(0)
        request = channel.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
        if os.fork() == 0:
            channel.close()
            errors, told = descriptors
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pid = os.fork()
            if pid == 0:
                os.close(told)
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(errors, 2)
                os.close(errors)
                arguments, environment = json.loads(request)
                return arguments, environment
            os.write(told, f"{pid}\n".encode())
            os.close(errors)
            os.write(told, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def prepare() -> None:
    """Import what runs import, and load the search's code."""
    import jax.numpy  # noqa: F401

    import disco_hlo.plugin.phases.enact_phase
    import disco_hlo.plugin.phases.search_phase  # noqa: F401
    from tests.compiled_search import compile_search

    compile_search()


def main(arguments: list[str]) -> None:
    if arguments[0] == "--serve":
        sys.path.insert(1, str(TESTS.parent))
        prepare()
        channel = socket.socket(fileno=int(arguments[1]))
        channel.send(b"!")
        arguments, environment = next_run(channel)
        os.environ.clear()
        os.environ.update(environment)
    if arguments[0] == "--into":
        said = os.open(arguments[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        arguments = arguments[2:]
    if arguments[0] == "--module":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    import observe

    observe.main(Path(arguments[0]), arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
