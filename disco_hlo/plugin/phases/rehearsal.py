"""The search's code compiled beside the profiling, on GPU.

The first search on a machine has its inner loops compiled: a minute or two of one core, in which all ranks wait for
rank 0. While a GPU's step is compiled and profiled the other cores of its host have little to do. So a fresh
interpreter searches the step with times that mean nothing, and what it compiles is in the cache when the search begins.
On CPU it would use the cores whose times are being measured.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from disco_hlo.activation.local import LocalChannel
from disco_hlo.compiled import is_cached
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.read import read
from disco_hlo.plugin.costing import costs_of, machine_of
from disco_hlo.plugin.interruption import Interruption
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.phases.finding import find, search_settings
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step
from disco_hlo.profiler.allreduce import fit, point_of
from disco_hlo.profiler.profile import Platform, Profile
from disco_hlo.search import run
from disco_hlo.search.methods.child import environment
from disco_hlo.search.warm import warm_up_in_time

PATIENCE_S = 200.0
"""Longest that a search waits for its code; then it compiles what is missing itself."""
_COMMAND = (sys.executable, "-P", "-m", "disco_hlo.plugin.phases.rehearsal")
_SEARCH_S = 2.0


def stand_in_profile(backend: str = "cpu", device_kind: str = "cpu") -> Profile:
    """A profile that says nothing true: enough to run the search's code once."""
    line = fit(tuple(point_of(size, [100_000 + size] * 3) for size in (1 << 10, 1 << 16, 1 << 22)))
    platform = Platform(device_kind, backend, "", "0", "0")
    return Profile(platform, {}, launch_ns=1000, memory_bandwidth=1e12, flops_per_s=1e14, all_reduce=line)


@contextlib.contextmanager
def rehearsed(session: Session, step: Step) -> Iterator[Callable[[Interruption], None]]:
    """Rehearse the search for ``step`` on rank 0 of a GPU job, as long as the block lasts.

    Yields what waits until the rehearsal is over, or somebody interrupts. It fails silently: then the search compiles
    its code itself.
    """
    wanted = session.leads and session.facts.backend == "gpu" and not is_cached(run.__name__)
    process = _begin(session, step.module) if wanted else None

    def wait(stop: Interruption) -> None:
        if process is None:
            return
        started = time.monotonic()
        while process.poll() is None and time.monotonic() - started < PATIENCE_S and not stop:
            time.sleep(0.05)
        waited_s = time.monotonic() - started
        LOGGER.debug("the search was rehearsed (%s), waited for it %.1f s", process.poll(), waited_s)

    try:
        yield wait
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _begin(session: Session, module: bytes) -> subprocess.Popen[bytes] | None:
    try:
        with tempfile.TemporaryFile() as given:
            given.write(module)
            given.seek(0)
            return subprocess.Popen(
                (*_COMMAND, session.facts.device_kind), stdin=given, env=environment(),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    except OSError as error:
        LOGGER.debug("the search is not rehearsed: %s", error)
        return None


def main() -> None:
    """Search the module on stdin, of a step on GPUs of the kind that is the argument, and forget what was found."""
    module = sys.stdin.buffer.read()
    source = canonicalize(module)
    settings = Settings(search=True, directory=Path(os.devnull), budget_s=_SEARCH_S)
    # Of a session the search asks its settings and its voice alone.
    session = Session(None, settings, None, LocalChannel())  # type: ignore[arg-type]
    profile, xla = stand_in_profile(source.graph.backend, sys.argv[1]), read(source)
    costs = costs_of(profile, source.graph, (xla,))
    warm_up_in_time(source.graph, costs, machine_of(profile), search_settings(settings), None)
    find(session, Step(module, source), xla, profile, Interruption(), quiet=True)


if __name__ == "__main__":
    main()
