"""The search's code, compiled before anybody waits for it: by numba, half a minute and more, once on a machine."""

from __future__ import annotations

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.optimize.ablations import candidates
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Budget, Case, optimize
from disco_hlo.plan.read import read
from disco_hlo.profiler.collectives import fit, point_of
from disco_hlo.profiler.profile import Platform, Profile
from disco_hlo.search.api import SearchSettings

COMPILE_S = 600.0
"""The longest that a training waits for the search's code, once on a machine. The budget does not count it, nor what
compiling the code that predicts takes: otherwise the first search would end without a plan."""
_SEARCH_S = 0.5


def compile_code(module: bytes, device_kind: str) -> None:
    """Search a step for a moment, with times that mean nothing, so that all code exists for a search of it.

    Args:
        module: a serialized, scheduled HloModuleProto.
        device_kind: whose kernels are estimated.
    """
    source = canonicalize(module)
    line = fit(tuple(point_of(size, [100_000 + size] * 3) for size in (1 << 10, 1 << 16, 1 << 22)))
    platform = Platform(device_kind, source.graph.backend, "", "0", "0")
    profile = Profile(platform, {}, 1000, 1e12, 1e14, all_reduce=line)
    xla = read(source)
    case = Case(source, xla, costs_of(profile, source, (xla,)))
    found = optimize(case, SearchSettings(seconds=_SEARCH_S), Budget.of(_SEARCH_S, COMPILE_S))
    candidates(found, 1)
    case.prediction(found.best)
