"""Compiling rows, several at a time, and predicting them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.apply import apply
from disco_hlo.plan.executed import executed_difference
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.verify import verify
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.candidates import DEFAULT
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate
from evaluation import measure
from evaluation.record import ABSENT, FAILED, NO_TIME, Record
from evaluation.rows import PLANNED, Context, Row, Variant
from evaluation.step import Costs

AT_A_TIME = max(1, min(16, (os.cpu_count() or 2) // 2))
"""Compiles at once: each takes a core and some gigabytes."""
_one_at_a_time = threading.Lock()
"""Rows are made, written and predicted one after the other, while those before them compile: a cost model works in
one place in memory, and threads that all run Python only wait for each other."""


@dataclass(frozen=True)
class Compiled:
    """A row that can be run."""

    row: Row
    executable: LoadedExecutable


def possible(context: Context, record: Record, rows: Sequence[Row]) -> list[Row]:
    """The rows that this backend has; the others are recorded as absent."""
    found = []
    for row in rows:
        if row.gpu_only and not context.on_gpu:
            record.update(row.name, kind=row.kind, status=ABSENT)
        else:
            found.append(row)
    return found


def try_row(
    context: Context, record: Record, row: Row, left_s: Callable[[], float], expected_s: float
) -> Compiled | None:
    """Compile a row if the time allows; what fails is recorded as failed, with the reason.

    Args:
        expected_s: what compiling takes.
    """
    if left_s() < expected_s:
        reason = f"{max(0.0, left_s()):.0f} s are left, compiling takes {expected_s:.0f} s"
        record.update(row.name, kind=row.kind, status=NO_TIME, reason=reason)
        return None
    record.begin(row.name, row.kind)
    try:
        return compile_row(context, record, row)
    except Exception as error:
        record.update(row.name, status=FAILED, reason=one_line(error)[:2000])
        return None


def compile_row(context: Context, record: Record, row: Row) -> Compiled:
    """Compile one row and record what compiling tells.

    Raises:
        Exception: the row is not legal, or XLA refuses it.
    """
    started = time.monotonic()
    module = None
    with _one_at_a_time:
        variant = row.make(context)
        if variant.strategy is not None:
            module = apply(variant.strategy, context.source)
            if (
                row.kind == PLANNED
            ):  # as the plugin does; the numbers of the others are compared when they run
                verify(context.source, module, variant.strategy)
    made_s = time.monotonic() - started
    executable = compiles.compile_module(variant.request, module, variant.options)
    compile_s = time.monotonic() - started - made_s
    record.update(row.name, make_s=round(made_s, 3), compile_s=round(compile_s, 3))
    compiled = Compiled(row, executable)
    describe(context, record, compiled, variant)
    if module is not None and row.name == PLAN:
        difference = executed_difference(module, executables.read_executable(executable))
        record.update(row.name, executed_difference=difference or "")
    return compiled


def describe(context: Context, record: Record, compiled: Compiled, variant: Variant) -> None:
    """Record what a compiled row needs and what the simulator says of it."""
    row = compiled.row
    predicted = _predicted(context, row, variant, compiled.executable)
    record.update(row.name, memory=measure.memory_of(compiled.executable), predicted=predicted)


def _predicted(context: Context, row: Row, variant: Variant, executable: LoadedExecutable) -> dict[str, Any]:
    """The simulator's word on the row, from the profile that the search had."""
    try:
        if variant.strategy is not None:
            return predict(context, context.source.graph, variant.strategy)
        if row.name == DEFAULT:
            return predict(context, context.source.graph, context.xla)
        theirs = canonicalize(executables.read_executable(executable))
        return predict(context, theirs.graph, read(theirs))
    except Exception as error:
        return {"error": f"{row.name}: {one_line(error)}"[:500]}


def predict(context: Context, graph: Graph, strategy: Strategy) -> dict[str, Any]:
    """Simulated step time and what it consists of, in ms, with the number of kernels and buckets.

    Raises:
        DiscoError: the strategy does not fit the graph.
    """
    return predicted(context.costs, graph, strategy)


def predicted(costs: Costs, graph: Graph, strategy: Strategy) -> dict[str, Any]:
    """:func:`predict` from costs alone."""
    with _one_at_a_time:
        timeline = simulate(build(graph, strategy, costs.model, costs.machine).problem)
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
