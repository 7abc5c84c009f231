"""The cells of one command, one after another, and the end of the time."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.optimize.rehearsal import stand_in_profile
from disco_hlo.plugin.logs import configure, one_line
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step
from evaluation import commands
from evaluation.cell import Asked, Cell
from evaluation.commands import BAD_ARGUMENTS, DONE, NOT_MEASURED
from evaluation.compiling import AT_A_TIME
from evaluation.measure import Comparison, shapes_of
from evaluation.predicting import predict_cell
from evaluation.record import CellName, Record, RecordError
from evaluation.rows import Row, chosen_names
from evaluation.step import Files, search

SCRIPT = Path(__file__).resolve().parents[1] / "benchmark.py"
COMPILES = 4
"""Models captured at once: each takes gigabytes of host memory, and autotunes on the devices."""
_ENDING_S, _TRACE_S, _CHECK_S = 3.0, 12.0, 20.0
"""What the end of a run, a trace, and the plugin's comparison may take, which makes all inputs anew."""
_LOOK_S = 60.0
"""What a look and the search behind it may take, all cells at once."""
_LAST = object()


def run(args: argparse.Namespace, left_s: Callable[[], float]) -> int:
    """Do what the command line asks for; the exit status."""
    configure(args.log)
    try:
        chosen_names(args.rows)
    except ValueError as error:
        print(f"benchmark.py: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    settings = Settings(
        search=True,
        directory=args.out,
        budget_s=args.search_seconds,
        seed=args.seed,
        finalists=args.finalists,
        looks=args.looks,
    )
    asked = Asked(args.rows, args.rounds, args.until, settings, args.out, _say, left_s, Comparison())
    names = [CellName(model, args.size, args.link, args.devices) for model in args.models]
    if args.warm_up:
        _warm_up(asked, names[0])
        return DONE
    if args.offline_search:
        return _offline(asked, names)
    if args.offline_predict:
        return _predict_offline(names, args.out)
    watchdog = commands.end_in(left_s(), "benchmark.py", lambda: _stop(args.out, names))
    stages = _Stages(asked, args)
    try:
        stages.run(names, args.until)
    except (ValueError, RecordError) as error:
        print(f"benchmark.py: {one_line(error)}", file=sys.stderr)
        return BAD_ARGUMENTS
    finally:
        watchdog.cancel()
    return NOT_MEASURED if stages.failed else DONE


class _Stages:
    """All cells through one stage, then all through the next. What compiles does so at once, baselines while searches
    run; what is timed has the machine to itself; searches run in processes of their own, beside what else there is."""

    def __init__(self, asked: Asked, args: argparse.Namespace) -> None:
        self._asked = asked
        self._args = args
        self._searches: dict[str, subprocess.Popen[bytes]] = {}
        self.failed = False

    def run(self, names: Sequence[CellName], until: str) -> None:
        environment = dict(os.environ)
        cells = [cell for name in names for cell in self._opened(name)]
        cells = self._at_once(cells, lambda cell: cell.capture(environment))
        if cells and until != "profile" and any(cell.files.plans() is None for cell in cells):
            # The first search on a machine compiles its code, which takes longer than searching.
            self._searches["warm-up"] = self._search(cells[0], "--warm-up")
        cells = self._at_once(cells, Cell.compile_for_profile)
        cells = [cell for cell in cells if self._profiled(cell, until)]
        if until == "profile":
            return
        if until != "search":
            self._compile(cells, Cell.choose_without_plans)
        self._await_searches()
        for look in range(1, self._args.looks + 1):
            self._look_again(cells, look)
        if until == "search":
            return
        self._compile(cells, Cell.choose_rows)
        self._measure(cells)
        if until == "measure":
            for cell in cells:
                self._try(cell, cell.predict)

    def _at_once(self, cells: Sequence[Cell], stage: Callable[[Cell], None]) -> list[Cell]:
        """Those that came through a stage in which nothing is timed."""
        with ThreadPoolExecutor(COMPILES, "stage") as pool:
            fine = list(pool.map(lambda cell: self._try(cell, lambda: stage(cell)), cells))
        return [cell for cell, well in zip(cells, fine, strict=True) if well]

    def _look_again(self, cells: Sequence[Cell], look: int) -> None:
        """Measure the kernels of each cell's plan, and search once more with their times. A look counts once its
        search has ended: one that was cut off is made again."""
        due = [cell for cell in cells if (cell.record.fact("looks") or 0) < look]
        due = self._at_once(due, Cell.compile_for_look)
        begun = [(cell, self._search(cell)) for cell in due if self._try(cell, cell.look, look)]
        self._searches = {cell.name.stem: process for cell, process in begun}
        self._await_searches()
        for cell, process in begun:
            if process.returncode == 0:
                cell.record.note("looks", look)

    def _compile(self, cells: Sequence[Cell], choose: Callable[[Cell], list[Row]]) -> None:
        """The rows of all cells, the important ones first. One that was being compiled when an earlier run
        ended may have ended it: it comes last, with nothing beside it."""
        rows: list[tuple[Cell, list[Row]]] = []
        for cell in cells:
            self._try(cell, lambda cell=cell: rows.append((cell, choose(cell))))
        ranked = [(rank, cell, row) for cell, left in rows for rank, row in enumerate(left)]
        ranked.sort(key=lambda one: one[0])
        suspects = [(c, row) for _, c, row in ranked if c.record.row(row.name).get("attempts", 0)]
        others = [(c, row) for _, c, row in ranked if (c, row) not in suspects]
        started = time.monotonic()

        looks = self._args.looks if any(cell.planned_rows for cell, _ in rows) else 0

        def left_s() -> float:
            return self._asked.left_s() - looks * _LOOK_S - sum(cell.measuring_s() for cell, _ in rows)

        with ThreadPoolExecutor(AT_A_TIME, "compile") as pool:
            shapes = {shape for cell, _ in rows for shape in shapes_of(cell.default)}
            compared = [pool.submit(self._asked.comparison.prepare, *shape) for shape in sorted(shapes)]
            list(pool.map(lambda one: one[0].compile(one[1], left_s), others))
            wait(compared)
        for cell, row in suspects:
            cell.compile(row, left_s)
        seconds = round(time.monotonic() - started, 1)
        _say(f"{len(ranked)} rows of {len(rows)} cells compiled in {seconds} s")
        for cell, _ in rows:
            cell.record.note("compile_all_s", round((cell.record.fact("compile_all_s") or 0) + seconds, 1))

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
        for _ in range(self._asked.rounds - 1):
            began = time.monotonic()
            found = [(cell, rounds) for cell, rounds in found if goes_well(cell, rounds.run_one)]
            if self._asked.left_s() < 2 * (time.monotonic() - began) + _ENDING_S:
                break
        found = [(cell, rounds) for cell, rounds in found if goes_well(cell, rounds.choose)]
        tracing = [(cell, rounds.traces()) for cell, rounds in found]
        while tracing and self._asked.left_s() > _TRACE_S:
            for cell, traces in list(tracing):
                if self._asked.left_s() > _TRACE_S:
                    with clock(cell):
                        ended = next(traces, _LAST) is _LAST
                    if ended:
                        tracing.remove((cell, traces))
        for cell, rounds in found:
            if self._asked.left_s() > _CHECK_S:
                goes_well(cell, rounds.check)
            cell.record.note("measure_s", round(spent_s[cell.name.stem], 3))

    def _opened(self, name: CellName) -> list[Cell]:
        try:
            return [Cell(self._asked, name)]
        except (DiscoError, RuntimeError) as error:
            self._complain(name, error)
            return []

    def _try(self, cell: Cell, stage: Callable[..., None], *values: Any) -> bool:
        try:
            stage(*values)
        except (ValueError, RecordError):
            raise
        except Exception as error:
            self._complain(cell.name, error)
            return False
        return True

    def _profiled(self, cell: Cell, until: str) -> bool:
        if not self._try(cell, cell.profile):
            return False
        if until != "profile":
            self._start_search(cell)
        return True

    def _complain(self, name: CellName, error: Exception) -> None:
        self.failed = True
        print(f"benchmark.py: {name.stem}: {type(error).__name__}: {one_line(error)}", file=sys.stderr)

    def _start_search(self, cell: Cell) -> None:
        if cell.files.plans() is None:
            self._searches[cell.name.stem] = self._search(cell)

    def _search(self, cell: Cell, *options: str) -> subprocess.Popen[bytes]:
        own, environment = self._args, {**os.environ, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(SCRIPT), cell.name.model, "--offline-search", "--link", own.link]
        command += ["--devices", str(own.devices), "--size", own.size, "--out", str(own.out)]
        command += ["--search-seconds", str(own.search_seconds), "--seed", str(own.seed)]
        command += ["--finalists", str(own.finalists), *options]
        return subprocess.Popen(command, env=environment)

    def _await_searches(self) -> None:
        for stem, process in self._searches.items():
            if process.wait() and stem != "warm-up":
                print(f"benchmark.py: {stem}: the search ended with {process.returncode}", file=sys.stderr)
                self.failed = True
        self._searches.clear()


def _warm_up(asked: Asked, name: CellName) -> None:
    """Search a little, for nothing: the search's compiled code is kept on disk for the searches that count."""
    module = Files(asked.out, name).module()
    if module is not None:
        settings = replace(asked.settings, budget_s=0.2)
        with contextlib.suppress(DiscoError):  # the search that counts will say what is wrong
            source = canonicalize(module)
            search(Step(module, source), stand_in_profile(source.graph.backend), settings)


def _offline(asked: Asked, names: Sequence[CellName]) -> int:
    """Search what was profiled, without a device."""
    status = DONE
    for name in names:
        files = Files(asked.out, name)
        module, profile = files.module(), files.profile()
        if module is None or profile is None:
            print(f"benchmark.py: {files.folder} holds no module with its profile", file=sys.stderr)
            status = NOT_MEASURED
            continue
        try:
            plans = search(Step(module, canonicalize(module)), profile, asked.settings, files.plans())
        except DiscoError as error:
            print(f"benchmark.py: {name.stem}: the search failed: {one_line(error)}", file=sys.stderr)
            status = NOT_MEASURED
            continue
        files.save_plans(plans)
        _say(f"{name.stem}: searched {plans.evaluations} candidates in {plans.search_s:.1f} s")
    return status


def _predict_offline(names: Sequence[CellName], out: Path) -> int:
    """Predict what was timed, without a device."""
    status = DONE
    for name in names:
        files, record = Files(out, name), Record.open(out, name)
        module = files.module()
        try:
            if module is None:
                raise DiscoError(f"{files.folder} holds no module")
            predict_cell(files, record, Step(module, canonicalize(module)))
        except DiscoError as error:
            print(f"benchmark.py: {name.stem}: {one_line(error)}", file=sys.stderr)
            status = NOT_MEASURED
            continue
        _say(f"{name.stem}: predicted")
    return status


def _stop(out: Path, cells: Sequence[CellName]) -> None:
    for cell in cells:
        if (out / f"{cell.stem}.json").exists():
            Record.open(out, cell).stop("the time was up")


def _say(text: str) -> None:
    print(text, flush=True)
