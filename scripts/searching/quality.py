"""How good what the search finds is: over time, against the bound, and against the true optimum."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from disco_hlo.optimize.predict import lower_bound
from disco_hlo.plan.baselines import one_bucket, unfused
from disco_hlo.plan.strategy import Bucket, Strategy
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.boundary.starts import prepare
from disco_hlo.search.methods.climber import Climber
from disco_hlo.search.run import search
from searching.results import RESULTS, is_done, record
from searching.speed import EVERYTHING
from searching.steps import Case, cases, count_processor_seconds, since_s

THRESHOLDS_MIB = (0, 1, 4, 16, 64, 256)
STEP = 500
"""Proposals of greedy and random search between two points of their curves."""


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
            runs = [METHODS[method](case, seed, arguments.seconds) for seed in range(arguments.seeds)]
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
        found = [(0.0, case.simulated_ns(case.xla)), (since_s(began), climber.makespan_ns())]
        while since_s(began) < seconds:
            climber.climb(EVERYTHING, STEP, threshold_ns, ordered=True)
            if climber.makespan_ns() < found[-1][1]:
                found.append((since_s(began), climber.makespan_ns()))
        # Alike kernels share a price while it climbs; what the joint search promises is simulated, and so is this.
        found.append((since_s(began), case.simulated_ns(climber.strategy(climber.state))))
        return found

    return run


METHODS = {
    "algorithm 1": _searched("backtracking"),
    "joint": _searched("joint"),
    "random": _climbed(2**50),
    "greedy": _climbed(0),
}


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
                    np.maximum(seconds, 0.005), times / 1e6, where="post", color=colour, lw=1.2, label=label
                )
        axes.set(title=name, xscale="log", xlabel="processor seconds", ylabel="predicted step, ms")
        axes.legend(fontsize=8)
    figure.savefig(RESULTS.with_name("search_curves.png"), dpi=80)
