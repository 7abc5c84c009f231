"""How soon the search is done: Algorithm 1 to its own end, the joint search against it, candidates a second."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from disco_hlo.plan.baselines import unfused
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.boundary.starts import prepare
from disco_hlo.search.methods import backtracking, island
from disco_hlo.search.methods.climber import Climber
from searching.results import is_done, record
from searching.steps import Case, cases, count_processor_seconds, since_s

DISCO_MINUTES = {"vgg19": 17, "resnet50": 22, "transformer": 74, "rnnlm": 9, "bert": 89, "reformer": 78}
"""Table 3 of the paper, alpha = 1.05 and beta = 10: minutes of search."""
EVERYTHING = {**island.KERNEL_MOVES, **island.BUCKET_MOVES, **island.ORDER_MOVES}


def algorithm_1(arguments: argparse.Namespace) -> None:
    """Each model in a process of its own, for its peak of memory."""
    for name, path in cases(arguments):
        if is_done(arguments, "algorithm_1", name):
            continue
        command = [sys.executable, sys.argv[0], "one", "--module", str(path), "--link", arguments.link]
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
    paper_s = since_s(began)
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
            found["joint"] = round(fresh.search(fresh.xla, settings).distinct_evaluations / since_s(began))
            settings = SearchSettings(method="backtracking", seconds=arguments.seconds)
            paper = backtracking.Backtracking(
                case.graph, case.costs, case.costs.machine, unfused(case.graph), settings
            )
            began = time.process_time()
            while since_s(began) < arguments.seconds and not paper.explore():
                pass
            found["algorithm_1"] = round(int(paper.seen.used[0]) / since_s(began))
            record("throughput", f"{name} {estimator}", found)


def _climbed_rates(case: Case, seed: int, seconds: float) -> dict[str, float]:
    """Distinct candidates a second by moves of kernels and by moves of everything, and what came before the first."""
    began = time.process_time()
    climber = Climber(case.graph, case.costs, case.costs.machine, prepare(case.graph, [case.xla]), 0, seed)
    found = {"prepared_s": since_s(began)}
    for part, moves in (("kernels", island.KERNEL_MOVES), ("orders", EVERYTHING)):
        began, before = time.process_time(), climber.distinct
        units = int(climber.state.word[at.TOTAL, at.UNITS])
        while since_s(began) < seconds:
            loss_ns = climber.total() // units // island.KERNEL_DIVISORS[0]
            climber.climb(moves, island.CHUNK, loss_ns, ordered=part == "orders")
        found[part] = round((climber.distinct - before) / since_s(began))
    return found


def _loop_s() -> float:
    began = time.process_time()
    total = 0
    for number in range(5_000_000):
        total += number
    return round(since_s(began), 2)
