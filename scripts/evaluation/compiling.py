"""Compiling rows, several at a time, and predicting them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.apply import apply
from disco_hlo.plan.executed import executed_difference
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.verify import verify
from disco_hlo.plugin import jaxlink
from disco_hlo.plugin.jaxlink import LoadedExecutable
from disco_hlo.plugin.logs import one_line
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate
from evaluation import measure
from evaluation.record import ABSENT, FAILED, NO_TIME, Record
from evaluation.rows import DEFAULT, PGLE, PLAN, Context, Row, Variant

AT_A_TIME = max(1, min(12, (os.cpu_count() or 2) // 2))


@dataclass(frozen=True)
class Compiled:
    """A row that can be run."""

    row: Row
    executable: LoadedExecutable


def compile_rows(
    context: Context, record: Record, rows: Sequence[Row], left_s: Callable[[], float], expected_s: float
) -> list[Compiled]:
    """Compile what fits into the time; a row that fails is recorded as failed, with the reason.

    XLA's default comes first, and must succeed: all else is held against it, and its autotuning of matmuls
    serves all. PGLE waits until that has run.

    Args:
        expected_s: what a compile takes, if the default's does not tell.

    Raises:
        Exception: whatever XLA raises of its own step.
    """
    started = time.monotonic()
    record.begin(rows[0].name, rows[0].kind)
    default = compile_row(context, record, rows[0])
    expected_s = max(expected_s, time.monotonic() - started)

    def one(row: Row) -> Compiled | None:
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

    possible = []
    for row in rows[1:]:
        if row.gpu_only and not context.on_gpu:
            record.update(row.name, kind=row.kind, status=ABSENT)
        elif row.name != PGLE:
            possible.append(row)
    # What may have ended the process last time is compiled with nothing beside it.
    alone = [row for row in possible if record.row(row.name).get("attempts", 0)]
    with ThreadPoolExecutor(AT_A_TIME, "compile") as pool:
        found = list(pool.map(one, [row for row in possible if row not in alone]))
    found += [one(row) for row in alone]
    return [default, *(compiled for compiled in found if compiled is not None)]


def compile_row(context: Context, record: Record, row: Row) -> Compiled:
    """Compile one row and record what compiling tells.

    Raises:
        Exception: the row is not legal, or XLA refuses it.
    """
    started = time.monotonic()
    variant = row.make(context)
    module = None
    if variant.strategy is not None:
        module = apply(variant.strategy, context.source)
        verify(context.source, module, variant.strategy)
    made_s = time.monotonic() - started
    executable = jaxlink.compile_module(variant.request, module, variant.options)
    compile_s = time.monotonic() - started - made_s
    executed = jaxlink.read_executable(executable)
    facts: dict[str, Any] = {
        "make_s": round(made_s, 3),
        "compile_s": round(compile_s, 3),
        "memory": measure.memory_of(executable),
        "predicted": _predicted(context, row, variant, executed),
    }
    if module is not None and row.name == PLAN:
        facts["executed_difference"] = executed_difference(module, executed) or ""
    record.update(row.name, **facts)
    return Compiled(row, executable)


def _predicted(context: Context, row: Row, variant: Variant, executed: bytes) -> dict[str, Any]:
    """The simulator's word on the row, from the profile that the search had."""
    try:
        if variant.strategy is not None:
            return predict(context, context.source.graph, variant.strategy)
        if row.name == DEFAULT:
            return predict(context, context.source.graph, context.xla)
        theirs = canonicalize(executed)
        return predict(context, theirs.graph, read(theirs))
    except Exception as error:
        return {"error": f"{row.name}: {one_line(error)}"[:500]}


def predict(context: Context, graph: Graph, strategy: Strategy) -> dict[str, Any]:
    """Simulated step time and what it consists of, in ms, with the number of kernels and buckets.

    Raises:
        DiscoError: the strategy does not fit the graph.
    """
    timeline = simulate(build(graph, strategy, context.costs.model, context.costs.machine).problem)
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
