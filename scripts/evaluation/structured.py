"""One step as XLA compiles it, and restructured by every named schedule, measured side by side.

Each variant of the step (XLA's own structure, and one per schedule) is compiled once without command buffers and
traced: that gives the times of its ops, and what of its communication is hidden. With these times our order and
buckets are found for it, and predicted. Then XLA's order and ours are compiled as a user would get them, their
numbers are compared with XLA's default, and all are run in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import disco_hlo
from disco_hlo.backends import backend_of
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.collectives import moved_bytes
from disco_hlo.optimize.costs import costs_of
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import DEFAULT, Strategy
from disco_hlo.plan.read import read, verify
from disco_hlo.plugin.logs import configure, one_line
from disco_hlo.plugin.measuring.inputs.arguments import fit_inputs
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.session import join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.structure import Early, named_schedules, refuse_unsupported
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.profiler.instructions import instruction_times
from disco_hlo.profiler.keys import keyed_times, owners
from disco_hlo.profiler.profile import OpTime, Profile, load
from disco_hlo.search.schedule import best_buckets, with_order
from evaluation import commands, measure, step
from evaluation.cell import AT_A_TIME
from evaluation.measure import Compiled, Rounds
from evaluation.predicting import Ran, predicted, xla_ran
from evaluation.record import FAILED, NO_TIME, CellName, Record, RecordError
from evaluation.strategies import check

XLA_ORDER, OUR_ORDER = "XLA's order", "our order"
ORDERS = (XLA_ORDER, OUR_ORDER)
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


def run(args: argparse.Namespace, left_s: Callable[[], float]) -> int:
    """Measure the steps that the command line names; the exit status."""
    configure(args.log)
    cells = [CellName(name, args.size, args.link, args.devices) for name in args.models]
    fine = True
    with commands.ending_in(left_s(), "benchmark.py", args.out, cells):
        for cell in cells:
            try:
                _Cell(args, Record.open(args.out, cell), left_s).measure()
            except RecordError as error:
                print(f"benchmark.py: {error}", file=sys.stderr)
                return commands.BAD_ARGUMENTS
            except Exception as error:  # the other steps are measured nevertheless
                said = f"{cell.model}: {type(error).__name__}: {one_line(error)}"
                print(f"benchmark.py: {said}", file=sys.stderr)
                fine = False
    return commands.DONE if fine else commands.NOT_MEASURED


class _Cell:
    """One step over one link: its variants on their way through the stages."""

    def __init__(self, args: argparse.Namespace, record: Record, left_s: Callable[[], float]) -> None:
        self.args, self.record, self.left_s = args, record, left_s
        self.request = request = step.request_of(record.cell.model, args.size)
        if len(request.devices) != args.devices:
            raise ValueError(f"--devices is {args.devices}, jax has {len(request.devices)}")
        self.backend = backend_of(request.backend.platform)
        record.note(
            versions=step.versions(),
            device=str(request.devices[0].device_kind),
            backend=str(request.backend.platform),
            environment=commands.described(os.environ),
            date=time.strftime("%Y-%m-%d", time.gmtime()),
        )
        print(f"{record.cell.stem}:", flush=True)

    def measure(self) -> None:
        """Measure everything that the record does not hold yet.

        Raises:
            DiscoError: XLA's default cannot be compiled, traced or run.
        """
        module = compiles.capture_structure(self.request)
        finer = compiles.may_compute_finer(self.request)
        self.early = Early(module, "", self.backend.copies_early, self.request.devices, finer)
        variants = self._variants()
        if not variants:
            _say("nothing left to do")
            return
        # What the autotuner picks for the default serves the others; alone, nothing disturbs it.
        with self.record.clock("compile_default"):
            self._make_traceable(variants[:1])
        if variants[1:]:
            with self.record.clock("compile_traceable"):
                self._make_traceable(variants[1:])
        if variants[0].error or variants[0].source is None:
            raise DiscoError(f"XLA's default: {variants[0].error}")
        fit_inputs(self.request, variants[0].source)
        profile = self._profile()
        with self.record.clock("trace"):
            profile = replace(profile, ops={**profile.ops, **self._op_times(variants)})
        with self.record.clock("compile"):
            rows = self._compile(variants, profile)
        with self.record.clock("measure"):
            self._run(rows)

    def _variants(self) -> list[Variant]:
        """The step as it is, and by each schedule that it has the pattern for; none where all was measured."""
        only = frozenset(filter(None, self.args.schedules.split(",")))
        with self.record.clock("propose"):
            found = named_schedules(self.early, only)
        self.record.note(schedules={name: len(moves) for name, moves in found.items()})
        if absent := sorted(only - set(found)):
            _say(f"no pattern for {', '.join(absent)}; this step has {', '.join(found) or 'none'}")
        whole, *others = [
            Variant(WHOLE),
            *(Variant(name, moves) for name, moves in found.items() if not only or name in only),
        ]
        left = [one for one in others if not self._finished(one)]
        return [] if not left and self._finished(whole) else [whole, *left]

    def _finished(self, variant: Variant) -> bool:
        return all(self.record.finished(variant.row(order)) for order in ORDERS)

    def _make_traceable(self, variants: Sequence[Variant]) -> None:
        def guarded(variant: Variant) -> None:
            try:
                if variant.moves:
                    variant.structure = self.early.moved(variant.moves)
                options = self.backend.singly_options
                variant.traceable, module = compiles.compile_seen(self.request, options, variant.structure)
                variant.source = canonicalize(module)
                refuse_unsupported(variant.source)
            except Exception as error:
                variant.error = one_line(error)[:2000]
                _say(f"{variant.name}: {variant.error}")

        with ThreadPoolExecutor(AT_A_TIME, "compile") as pool:
            list(pool.map(guarded, variants))

    def _profile(self) -> Profile:
        """Transfer times, device constants and contention: shipped for the link on GPU, measured elsewhere. Of ops the
        times that no trace shows."""
        if self.request.backend.platform != "cpu":
            shipped = Path(disco_hlo.__path__[0]) / "data" / "profiles"
            return load(shipped / f"nvidia-h200-{self.args.link}.json")
        session = join(self.request, Settings(search=True, directory=self.args.out))
        return step.profile(session, step.captured(self.request), self.args.out)

    def _op_times(self, variants: Sequence[Variant]) -> dict[str, OpTime]:
        """Times of the ops of all variants, from traces in XLA's order; the breakdown stays with each variant."""
        found: dict[str, OpTime] = {}
        inputs_of: Runner | None = None
        for variant in variants:
            if variant.error:
                continue
            try:
                inputs_of = Runner(self.request, variant.traceable, self.args.seed, inputs_of=inputs_of)
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

    def _order(self, variant: Variant, profile: Profile) -> None:
        """Find our order and buckets for a variant; predict both orders."""
        assert variant.source is not None
        source, graph = variant.source, variant.source.graph
        started = time.monotonic()
        try:
            xla = read(source)
            costs = costs_of(profile, source, [xla])
            self._note(variant, XLA_ORDER, predicted(costs, xla_ran(source)))
            made = [with_order(graph, xla, costs, costs.machine)]
            made.append(best_buckets(graph, xla.groups, costs, costs.machine))
            best = min(made, key=lambda one: one.predicted_ns)
            variant.strategy = check(source, best.strategy)
            self._note(variant, OUR_ORDER, predicted(costs, Ran(source, variant.strategy)))
        except Exception as error:
            reason = one_line(error)[:2000]
            _say(f"{variant.name}, {OUR_ORDER}: {reason}")
            self.record.update(variant.row(OUR_ORDER), kind=variant.name, status=FAILED, reason=reason)
        self.record.update(variant.row(OUR_ORDER), order_s=round(time.monotonic() - started, 3))

    def _note(self, variant: Variant, order: str, said: dict[str, Any]) -> None:
        assert variant.source is not None
        graph = variant.source.graph
        self.record.update(
            variant.row(order), kind=variant.name, predicted=said, transfers=len(graph.collectives),
            transferred_bytes=int(moved_bytes(graph).sum()), nodes=len(graph), moves=len(variant.moves),
        )  # fmt: skip

    def _compile(self, variants: Sequence[Variant], profile: Profile) -> list[Compiled]:
        """Compile what has not been measured; XLA's default always, since the others are compared with it. Our orders
        are found while XLA's are being compiled."""

        def wanted(variant: Variant, order: str) -> bool:
            return variant.row(order) == DEFAULT or not self.record.finished(variant.row(order))

        for variant in variants:
            for order in ORDERS if variant.error else ():
                self.record.update(variant.row(order), kind=variant.name, status=FAILED, reason=variant.error)
        alive = [variant for variant in variants if not variant.error]
        with ThreadPoolExecutor(AT_A_TIME, "compile") as pool:
            made = [pool.submit(self._compiled, one, XLA_ORDER) for one in alive if wanted(one, XLA_ORDER)]
            for variant in alive:
                if wanted(variant, OUR_ORDER):
                    self._order(variant, profile)
                    if variant.strategy is not None:
                        made.append(pool.submit(self._compiled, variant, OUR_ORDER))
            return [row for row in (one.result() for one in made) if row is not None]

    def _compiled(self, variant: Variant, order: str) -> Compiled | None:
        name, record = variant.row(order), self.record
        if name != DEFAULT and self.left_s() < 10:
            record.update(name, status=NO_TIME, reason="no time was left to compile it")
            return None
        record.begin(name, variant.name)
        started = time.monotonic()
        module = None
        try:
            if order == OUR_ORDER:
                assert variant.source is not None
                assert variant.strategy is not None
                module = apply(variant.strategy, variant.source)
                verify(variant.source, module, variant.strategy)
            executable = compiles.compile_module(self.request, module, None, variant.structure)
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

    def _run(self, rows: Sequence[Compiled]) -> None:
        """First runs with their numbers, then rounds in turn, then traces of our orders."""
        rounds = Rounds(
            self.request, rows, self.record, self.args.seed, inputs_of=None, in_a_row=True, of_form=False
        )
        rounds.begin()
        for _ in range(self.args.rounds - 1):
            started = time.monotonic()
            rounds.run_one()
            if self.left_s() < 2 * (time.monotonic() - started) + 5:
                break
        rounds.choose()
        for _ in rounds.traces():
            if self.left_s() < 5:
                break


def _say(text: str) -> None:
    print(f"  {text}", flush=True)
