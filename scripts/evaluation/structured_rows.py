"""Restructured steps on the devices: compiled in XLA's order and in ours, then run in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import DEFAULT, Strategy
from disco_hlo.plan.read import verify
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler.profile import Profile
from evaluation import measure
from evaluation.compiling import AT_A_TIME, Compiled
from evaluation.record import FAILED, NO_TIME, Record
from evaluation.rounds import Rounds

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
    seed: int
    profile: Callable[[CompileRequest], Profile]
    """Where times of transfers come from, and of ops that no trace shows."""
    say: Callable[[str], None]
    left_s: Callable[[], float]


def compile_rows(
    asked: Asked,
    record: Record,
    request: CompileRequest,
    variants: Sequence[Variant],
    order: Callable[[Variant], None],
) -> list[Compiled]:
    """Compile what has not been measured; XLA's default always, since the others are compared with it.

    ``order`` finds a variant's strategy, here while XLA's orders are being compiled.
    """
    alive = [variant for variant in variants if not _given_up(record, variant)]

    def wanted(variant: Variant, which: str) -> bool:
        return variant.row(which) == DEFAULT or not record.finished(variant.row(which))

    with ThreadPoolExecutor(AT_A_TIME, "compile") as pool:
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
) -> Compiled | None:
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
    if order == XLA_ORDER:  # as traced for the times of its ops
        record.update(name, trace=variant.trace)
    return Compiled(name, variant.name, executable, traced=order == OUR_ORDER)


def _executable(request: CompileRequest, variant: Variant, order: str) -> LoadedExecutable:
    module = None
    if order == OUR_ORDER:
        assert variant.source is not None
        assert variant.strategy is not None
        module = apply(variant.strategy, variant.source)
        verify(variant.source, module, variant.strategy)
    return compiles.compile_module(request, module, None, variant.structure)


def run_rows(asked: Asked, record: Record, request: CompileRequest, rows: Sequence[Compiled]) -> None:
    """First runs with their numbers, then rounds in turn, then traces of our orders."""
    rounds = Rounds(
        request, rows, record, asked.seed, inputs_of=None, in_a_row=True, of_form=False, say=asked.say
    )
    rounds.begin()
    for _ in range(asked.rounds - 1):
        started = time.monotonic()
        rounds.run_one()
        if asked.left_s() < 2 * (time.monotonic() - started) + 5:
            break
    rounds.choose()
    for _ in rounds.traces():
        if asked.left_s() < 5:
            break


def _given_up(record: Record, variant: Variant) -> bool:
    if variant.error:
        for order in (XLA_ORDER, OUR_ORDER):
            record.update(variant.row(order), kind=variant.name, status=FAILED, reason=variant.error)
    return bool(variant.error)
