"""Compiling rows, several at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.apply import apply
from disco_hlo.plan.read import verify
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.executables import LoadedExecutable
from evaluation import measure, predicting
from evaluation.predicting import Ran
from evaluation.record import ABSENT, FAILED, NO_TIME, Record
from evaluation.rows import PLANNED, Context, Row

AT_A_TIME = max(1, min(16, (os.cpu_count() or 2) // 2))
"""Compiles at once: each takes a core and some gigabytes."""


@dataclass(frozen=True)
class Compiled:
    """A row that can be run."""

    name: str
    kind: str
    executable: LoadedExecutable
    traced: bool = False
    """Whether its trace is kept, time allowing."""


def possible(record: Record, rows: Sequence[Row]) -> list[Row]:
    """The rows that this step and backend have; the others are recorded as absent, and why."""
    found = []
    for row in rows:
        if row.absent:
            record.update(row.name, kind=row.kind, status=ABSENT, reason=row.absent)
        else:
            found.append(row)
    return found


def try_row(
    context: Context, record: Record, row: Row, left_s: Callable[[], float], expected_s: float
) -> tuple[Compiled, Ran] | None:
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


def compile_row(context: Context, record: Record, row: Row) -> tuple[Compiled, Ran]:
    """Compile one row, and record what compiling tells and what is predicted.

    Raises:
        Exception: the row is not legal, or XLA refuses it.
    """
    started = time.monotonic()
    module = None
    with predicting.python_at_once:
        variant = row.make(context)
        if variant.strategy is not None:
            module = apply(variant.strategy, context.source)
            # As the plugin does; the numbers of the others are compared when they run, of orders only a few.
            if row.kind == PLANNED or variant.strategy.regions:
                verify(context.source, module, variant.strategy)
    made_s = time.monotonic() - started
    executable = compiles.compile_module(variant.request, module, variant.options)
    compile_s = time.monotonic() - started - made_s
    record.update(
        row.name,
        make_s=round(made_s, 3),
        compile_s=round(compile_s, 3),
        memory=measure.memory_of(executable),
    )
    if variant.strategy is None:
        ran = predicting.xla_ran(canonicalize(executables.read_executable(executable)))
    else:
        ran = predicting.Ran(context.source, variant.strategy)
    record.update(row.name, predicted=predicting.noted(context.costs, ran))
    return Compiled(row.name, row.kind, executable, row.traced), ran
