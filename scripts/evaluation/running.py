"""The cells of one command, all through one stage, then all through the next; and the end of the time."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from disco_hlo.errors import DiscoError
from disco_hlo.plugin.logs import configure, one_line
from disco_hlo.plugin.settings import Settings
from disco_hlo.printable import counted
from evaluation import commands
from evaluation.cell import AT_A_TIME, Cell
from evaluation.record import NO_TIME, CellName, RecordError
from evaluation.rows import chosen_names

COMPILES = 4
"""Models captured at once: each takes gigabytes of host memory, and autotunes on the devices."""
_ENDING_S, _TRACE_S = 3.0, 12.0
"""What the end of a run, and a trace, may take."""
_LAST = object()


def run(args: argparse.Namespace, left_s: Callable[[], float]) -> int:
    """Do what the command line asks for; the exit status."""
    configure(args.log)
    names = [CellName(model, args.size, args.link, args.devices) for model in args.models]
    stages = _Stages(args, left_s)
    try:
        chosen_names(args.rows)
        with commands.ending_in(left_s(), "benchmark.py", args.out, names):
            stages.run(names)
    except (ValueError, RecordError) as error:
        print(f"benchmark.py: {one_line(error)}", file=sys.stderr)
        return commands.BAD_ARGUMENTS
    if stages.failed:
        return commands.NOT_MEASURED
    return commands.OUT_OF_TIME if stages.rows_without_time() else commands.DONE


class _Stages:
    """All cells through one stage, then all through the next. What compiles does so at once; what is timed has the
    machine to itself."""

    def __init__(self, args: argparse.Namespace, left_s: Callable[[], float]) -> None:
        self.args, self.left_s = args, left_s
        self.failed = False
        self.cells: list[Cell] = []

    def rows_without_time(self) -> bool:
        """Whether there was no time for something that was asked for."""
        rows = (cell.record.row(row.name) for cell in self.cells for row in cell.left)
        return any(row.get("status") == NO_TIME for row in rows)

    def run(self, names: Sequence[CellName]) -> None:
        environment = dict(os.environ)
        self.cells = cells = [cell for name in names for cell in self._opened(name)]
        cells = self._at_once(cells, lambda cell: cell.capture(environment))
        cells = self._at_once(cells, Cell.compile_first)
        if not self.args.one_by_one:
            self._through(cells)
            return
        for cell in cells:
            self._through([cell])
            cell.release()

    def _opened(self, name: CellName) -> list[Cell]:
        args = self.args
        settings = Settings(
            search=True, directory=args.out, budget_s=args.search_seconds, seed=args.seed,
            finalists=args.finalists,
        )  # fmt: skip
        try:
            return [Cell(args, settings, name)]
        except (DiscoError, RuntimeError) as error:
            self._complain(name, error)
            return []

    def _through(self, cells: Sequence[Cell]) -> None:
        cells = [cell for cell in cells if self._try(cell, cell.profile)]
        cells = [cell for cell in cells if self._try(cell, cell.search)]
        self._compile(cells)
        self._measure(cells)
        for cell in cells:
            self._try(cell, cell.predict)

    def _at_once(self, cells: Sequence[Cell], stage: Callable[[Cell], None]) -> list[Cell]:
        """Those that came through a stage in which nothing is timed."""
        with ThreadPoolExecutor(COMPILES, "stage") as pool:
            fine = list(pool.map(lambda cell: self._try(cell, lambda: stage(cell)), cells))
        return [cell for cell, well in zip(cells, fine, strict=True) if well]

    def _compile(self, cells: Sequence[Cell]) -> None:
        """The rows of all cells, the important ones first. One that was being compiled when an earlier run
        ended may have ended it: it comes last, with nothing beside it."""
        cells = [cell for cell in cells if self._try(cell, cell.choose_rows)]
        ranked = [(rank, cell, row) for cell in cells for rank, row in enumerate(cell.left)]
        ranked.sort(key=lambda one: one[0])
        suspects = [(c, row) for _, c, row in ranked if c.record.row(row.name).get("attempts", 0)]
        others = [(c, row) for _, c, row in ranked if (c, row) not in suspects]
        started = time.monotonic()

        def left_s() -> float:
            if (
                self.args.one_by_one
            ):  # a cell of some rows only says nothing: all are tried, or the next run's
                return math.inf
            return self.left_s() - sum(cell.measuring_s() for cell in cells)

        with ThreadPoolExecutor(AT_A_TIME, "compile") as pool:
            list(pool.map(lambda one: one[0].compile(one[1], left_s), others))
        for cell, row in suspects:
            cell.compile(row, left_s)
        seconds = round(time.monotonic() - started, 1)
        print(
            f"{counted(len(ranked), 'row')} of {counted(len(cells), 'cell')} compiled in {seconds} s",
            flush=True,
        )
        for cell in cells:
            spent_s = round((cell.record.fact("compile_all_s") or 0) + seconds, 1)
            cell.record.note(compile_all_s=spent_s, predicted_until=time.strftime("%H:%M:%S", time.gmtime()))

    def _measure(self, cells: Sequence[Cell]) -> None:
        """Rounds of all cells in turn, as many of each, since a link changes by the minute; then, while there is time,
        traces, the important ones of all cells first."""
        spent_s: dict[str, float] = defaultdict(float)

        @contextlib.contextmanager
        def clock(cell: Cell) -> Iterator[None]:
            started = time.monotonic()
            yield
            spent_s[cell.name.stem] += time.monotonic() - started

        def goes_well(cell: Cell, stage: Callable[[], None]) -> bool:
            with clock(cell):
                return self._try(cell, stage)

        found = [(cell, rounds) for cell in cells if (rounds := cell.rounds()) is not None]
        found = [(cell, rounds) for cell, rounds in found if goes_well(cell, rounds.begin)]
        for _ in range(self.args.rounds - 1):
            began = time.monotonic()
            found = [(cell, rounds) for cell, rounds in found if goes_well(cell, rounds.run_one)]
            if self.left_s() < 2 * (time.monotonic() - began) + _ENDING_S:
                break
        found = [(cell, rounds) for cell, rounds in found if goes_well(cell, rounds.choose)]
        tracing = [] if self.args.one_by_one else [(cell, rounds.traces()) for cell, rounds in found]
        while tracing and self.left_s() > _TRACE_S:
            for cell, traces in list(tracing):
                if self.left_s() > _TRACE_S:
                    with clock(cell):
                        ended = next(traces, _LAST) is _LAST
                    if ended:
                        tracing.remove((cell, traces))
        for cell, _ in found:
            cell.record.note(measure_s=round(spent_s[cell.name.stem], 3))

    def _try(self, cell: Cell, stage: Callable[..., None], *values: Any) -> bool:
        try:
            stage(*values)
        except Exception as error:
            self._complain(cell.name, error)
            return False
        return True

    def _complain(self, name: CellName, error: Exception) -> None:
        self.failed = True
        print(f"benchmark.py: {name.stem}: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
