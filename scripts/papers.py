"""The papers' tables from our simulator, each figure next to the paper's: ``scripts/papers.py t3|coconet|fused``.
``scatter`` compares the ring with reduce-scatters measured on GPUs, ``matmul`` stages with matmuls measured on V100.

Figures that a parameter was fitted to are marked, and not compared. Where one is not reached, the last lines say which
parameter the paper leaves open, and what it would have to be. ``--svg FILE`` draws the table.
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

import msgspec
import numpy as np
from paper_figures import (
    FIGURES,
    ROOT,
    Measurement,
    Open,
    Paper,
    Row,
    geometric_mean,
    is_within,
    of_the_authors_files,
    read,
    solve,
    training_rows,
    winners,
)

from disco_hlo.errors import DiscoError
from disco_hlo.whatif.machine import Gpu, Matmul, collective_ns, load, matmul_ns, stages

RECORDS = ROOT / "docs" / "benchmarks"
FITTED_MB = (6, 24, 96)


class Measured(msgspec.Struct):
    """Times of NCCL's reduce-scatter in ns by size in MB, of several runs; also where NCCL has one protocol alone."""

    device: str
    devices: int
    points: dict[int, list[float]]
    by_protocol: dict[str, dict[int, list[float]]] = {}


def scatter() -> str:
    """T3's figure 14 on GPUs: the ring's lines fitted at some sizes, compared at the others."""
    records = sorted(RECORDS.glob("reduce_scatter_*x*.json"))
    return "\n\n".join(_compared(msgspec.json.decode(one.read_bytes(), type=Measured)) for one in records)


def _compared(measured: Measured) -> str:
    lines = [_line(points) for points in (measured.by_protocol or {"": measured.points}).values()]
    share = (measured.devices - 1) / measured.devices
    fits = [f"{share / per_byte:.0f} GB/s and {latency_ns / 1e3:.1f} µs" for per_byte, latency_ns in lines]
    told = [
        f"{fit}{one and f' ({one})'}" for fit, one in zip(fits, measured.by_protocol or [""], strict=True)
    ]
    text = [
        f"{measured.devices} x {measured.device}, reduce-scatter. Fitted: {', '.join(told)}, at "
        f"{', '.join(map(str, FITTED_MB))} MB; the other sizes are held out.",
        "",
        "| MB | measured | fitted ring | off | NCCL's own numbers | off |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    errors = []
    for size, times in sorted(measured.points.items()):
        known = median(times)
        have = min(per_byte * size * 1e6 + latency_ns for per_byte, latency_ns in lines)
        nominal = collective_ns(load("h200"), "reduce-scatter", size * 1e6, measured.devices)
        errors += [] if size in FITTED_MB else [abs(have / known - 1)]
        text.append(
            f"| {size} | {known / 1e3:.1f} µs | {have / 1e3:.1f} µs | {100 * (have / known - 1):+.1f} % "
            f"| {nominal / 1e3:.1f} µs | {100 * (nominal / known - 1):+.1f} % |"
        )
    mean = geometric_mean([1 + error for error in errors]) - 1
    last = f"Held out: {100 * mean:.1f} % geometric mean error, {100 * max(errors):.1f} % at most (T3: 6 %)."
    apart, size = max(
        (max(measured.points[size]) / min(measured.points[size]) - 1, size) for size in FITTED_MB
    )
    last += f" Of the sizes fitted, {size} MB differs most from run to run, by {100 * apart:.0f} %."
    return "\n".join([*text, "", last])


def _line(points: dict[int, list[float]]) -> tuple[float, float]:
    """The ring's ns a byte and its latency: least squares of relative errors, two unknowns."""
    known = {size: median(points[size]) for size in FITTED_MB}
    rows = np.array([[size * 1e6 / ns, 1 / ns] for size, ns in known.items()])
    (per_byte, latency_ns), *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    return per_byte, latency_ns


class Matmuls(msgspec.Struct):
    """Times that others measured: rows, columns, depth, ms."""

    device: str
    source: str
    clock_ghz: float
    matmuls: list[tuple[int, int, int, float]]


def fitted_matmuls(measured: Matmuls) -> tuple[float, float]:
    """Efficiency and us of a stage: least squares of relative errors, where no stage waits for its reads."""
    bare = _measured_on(measured, matmul_efficiency=1, stage_us=0, memory_gb_per_s=1e9)
    rows, rest = [], []
    for features, tokens, depth, ms in measured.matmuls:
        one = stages(bare, Matmul(tokens, features, depth))
        rows.append([one.count * one.products_ns / (1e6 * ms), one.count * 1e3 / (1e6 * ms)])
        rest.append(1 - one.count * one.write_ns / (1e6 * ms))
    (slowness, stage_us), *_ = np.linalg.lstsq(np.array(rows), np.array(rest))
    return 1 / slowness, stage_us


def _measured_on(measured: Matmuls, **changes: Any) -> Gpu:
    return replace(load("coconet").gpu, clock_ghz=measured.clock_ghz, **changes)


def matmul() -> str:
    """The stages of a matmul, fitted to what others measured."""
    measured = msgspec.json.decode((RECORDS / "matmuls_v100.json").read_bytes(), type=Matmuls)
    efficiency, stage_us = fitted_matmuls(measured)
    gpu = _measured_on(measured, matmul_efficiency=efficiency, stage_us=stage_us)
    off = np.array(
        [
            matmul_ns(gpu, Matmul(tokens, features, depth)) / (1e6 * ms) - 1
            for features, tokens, depth, ms in measured.matmuls
        ]
    )
    return (
        f"{len(off)} matmuls on {measured.device}. Fitted: {100 * efficiency:.1f} % of the peak and {stage_us:.2f} µs "
        f"a stage. Root of the mean square error: {100 * np.sqrt(np.mean(off**2)):.1f} %, at most "
        f"{100 * np.abs(off).max():.1f} %."
    )


@functools.cache
def table(name: str) -> tuple[Paper, list[Row], dict[str, float]]:
    """A paper's rows, and our figures by key."""
    paper = read(name)
    machine = load(paper.machine)
    found = FIGURES[name][0](machine)
    rows, more = training_rows(machine, paper)
    return paper, paper.row + rows, found | more


def text(paper: Paper, value: float) -> str:
    """A figure as the paper writes it."""
    return f"{value:.2f}x" if paper.by == "factor" or abs(value) >= 1.5 else f"{100 * value:.1f} %"


def markdown(name: str) -> str:
    """The table, and what would have to be otherwise."""
    paper, rows, found = table(name)
    lines = [f"| figure | | paper | here | within {_tolerance(paper)} |", "| --- | --- | --- | --- | --- |"]
    missed = []
    for row in rows:
        within = is_within(paper, row.paper, found[row.key])
        missed += [] if within or row.is_fitted else [row]
        said, ours = text(paper, row.paper), text(paper, found[row.key])
        verdict = "fitted" if row.is_fitted else "yes" if within else "no"
        lines.append(f"| {row.figure} | {row.what} | {said} | {ours} | {verdict} |")
    compared = sum(not row.is_fitted for row in rows)
    lines += ["", f"{compared - len(missed)} of {compared} figures compared are within the tolerance.", ""]
    machine = load(paper.machine)
    if name == "coconet":
        lines += [winners(machine), ""]
        lines += [*map(functools.partial(_told, found), paper.measured), ""]
        lines += [*of_the_authors_files(machine, paper), ""]
    opened = FIGURES[name][1](machine)
    lines += [
        f"* {row.what}: {one.parameter} {_needed(one, row.paper)}, taken is {one.taken:.3g}."
        for row in missed for one in opened if one.key == row.key
    ]  # fmt: skip
    for by in ("assumed", "fitted"):
        named = ", ".join(machine.sourced(by)) or "no parameter of the machine"
        lines += ["", f"{by.capitalize()}: {named}."]
    return "\n".join(lines)


def _told(found: dict[str, float], one: Measurement) -> str:
    have = found[one.key]
    verdict = "fitted" if one.is_fitted else f"{100 * (have / one.value - 1):+.1f} %"
    return f"* {one.what}: measured {one.value:.1f} {one.unit}, here {have:.1f} ({verdict})."


def _needed(one: Open, target: float) -> str:
    value = solve(one, target)
    return f"would have to be {value:.3g}" if value else f"does not reach it from {one.low:g} to {one.high:g}"


def _tolerance(paper: Paper) -> str:
    return f"{100 * paper.tolerance:g} points" if paper.by == "points" else f"{100 * paper.tolerance:g} %"


PAPER_COLOR, OURS_COLOR, INK, PALE = "#8a8f98", "#1f6fb2", "#222222", "#dddddd"
LABELS, CHART, BAR, LINE = 400, 420, 9, 30


def svg(name: str) -> str:
    """The table as bars: the paper's above ours."""
    paper, rows, found = table(name)
    rows = [row for row in rows if name != "t3" or row.paper < 1]  # two are counts of another size
    most = max(max(row.paper, found[row.key]) for row in rows)
    least = min(0.0, *(min(row.paper, found[row.key]) for row in rows))
    scale = CHART / (most - least)
    zero = LABELS - least * scale
    height = 64 + LINE * len(rows)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABELS + CHART + 90} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="15">{escape(paper.title)}</text>',
        f'<rect x="10" y="32" width="12" height="{BAR}" fill="{PAPER_COLOR}"/><text x="27" y="41">paper</text>',
        f'<rect x="80" y="32" width="12" height="{BAR}" fill="{OURS_COLOR}"/><text x="97" y="41">here</text>',
        f'<line x1="{zero:.1f}" y1="52" x2="{zero:.1f}" y2="{height - 8}" stroke="{PALE}"/>',
    ]
    for number, row in enumerate(rows):
        top = 56 + LINE * number
        drawn.append(f'<text x="{LABELS - 8}" y="{top + 13}" text-anchor="end">{escape(_label(row))}</text>')
        for place, (value, color) in enumerate(((row.paper, PAPER_COLOR), (found[row.key], OURS_COLOR))):
            left, wide, y = zero + min(0, value) * scale, abs(value) * scale, top + place * (BAR + 2)
            drawn.append(
                f'<rect x="{left:.1f}" y="{y}" width="{max(1.0, wide):.1f}" height="{BAR}" fill="{color}"/>'
                f'<text x="{max(left + wide, zero) + 5:.1f}" y="{y + 9}" font-size="10">{text(paper, value)}</text>'
            )
    return "\n".join([*drawn, "</svg>", ""])


def _label(row: Row) -> str:
    return f"{row.figure}: {row.what}{' (fitted)' * row.is_fitted}"


RECORDED = {"scatter": scatter, "matmul": matmul}


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paper", choices=[*FIGURES, *RECORDED])
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the table here")
    chosen = parser.parse_args(arguments)
    try:
        print(RECORDED[chosen.paper]() if chosen.paper in RECORDED else markdown(chosen.paper))
        if chosen.svg and chosen.paper in FIGURES:
            chosen.svg.write_text(svg(chosen.paper))
    except (DiscoError, OSError) as error:
        print(f"papers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
