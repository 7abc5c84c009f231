"""The papers' tables from our simulator, each figure next to the paper's: ``scripts/papers.py t3|coconet|fused``.

No parameter of a machine or a model was fitted to a figure here. Where one is not reached, the last lines say which
parameter the paper leaves open, and what it would have to be. ``--svg FILE`` draws the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

import msgspec

from disco_hlo.errors import DiscoError
from disco_hlo.whatif import coconet, fused, transformers
from disco_hlo.whatif.machine import Machine, load
from disco_hlo.whatif.matmul import Matmul
from disco_hlo.whatif.t3 import Arbitration, Contention

ROOT = Path(__file__).resolve().parents[1]
FOUND_BITS = 40


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """A figure of a paper's."""

    figure: str
    what: str
    key: str
    paper: float


class Training(msgspec.Struct, forbid_unknown_fields=True):
    """A row of CoCoNet's table 1."""

    optimizer: coconet.Optimizer
    model: str
    micro_batches: tuple[int, int, int, int]
    speed_ups: tuple[float, float, float]


class Paper(msgspec.Struct, forbid_unknown_fields=True):
    """What a paper says."""

    title: str
    machine: str
    by: Literal["points", "factor"]
    tolerance: float
    row: list[Row]
    training: list[Training] = []


@dataclass(frozen=True)
class Open:
    """A parameter that a paper leaves open."""

    key: str
    parameter: str
    taken: float
    low: float
    high: float
    of: Callable[[float], float]
    """The figure for a value."""


def geometric_mean(values: list[float]) -> float:
    """Of speed-ups."""
    return exp(sum(map(log, values)) / len(values))


# ---- T3


def t3_figures(
    machine: Machine, contention: Contention = Contention(), other: float = transformers.OTHER_SHARE
) -> dict[str, float]:
    """By key of ``configs/papers/t3.toml``."""
    found: dict[str, float] = {}
    for size, models in (("smaller", transformers.SMALLER), ("larger", transformers.LARGER)):
        cases = transformers.cases(machine, models, contention)
        results = [one.result for one in cases]
        ideal = [one.sequential_ns / one.ideal_ns for one in results]
        _speed_ups(found, f"ideal {size}", ideal)
        for short, arbitration in (("mca", Arbitration.COMPUTE_FIRST), ("t3", Arbitration.ROUND_ROBIN)):
            _speed_ups(
                found, f"{short} {size}", [one.sequential_ns / one.t3_ns(arbitration) for one in results]
            )
            for phase in ("training", "prompt"):
                of_one = [
                    transformers.iteration_speed_up(
                        machine,
                        [one for one in cases if (one.model, one.degree) == case],
                        arbitration,
                        training=phase == "training",
                        other_share=other,
                    )
                    for case in dict.fromkeys((one.model, one.degree) for one in cases)
                ]
                if size == "smaller":
                    _speed_ups(found, f"{phase} {short}", of_one)
                elif short == "mca":
                    _speed_ups(found, f"larger {phase}", of_one)
        if size == "smaller":
            _traffic(found, cases)
            found |= {f"ideal {c.model.name} {c.degree} {c.name}": s - 1 for c, s in zip(cases, ideal, strict=True)}
    return found


def _speed_ups(found: dict[str, float], name: str, values: list[float]) -> None:
    found[f"{name} mean"], found[f"{name} most"] = geometric_mean(values) - 1, max(values) - 1


def _traffic(found: dict[str, float], cases: list[transformers.Case]) -> None:
    saved = [1 - one.result.fused_traffic.total / one.result.sequential_traffic.total for one in cases]
    found["traffic mean"], found["traffic most"] = sum(saved) / len(saved), max(saved)
    for one in cases:
        before, after = one.result.sequential_traffic, one.result.fused_traffic
        found[f"scatter reads {one.degree}"] = before.scatter_reads / after.scatter_reads
        written = (before.matmul_writes + before.scatter_writes) / (after.matmul_writes + after.scatter_writes)
        found[f"writes {one.degree}"] = written - 1
        found[f"near memory {one.degree}"] = one.result.scatter_ns / one.result.near_memory_scatter_ns - 1


def t3_open(machine: Machine) -> list[Open]:
    """What T3 leaves open."""

    def cost(key: str) -> Open:
        name = "Contention.update_cost (time of an update near memory over that of a write; at most 2 by table 1)"
        return Open(key, name, 1, 1, 8, lambda value: t3_figures(machine, Contention(1, value))[key])

    def other(key: str) -> Open:
        name = "transformers.OTHER_SHARE (what an iteration spends elsewhere; the paper: 0.40 to 0.45)"
        return Open(
            key, name, transformers.OTHER_SHARE, 0.0, 0.9, lambda value: t3_figures(machine, other=value)[key]
        )

    def efficiency(value: float) -> Machine:
        return replace(machine, gpu=replace(machine.gpu, matmul_efficiency=value))

    def cache(value: float) -> Machine:
        return replace(machine, gpu=replace(machine.gpu, cache_mb=value))

    def link(value: float) -> Machine:
        return replace(machine, network=replace(machine.network, link_gb_per_s=value))

    keys = [
        "mca smaller mean", "mca smaller most", "t3 smaller mean", "t3 smaller most", "mca larger mean", "mca larger most",
    ]  # fmt: skip
    shares = ["prompt mca mean", "prompt mca most", "training mca most", "larger training most", "larger prompt most"]
    return [
        *map(cost, keys),
        *map(other, shares),
        *(
            Open(
                key, "gpu.matmul_efficiency", machine.gpu.matmul_efficiency, 0.664, 0.82,
                lambda value, key=key: t3_figures(efficiency(value))[key],
            )
            for key in ("ideal T-NLG 16 FC-1", "ideal smaller most")
        ),
        Open("traffic most", "gpu.cache_mb", machine.gpu.cache_mb, 4, 16, lambda v: t3_figures(cache(v))["traffic most"]),
        *(
            Open(key, "network.link_gb_per_s", machine.network.link_gb_per_s, 75, 400,
                 lambda value, key=key: t3_figures(link(value))[key])
            for key in ("near memory 8", "near memory 16")
        ),
    ]  # fmt: skip


# ---- CoCoNet

LARGEST, LARGE = 1 << 30, range(26, 31)
MICRO_BATCHES = (2, 4, 6, 8)
"""Of figure 12: assumed."""
BATCHES = {"Adam": 8192, "LAMB": 65536}
FUSED, ONE, OVERLAPPED, PIPED = "fuse(RS-Opt-AG)", "AR-Opt", "OL(MM,fuse(RS+C+AG))", "OL(RS+C,P2P,AG)"


def coconet_figures(machine: Machine) -> dict[str, float]:
    """By key of ``configs/papers/coconet.toml``."""
    found: dict[str, float] = {}
    for optimizer in coconet.UPDATE_BYTES:
        of = [coconet.update_schedules(machine, optimizer, 1 << bits) for bits in LARGE]
        found[f"{optimizer} most"] = of[-1][ONE] / of[-1][FUSED]
        found[f"{optimizer} over GShard"] = geometric_mean([one["GShard-Eq"] / one[FUSED] for one in of])
    plain = [
        coconet.matmul_schedules(machine, Matmul(batch * 1024, 3072, 768), 16, pointwise=False)
        for batch in (8, 16, 32, 64)
    ]
    found["figure 1 most"] = max(one["MM+AR+C"] / one[OVERLAPPED] for one in plain)
    of = [
        coconet.matmul_schedules(machine, Matmul(batch * 1024, 3072, depth), 16)
        for batch in (8, 16)
        for depth in (192, 768)
    ]
    _range(found, "GShard", [one["MM+AR+C"] / one["GShard-Eq"] for one in of])
    _range(found, "overlap", [one["MM+AR+C"] / one[OVERLAPPED] for one in of])
    _range(found, "overlap over GShard", [one["GShard-Eq"] / one[OVERLAPPED] for one in of])
    of = [coconet.pipeline_schedules(machine, batch * 2048 * 12288) for batch in MICRO_BATCHES]
    _range(found, "pipeline", [one["AR+P2P+C"] / one[PIPED] for one in of])
    _range(found, "pipeline over GShard", [one["GShard-Eq"] / one[PIPED] for one in of])
    found["pipeline over sliced"] = geometric_mean([one["AR+P2P+C+AG"] / one[PIPED] for one in of])
    return found


def _range(found: dict[str, float], name: str, values: list[float]) -> None:
    found[f"{name} least"], found[f"{name} most"] = min(values), max(values)


def training_rows(machine: Machine, paper: Paper) -> tuple[list[Row], dict[str, float]]:
    """Table 1: what the paper has, and what we have, by system; systems without memory must have none here either."""
    rows, found = [], {}
    for one in paper.training:
        model = next(model for model in coconet.BERTS if model.name == one.model)
        times = {}
        for system, micro_batch in zip(coconet.STATE_BYTES, one.micro_batches, strict=True):
            fits = coconet.has_memory(machine, system, one.optimizer, model)
            key = f"{one.optimizer} {one.model} {system}"
            if fits != bool(micro_batch):
                rows.append(Row("table 1", f"{key}: out of memory", key, float(not micro_batch)))
                found[key] = float(not fits)
            elif fits:
                batch = BATCHES[one.optimizer]
                times[system] = coconet.training_ns(machine, system, one.optimizer, model, micro_batch, batch)
        for system, said in zip(coconet.STATE_BYTES, one.speed_ups, strict=False):
            if said and system in times:
                key = f"{one.optimizer} {one.model} {system}"
                rows.append(Row("table 1", f"CoCoNet over {system}, {one.optimizer}, {one.model}", key, said))
                found[key] = times[system] / times["CoCoNet"]
    return rows, found


def winners(machine: Machine) -> str:
    """Who is fastest where."""
    lines = []
    for optimizer in coconet.UPDATE_BYTES:
        best = []
        for bits in range(10, 31):
            times = coconet.update_schedules(machine, optimizer, 1 << bits)
            del times["UB"]
            best.append(min(times, key=times.__getitem__))
        change = 10 + best.index(FUSED) if FUSED in best else 31
        lines.append(
            f"Figure 10, {optimizer}: {best[0]} is fastest up to 2^{change - 1} elements, then {best[-1]} "
            f"(the paper: AR-Opt for small, {FUSED} for large tensors)."
        )
    return "\n".join(lines)


def coconet_open(machine: Machine) -> list[Open]:
    """What CoCoNet leaves open."""

    def apart(optimizer: coconet.Optimizer, share: float) -> float:
        times = coconet.update_schedules(machine, optimizer, LARGEST)
        return times["GShard-Eq"] / share / times[FUSED]

    def sliced(share: float) -> float:
        of = []
        for batch in MICRO_BATCHES:
            elements = batch * 2048 * 12288
            times = coconet.pipeline_schedules(machine, elements)
            sent = coconet.send_ns(machine, coconet.HALF * elements / machine.network.node_devices)
            of.append((times["AR+P2P+C+AG"] - sent + sent / share) / times[PIPED])
        return geometric_mean(of)

    def overlapped(efficiency: float) -> Machine:
        return replace(machine, gpu=replace(machine.gpu, matmul_efficiency=efficiency))

    share = "bandwidth of NCCL's reduce-scatter and all-gather over that of the fused kernel"
    keys = ("figure 1 most", "overlap most", "overlap over GShard most")
    return [
        *(
            Open(f"{optimizer} over GShard", share, 1.0, 0.5, 1.0, lambda v, o=optimizer: apart(o, v))
            for optimizer in coconet.UPDATE_BYTES
        ),
        *(
            Open(key, "gpu.matmul_efficiency", machine.gpu.matmul_efficiency, 0.664, 1.0,
                 lambda value, key=key: coconet_figures(overlapped(value))[key])
            for key in keys
        ),
        Open("pipeline over sliced", "share of the ports' bandwidth that a sliced send reaches", 1.0, 0.1, 1.0, sliced),
    ]  # fmt: skip


# ---- paper 004

BATCH_SIZES, TABLES = (256, 512, 1024, 2048), (64, 128, 256)
"""Of figures 8 and 12: assumed but for {1024 | 256} and {2048 | 256}."""
GEMV = [(rows * 1024, depth * 1024) for rows in (8, 16, 32, 64) for depth in (2, 4, 8)]
MATMULS = [
    Matmul(tokens, width, 4 * width) for tokens in (2048, 4096, 8192) for width in (1024, 2048, 4096)
]
"""Of figures 9 and 10: assumed, of the sizes of Transformers; only 64 k rows are named."""


def fused_figures(_: Machine) -> dict[str, float]:
    """By key of ``configs/papers/fused.toml``."""
    node, pair, torus = map(load, ("mi210-node", "mi210-pair", "mi210-torus"))
    tables = [fused.Embedding(batch, count) for batch in BATCH_SIZES for count in TABLES]
    found: dict[str, float] = {}
    for name, machine in (("node", node), ("pair", pair)):
        _saved(found, name, [fused.embedding_all_to_all(machine, one) for one in tables])
    _saved(found, "gemv", [fused.gemv_all_reduce(node, *size) for size in GEMV])
    _saved(found, "matmul", [fused.matmul_all_to_all(node, one) for one in MATMULS])
    one = fused.Embedding(1024, 256)
    quarter, three, most = (fused.pooling_ns(pair, one, share) for share in (0.25, 0.75, 0.875))
    found["occupancy 25 to 75"], found["occupancy 75 to 87.5"] = 1 - three / quarter, 1 - most / three
    one = fused.Embedding(2048, 256)
    found["skew"] = fused.skew(pair, one, aware=False)
    found["skew aware"] = fused.skew(pair, one, aware=True)
    found["dlrm"] = fused.dlrm(torus, fused.Dlrm()).saved
    return found


def _saved(found: dict[str, float], name: str, of: list[fused.Compared]) -> None:
    saved = [one.saved for one in of]
    found[f"{name} mean"], found[f"{name} most"] = sum(saved) / len(saved), max(saved)


def fused_open(_: Machine) -> list[Open]:
    """What paper 004 leaves open."""
    pair, torus = load("mi210-pair"), load("mi210-torus")

    def on_link(value: float) -> float:
        network = replace(torus.network, link_gb_per_s=value)
        return fused.dlrm(replace(torus, network=network), fused.Dlrm()).saved

    def pooled(value: float) -> float:
        return fused.embedding_all_to_all(pair, fused.Embedding(1024, 256, pooling=round(value))).saved

    return [
        Open("dlrm", "network.link_gb_per_s (200 Gb/s, if both directions share it: 12.5)", 25, 1, 25, on_link),
        Open("pair mean", "Embedding.pooling, which is stated for the simulation only", 70, 45, 200, pooled),
        Open(
            "occupancy 25 to 75", "share of occupancy at which memory is saturated", 1.0, 0.26, 1.0,
            lambda value: 1 - 0.25 / min(0.75, value),
        ),
        Open(
            "occupancy 75 to 87.5", "memory bandwidth at 87.5 % occupancy over that at 75 %", 7 / 6, 0.5, 1.5,
            lambda value: 1 - 1 / value,
        ),
    ]  # fmt: skip


# ---- tables


PAPERS = {
    "t3": (t3_figures, t3_open),
    "coconet": (coconet_figures, coconet_open),
    "fused": (fused_figures, fused_open),
}


def is_within(paper: Paper, said: float, have: float) -> bool:
    """Whether a figure is reached."""
    off = abs(have - said) if paper.by == "points" else abs(have / said - 1)
    return off <= paper.tolerance + 1e-9


def solve(one: Open, target: float) -> float | None:
    """The value at which a figure becomes ``target``; None where it does not between the ends."""
    low, high = one.low, one.high
    at_low, at_high = one.of(low), one.of(high)
    if not min(at_low, at_high) <= target <= max(at_low, at_high):
        return None
    for _ in range(FOUND_BITS):
        middle = (low + high) / 2
        if (one.of(middle) < target) == (at_low < target):
            low = middle
        else:
            high = middle
    return low


def table(name: str) -> tuple[Paper, list[Row], dict[str, float]]:
    """A paper's rows, and our figures by key."""
    paper = msgspec.toml.decode((ROOT / "configs" / "papers" / f"{name}.toml").read_bytes(), type=Paper)
    machine = load(paper.machine)
    found = PAPERS[name][0](machine)
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
        have, within = found[row.key], is_within(paper, row.paper, found[row.key])
        missed += [] if within else [row]
        said, ours = text(paper, row.paper), text(paper, have)
        lines.append(f"| {row.figure} | {row.what} | {said} | {ours} | {'yes' if within else 'no'} |")
    lines += ["", f"{len(rows) - len(missed)} of {len(rows)} figures are within the tolerance.", ""]
    machine = load(paper.machine)
    if name == "coconet":
        lines += [winners(machine), ""]
    opened = {one.key: one for one in PAPERS[name][1](machine)}
    for row in missed:
        if row.key in opened:
            one = opened[row.key]
            value = solve(one, row.paper)
            had = (
                f"would have to be {value:.3g}" if value else f"does not reach it from {one.low:g} to {one.high:g}"
            )
            lines.append(f"* {row.what}: {one.parameter} {had}, taken is {one.taken:.3g}.")
    lines += ["", "Assumed: " + (", ".join(machine.assumed) or "no parameter of the machine") + "."]
    return "\n".join(lines)


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
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="20" font-size="15">{escape(paper.title)}</text>',
        f'<rect x="10" y="32" width="12" height="{BAR}" fill="{PAPER_COLOR}"/><text x="27" y="41">paper</text>',
        f'<rect x="80" y="32" width="12" height="{BAR}" fill="{OURS_COLOR}"/><text x="97" y="41">here</text>',
        f'<line x1="{zero:.1f}" y1="52" x2="{zero:.1f}" y2="{height - 8}" stroke="{PALE}"/>',
    ]
    for number, row in enumerate(rows):
        top = 56 + LINE * number
        drawn.append(f'<text x="{LABELS - 8}" y="{top + 13}" text-anchor="end">{escape(row.what)}</text>')
        for place, (value, color) in enumerate(((row.paper, PAPER_COLOR), (found[row.key], OURS_COLOR))):
            left, wide, y = zero + min(0, value) * scale, abs(value) * scale, top + place * (BAR + 2)
            drawn.append(
                f'<rect x="{left:.1f}" y="{y}" width="{max(1.0, wide):.1f}" height="{BAR}" fill="{color}"/>'
                f'<text x="{max(left + wide, zero) + 5:.1f}" y="{y + 9}" font-size="10">{text(paper, value)}</text>'
            )
    return "\n".join([*drawn, "</svg>", ""])


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the table here")
    chosen = parser.parse_args(arguments)
    try:
        print(markdown(chosen.paper))
        if chosen.svg:
            chosen.svg.write_text(svg(chosen.paper))
    except (DiscoError, OSError) as error:
        print(f"papers: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
