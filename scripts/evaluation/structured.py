"""One step as XLA compiles it, and restructured by every named schedule, measured side by side.

Each variant of the step (XLA's own structure, and one per schedule) is compiled once without command buffers and
traced: that gives the times of its ops, and what of its communication is hidden. With these times our order and
buckets are found for it, and predicted. Then XLA's order and ours are compiled as a user would get them, their
numbers are compared with XLA's default, and all are run in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from disco_hlo.backends import backend_of
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.collectives import moved_bytes
from disco_hlo.optimize.costs import costs_of
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import DEFAULT, Strategy
from disco_hlo.plan.read import read, verify
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.inputs.arguments import fit_inputs
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.structure import Early, named_schedules, refuse_unsupported
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.profiler.instructions import instruction_times
from disco_hlo.profiler.keys import keyed_times, owners
from disco_hlo.profiler.profile import OpTime, Profile
from disco_hlo.search.schedule import best_buckets, with_order
from evaluation import measure
from evaluation.cell import AT_A_TIME
from evaluation.measure import Compiled, Rounds
from evaluation.predicting import Ran, predicted, xla_ran
from evaluation.record import FAILED, NO_TIME, Record
from evaluation.rows import check
from evaluation.step import Costs


def measure_cell(asked: Asked, record: Record, request: CompileRequest) -> None:
    """Measure everything that the record does not hold yet.

    Raises:
        DiscoError: XLA's default cannot be compiled, traced or run.
    """
    variants, early = _variants(asked, record, request)
    if not variants:
        asked.say("  nothing left to do")
        return

    def compile_traceable(variant: Variant) -> None:
        _compile_traceable(request, early, variant)

    # What the autotuner picks for the default serves the others; alone, nothing disturbs it.
    for some in filter(None, (variants[:1], variants[1:])):
        name = "compile_default_s" if some[0] is variants[0] else "compile_traceable_s"
        _timed(record, name, partial(_in_parallel, asked, compile_traceable, some))
    if variants[0].error or variants[0].source is None:
        raise DiscoError(f"XLA's default: {variants[0].error}")
    fit_inputs(request, variants[0].source)
    base = asked.profile(request)
    times = _timed(record, "trace_s", lambda: _op_times(asked, request, variants))
    profile = replace(base, ops={**base.ops, **times})
    rows = _timed(record, "compile_s", lambda: compile_rows(
        asked, record, request, variants, lambda variant: _order(asked, record, variant, profile)
    ))  # fmt: skip
    _timed(record, "measure_s", lambda: run_rows(asked, record, request, rows))


def _timed(record: Record, name: str, work: Callable[[], Any]) -> Any:
    started = time.monotonic()
    found = work()
    record.note(name, round(time.monotonic() - started, 3))
    return found


def _in_parallel(asked: Asked, work: Callable[[Variant], None], variants: Sequence[Variant]) -> None:
    def guarded(variant: Variant) -> None:
        try:
            work(variant)
        except Exception as error:
            variant.error = one_line(error)[:2000]
            asked.say(f"  {variant.name}: {variant.error}")

    with ThreadPoolExecutor(AT_A_TIME, "compile") as pool:
        list(pool.map(guarded, variants))


def _variants(asked: Asked, record: Record, request: CompileRequest) -> tuple[list[Variant], Early]:
    """The step as it is, and by each schedule that it has the pattern for; and what their moves are made on."""
    early = Early(compiles.capture_structure(request), "", backend_of(request.backend.platform).copies_early)
    started = time.monotonic()
    found = named_schedules(early)
    record.note_all(
        schedules={name: len(moves) for name, moves in found.items()},
        propose_s=round(time.monotonic() - started, 3),
    )
    absent = sorted(asked.only - set(found))
    if absent:
        asked.say(f"  no pattern for {', '.join(absent)}; this step has {', '.join(found) or 'none'}")
    variants = [Variant(WHOLE)]
    variants += [
        Variant(name, moves) for name, moves in found.items() if not asked.only or name in asked.only
    ]
    orders = (XLA_ORDER, OUR_ORDER)
    left = [one for one in variants[1:] if not all(record.finished(one.row(order)) for order in orders)]
    if not left and all(record.finished(variants[0].row(order)) for order in orders):
        return [], early
    variants = [variants[0], *left]
    return variants, early


def _compile_traceable(request: CompileRequest, early: Early, variant: Variant) -> None:
    if variant.moves:
        variant.structure = early.moved(variant.moves)
    options = backend_of(request.backend.platform).naming_options
    variant.traceable, module = compiles.compile_seen(request, options, variant.structure)
    variant.source = canonicalize(module)
    refuse_unsupported(variant.source)


# --- traces and costs -----------------------------------------------------------------------------


def _op_times(asked: Asked, request: CompileRequest, variants: Sequence[Variant]) -> dict[str, OpTime]:
    """Times of the ops of all variants, from traces in XLA's order; the breakdown stays with each variant."""
    found: dict[str, OpTime] = {}
    inputs_of: Runner | None = None
    for variant in variants:
        if variant.error:
            continue
        try:
            inputs_of = Runner(request, variant.traceable, asked.seed, inputs_of=inputs_of)
            taken = measure.traced(inputs_of)
            variant.trace = measure.breakdown(taken, variant.traceable)
            executed = executables.read_executable(variant.traceable)
            written = canonicalize(executed)
            times = instruction_times(taken, written.graph.module_name, owners(executed))
            found = {**keyed_times(written.graph, written.origins, times), **found}
        except Exception as error:
            if variant.name == WHOLE:
                raise
            variant.error = one_line(error)[:2000]
        variant.traceable = None
    return found


def _order(asked: Asked, record: Record, variant: Variant, profile: Profile) -> None:
    """Find our order and buckets for a variant; predict both orders."""
    assert variant.source is not None
    source, graph = variant.source, variant.source.graph
    started = time.monotonic()
    try:
        xla = read(source)
        costs = costs_of(profile, source, [xla])
        _note_prediction(record, variant, XLA_ORDER, costs, xla_ran(source))
        made = [with_order(graph, xla, costs, costs.machine)]
        made.append(best_buckets(graph, xla.groups, costs, costs.machine))
        best = min(made, key=lambda one: one.predicted_ns)
        variant.strategy = check(source, best.strategy)
        _note_prediction(record, variant, OUR_ORDER, costs, Ran(source, variant.strategy))
    except Exception as error:
        reason = one_line(error)[:2000]
        asked.say(f"  {variant.name}, {OUR_ORDER}: {reason}")
        record.update(variant.row(OUR_ORDER), kind=variant.name, status=FAILED, reason=reason)
    record.update(variant.row(OUR_ORDER), order_s=round(time.monotonic() - started, 3))


def _note_prediction(record: Record, variant: Variant, order: str, costs: Costs, ran: Ran) -> None:
    graph = ran.source.graph
    moved = int(moved_bytes(graph).sum())
    record.update(
        variant.row(order),
        kind=variant.name,
        predicted=predicted(costs, ran),
        transfers=len(graph.all_reduces),
        transferred_bytes=moved,
        nodes=len(graph),
        moves=len(variant.moves),
    )


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
