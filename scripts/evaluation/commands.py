"""What the benchmark commands share: options, exit statuses, and the end of their time. Imports no jax."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from evaluation.record import CellName, Record

DONE, NOT_MEASURED, BAD_ARGUMENTS, OUT_OF_TIME = 0, 1, 2, 3


def parser(description: str | None, *, size: str, seconds: float, of: str = "") -> argparse.ArgumentParser:
    """The options that every benchmark has.

    Args:
        description: the script's own.
        size: the default of ``--size``.
        seconds: the default of ``--seconds``.
        of: what the seconds are for; empty for everything.
    """
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=description, formatter_class=raw)
    made.add_argument("--size", default=size, choices=("full", "tiny"))
    made.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help=f"{of or 'time for everything'} (default {seconds:g})",
    )
    made.add_argument("--rounds", type=int, default=9, help="runs of every row, in turn (default 9)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, required=True, help="folder of the records")
    return made


def check(made: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with 2 where a shared option has a value that cannot be used."""
    if not args.seconds > 0:
        made.error("expected --seconds above 0")
    if args.rounds < 2:
        made.error("expected --rounds of at least 2")
    if args.out.exists() and not args.out.is_dir():
        made.error(f"--out {args.out} is not a directory")


def end_in(seconds: float, script: str, stop: Callable[[], None]) -> threading.Timer:
    """End the process when the time is up, whatever it is doing: devices may be waiting for each other.

    Args:
        seconds: how long from now.
        script: its name, for the message.
        stop: called first, to say so in the records.
    """

    def end() -> None:
        try:
            stop()
        finally:
            print(f"{script}: the time is up; run again to go on", file=sys.stderr, flush=True)
            os._exit(OUT_OF_TIME)

    timer = threading.Timer(max(0.0, seconds), end)
    timer.daemon = True
    timer.start()
    return timer


def stop(out: Path, cells: Iterable[CellName]) -> None:
    """Say in the records of these cells, where there are any, that the time was up."""
    for cell in cells:
        if (out / f"{cell.stem}.json").exists():
            Record.open(out, cell).stop("the time was up")
