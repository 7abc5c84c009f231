"""The forms of examples/llama.py over several links, as many cells as the time allows, the most valuable first.

    python scripts/benchmark_forms.py --out DIR --store profile.sqlite --seconds 520
    python scripts/benchmark_forms.py --out DIR fsdp-scan@staged fsdp-scan-x4@nvlink
    JAX_PLATFORMS=cpu python scripts/benchmark_forms.py --size tiny --out DIR

A cell is FORM@LINK. Neighbouring cells that share a link share a process (scripts/benchmark.py), since NCCL reads its
settings once. All cells share the measured times in DIR/profile.sqlite. Records, log.txt and tables.md are in DIR; what
one run did not get to, the next one does.

Exit status: 0 every cell was measured; 1 one could not be; 2 bad arguments; 3 the time was up.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import make_tables
from checkout import ROOT, find_package, outdated
from evaluation import commands, fidelity, tables
from evaluation.record import OK, CellName, RecordError, read

REHEARSED = ROOT / "tests" / "data" / "h100_llama" / "fsdp_scan.hlo.pb.gz"
"""A step of the kind that is searched: to compile the search's code while the first cell is compiled and profiled."""
_CELL_S = 260.0
"""The most for a cell, on average."""
_LEAST_S = 20.0
"""No process begins with less left."""
_TRIES = 2
"""Of a process that a signal ended."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    parser = commands.parser(__doc__, size="full", seconds=520)
    cells = "FORM@LINK (default: all, see evaluation/commands)"
    parser.add_argument("cells", nargs="*", type=_cell, metavar="CELL", help=cells)
    parser.add_argument("--devices", type=int, default=2, metavar="N")
    parser.add_argument("--store", type=Path, help="measured times to begin with (a profile.sqlite)")
    parser.set_defaults(rounds=5)
    args = parser.parse_args(argv)
    commands.check(parser, args)
    if args.store is not None and not args.store.is_file():
        parser.error(f"--store {args.store} is no file")
    args.cells = args.cells or list(commands.FORM_CELLS)
    return args


def _cell(text: str) -> str:
    form, _, link = text.partition("@")
    if not commands.is_form(f"llama-{form}") or link not in commands.LINKS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected FORM@LINK, such as fsdp-scan-x4@staged; links: {', '.join(commands.LINKS)}"
        )
    return text


class _Log:
    """What all processes say, with the seconds since the beginning."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._began = file, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str, *, aloud: bool = True) -> None:
        line = f"{self.seconds:7.1f} {text}"
        print(line, file=self._file, flush=True)
        if aloud:
            print(line, flush=True)


def run_link(args: argparse.Namespace, log: _Log, link: str, models: Sequence[str]) -> int:
    """Measure these forms over one link, as long as there is time; the exit status of the last process."""
    status = commands.OUT_OF_TIME
    for _ in range(_TRIES):
        left_s = min(args.seconds - log.seconds - 2.0, _CELL_S * len(models))
        if left_s < _LEAST_S:
            return commands.OUT_OF_TIME
        log.say(f"{link}: {', '.join(models)}, {left_s:.0f} s")
        options = {
            "link": link, "devices": args.devices, "size": args.size, "rows": "form", "rounds": args.rounds,
            "seconds": f"{left_s:.1f}", "search-seconds": 8, "finalists": 1,
            "seed": args.seed, "out": args.out, "log": "debug",
        }  # fmt: skip
        command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *models, "--one-by-one"]
        command += [f"--{name}={value}" for name, value in options.items()]
        # Multicast over NVLink is left off: not every host of such GPUs lets a process use it.
        environment = {"NCCL_NVLS_ENABLE": "0", **os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    log.say(line.rstrip()[:2000], aloud=not line.startswith("disco: debug"))
            finally:
                process.kill()
        status = process.returncode
        log.say(f"{link}: exit status {status}")
        if status >= 0:
            break
    return status


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Compile the search's code meanwhile, where a GPU's host has cores for it."""
    from disco_hlo.optimize.rehearsal import rehearsed

    wanted = os.environ.get("JAX_PLATFORMS") != "cpu" and REHEARSED.exists()
    module = gzip.decompress(REHEARSED.read_bytes()) if wanted else b""
    with rehearsed(module, "NVIDIA H100 80GB HBM3", wanted=wanted):
        yield


def reached(args: argparse.Namespace, cell: str) -> str | None:
    """What is known of a cell, in a line; None where no row of it but the default was timed."""
    form, link = cell.split("@")
    try:
        record = read(args.out / f"{CellName(f'llama-{form}', args.size, link, args.devices).stem}.json")
    except RecordError:
        return None
    timed = [name for name, row in record["rows"].items() if row.get("status") == OK]
    if len(timed) < 2:
        return None
    found = fidelity.points(record)
    mean, largest = map(tables.percent_text, fidelity.errors(found))
    order = fidelity.tau_text(fidelity.kendall_tau(found))
    phases = {name: value for name, value in record["facts"].items() if name.endswith("_s")}
    spent = ", ".join(f"{name.removesuffix('_s')} {value:.0f}" for name, value in phases.items())
    rows = f"{len(timed)} of {len(record['rows'])} rows"
    return f"{rows}, mean error {mean}, largest {largest}, tau {order}; seconds: {spent}"


def main() -> int:
    """Measure what there is time for; say what there was none for."""
    args = arguments()
    find_package()
    if files := outdated():
        listed = ", ".join(files[:3])
        text = f"the installed disco_hlo is not this checkout's, install it anew: {listed} differ"
        print(f"benchmark_forms.py: {text}", file=sys.stderr)
        return commands.BAD_ARGUMENTS
    args.out.mkdir(parents=True, exist_ok=True)
    store = args.out / "profile.sqlite"
    if args.store is not None and not store.exists():
        shutil.copyfile(args.store, store)
    with (args.out / "log.txt").open("a") as file, rehearsal():
        log = _Log(file)
        statuses = [run_link(args, log, link, models) for link, models in commands.by_link(args.cells)]
        said = {cell: reached(args, cell) for cell in args.cells}
        for cell, text in said.items():
            if text is not None:
                log.say(f"{cell}: {text}")
        missing = [cell for cell, text in said.items() if text is None]
        log.say(f"not reached: {', '.join(missing) or 'none'}")
    with contextlib.suppress(RecordError):
        make_tables.write(args.out, args.out)
    if any(status not in (commands.DONE, commands.OUT_OF_TIME) for status in statuses):
        return commands.NOT_MEASURED
    return commands.OUT_OF_TIME if missing or commands.OUT_OF_TIME in statuses else commands.DONE


if __name__ == "__main__":
    raise SystemExit(main())
