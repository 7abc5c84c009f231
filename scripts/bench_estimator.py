"""What the fused-op estimator costs: per new fused op, and within a search.

    python scripts/bench_estimator.py [--seconds 20]

On the step in tests/data, with the weights for the H200. Seconds are seconds of this process on a processor, so
that other work on the machine matters little. Prints JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from types import SimpleNamespace
from typing import Any

from checkout import ROOT, find_package

find_package()

import numpy as np  # noqa: E402

from disco_hlo.estimator.gnn import GnnModel, estimator_for  # noqa: E402
from disco_hlo.estimator.samples import FusedOp, Grower, Growth  # noqa: E402
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize  # noqa: E402
from disco_hlo.optimize.costs import costs_of  # noqa: E402
from disco_hlo.plan.read import read  # noqa: E402
from disco_hlo.profiler.costs import MeasuredCosts  # noqa: E402
from disco_hlo.profiler.profile import load  # noqa: E402
from disco_hlo.search.api import SearchSettings  # noqa: E402
from disco_hlo.search.methods import backtracking, island, joint  # noqa: E402
from disco_hlo.search.run import search  # noqa: E402
from disco_hlo.search.warm import warm_up  # noqa: E402

PROFILE = ROOT / "disco_hlo" / "data" / "profiles" / "nvidia-h200-staged.json"
MODULE = ROOT / "tests" / "data" / "h200_transformer_default.hlo.pb.gz"
BATCH = 256


class Clocked:
    """An estimator, and the processor time that it took."""

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator
        self.seconds = 0.0
        self.asked = 0

    def nodes_ns(self, graph: Any) -> Any:
        """See ``AnalyticModel``."""
        return self.estimator.nodes_ns(graph)

    def groups_ns(self, graph: Any, groups: Any) -> Any:
        """See ``AnalyticModel``."""
        return self._clocked(len(groups), self.estimator.groups_ns, graph, groups)

    def kernels_ns(self, graph: Any, member_at: Any, *rest: Any) -> Any:
        """See ``AnalyticModel``."""
        return self._clocked(len(member_at) - 1, self.estimator.kernels_ns, graph, member_at, *rest)

    def _clocked(self, count: int, ask: Any, *arguments: Any) -> Any:
        started = time.process_time()
        answer = ask(*arguments)
        self.seconds += time.process_time() - started
        self.asked += count
        return answer


def flat(lists: list[tuple[int, ...]]) -> tuple[Any, Any]:
    """(where each list begins, all of them in a row)."""
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in lists])]).astype(np.int64)
    return starts, np.array([id_ for ids in lists for id_ in ids], np.int64)


def per_kernel_us(model: Any, source: CanonicalModule, ops: list[FusedOp]) -> dict[str, float]:
    """Microseconds a fused op when ``BATCH`` are asked for at a time, new ones and known ones."""
    found = {}
    for name in ("new", "known"):
        spent = []
        for first in range(0, len(ops) - BATCH + 1, BATCH):
            some = ops[first : first + BATCH]
            lists = (*flat([op.members for op in some]), *flat([op.results for op in some]))
            started = time.process_time()
            model.kernels_ns(source.graph, *lists)
            spent.append(1e6 * (time.process_time() - started) / BATCH)
        found[name] = round(float(np.median(spent)), 2)
    return found


def searched(
    source: CanonicalModule, costs: Any, machine: Any, method: str, seconds: float
) -> dict[str, Any]:
    """How fast a search is, and its estimator's share of it."""
    settings = SearchSettings(method=method, seconds=seconds, seeds=1)  # the clock runs in this process alone
    warm_up(source.graph, costs, machine, settings)
    clocked = Clocked(costs.estimator)
    costs = MeasuredCosts(costs.profile, clocked)
    started = time.process_time()
    result = search(source.graph, costs, machine, start=read(source), settings=settings)
    spent = time.process_time() - started
    return {
        "processor_s": round(spent, 2),
        "distinct_candidates_per_s": round(result.distinct_evaluations / spent),
        "kernels_estimated": clocked.asked,
        "share_of_estimator": round(clocked.seconds / spent, 3),
        "predicted_ms": round(result.predicted_ns / 1e6, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each search (default 20)")
    parser.add_argument("--ops", type=int, default=4096, help="fused ops to ask for (default 4096)")
    arguments = parser.parse_args()
    if not 0 < arguments.seconds < math.inf or arguments.ops < 1:
        parser.error("expected --seconds above 0 and --ops of at least 1")
    for module in (backtracking, island, joint):
        vars(module)["time"] = SimpleNamespace(perf_counter=time.process_time, sleep=time.sleep)
    source = canonicalize(gzip.decompress(MODULE.read_bytes()))
    profile = load(PROFILE)
    costs = costs_of(profile, source.graph)
    machine = costs.machine
    trained = costs.estimator
    if not isinstance(trained, GnnModel):
        raise SystemExit("no weights ship for the H200")
    grower = Grower(source.graph, [], Growth(), 0)
    drawn = (grower.draw() for _ in range(20 * arguments.ops))
    ops = list({op.members: op for op in drawn if op is not None}.values())[: arguments.ops + 2]
    for warm in (trained, trained.analytic):
        per_kernel_us(warm, source, ops[:2] * (BATCH // 2))
    report: dict[str, Any] = {"us_per_fused_op": {"trained": per_kernel_us(trained, source, ops[2:])}}
    report["us_per_fused_op"]["analytical"] = per_kernel_us(trained.analytic, source, ops[2:])
    local = estimator_for("gpu", "a device without weights", trained.analytic.device)
    for method in ("backtracking", "joint"):
        report[method] = {
            name: searched(source, MeasuredCosts(profile, model), machine, method, arguments.seconds)
            for name, model in (("trained", trained), ("analytical", local))
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
