"""The cells of one command, one after another, and the end of the time."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable

from evaluation.cell import Asked, run_cell, search
from evaluation.links import described
from evaluation.record import CellName, Record, RecordError
from evaluation.step import Files

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plugin.logs import configure, one_line
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step

DONE, NOT_MEASURED, BAD_ARGUMENTS, OUT_OF_TIME = 0, 1, 2, 3


def run(args: argparse.Namespace, left_s: Callable[[], float]) -> int:
    """Do what the command line asks for; the exit status."""
    configure("warning")
    settings = Settings(
        search=True,
        directory=args.out,
        budget_s=args.search_seconds,
        seed=args.seed,
        finalists=args.finalists,
    )
    asked = Asked(args.rows, args.rounds, args.until, settings, args.out, _say, left_s)
    cells = [CellName(model, args.size, args.link, args.devices) for model in args.models]
    if args.offline_search:
        return _each(cells, lambda cell: _search_offline(asked, cell), left_s)
    import jax

    if len(jax.devices()) != args.devices:
        print(
            f"benchmark.py: expected {args.devices} devices, jax has {len(jax.devices())}", file=sys.stderr
        )
        return BAD_ARGUMENTS
    environment = dict(os.environ)
    _watch(args, cells, left_s)
    return _each(cells, lambda cell: run_cell(asked, cell, environment), left_s)


def _each(cells: list[CellName], work: Callable[[CellName], None], left_s: Callable[[], float]) -> int:
    status = DONE
    for cell in cells:
        if left_s() < 0:
            return OUT_OF_TIME
        try:
            work(cell)
        except (ValueError, RecordError) as error:
            print(f"benchmark.py: {cell.stem}: {one_line(error)}", file=sys.stderr)
            return BAD_ARGUMENTS
        except Exception as error:
            print(f"benchmark.py: {cell.stem}: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
            status = NOT_MEASURED
    return status


def _search_offline(asked: Asked, cell: CellName) -> None:
    files = Files(asked.out, cell)
    module, profile = files.module(), files.profile()
    if module is None or profile is None:
        raise DiscoError(f"{files.folder} holds no module with its profile: run --until profile first")
    record = Record.open(asked.out, cell)
    search(asked, files, record, Step(module, canonicalize(module)), profile)


def _watch(args: argparse.Namespace, cells: list[CellName], left_s: Callable[[], float]) -> None:
    """End the process when the time is up, whatever it is doing: devices may be waiting for each other."""

    def end() -> None:
        for cell in cells:
            path = args.out / f"{cell.stem}.json"
            if path.exists():
                Record.open(args.out, cell).stop("the time was up")
        print("benchmark.py: the time is up; run again to go on", file=sys.stderr, flush=True)
        os._exit(OUT_OF_TIME)

    timer = threading.Timer(max(0.0, left_s()), end)
    timer.daemon = True
    timer.start()


def _say(text: str) -> None:
    print(text, flush=True)
