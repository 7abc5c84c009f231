"""The search's code compiled for a GPU while something else goes on: while the script makes its state, and its step is
profiled.

The first search on a machine has its inner loops compiled: a minute of one core, in which all ranks wait for rank 0.
Neither the step nor its times matter to the code. So two fresh interpreters, one that predicts a small step and one
that searches it, begin with the script's first program of several devices, and what they compile is in the cache when
the search begins. On CPU they would use the cores whose times are being measured.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import BACKENDS
from disco_hlo.compiled import is_cached
from disco_hlo.elsewhere import environment
from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.estimator.gnn import estimator_for
from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.hlo.cost_model import CostModel, Kernels, LinearPieces
from disco_hlo.hlo.graph import Graph
from disco_hlo.optimize.costs import Costs
from disco_hlo.optimize.regions import predict
from disco_hlo.plan.units import unit_graph
from disco_hlo.profiler.collectives import fit, point_of
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.profiler.profile import Platform, Profile
from disco_hlo.search import run
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.schedule import best_of
from disco_hlo.search.warm import small_plan, small_step, warm_up_in_time
from disco_hlo.simulator.bound import lowest_bound
from disco_hlo.simulator.costs import MACHINES

LOGGER = logging.getLogger("disco_hlo")
PATIENCE_S = 200.0
"""Longest that a search waits for its code; then it compiles what is missing itself."""
_COMMAND = (sys.executable, "-P", "-m", "disco_hlo.optimize.rehearsal")
_BACKEND = next(name for name, one in BACKENDS.items() if one.asynchronous)
"""The one whose collectives run beside kernels."""


@functools.cache
def begin() -> Sequence[subprocess.Popen[bytes]]:
    """Begin to compile what is not compiled yet, once in a process. It fails silently: then the search compiles it."""
    if is_cached(run.__name__) and is_cached(DeviceModel.__module__):
        return ()
    try:
        return [
            subprocess.Popen(
                (*_COMMAND, part), stdin=subprocess.DEVNULL, env=environment(),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for part in PARTS
        ]  # fmt: skip
    except OSError as error:
        LOGGER.debug("the search is not rehearsed: %s", error)
        return ()


def wait(stop: Callable[[], bool]) -> None:
    """Return once all is compiled that :func:`begin` has begun with, or ``stop`` answers True."""
    started = time.monotonic()
    for process in begin():
        while process.poll() is None and time.monotonic() - started < PATIENCE_S and not stop():
            time.sleep(0.05)
        waited_s = time.monotonic() - started
        LOGGER.debug("the search was rehearsed (%s), waited for it %.1f s", process.poll(), waited_s)


def predict_small_step() -> None:
    """Do once, with times that mean nothing, what predicts a step."""
    line = fit(tuple(point_of(size, [100_000 + size] * 3) for size in (1 << 10, 1 << 16, 1 << 22)))
    kind = (BACKENDS[_BACKEND].shipped or ("",))[0]
    profile = Profile(Platform(kind, _BACKEND, "", "0", "0"), {}, 1000, 1e12, 1e14, all_reduce=line)
    analytic = AnalyticModel(DeviceModel(1e12, 1e14, hoists=False))
    costs = Costs(profile, estimator_for(_BACKEND, kind, analytic, {}))
    small = small_step(_BACKEND, transfers=True)
    plan = small_plan(small)
    lowest_bound(small, [plan.groups], costs, costs.machine)
    kernel_keys(small, unit_graph(small, plan).kernels(small))
    best_of(small, plan, [predict(small, plan, costs).strategy.order], costs, costs.machine)


class _AnyTimes(CostModel):
    """Everything takes a microsecond."""

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        return np.full(len(graph), 1000, np.int64)

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        del graph
        return np.full(len(kernels), 1000, np.int64)

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        del kind
        return LinearPieces.of((0, 0.0, 1000.0))


def search_small_step() -> None:
    """Search once, without an estimator, which the other process compiles."""
    small = small_step(_BACKEND, transfers=True)
    warm_up_in_time(small, _AnyTimes(), MACHINES[_BACKEND], SearchSettings(), None)


PARTS = {"predict": predict_small_step, "search": search_small_step}

if __name__ == "__main__":
    PARTS[sys.argv[1]]()
