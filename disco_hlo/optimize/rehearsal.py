"""The search's code compiled while something else goes on: while a GPU's step is profiled.

The first search on a machine has its inner loops compiled: a minute or two of one core, in which all ranks wait for
rank 0. While a GPU's step is compiled and profiled the other cores of its host have little to do. So one fresh
interpreter predicts the step with times that mean nothing, another one searches a small step
(:func:`~disco_hlo.search.warm.compile_ahead`), and what they compile is in the cache when the search begins. On CPU
they would use the cores whose times are being measured.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from disco_hlo.compiled import is_cached
from disco_hlo.estimator.analytic import DeviceModel
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Case
from disco_hlo.plan.read import read
from disco_hlo.profiler.collectives import fit, point_of
from disco_hlo.profiler.profile import Platform, Profile
from disco_hlo.search.child import environment
from disco_hlo.search.warm import compile_ahead

LOGGER = logging.getLogger("disco_hlo")
_BACKEND = "gpu"
PATIENCE_S = 200.0
"""Longest that a search waits for its code; then it compiles what is missing itself."""
_COMMAND = (sys.executable, "-P", "-m", "disco_hlo.optimize.rehearsal")


def stand_in_profile(backend: str, device_kind: str) -> Profile:
    """A profile that says nothing true: enough to run the search's code once."""
    line = fit(tuple(point_of(size, [100_000 + size] * 3) for size in (1 << 10, 1 << 16, 1 << 22)))
    platform = Platform(device_kind, backend, "", "0", "0")
    return Profile(platform, {}, launch_ns=1000, memory_bandwidth=1e12, flops_per_s=1e14, all_reduce=line)


@contextlib.contextmanager
def rehearsed(
    module: bytes, device_kind: str, *, wanted: bool
) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Rehearse the search for a step of GPUs, as long as the block lasts, where its code is not compiled yet.

    Yields what waits until the rehearsal is over, or until what it is handed answers True. It fails silently: then the
    search compiles its code itself.

    Args:
        wanted: False rehearses nothing.
    """
    searching = compile_ahead(_BACKEND) if wanted else None
    process = _begin(module, device_kind) if wanted and not is_cached(DeviceModel.__module__) else None
    under_way = [one for one in (searching, process) if one is not None]

    def wait(stop: Callable[[], bool]) -> None:
        started = time.monotonic()
        for one in under_way:
            while one.poll() is None and time.monotonic() - started < PATIENCE_S and not stop():
                time.sleep(0.05)
            waited_s = time.monotonic() - started
            LOGGER.debug("the search was rehearsed (%s), waited for it %.1f s", one.poll(), waited_s)

    try:
        yield wait
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _begin(module: bytes, device_kind: str) -> subprocess.Popen[bytes] | None:
    try:
        with tempfile.TemporaryFile() as given:
            given.write(module)
            given.seek(0)
            return subprocess.Popen(
                (*_COMMAND, device_kind), stdin=given, env=environment(),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    except OSError as error:
        LOGGER.debug("the search is not rehearsed: %s", error)
        return None


def rehearse(module: bytes, device_kind: str) -> Case:
    """Predict once, with times that mean nothing, what this step of such devices takes."""
    source = canonicalize(module)
    profile, xla = stand_in_profile(source.graph.backend, device_kind), read(source)
    case = Case(source, xla, costs_of(profile, source, (xla,)))
    case.prediction(case.simulated(xla))
    return case


if __name__ == "__main__":
    rehearse(sys.stdin.buffer.read(), sys.argv[1])
