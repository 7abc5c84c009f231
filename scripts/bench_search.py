"""How fast the search is, and how good what it finds: every figure of ``docs/search.md``.

    python scripts/bench_search.py throughput     candidates a second, with either estimator
    python scripts/bench_search.py algorithm-1    Algorithm 1 with the paper's settings, per model
    python scripts/bench_search.py race           how soon the joint search is where Algorithm 1 ends
    python scripts/bench_search.py curves         quality against time, four methods, five seeds
    python scripts/bench_search.py gap            share of the gap to the bound that is closed
    python scripts/bench_search.py optimum        200 small steps against the true optimum
    python scripts/bench_search.py plot           the curves as one picture (needs matplotlib)

The steps are those in ``tests/data``; ``--modules DIR`` takes others, ``NAME.hlo.pb.gz``. Results go into
``docs/benchmarks/search.json``, a section each, after every run; what is there already is not run again
(``--again`` runs it). Seconds are seconds of this process on
a processor (nothing runs in parallel), so that other work on the machine does not matter; wall time is
recorded beside them where a user would wait for it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from disco_hlo.estimator.gnn import GnnModel  # noqa: E402
from disco_hlo.profiler.costs import MeasuredCosts  # noqa: E402
from disco_hlo.profiler.keys import GROUP_PREFIX  # noqa: E402
from disco_hlo.profiler.profile import load as load_profile  # noqa: E402
from disco_hlo.search.api import SearchSettings  # noqa: E402
from disco_hlo.search.arrays import layout as at  # noqa: E402
from disco_hlo.search.boundary.starts import prepare  # noqa: E402
from disco_hlo.search.methods import backtracking, island, joint  # noqa: E402
from disco_hlo.search.methods.climber import Climber  # noqa: E402
from disco_hlo.search.run import search  # noqa: E402
from disco_hlo.search.warm import warm_up  # noqa: E402

from disco_hlo.cli.costs import Costs, costs_for  # noqa: E402
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize  # noqa: E402
from disco_hlo.plan.baselines import one_bucket, unfused  # noqa: E402
from disco_hlo.plan.read import read  # noqa: E402
from disco_hlo.plan.strategy import Bucket, Strategy  # noqa: E402
from disco_hlo.report.predict import lower_bound  # noqa: E402
from disco_hlo.simulator.build import build  # noqa: E402
from disco_hlo.simulator.timeline import simulate  # noqa: E402

RESULTS = ROOT / "docs" / "benchmarks" / "search.json"
FIXTURE = ROOT / "tests" / "data" / "h200_transformer_default.hlo.pb.gz"
UNFUSED = FIXTURE.with_name("h200_transformer_unfused.hlo.pb.gz")
DISCO_MINUTES = {"vgg19": 17, "resnet50": 22, "transformer": 74, "rnnlm": 9, "bert": 89, "reformer": 78}
"""Table 3 of the paper, alpha = 1.05 and beta = 10: minutes of search."""
EVERYTHING = {**island.KERNEL_MOVES, **island.BUCKET_MOVES, **island.ORDER_MOVES}
THRESHOLDS_MIB = (0, 1, 4, 16, 64, 256)
STEP = 500
"""Proposals of greedy and random search between two points of their curves."""


class Case:
    """A step with its costs on one link."""

    def __init__(self, name: str, path: Path, link: str, estimator: str = "gnn") -> None:
        self.name, self.link = name, link
        self.module: CanonicalModule = canonicalize(gzip.decompress(path.read_bytes()))
        self.graph = self.module.graph
        profile = load_profile(ROOT / "disco_hlo" / "data" / "profiles" / f"nvidia-h200-{link}.json")
        self.costs: Costs = costs_for(self.graph, profile, None)
        model = self.costs.model
        if estimator != "gnn" and isinstance(model, MeasuredCosts) and isinstance(model.estimator, GnnModel):
            ops = {key: time for key, time in profile.ops.items() if key[: len(GROUP_PREFIX)] != GROUP_PREFIX}
            told = profile if estimator == "measured" else replace(profile, ops=ops)
            self.costs.model = MeasuredCosts(told, model.estimator.analytic)
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
        if (
            name in arguments.only
            if arguments.only
            else name != "gpt12-unfused" or arguments.run is algorithm_1
        ):
            yield name, path


def is_done(arguments: argparse.Namespace, section: str, key: str) -> bool:
    """Whether a result is there and need not be found again."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return not arguments.again and key in found.get(section, {})


def record(section: str, key: str, value: object) -> None:
    """Put one result into the file, at once."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found.setdefault(section, {})[key] = value
    temporary = RESULTS.with_suffix(".new")
    temporary.write_text(_a_result_a_line(found))
    os.replace(temporary, RESULTS)
    print(section, key, json.dumps(value)[:300], flush=True)


def _a_result_a_line(found: dict[str, dict[str, Any]]) -> str:
    """JSON in which a changed result changes one line."""
    sections = []
    for section, results in sorted(found.items()):
        lines = [
            f"  {json.dumps(key)}: {json.dumps(value, sort_keys=True)}"
            for key, value in sorted(results.items())
        ]
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


# --- Algorithm 1 with default settings ---------------------------------------------------------------


def algorithm_1(arguments: argparse.Namespace) -> None:
    """Each model in a process of its own, for its peak of memory."""
    for name, path in cases(arguments):
        if is_done(arguments, "algorithm_1", name):
            continue
        command = [sys.executable, __file__, "one", "--module", str(path), "--link", arguments.link]
        command += ["--seconds", str(arguments.seconds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        record("algorithm_1", name, {**found, "disco_minutes": DISCO_MINUTES.get(name)})


def one(arguments: argparse.Namespace) -> None:
    """Algorithm 1 on one step, as JSON on the last line."""
    case = Case("one", arguments.module, arguments.link)
    case.warm_up()
    wall, processor = time.perf_counter(), time.process_time()
    settings = SearchSettings(method="backtracking", seconds=arguments.seconds)
    result = case.search(unfused(case.graph), settings)
    processor_s = time.process_time() - processor
    print(
        json.dumps(
            {
                "ops": len(case.graph),
                "all_reduces": len(case.graph.all_reduces),
                "start_ns": result.start_ns,
                "found_ns": result.predicted_ns,
                "candidates": result.evaluations,
                "distinct": result.distinct_evaluations,
                "stopped": result.stopped,
                "wall_s": round(time.perf_counter() - wall, 2),
                "processor_s": round(processor_s, 2),
                "distinct_per_s": round(result.distinct_evaluations / processor_s),
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


# --- the joint search against Algorithm 1's own end ---------------------------------------------------


def race(arguments: argparse.Namespace) -> None:
    """Algorithm 1 with the paper's settings, from the unfused step to its own end, and how soon the joint search,
    from XLA's plan, has a plan as good. Each begins with a step nobody has looked at: what both prepare counts."""
    count_processor_seconds()
    for name, path in cases(arguments):
        if is_done(arguments, "race", name):
            continue
        Case(name, path, arguments.link).warm_up()
        runs = [_raced(name, path, arguments, seed) for seed in range(arguments.seeds)]
        record("race", name, {"runs": runs})


def _raced(name: str, path: Path, arguments: argparse.Namespace, seed: int) -> dict[str, object]:
    case = Case(name, path, arguments.link)
    began = time.process_time()
    settings = SearchSettings(method="backtracking", seed=seed, seconds=arguments.seconds, finalists=1)
    paper = case.search(unfused(case.graph), settings)
    paper_s = _since(began)
    case = Case(name, path, arguments.link)
    settings = SearchSettings(seed=seed, seconds=max(1.0, paper_s / 5), seeds=1, finalists=1)
    joint = case.search(case.xla, settings)
    points = [(0.0, joint.start_ns), *((step.seconds, step.cost_ns) for step in joint.trace)]
    there = [seconds for seconds, cost_ns in points if cost_ns <= paper.predicted_ns]
    return {
        "algorithm_1_s": paper_s, "algorithm_1_ns": paper.predicted_ns, "stopped": paper.stopped,
        "xla_ns": joint.start_ns, "joint_there_s": round(there[0], 3) if there else None,
        "joint_first_s": round(points[1][0], 3) if joint.trace else None,
        "joint_s": round(settings.seconds or 0.0, 3), "joint_ns": joint.predicted_ns,
    }  # fmt: skip


# --- candidates a second ------------------------------------------------------------------------------


def throughput(arguments: argparse.Namespace) -> None:
    """Distinct legal candidates a processor second, from a cold cache: nothing is priced before.

    ``kernels``: moves judged by the sum of all times; ``orders``: moves of everything, each order
    simulated; both from XLA's plan. ``joint``: a whole search by one seed, its own mixture of the two, preparing
    and checking included. ``algorithm_1``: candidates of up to ten moves, each simulated by the
    ready queue, from the unfused step. The first two with several seeds; the figure is their median, ``of_seeds`` has
    all. Kernels are priced by the analytical model (``analytic``), by it where none was measured (``measured``), or by
    the network where none was measured, as a user's are (``gnn``). ``prepared_s`` is what comes before the first
    candidate, ``loop_s`` what five million additions in Python take at that moment: a quarter of a second on an
    unhurried core.
    """
    count_processor_seconds()
    for name, path in cases(arguments):
        for estimator in ("analytic", "measured", "gnn"):
            if is_done(arguments, "throughput", f"{name} {estimator}"):
                continue
            case = Case(name, path, arguments.link, estimator)
            case.warm_up()
            rates = [
                _climbed_rates(Case(name, path, arguments.link, estimator), seed, arguments.seconds)
                for seed in range(arguments.seeds)
            ]
            found: dict[str, object] = {"loop_s": _loop_s(), "of_seeds": rates}
            found |= {part: statistics.median(rate[part] for rate in rates) for part in rates[0]}
            settings = SearchSettings(seconds=arguments.seconds, seeds=1, unchanged=10**9, finalists=1)
            fresh = Case(name, path, arguments.link, estimator)
            began = time.process_time()
            found["joint"] = round(fresh.search(fresh.xla, settings).distinct_evaluations / _since(began))
            settings = SearchSettings(method="backtracking", seconds=arguments.seconds)
            paper = backtracking.Backtracking(
                case.graph, case.costs, case.costs.machine, unfused(case.graph), settings
            )
            began = time.process_time()
            while _since(began) < arguments.seconds and not paper.explore():
                pass
            found["algorithm_1"] = round(int(paper.seen.used[0]) / _since(began))
            record("throughput", f"{name} {estimator}", found)


def _climbed_rates(case: Case, seed: int, seconds: float) -> dict[str, float]:
    """Distinct candidates a second by moves of kernels and by moves of everything, and what came before the first."""
    began = time.process_time()
    climber = Climber(case.graph, case.costs, case.costs.machine, prepare(case.graph, [case.xla]), 0, seed)
    found = {"prepared_s": _since(began)}
    for part, moves in (("kernels", island.KERNEL_MOVES), ("orders", EVERYTHING)):
        began, before = time.process_time(), climber.distinct
        units = int(climber.state.word[at.TOTAL, at.UNITS])
        while _since(began) < seconds:
            loss_ns = climber.total_ns() // units // island.KERNEL_DIVISORS[0]
            climber.climb(moves, island.CHUNK, loss_ns, ordered=part == "orders")
        found[part] = round((climber.distinct - before) / _since(began))
    return found


def _loop_s() -> float:
    began = time.process_time()
    total = 0
    for number in range(5_000_000):
        total += number
    return round(_since(began), 2)


# --- quality against time ----------------------------------------------------------------------------


def curves(arguments: argparse.Namespace) -> None:
    """Best predicted step time over seconds: (seconds, ns) of every improvement, from XLA's plan."""
    count_processor_seconds()
    for name, path in cases(arguments):
        methods = [one for one in arguments.methods if not is_done(arguments, "curves", f"{name} {one}")]
        if not methods:
            continue
        case = Case(name, path, arguments.link)
        case.warm_up()
        for method in methods:
            runs = [_METHODS[method](case, seed, arguments.seconds) for seed in range(arguments.seeds)]
            record("curves", f"{name} {method}", {"budget_s": arguments.seconds, "runs": runs})


def _searched(method: str) -> Callable[[Case, int, float], list[tuple[float, int]]]:
    def run(case: Case, seed: int, seconds: float) -> list[tuple[float, int]]:
        settings = SearchSettings(
            method=method, seed=seed, seconds=seconds, seeds=1, unchanged=10**9, finalists=1
        )
        result = case.search(case.xla, settings)
        found = [(0.0, result.start_ns)]
        found += [(round(step.seconds, 3), step.cost_ns) for step in result.trace]
        return found

    return run


def _climbed(threshold_ns: int) -> Callable[[Case, int, float], list[tuple[float, int]]]:
    """Random moves of all kinds from XLA's plan: all kept (random search), or none that makes it worse."""

    def run(case: Case, seed: int, seconds: float) -> list[tuple[float, int]]:
        began = time.process_time()
        climber = Climber(
            case.graph, case.costs, case.costs.machine, prepare(case.graph, [case.xla]), 0, seed
        )
        found = [(0.0, case.simulated_ns(case.xla)), (_since(began), climber.makespan_ns())]
        while _since(began) < seconds:
            climber.climb(EVERYTHING, STEP, threshold_ns, ordered=True)
            if climber.makespan_ns() < found[-1][1]:
                found.append((_since(began), climber.makespan_ns()))
        # Alike kernels share a price while it climbs; what the joint search promises is simulated, and so is this.
        found.append((_since(began), case.simulated_ns(climber.strategy(climber.state))))
        return found

    return run


def _since(began: float) -> float:
    return round(time.process_time() - began, 3)


_METHODS = {
    "algorithm 1": _searched("backtracking"),
    "joint": _searched("joint"),
    "random": _climbed(2**50),
    "greedy": _climbed(0),
}


# --- the gap to the bound ----------------------------------------------------------------------------


def gap(arguments: argparse.Namespace) -> None:
    """What is left between the best plan without search and the bound, and how much of it is closed."""
    count_processor_seconds()
    for name, path in cases(arguments):
        for link in arguments.links:
            if is_done(arguments, "gap", f"{name} {link}"):
                continue
            case = Case(name, path, link)
            case.warm_up()
            baselines = dict(_baselines(case))
            result = case.search(
                case.xla, SearchSettings(seconds=arguments.seconds, seeds=1, processes=1, finalists=1)
            )
            limit = lower_bound(case.graph, [result.strategy, case.xla], case.costs)
            best = min(baselines.values())
            record(
                "gap", f"{name} {link}",
                {
                    "baselines_ns": baselines, "found_ns": result.predicted_ns, "bound_ns": limit.makespan_ns,
                    "plain_bound_ns": limit.plain_ns,
                    "communication_ns": limit.communication_ns, "compute_ns": limit.compute_ns,
                    "processor_s": round(result.wall_s, 1), "candidates": result.evaluations,
                    "closed": round((best - result.predicted_ns) / max(best - limit.makespan_ns, 1), 4),
                    "closed_plain": round((best - result.predicted_ns) / max(best - limit.plain_ns, 1), 4),
                },
            )  # fmt: skip


def _baselines(case: Case) -> Iterator[tuple[str, int]]:
    """XLA's plan, and its kernels in its order with all-reduces combined up to a threshold."""
    yield "xla", case.simulated_ns(case.xla)
    ranked = sorted(case.graph.all_reduces, key=lambda x: (_depth(case)[x], x))
    for threshold in THRESHOLDS_MIB:
        yield f"{threshold} MiB", _in_xla_order(case, _combined(case, ranked, threshold << 20))
    yield "all", _in_xla_order(case, one_bucket(case.graph, case.xla.groups))


def _depth(case: Case) -> list[int]:
    depth = [0] * len(case.graph)
    for node in case.graph.nodes:
        depth[node.id] = 1 + max((depth[operand] for operand in node.operands), default=0)
    return depth


def _combined(case: Case, ranked: list[int], most_bytes: int) -> Strategy:
    """Neighbouring all-reduces together as long as they are not larger than the threshold."""
    buckets: list[list[int]] = []
    for x in ranked:
        node = case.graph.nodes[x]
        last = buckets[-1] if buckets else []
        size = node.shape.size_bytes + sum(case.graph.nodes[y].shape.size_bytes for y in last)
        same = last and case.graph.nodes[last[0]].collective == node.collective
        if same and case.graph.nodes[last[0]].shape.dtype == node.shape.dtype and size <= most_bytes:
            last.append(x)
        else:
            buckets.append([x])
    return Strategy(case.xla.groups, tuple(Bucket(tuple(bucket)) for bucket in buckets))


def _in_xla_order(case: Case, strategy: Strategy) -> int:
    """Kernels in XLA's order, transfers issued as early and waited for as late as that allows."""
    order = tuple(token for token in case.xla.order if token[0] != "b")
    starts = prepare(case.graph, [replace(strategy, order=order)])
    return Climber(case.graph, case.costs, case.costs.machine, starts, 0, 0).makespan_ns()


# --- the true optimum --------------------------------------------------------------------------------


def optimum(arguments: argparse.Namespace) -> None:
    """The joint search against every strategy and every order there is."""
    from disco_hlo.simulator.costs import GPU
    from tests.search.cost_models import ResultCosts
    from tests.search.exhaustive import least_ns, small_steps

    machine, costs = replace(GPU, launch_ns=3000), ResultCosts()
    ratios = []
    for seed, graph in enumerate(small_steps(arguments.count, "gpu")):
        least = least_ns(graph, costs, machine)
        settings = SearchSettings(seed=seed, evaluations=2000, seeds=1)
        found = search(graph, costs, machine, start=unfused(graph), settings=settings).predicted_ns
        ratios.append(found / least)
    record(
        "optimum", "joint",
        {
            "steps": len(ratios), "within_1_percent": sum(ratio <= 1.01 for ratio in ratios),
            "exact": sum(ratio == 1 for ratio in ratios), "worst": round(max(ratios), 4),
            "below_optimum": sum(ratio < 1 for ratio in ratios),
        },
    )  # fmt: skip


# --- the picture -------------------------------------------------------------------------------------


def plot(arguments: argparse.Namespace) -> None:
    """All curves, a panel for each step."""
    from matplotlib.figure import Figure

    del arguments
    found = json.loads(RESULTS.read_text())["curves"]
    names = sorted({key.split(" ", 1)[0] for key in found})
    colours = {"algorithm 1": "#6baed6", "joint": "#d94801", "random": "#bdbdbd", "greedy": "#31a354"}
    rows = -(-len(names) // 3)
    figure = Figure(figsize=(13, 3.6 * rows), layout="constrained")
    for place, name in enumerate(names):
        axes = figure.add_subplot(rows, 3, place + 1)
        for method, colour in colours.items():
            entry = found.get(f"{name} {method}", {"runs": []})
            for number, run in enumerate(entry["runs"]):
                seconds, times = np.array([*run, [entry["budget_s"], run[-1][1]]]).T
                label = method if number == 0 else None
                axes.step(
                    np.maximum(seconds, 0.05), times / 1e6, where="post", color=colour, lw=1.2, label=label
                )
        axes.set(title=name, xscale="log", xlabel="processor seconds", ylabel="predicted step, ms")
        axes.legend(fontsize=8)
    figure.savefig(RESULTS.with_name("search_curves.png"), dpi=80)


def main() -> None:
    """Parse the command line and run one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, run, seconds in (
        ("throughput", throughput, 1.5), ("algorithm-1", algorithm_1, 600.0), ("one", one, 600.0),
        ("race", race, 100.0), ("curves", curves, 10.0), ("gap", gap, 60.0), ("optimum", optimum, 0.0),
        ("plot", plot, 0.0),
    ):  # fmt: skip
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--modules", type=Path, default=ROOT / "tests" / "data" / "h200_models")
        command.add_argument("--module", type=Path)
        command.add_argument("--link", default="staged", choices=("nvlink", "staged", "sockets"))
        command.add_argument("--links", nargs="*", default=["nvlink", "staged", "sockets"])
        command.add_argument("--seconds", type=float, default=seconds)
        command.add_argument("--seeds", type=int, default=5)
        command.add_argument("--count", type=int, default=200)
        command.add_argument("--only", nargs="*", help="steps by name")
        command.add_argument("--again", action="store_true", help="run what has a result already, too")
        command.add_argument("--methods", nargs="*", default=list(_METHODS), choices=list(_METHODS))
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
