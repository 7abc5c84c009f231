"""The steps that the search is measured on, and the clock it is measured by."""

from __future__ import annotations

import argparse
import gzip
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from disco_hlo.estimator.gnn import GnnModel
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.optimize.costs import Costs, costs_for
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.profiler.keys import GROUP_PREFIX
from disco_hlo.profiler.profile import load as load_profile
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.methods import backtracking, island, joint
from disco_hlo.search.run import search
from disco_hlo.search.warm import warm_up
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "data" / "h200_transformer_default.hlo.pb.gz"
UNFUSED = FIXTURE.with_name("h200_transformer_unfused.hlo.pb.gz")


class Case:
    """A step with its costs on one link."""

    def __init__(self, name: str, path: Path, link: str, estimator: str = "gnn") -> None:
        self.name, self.link = name, link
        self.module: CanonicalModule = canonicalize(gzip.decompress(path.read_bytes()))
        self.graph = self.module.graph
        profile = load_profile(ROOT / "disco_hlo" / "data" / "profiles" / f"nvidia-h200-{link}.json")
        self.costs: Costs = costs_for(self.graph, profile, None)
        network = self.costs.estimator
        if estimator != "gnn" and isinstance(network, GnnModel):
            ops = {key: time for key, time in profile.ops.items() if key[: len(GROUP_PREFIX)] != GROUP_PREFIX}
            told = profile if estimator == "measured" else replace(profile, ops=ops)
            self.costs = Costs(told, network.analytic)
        self.xla = read(self.module)

    def simulated_ns(self, strategy: Strategy) -> int:
        """What the simulator says of a strategy."""
        return simulate(build(self.graph, strategy, self.costs, self.costs.machine).problem).makespan_ns

    def search(self, start: Strategy, settings: SearchSettings) -> Any:
        """A search on this step."""
        return search(self.graph, self.costs, self.costs.machine, start=start, settings=settings)

    def warm_up(self) -> None:
        """Compile everything before a clock runs."""
        for method in ("joint", "backtracking"):
            warm_up(self.graph, self.costs, self.costs.machine, SearchSettings(method=method))


def count_processor_seconds() -> None:
    """Let budgets and curves be seconds of this process on a processor."""
    clock = SimpleNamespace(perf_counter=time.process_time, sleep=time.sleep)
    for module in (backtracking, island, joint):
        vars(module)["time"] = clock


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """The steps by name: the one that is kept with the tests, and those captured elsewhere."""
    paths = {
        path.name.removesuffix(".hlo.pb.gz"): path for path in sorted(arguments.modules.glob("*.hlo.pb.gz"))
    }
    for name, path in {"gpt12-unfused": UNFUSED, "gpt12": FIXTURE, **paths}.items():
        if name in arguments.only if arguments.only else name != "gpt12-unfused" or arguments.also_unfused:
            yield name, path


def since_s(began: float) -> float:
    """Processor seconds of this process since ``began``."""
    return round(time.process_time() - began, 3)
