"""The search's code, compiled before a test whose search has less time than that takes on a fresh machine."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.optimize.ablations import candidates
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Budget, Case, optimize
from disco_hlo.plan.read import read
from disco_hlo.profiler.collectives import fit, point_of
from disco_hlo.profiler.profile import Platform, Profile
from disco_hlo.search.api import SearchSettings


def compile_search(module: bytes, device_kind: str) -> None:
    """Search this step once, with times that mean nothing; one process at a time, as the others then find what it
    made."""
    with (Path(tempfile.gettempdir()) / "disco_tests_compile").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        source = canonicalize(module)
        line = fit(tuple(point_of(size, [100_000 + size] * 3) for size in (1 << 10, 1 << 16, 1 << 22)))
        platform = Platform(device_kind, source.graph.backend, "", "0", "0")
        profile = Profile(platform, {}, 1000, 1e12, 1e14, all_reduce=line)
        xla = read(source)
        case = Case(source, xla, costs_of(profile, source, (xla,)))
        found = optimize(case, SearchSettings(seconds=2.0), Budget.of(2.0, 600.0))
        candidates(found, 5)
        case.prediction(found.best)
