"""What the simulator says of the rows of a cell: once they are timed, or later and elsewhere.

A row keeps what was compiled: our strategy, or XLA's own module. So predictions cost no device time, and those of a
simulator that has learnt something since can be held against what was measured before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.baselines import one_at_a_time
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.read import Repeat, read, repeats
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.known_times import bucket_sizes
from disco_hlo.plugin.step import Step
from disco_hlo.plugin.xla import executables
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.profiler.in_step import InStep, counted
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate
from evaluation.bounds import lowest_of
from evaluation.record import ALONE_XLA, OK, Record
from evaluation.step import Costs, Files, costs
from evaluation.tables import step_ms

_LEAST_SHARE = 0.4
"""Of a step in which nothing runs beside transfers. Kernels are known to 2.5 %, so transfers are by 3.7 % then; over
sockets these changed by 12 to 17 % between profile and rounds."""
python_at_once = threading.Lock()
"""Held by what runs Python for seconds beside compiles: a cost model works in one place in memory, and threads that all
run Python only wait for each other."""


def keep(files: Files, name: str, strategy: Strategy | None, executable: LoadedExecutable) -> None:
    """Keep what a row's prediction is made from; XLA's default is the cell's own module."""
    if strategy is not None:
        files.save_row(name, msgspec.json.encode(strategy))
    elif name != DEFAULT:
        files.save_row(name, executables.read_executable(executable))


def predict_cell(files: Files, record: Record, captured: Step) -> None:
    """Note in the record what is predicted of every row that was timed: by the profile that the search had, and, where
    the link's rate decides, by the rate that it had in the rounds.

    Raises:
        DiscoError: the cell has no profile, or no plans.
    """
    plans, profile = files.plans(), files.profile()
    if plans is None or profile is None:
        raise DiscoError(f"{files.folder} lacks its profile or its plans")
    known = costs(profile, captured, plans)
    _predict_rows(files, record, captured.source, known, "predicted")
    together = _transfers_in_the_rounds(record, captured.source, known)
    if together is not None:
        again = costs(replace(profile, together=together), captured, plans)
        _predict_rows(files, record, captured.source, again, "predicted_in_rounds")
        record.note("bounds_in_rounds", lowest_of(captured.source, again, plans))


def _transfers_in_the_rounds(record: Record, source: CanonicalModule, known: Costs) -> InStep | None:
    """What the step's transfers took in the rounds, by the row in which nothing runs beside them: what that took beyond
    its kernels. None where transfers are too small a part of it, and an error of the kernels would count as theirs.

    Links through a network change by the minute: one over sockets was a sixth slower in the rounds than in the profile.
    The row's time is taken as all tables take times, by its ratio to the default: medians of their own of two rows were
    6 % apart where the ratios of the rounds told them alike.
    """
    alone_ms, row = step_ms(record.data, ALONE_XLA), record.row(ALONE_XLA)
    if alone_ms is None or row.get("status") != OK:
        return None
    alone = one_at_a_time(source.graph, read(source))
    kernels_ms = predicted(known, source.graph, alone)["compute_ms"]
    transfers_ms = alone_ms - kernels_ms
    if transfers_ms < _LEAST_SHARE * alone_ms:
        return None
    sizes = counted(bucket_sizes(source.graph, alone))
    return InStep(sizes, int(1e6 * transfers_ms), int(1e6 * row["spread_ms"]), len(row["times_ms"]))


def _predict_rows(files: Files, record: Record, source: CanonicalModule, known: Costs, noted_as: str) -> None:
    changes: dict[str, dict[str, Any]] = {}
    for name, row in record.rows().items():
        if row.get("status") != OK or not row.get("attempts"):  # PyTorch's rows are nothing that we compiled
            continue
        try:
            changes[name] = {noted_as: predicted(known, *what_ran(files, name, source))}
        except DiscoError as error:
            changes[name] = {noted_as: {"error": f"{name}: {one_line(error)}"[:500]}}
    record.update_all(changes)


def what_ran(files: Files, name: str, source: CanonicalModule) -> tuple[Graph, Strategy, tuple[Repeat, ...]]:
    """The graph and strategy of a row, and what XLA's own modules execute besides.

    Raises:
        DiscoError: nothing of it was kept, or it is damaged.
    """
    if name == DEFAULT:
        return source.graph, read(source), repeats(source)
    kept = files.row(name)
    if kept.startswith(b"{"):
        try:
            return source.graph, msgspec.json.decode(kept, type=Strategy), ()
        except msgspec.MsgspecError as error:
            raise DiscoError(f"{files.folder} does not hold the strategy of {name!r}: {error}") from error
    theirs = canonicalize(kept)
    return theirs.graph, read(theirs), repeats(theirs)


def predicted(known: Costs, graph: Graph, strategy: Strategy, again: Sequence[Repeat] = ()) -> dict[str, Any]:
    """Simulated step time and what it consists of, in ms, with the number of kernels and buckets.

    Args:
        again: what a module of XLA's executes besides.

    Raises:
        DiscoError: the strategy does not fit the graph.
    """
    with python_at_once:
        timeline = simulate(build(graph, strategy, known.model, known.machine, repeats=again).problem)
    return {
        "step_ms": timeline.makespan_ns / 1e6,
        "compute_ms": timeline.compute_ns / 1e6,
        "communication_ms": timeline.communication_ns / 1e6,
        "hidden_ms": timeline.overlap_ns / 1e6,
        "exposed_ms": timeline.exposed_ns / 1e6,
        "peak_bytes": timeline.peak_bytes,
        "groups": len(strategy.groups),
        "buckets": len(strategy.buckets),
    }
