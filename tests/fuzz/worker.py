"""The process that compiles and runs, and who asks it.

It reads tasks as JSON lines, and says of each pair what it tries before it does; who asks tells apart how it ends.

An XLA that aborts takes the process with it; the last line that it said tells what it was trying.
"""

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
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

WRITING, DEFAULT = "the program", "XLA's default"
"""What is tried before any strategy."""
CLEAR_EVERY = 20
"""So many programs share jax's caches, which otherwise grow without end."""
ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 120.0
"""Until a process has imported jax and found its devices."""
_LAST_BYTES = 2000
_MOST_TASKS = 200
"""So many are given to one process, which bounds its memory."""
# Asking -----------------------------------------------------------------------------------------


def environment(platform: str, devices: int, jobs: int) -> dict[str, str]:
    """What a worker runs under; jax reads it once, before it is imported."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name not in ("ENABLE_SEARCH", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")
        and not name.startswith("DISCO_")
    }
    if platform == "gpu":
        found["JAX_PLATFORMS"] = "cuda,cpu"
        found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.8 / jobs:.3f}"
        # Tuning kernels takes longer than all else, and products in TF32 would differ from what is computed by hand.
        found["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "--xla_gpu_autotune_level=0")
        found.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    else:
        found["JAX_PLATFORMS"] = "cpu"
        # What XLA executes is settled before LLVM's optimizations, which take half of every compile.
        flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        found["XLA_FLAGS"] = flags
    found["TF_CPP_MIN_LOG_LEVEL"] = "2"
    return found


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
        command: what to start; speaks as ``worker`` does.
    """

    def __init__(
        self,
        platform: str,
        devices: int,
        jobs: int = 1,
        pair_limit_s: float = 60.0,
        command: Sequence[str] = (sys.executable, "-m", "tests.fuzz.worker"),
    ) -> None:
        self.command = command
        self.environment = environment(platform, devices, jobs)
        self.pair_limit_s = pair_limit_s
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
        if self.process is not None and self.tasks >= _MOST_TASKS:
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


# Answering --------------------------------------------------------------------------------------


def serve(tasks: IO[str], say: Callable[[dict[str, Any]], None]) -> None:
    """Do what each line of ``tasks`` asks for, until there are no more."""
    # Imported here: the environment that jax reads is the process's.
    import jax
    from msgspec import convert

    from tests.fuzz.grammar import generate
    from tests.fuzz.pairs import Case, SkippedError
    from tests.fuzz.program import Program, has_regions
    from tests.fuzz.strategies import Wanted

    warnings.simplefilter("ignore")  # jax warns of donated arguments that no result takes over
    say({"ready": jax.device_count()})
    for number, line in enumerate(tasks):
        task = json.loads(line)
        if number % CLEAR_EVERY == CLEAR_EVERY - 1:
            jax.clear_caches()
        if task["do"] == "warm":
            _compile_search()
            say({"done": True})
            continue
        say({"trying": WRITING})
        given = task["program"]
        program = generate(given, task["devices"]) if isinstance(given, int) else convert(given, Program)
        if task["regions"] and not has_regions(program):
            say({"skipped": "plain: it has no loop and no branch"})
            say({"done": True})
            continue
        wanted = [Wanted(kind, seed) for kind, seed in task["strategies"]]
        began = time.perf_counter()
        try:
            say({"trying": DEFAULT})
            case = Case(program, task["by_hand"])
            if task["regions"] and not case.source.regions:
                raise SkippedError("plain: XLA left no loop and no branch, or none that can be written anew")
            for one in wanted:
                say({"trying": str(one)})
                outcome = case.attempt(one)
                say({"pair": str(one), "kind": outcome.kind, "detail": outcome.detail})
                if outcome.kind == task["until"]:
                    break
        except SkippedError as error:
            say({"skipped": str(error)})
        say({"done": True, "seconds": time.perf_counter() - began})


def _compile_search() -> None:
    """Let numba compile the search, once on a machine."""
    import random

    from disco_hlo.plan.variants import unfused
    from tests.fuzz.searching import after_moves, after_search
    from tests.search.steps import random_step

    graph = random_step(random.Random(1), 40)
    for run in (after_moves, after_search):
        run(graph, unfused(graph), random.Random(2))


def main() -> None:
    """Serve standard input; answers go where standard output went, and nothing else does."""
    # Where nothing is installed, the package is the checkout's.
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    from checkout import find_package

    find_package()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    serve(sys.stdin, say)


if __name__ == "__main__":
    main()
