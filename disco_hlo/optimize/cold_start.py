"""The search's code, compiled before anybody waits for it: by numba, half a minute and more, once on a machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.hlo.cost_model import CostModel, Kernels, LinearPieces
from disco_hlo.hlo.graph import Graph
from disco_hlo.optimize.ablations import candidates
from disco_hlo.optimize.costs import costs_of, machine_of
from disco_hlo.optimize.pipeline import Budget, Case, optimize
from disco_hlo.plan.read import read
from disco_hlo.profiler.collectives import fit, point_of
from disco_hlo.profiler.profile import Platform, Profile
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.warm import warm_up_in_time

COMPILE_S = 600.0
"""The longest that a training waits for the search's code, once on a machine. The budget does not count it, nor what
compiling the code that predicts takes: otherwise the first search would end without a plan."""
_SEARCH_S = 0.5


class _NoCosts(CostModel):
    """Times that mean nothing and need no code of their own."""

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        return np.ones(len(graph), np.int64)

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        del graph
        return np.ones(len(kernels), np.int64)

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        del kind
        return LinearPieces.of((0, 1.0, 300.0))


def compile_code(module: bytes, device_kind: str) -> None:
    """Search a step for a moment, with times that mean nothing, so that all code exists for a search of it. The code
    of the search is compiled in a process of its own, beside that of the costs.

    Args:
        module: a serialized, scheduled HloModuleProto.
        device_kind: whose kernels are estimated.
    """
    source = canonicalize(module)
    line = fit(tuple(point_of(size, [100_000 + size] * 3) for size in (1 << 10, 1 << 16, 1 << 22)))
    platform = Platform(device_kind, source.graph.backend, "", "0", "0")
    profile = Profile(platform, {}, 1000, 1e12, 1e14, all_reduce=line)
    settings = SearchSettings(seconds=_SEARCH_S)
    xla = read(source)
    with ThreadPoolExecutor(
        1
    ) as pool:  # what this leaves uncompiled, for whatever reason, the search below compiles
        pool.submit(warm_up_in_time, source.graph, _NoCosts(), machine_of(profile), settings, COMPILE_S)
        case = Case(source, xla, costs_of(profile, source, (xla,)))
        _ = case.default  # simulated, by the code of the costs
    found = optimize(case, settings, Budget.of(_SEARCH_S, COMPILE_S))
    candidates(found, 1)
    case.prediction(found.best)
