"""What a look at the plan's kernels is worth where the estimator errs, in simulation.

    python scripts/bench_looks.py --modules tests/data/h200_models -o docs/benchmarks/looks.json

The times that the H200 profile and its estimator say are taken for the truth. The search is told another estimate
of every kernel that never ran: the truth times a random factor, the same one each time it asks (``--error`` is the
standard deviation of its logarithm; a model that training never saw is estimated with a mean error of 8 %). After each
search the best plan's kernels are looked up in the truth, as ``phases.finding`` measures them on a device, and the
search is made again, in one series with estimates corrected by what was measured (``profiler.corrections``), in the
other as they are.
Every search has the same budget in candidates, so the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.kernel_times import FusedOps
from disco_hlo.optimize.costs import costs_of, machine_of, seen_kernels
from disco_hlo.optimize.reprofile import estimates_ns
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.profiler.corrections import NONE, corrections
from disco_hlo.profiler.costs import Estimator, MeasuredCosts, fused_key
from disco_hlo.profiler.kernel_keys import kernel_keys, key_texts
from disco_hlo.profiler.keys import GROUP_PREFIX, group_key
from disco_hlo.profiler.profile import OpTime, Profile, load
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.run import search
from disco_hlo.search.warm import warm_up
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import CostModel
from disco_hlo.simulator.timeline import simulate

ROOT = Path(__file__).resolve().parents[1]
FIXTURE = ROOT / "tests" / "data" / "h200_transformer_default.hlo.pb.gz"
LOOKS = 2


class Mistaken:
    """An estimator whose figures for fused kernels are off by a factor that depends on the kernel alone."""

    def __init__(self, right: Estimator, graph: Graph, error: float, seed: int) -> None:
        self._right, self._texts = right, key_texts(graph)
        self._error, self._seed = error, seed
        self._factors: dict[str, float] = {}

    def nodes_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Ops alone are told as they are."""
        return self._right.nodes_ns(graph)

    def groups_ns(self, graph: Graph, groups: Sequence[FusedOps]) -> NDArray[np.int64]:
        """As :class:`~disco_hlo.profiler.costs.Estimator` has it, with the error."""
        keys = [fused_key(graph, group).removeprefix(GROUP_PREFIX) for group in groups]
        return self._wrong(self._right.groups_ns(graph, groups), keys)

    def kernels_ns(
        self,
        graph: Graph,
        member_at: NDArray[np.int64],
        members: NDArray[np.int64],
        result_at: NDArray[np.int64],
        results: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """As :class:`~disco_hlo.profiler.costs.Estimator` has it, with the error."""
        times = self._right.kernels_ns(graph, member_at, members, result_at, results)
        return self._wrong(times, kernel_keys(self._texts, member_at, members, result_at, results))

    def _wrong(self, times: NDArray[np.int64], keys: Sequence[str]) -> NDArray[np.int64]:
        factors = np.array([self._factor(key) for key in keys])
        return np.maximum(1, np.rint(times * factors)).astype(np.int64)

    def _factor(self, key: str) -> float:
        if key not in self._factors:
            dice = np.random.default_rng(zlib.crc32(f"{self._seed} {key}".encode()))
            self._factors[key] = float(np.exp(self._error * dice.standard_normal()))
        return self._factors[key]


class Experiment:
    """One step on one link, with the truth and what the search is told."""

    def __init__(self, path: Path, link: str, error: float, candidates: int) -> None:
        module = canonicalize(gzip.decompress(path.read_bytes()))
        self.graph, self.xla = module.graph, read(module)
        shipped = load(ROOT / "disco_hlo" / "data" / "profiles" / f"nvidia-h200-{link}.json")
        self.truth = costs_of(shipped, self.graph)
        # XLA's kernels ran before the search.
        self.profile = self._looked_at(shipped, self.xla)
        self.machine = machine_of(shipped)
        self.error = error
        self.settings = SearchSettings(evaluations=candidates, seeds=1, processes=1)
        warm_up(self.graph, self.truth, self.machine, self.settings)

    def run(self, seed: int, *, learning: bool) -> list[dict[str, float]]:
        """True step time of the best plan, of XLA's, and how much longer that is than promised; before and after
        each look."""
        found: list[dict[str, float]] = []
        plans: list[Strategy] = []
        profile, default_ns = self.profile, self._step_ns(self.xla, self.truth)
        for _ in range(1 + LOOKS):
            mistaken = Mistaken(self.truth.estimator, self.graph, self.error, seed)
            known = seen_kernels(profile, self.graph, mistaken, (self.xla, *plans))
            told = MeasuredCosts(profile, mistaken, corrections(self.graph, known) if learning else NONE)
            result = search(self.graph, told, self.machine, start=self.xla, settings=self.settings)
            plans += [one.strategy for one in result.finalists]
            best = min(plans, key=lambda plan: self._step_ns(plan, told))
            takes_ns = self._step_ns(best, self.truth)
            promised_ns = self._step_ns(best, told)
            found.append(
                {
                    "of_default": round(takes_ns / default_ns, 5),
                    "longer_than_promised": round(takes_ns / promised_ns - 1, 5),
                    "shortfall": round(told.corrections.shortfall - 1, 4),
                }
            )
            profile = self._looked_at(profile, best)
        return found

    def _step_ns(self, plan: Strategy, costs: CostModel) -> int:
        return simulate(build(self.graph, plan, costs, self.machine).problem).makespan_ns

    def _looked_at(self, profile: Profile, plan: Strategy) -> Profile:
        takes_ns = estimates_ns(self.truth, self.graph, plan).tolist()
        units = unit_graph(self.graph, plan)
        new: dict[str, int] = {}
        for i, group in enumerate(plan.groups):
            results = [value.node for value in units.values_of[units.index[f"g{i}"]]]
            key = group_key(self.graph, (*group.nodes, *group.duplicates), results)
            if group.kind == "triton":
                key = fused_key(self.graph, group)
            if key not in profile.ops:
                new[key] = i
        ops = {key: OpTime(takes_ns[i], 0, 1) for key, i in new.items()}
        return replace(profile, ops={**profile.ops, **ops})


def main() -> None:
    """Run the experiment for every step, resumably."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", type=Path, default=ROOT / "tests" / "data" / "h200_models")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--link", default="staged", choices=["nvlink", "staged", "sockets"])
    parser.add_argument("--error", type=float, default=0.1)
    parser.add_argument("--candidates", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON; what is there is not run again")
    arguments = parser.parse_args()
    if arguments.out.is_dir():
        parser.error(f"--out {arguments.out} is a folder; name a file")
    if arguments.seeds < 1 or arguments.candidates < 1 or not arguments.error >= 0:
        parser.error("expected --seeds and --candidates of at least 1 and --error of at least 0")
    paths = {
        path.name.removesuffix(".hlo.pb.gz"): path for path in sorted(arguments.modules.glob("*.hlo.pb.gz"))
    }
    if not paths:
        parser.error(f"--modules {arguments.modules}: no NAME.hlo.pb.gz in it")
    for name, path in {"gpt12": FIXTURE, **paths}.items():
        if arguments.only and name not in arguments.only:
            continue
        experiment = None
        for seed in range(arguments.seeds):
            for series, learning in (("looked at", False), ("looked at, estimates corrected", True)):
                key = f"{name} {arguments.link} {arguments.error} {seed} {series}"
                found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
                if key in found:
                    continue
                experiment = experiment or Experiment(
                    path, arguments.link, arguments.error, arguments.candidates
                )
                found[key] = experiment.run(seed, learning=learning)
                draft = arguments.out.with_suffix(".new")
                draft.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
                os.replace(draft, arguments.out)
                print(key, json.dumps(found[key]), flush=True)


if __name__ == "__main__":
    main()
