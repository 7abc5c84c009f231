"""Restructured steps on the devices: compiled in XLA's order and in ours, compared, run in turn, traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.optimize.select import ratio_to
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.verify import verify
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.candidates import Trial
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.step_time import time_once
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler.profile import Profile
from evaluation import measure
from evaluation.record import FAILED, NO_TIME, Record

XLA_ORDER, OUR_ORDER = "XLA's order", "our order"
WHOLE = "whole"
"""The step with the structure XLA gives it; in XLA's order it is XLA's default."""


@dataclass
class Variant:
    """One structure of the step."""

    name: str
    moves: list[dict[str, Any]] = field(default_factory=list)
    structure: bytes | None = None
    """The module at the hook's early stage; None leaves XLA's."""
    source: CanonicalModule | None = None
    """What XLA makes of it."""
    traceable: LoadedExecutable = None
    """In XLA's order, without command buffers."""
    trace: dict[str, float] = field(default_factory=dict)
    strategy: Strategy | None = None
    """Our order and buckets."""
    restructure_s: float = 0.0
    """What applying the moves took."""
    error: str = ""

    def row(self, order: str) -> str:
        """Name of the row that runs it in this order."""
        return DEFAULT if (self.name, order) == (WHOLE, XLA_ORDER) else f"{self.name}, {order}"


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    only: frozenset[str]
    """Schedules to try; empty: all."""
    rounds: int
    compiles: int
    """Modules compiled at once."""
    seed: int
    profile: Callable[[CompileRequest], Profile]
    """Where times of transfers come from, and of ops that no trace shows."""
    say: Callable[[str], None]
    left_s: Callable[[], float]
    comparison: measure.Comparison
    modules: Path | None = None
    """Folder for the early module, and for what XLA makes of each variant."""


@dataclass
class Row:
    """An executable to be run in turn with the others."""

    name: str
    executable: LoadedExecutable
    variant: Variant
    order: str
    runner: Runner | None = None
    trial: Trial = field(default_factory=lambda: Trial("", None, 0))


def compile_rows(
    asked: Asked,
    record: Record,
    request: CompileRequest,
    variants: Sequence[Variant],
    order: Callable[[Variant], None],
) -> list[Row]:
    """Compile what has not been measured; XLA's default always, since the others are compared with it.

    ``order`` finds a variant's strategy, here while XLA's orders are being compiled.
    """
    alive = [variant for variant in variants if not _given_up(record, variant)]

    def wanted(variant: Variant, which: str) -> bool:
        return variant.row(which) == DEFAULT or not record.finished(variant.row(which))

    with ThreadPoolExecutor(asked.compiles, "compile") as pool:
        made = [
            pool.submit(_compiled, asked, record, request, variant, XLA_ORDER)
            for variant in alive
            if wanted(variant, XLA_ORDER)
        ]
        for variant in alive:
            if not wanted(variant, OUR_ORDER):
                continue
            order(variant)
            if variant.strategy is not None:
                made.append(pool.submit(_compiled, asked, record, request, variant, OUR_ORDER))
        return [row for row in (one.result() for one in made) if row is not None]


def _compiled(
    asked: Asked, record: Record, request: CompileRequest, variant: Variant, order: str
) -> Row | None:
    name = variant.row(order)
    if name != DEFAULT and asked.left_s() < 10:
        record.update(name, status=NO_TIME, reason="no time was left to compile it")
        return None
    record.begin(name, variant.name)
    started = time.monotonic()
    try:
        executable = _executable(request, variant, order)
    except Exception as error:
        if name == DEFAULT:
            raise
        record.update(name, status=FAILED, reason=one_line(error)[:2000])
        return None
    seconds = round(time.monotonic() - started, 3)
    record.update(name, compile_s=seconds, memory=measure.memory_of(executable))
    return Row(name, executable, variant, order)


def _executable(request: CompileRequest, variant: Variant, order: str) -> LoadedExecutable:
    module = None
    if order == OUR_ORDER:
        assert variant.source is not None
        assert variant.strategy is not None
        module = apply(variant.strategy, variant.source)
        verify(variant.source, module, variant.strategy)
    return compiles.compile_module(request, module, None, variant.structure)


def run_rows(asked: Asked, record: Record, request: CompileRequest, rows: Sequence[Row]) -> None:
    """First runs with their numbers, then rounds in turn, then traces of our orders."""
    default = rows[0]
    default.runner = measure.runner_of(request, default.executable, asked.seed, None)
    default.runner.run()
    at_once = measure.at_once(record, default.runner)
    expected = measure.outputs_on_device(default.executable, default.runner)
    alive = [row for row in rows if _first_run(asked, record, request, row, default, expected)]
    del expected
    for _ in range(asked.rounds):
        started = time.monotonic()
        for row in alive:
            assert row.runner is not None
            row.trial.times_ns.append(time_once(row.runner, at_once))
        record.update_all({row.name: measure.times_of(row.trial, default.trial) for row in alive})
        if asked.left_s() < 2 * (time.monotonic() - started) + 5:
            break
    for row in alive:
        _trace(asked, record, row)
        ratio = ratio_to(row.trial.times_ns, default.trial.times_ns)
        asked.say(f"  {row.name}: {row.trial.median_ns / 1e6:.2f} ms, {ratio:.3f} of default")


def _first_run(
    asked: Asked, record: Record, request: CompileRequest, row: Row, default: Row, expected: Sequence[Any]
) -> bool:
    try:
        record.update(row.name, first_run_began=time.time())
        row.runner = measure.runner_of(request, row.executable, asked.seed, default.runner)
        row.runner.run()
        got = measure.outputs_on_device(row.executable, row.runner)
        numbers = {"max_relative_difference": max(asked.comparison.apart(expected, got))}
    except Exception as error:
        if row is default:
            raise
        record.update(row.name, status=FAILED, reason=one_line(error)[:2000], first_run_began=None)
        return False
    record.update(row.name, numbers=numbers, first_run_began=None)
    return True


def _trace(asked: Asked, record: Record, row: Row) -> None:
    found: dict[str, Any] = row.variant.trace
    if row.order == OUR_ORDER and asked.left_s() > 5:
        assert row.runner is not None
        try:
            found = measure.breakdown(measure.traced(row.runner), row.executable)
        except Exception as error:
            found = {"error": one_line(error)[:500]}
    elif row.order == OUR_ORDER:
        found = {}
    record.update(row.name, trace=found)


def _given_up(record: Record, variant: Variant) -> bool:
    if variant.error:
        for order in (XLA_ORDER, OUR_ORDER):
            record.update(variant.row(order), kind=variant.name, status=FAILED, reason=variant.error)
    return bool(variant.error)
