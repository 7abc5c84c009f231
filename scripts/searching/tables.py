"""The tables of ``docs/search.md``, as Markdown, from the record."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from searching.results import RESULTS

_PRICED = {"analytic": "analytic", "measured": "measured, analytic", "gnn": "measured, network"}
_METHODS = ("algorithm 1", "joint", "greedy", "random")


def tables(arguments: argparse.Namespace) -> None:
    """Print what the record holds, a table for every kind of run."""
    del arguments
    found = json.loads(RESULTS.read_text())
    for section, table in _TABLES.items():
        if section in found:
            print(f"\n{section}\n\n" + "\n".join(table(found[section])))


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> list[str]:
    marks = ["---"] * texts + ["---:"] * (len(columns) - texts)
    return [f"| {' | '.join(map(str, row))} |" for row in (columns, marks, *rows)]


def _throughput(found: dict[str, Any]) -> list[str]:
    columns = (
        "step",
        "kernels priced",
        "loop, s",
        "prepared, s",
        "kernels",
        "orders",
        "joint search",
        "Algorithm 1",
    )
    rows = [
        (
            name, priced, f"{one['loop_s']:.2f}", f"{one['prepared_s']:.3f}", round(one["kernels"]),
            round(one["orders"]), one["joint"], one["algorithm_1"],
        )
        for name in _names(found)
        for estimator, priced in _PRICED.items()
        if (one := found.get(f"{name} {estimator}"))
    ]  # fmt: skip
    return _table(columns, rows, texts=2)


def _algorithm_1(found: dict[str, Any]) -> list[str]:
    columns = (
        "step", "ops", "start, ms", "found, ms", "candidates", "distinct a processor second", "processor s",
        "wall s", "peak MiB", "ended by", "DisCo, minutes",
    )  # fmt: skip
    rows = [
        (name, one["ops"], _ms(one["start_ns"]), _ms(one["found_ns"]), one["candidates"], one["distinct_per_s"],
         one["processor_s"], one["wall_s"], one["peak_mib"], one["stopped"], one["disco_minutes"] or "")
        for name, one in sorted(found.items())
    ]  # fmt: skip
    return _table(columns, rows)


def _race(found: dict[str, Any]) -> list[str]:
    columns = (
        "step", "seeds", "Algorithm 1, s", "its end, ms", "XLA's plan, ms", "joint's first plan after, s",
        "joint as good after, s", "share of that time", "joint stopped at, s", "its end, ms",
    )  # fmt: skip
    rows = []
    for name, entry in sorted(found.items()):
        runs = entry["runs"]

        def middle(of: Callable[[dict[str, Any]], float], runs: list[dict[str, Any]] = runs) -> float:
            return statistics.median(map(of, runs))

        rows.append(
            (
                name, len(runs), f"{middle(lambda run: run['algorithm_1_s']):.2f}",
                _ms(middle(lambda run: run["algorithm_1_ns"])), _ms(middle(lambda run: run["xla_ns"])),
                f"{middle(lambda run: run['joint_first_s']):.3f}", f"{middle(_there_s):.3f}",
                f"{middle(lambda run: _there_s(run) / run['algorithm_1_s']):.2f}",
                f"{middle(lambda run: run['joint_s']):.1f}", _ms(middle(lambda run: run["joint_ns"])),
            )
        )  # fmt: skip
    return _table(columns, rows)


def _there_s(run: dict[str, Any]) -> float:
    there = run["joint_there_s"]
    return float("inf") if there is None else float(there)


def _curves(found: dict[str, Any]) -> list[str]:
    columns = (
        "step", "budget, processor s", "seeds", "Algorithm 1", "joint", "greedy", "random", "first answer",
        "joint at Algorithm 1's end", "Algorithm 1 there",
    )  # fmt: skip
    rows = []
    for name in _names(found):
        runs = {method: found[f"{name} {method}"]["runs"] for method in _METHODS}
        ends = {method: statistics.median(run[-1][1] for run in runs[method]) for method in _METHODS}
        goal = ends["algorithm 1"]
        joint, own = ([_reached_s(run, goal) for run in runs[method]] for method in ("joint", "algorithm 1"))
        reached = [seconds for seconds in joint if seconds < float("inf")]
        rows.append(
            (
                name, found[f"{name} joint"]["budget_s"], len(runs["joint"]),
                *(_ms(ends[method]) for method in ("algorithm 1", "joint", "greedy", "random")),
                f"{statistics.median(run[min(1, len(run) - 1)][0] for run in runs['joint']):.2f} s",
                f"{statistics.median(joint):.2f} s, {len(reached)} of {len(joint)} seeds",
                f"{statistics.median(own):.2f} s",
            )
        )  # fmt: skip
    return _table(columns, rows)


def _reached_s(run: list[list[float]], goal_ns: float) -> float:
    return next((seconds for seconds, cost_ns in run if cost_ns <= goal_ns), float("inf"))


def _gap(found: dict[str, Any]) -> list[str]:
    columns = (
        "step", "link", "best baseline, ms", "found, ms", "bound, ms", "closed", "plain bound, ms",
        "of the plain gap", "compute, ms", "communication, ms",
    )  # fmt: skip
    rows = [
        (*key.split(" "), _ms(min(one["baselines_ns"].values())), _ms(one["found_ns"]), _ms(one["bound_ns"]),
         f"{one['closed']:.1%}", _ms(one["plain_bound_ns"]), f"{one['closed_plain']:.1%}", _ms(one["compute_ns"]),
         _ms(one["communication_ns"]))
        for key, one in sorted(found.items())
    ]  # fmt: skip
    return _table(columns, rows, texts=2)


def _names(found: dict[str, Any]) -> list[str]:
    return sorted({key.split(" ", 1)[0] for key in found})


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.2f}"


_TABLES = {
    "throughput": _throughput, "algorithm_1": _algorithm_1, "race": _race, "curves": _curves, "gap": _gap,
}  # fmt: skip
