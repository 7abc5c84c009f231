"""What the demo found, as a table for people, Markdown for a README, and a record.

The step times are those of the search's own run, where XLA's default and every candidate took turns on
the devices; they are read from the plan.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from disco_hlo.hlo.cost_model import Line
from disco_hlo.plan.plan import Candidate, Plan

ALLOWED_LOSS_DIFFERENCE = 1e-4
DEFAULT = "XLA default"
BASELINES = (DEFAULT, "no fusion", "one bucket, XLA's op fusion", "plan's buckets, XLA's op fusion")
"""What the search phase measures beside the plans it found, by the names it gives them."""


class DemoError(Exception):
    """The demo cannot go on; the message is all the user sees."""


class Run(msgspec.Struct, frozen=True):
    """A finished training job."""

    median_step_s: float
    """Of all steps but the first two, which compile and allocate."""
    wall_s: float
    losses: list[float]


class Row(msgspec.Struct, frozen=True):
    """One row of the table: a candidate of the search, measured in turn with the others."""

    name: str
    candidate: str
    """Its name in the plan; empty where XLA's fusions and those buckets do not go together, or there was no time to
    compile it."""
    median_ns: int
    spread_ns: int
    predicted_ns: int
    speed_up: float | None
    """Median step time of XLA's default over this one's; None where one of them did not run."""


class Result(msgspec.Struct, frozen=True):
    """Everything the demo found; ``demo.json``."""

    rows: tuple[Row, ...]
    runs: dict[str, Run]
    loss_difference: float
    """Largest relative difference of any step's loss from XLA's default's, in either other run."""
    chosen: str
    plan: str
    all_reduce: tuple[Line, ...]
    profile_s: float
    search_s: float
    measure_s: float
    evaluations: int
    notes: tuple[str, ...]
    versions: dict[str, str]
    processes: int
    cores: int | None
    load: float
    """Of the machine before the demo began: how many processes were running or waiting to."""


# --- what the runs say ------------------------------------------------------------


def rows_of(plan: Plan) -> tuple[Row, ...]:
    """The table's rows: the baselines, then the plan.

    "The plan" is the one that was chosen; where a baseline was the fastest of all, the search's own best.

    Raises:
        DemoError: the plan lacks XLA's default, or itself.
    """
    candidates = {one.name: one for one in plan.measured.candidates} if plan.measured else {}
    found = "plan" if plan.chosen in BASELINES else plan.chosen
    missing = [name for name in (DEFAULT, found) if name not in candidates]
    if missing:
        raise DemoError(f"the plan holds no measurement of {missing[0]!r}; it has: {', '.join(candidates)}")
    named = [*zip(BASELINES, BASELINES, strict=True), ("the plan", found)]
    return tuple(_row(name, candidates.get(key), candidates[DEFAULT]) for name, key in named)


def _row(name: str, candidate: Candidate | None, default: Candidate) -> Row:
    if candidate is None:
        return Row(name, "", 0, 0, 0, None)
    measured = candidate.median_ns and default.median_ns
    return Row(
        name=name,
        candidate=candidate.name,
        median_ns=candidate.median_ns,
        spread_ns=candidate.spread_ns,
        predicted_ns=candidate.predicted_ns,
        speed_up=default.median_ns / candidate.median_ns if measured else None,
    )


def loss_difference(expected: Sequence[float], got: Sequence[float]) -> float:
    """Largest relative difference of two loss curves; infinite where they cannot be compared."""
    if len(expected) != len(got) or not all(map(math.isfinite, (*expected, *got))):
        return math.inf
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, got, strict=True)), default=0.0)


def result_of(plan: Plan, place: str, runs: dict[str, Run], load: float) -> Result:
    """Put plan and runs together; ``place`` is where the plan lies, as the user is to read it.

    Raises:
        DemoError: the plan was not measured.
    """
    rows, measured = rows_of(plan), plan.measured
    assert measured is not None
    expected = runs["default"].losses
    return Result(
        rows=rows,
        runs=runs,
        loss_difference=max(loss_difference(expected, run.losses) for run in runs.values()),
        chosen=plan.chosen,
        plan=place,
        all_reduce=measured.all_reduce,
        profile_s=measured.profile_s,
        search_s=measured.search_s,
        measure_s=measured.measure_s,
        evaluations=plan.search.evaluations,
        notes=plan.notes,
        versions=plan.versions,
        processes=plan.target.process_count,
        cores=os.cpu_count(),
        load=round(load, 1),
    )


# --- what the user reads ------------------------------------------------------------

HEADINGS = ("", "step time", "spread", "vs default", "predicted")


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table as text."""
    predicted = f"{row.predicted_ns / 1e6:.1f} ms" if row.predicted_ns else "-"
    if not row.median_ns:
        return (row.name, "failed" if row.candidate else "left out", "-", "-", predicted)
    ratio = f"{row.speed_up:.2f}x" if row.speed_up else "-"
    return (row.name, f"{row.median_ns / 1e6:.1f} ms", f"± {row.spread_ns / 1e6:.1f} ms", ratio, predicted)


def all_reduce_text(line: Line) -> str:
    """One piece of T = C x + D in words."""
    bandwidth = f"{1 / line.ns_per_byte:.2f} GB/s" if line.ns_per_byte else "no limit seen"
    fixed = "latency" if line.offset_ns >= 0 else "offset"
    start = f" from {line.from_bytes} bytes" if line.from_bytes else ""
    return (
        f"all-reduce{start}: {fixed} {line.offset_ns / 1e6:.3f} ms, bandwidth {bandwidth} "
        f"(T = C x + D, C = {line.ns_per_byte:.3g} ns/byte)"
    )


def facts(result: Result) -> list[str]:
    """The lines below the table."""
    runs = result.runs
    before, after = runs["default"].median_step_s, runs["enacted"].median_step_s
    steps = f"{1e3 * before:.1f} ms per step with XLA's default, {1e3 * after:.1f} ms with the plan"
    searched = f"{1e3 * runs['search'].median_step_s:.1f} ms in the searching run, once it had searched"
    lines = [
        f"training runs, {len(runs['enacted'].losses)} steps each: {steps} ({before / after:.2f}x); "
        f"{searched}",
        f"loss curves: {result.loss_difference:.1e} apart at most, relative "
        f"({ALLOWED_LOSS_DIFFERENCE:.0e} is allowed)",
        *map(all_reduce_text, result.all_reduce),
        f"search: profiled in {result.profile_s:.0f} s, {result.evaluations} candidates simulated in "
        f"{result.search_s:.0f} s, finalists compiled and measured in {result.measure_s:.0f} s",
    ]
    if result.chosen in BASELINES:
        lines.append(f'nothing searched was faster than "{result.chosen}", which is what the plan holds')
    lines += [f"note: {note}" for note in result.notes]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    where = f"{result.processes} CPU processes on {result.cores} cores, load {result.load} before"
    return [*lines, f"{where}; {versions}"]


def markdown(result: Result) -> str:
    """Table and facts for a README."""
    table = [HEADINGS, ("---", *["---:"] * (len(HEADINGS) - 1)), *map(cells, result.rows)]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([*lines, "", *(f"- {printable(line)}" for line in facts(result))]) + "\n"


def what_next(result: Result) -> str:
    """The plan, and what to try with it."""
    disco = shlex.quote(from_here(Path(sys.executable).parent / "disco"))
    place, page = shlex.quote(result.plan), shlex.quote(f"{result.plan}/report.html")
    return f"plan: {result.plan}\n\nnext:\n  {disco} inspect {place}\n  {disco} report {place} -o {page}"


def printable(line: str) -> str:
    """``line`` without what a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in line)


def from_here(path: Path) -> str:
    """``path`` as short as it can be typed in the current folder."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
