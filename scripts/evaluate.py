"""The evaluation by one command (DisCo, section 6): every step over every link, against every baseline.

    python scripts/evaluate.py --out DIR                          what is left of it, for as long as it takes
    python scripts/evaluate.py --out DIR --seconds 1700           as much of that as fits
    python scripts/evaluate.py --out DIR --list                   what is left, and how long it takes

A cell is one step over one link. Over staged links it has all rows, over the others XLA's default, the plans, that of
Algorithm 1, and the three of XLA's own ways that were the fastest for this step over staged links. Each cell is a run
of scripts/benchmark.py by itself; DIR/evaluated.txt says which are done. At the end come DIR/tables.md, and the names
of all cells and rows that were not reached.

Exit status: 0 all is measured; 1 a cell could not be; 2 bad arguments; 3 the time was up.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import make_tables
from benchmark import MODELS
from checkout import find_package
from evaluation import commands, tables
from evaluation.record import CellName, RecordError, read, write_atomically

STEPS = tuple(name for name in MODELS if name != "transformer_lm")
FORMS = ("llama-fsdp-scan", "llama-dp-scan", "llama-fsdp-unroll", "llama-dp-unroll")
LINKS = ("staged", "nvlink", "sockets")
"""Staged links first: what is fast there is tried over the others."""
BEST = 3
LEAST_S, MOST_S = 60.0, 1500.0
"""Time with which a cell is begun, and at most given."""
_CELL_S, _ROW_S = 110.0, 9.0
"""What a cell took, and what each of its rows took besides, in the records of 2026-11-25 to 2026-11-28."""
_ROWS = {"steps": 46, "forms": 24, "others": 8}
"""About how many there are in a cell of the seven steps and of the forms over staged links, and over others."""
DONE_FILE = "evaluated.txt"


@dataclass(frozen=True, slots=True)
class Run:
    """One cell as it is run."""

    cell: CellName
    rows: str
    """As ``--rows`` of scripts/benchmark.py takes them."""
    expected_s: float

    @property
    def command(self) -> list[str]:
        """Without ``--seconds`` and ``--out``."""
        cell = self.cell
        where = ["--link", cell.link, "--devices", str(cell.devices), "--size", cell.size]
        return [cell.model, *where, "--rows", self.rows]


def runs(args: argparse.Namespace) -> Iterator[Run]:
    """All cells that the command line asks for, those of staged links first."""
    for link in LINKS:
        for model in (*STEPS, *FORMS):
            if link in args.links and model in args.steps:
                cell = CellName(model, args.size, link, args.devices)
                rows, count = rows_of(args.out, cell)
                yield Run(cell, rows, _CELL_S + _ROW_S * count)


def rows_of(out: Path, cell: CellName) -> tuple[str, int]:
    """The rows of a cell, and about how many these are."""
    from evaluation.step import ALGORITHM_1, OTHER_SEARCHES

    form = commands.is_form(cell.model)
    if cell.link == LINKS[0]:
        names: tuple[str, ...] = ("form", "xla", *OTHER_SEARCHES) if form else ("all",)
        return ",".join(names), _ROWS["forms" if form else "steps"]
    names = ("plan", "plan 2", "plan 3", "plan's order only", ALGORITHM_1, *best_of_xla(out, cell))
    return ",".join(names), _ROWS["others"]


def best_of_xla(out: Path, cell: CellName) -> list[str]:
    """XLA's own ways that were the fastest for this step over staged links, and where nobody knows them, what mostly
    are; its default, which every cell has, is none of them."""
    from evaluation.rows import BASELINE, EVERYTHING, NO_COMBINING, PGLE, PGLE_BEST

    path = out / f"{CellName(cell.model, cell.size, LINKS[0], cell.devices).stem}.json"
    rows = read(path)["rows"] if path.exists() else {}
    timed = {
        PGLE if name == PGLE_BEST else name: row["of_default"]
        for name, row in rows.items()
        if row.get("kind") == BASELINE and "of_default" in row and name != tables.DEFAULT
    }
    return sorted(timed, key=lambda name: timed[name])[:BEST] or [PGLE, NO_COMBINING, EVERYTHING]


def done_cells(out: Path) -> list[str]:
    """The names of the cells that were measured."""
    path = out / DONE_FILE
    return path.read_text().split() if path.exists() else []


def measure(out: Path, run: Run, seconds: float, options: Sequence[str]) -> int:
    """Run a cell; the exit status. PGLE with the best threshold needs that one measured, and so a run of its own."""
    started, code = time.monotonic(), commands.DONE
    for _ in range(1 + (run.cell.link == LINKS[0])):
        left_s = seconds - (time.monotonic() - started)
        script = [sys.executable, str(Path(__file__).with_name("benchmark.py")), *run.command]
        limits = ["--seconds", f"{max(1.0, left_s):.0f}", "--out", str(out), *options]
        code = subprocess.run([*script, *limits], check=False).returncode
        code = commands.NOT_MEASURED if code < 0 else code  # a signal ended it
        if code != commands.DONE:
            break
    return code


def not_reached(args: argparse.Namespace, done: Sequence[str]) -> list[str]:
    """The cells that are not done, and the rows without a time of those that are, a line each."""
    lines = []
    for run in runs(args):
        path = args.out / f"{run.cell.stem}.json"
        without = [row[1:] for row in tables.missing([read(path)])[1]] if path.exists() else []
        if run.cell.stem not in done:
            lines.append(
                f"{run.cell.stem}: not reached" if not path.exists() else f"{run.cell.stem}: in part"
            )
        lines += [f"{run.cell.stem}: {': '.join(row)}" for row in without]
    return lines


def listed(value: str, known: Sequence[str]) -> list[str]:
    """Names with commas between."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names or (unknown := [name for name in names if name not in known]):
        wrong = unknown[0] if names else value
        raise argparse.ArgumentTypeError(f"invalid choice: {wrong!r} (choose from {', '.join(known)})")
    return names


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    every = (*STEPS, *FORMS)
    parser = commands.parser(__doc__, size="full", seconds=1e6)
    parser.add_argument("--devices", type=int, choices=range(2, 65), default=2, metavar="N")
    parser.add_argument("--steps", type=lambda value: listed(value, every), default=list(every))
    parser.add_argument("--links", type=lambda value: listed(value, LINKS), default=list(LINKS))
    parser.add_argument("--search-seconds", type=float, default=20.0, help="of each search (default 20)")
    parser.add_argument("--list", action="store_true", help="run nothing")
    args = parser.parse_args(argv)
    commands.check(parser, args)
    return args


def main() -> int:
    """Run what is left of the evaluation."""
    began = time.monotonic()
    args = arguments()
    find_package()
    try:
        return evaluate(args, began)
    except (OSError, UnicodeDecodeError, RecordError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return commands.BAD_ARGUMENTS


def evaluate(args: argparse.Namespace, began: float) -> int:
    """Run what is left, as far as the time goes; the exit status.

    Raises:
        OSError: nothing can be written to ``--out``.
        RecordError: what is there is damaged.
    """
    done = done_cells(args.out)
    left = [run.cell.stem for run in runs(args) if run.cell.stem not in done]
    expected_s = sum(run.expected_s for run in runs(args) if run.cell.stem in left)
    total = len(args.links) * len(args.steps)
    print(f"cells left: {len(left)} of {total}, which takes about {expected_s / 3600:.1f} hours", flush=True)
    if args.list:
        print(*left, sep="\n", end="\n" * bool(left))
        return commands.DONE
    args.out.mkdir(parents=True, exist_ok=True)
    options = ["--rounds", str(args.rounds), "--seed", str(args.seed)]
    options += ["--search-seconds", f"{args.search_seconds:g}"]
    worst = commands.DONE
    for run in runs(args):  # the rows over other links follow from what was measured over staged ones
        if run.cell.stem in done:
            continue
        seconds = min(args.seconds - (time.monotonic() - began), MOST_S)
        if seconds < LEAST_S:
            worst = worst or commands.OUT_OF_TIME
            break
        print(f"{run.cell.stem}: about {run.expected_s:.0f} s", flush=True)
        code = measure(args.out, run, seconds, options)
        worst = worst or code
        if code == commands.DONE:
            done.append(run.cell.stem)
            write_atomically(args.out / DONE_FILE, ("\n".join(done) + "\n").encode())
    lines = not_reached(args, done)
    print("\n".join(lines or ["every cell and row was measured"]))
    if any(args.out.glob("*.json")):
        make_tables.write(args.out, args.out)
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
