"""One cell from start to end: profile, search, compile, measure, predict; each stage takes up what the last left."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.collectives import moved_bytes
from disco_hlo.optimize.regions import launched_singly
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.read import verify
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.profiling import Kept
from disco_hlo.plugin.measuring.runner import Runner, steps_at_once
from disco_hlo.plugin.session import join, launch_options
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.printable import counted
from disco_hlo.profiler.profile import Profile
from evaluation import commands, measure, predicting, step
from evaluation.measure import Compiled, Rounds
from evaluation.predicting import Ran, xla_ran
from evaluation.record import ABSENT, FAILED, NO_TIME, CellName, Record
from evaluation.rows import (
    AS_ENACTED,
    BASELINE,
    OTHER_SEARCH,
    PGLE,
    PGLE_BEST,
    PLANNED,
    Context,
    Row,
    best_threshold_bytes,
    chosen_names,
    promised_ns,
    rows_of,
    wanted,
)  # fmt: skip

AT_A_TIME = max(1, min(16, (os.cpu_count() or 2) // 2))
"""Compiles at once: each takes a core and some gigabytes."""
CELL_S, ROW_S = 15.0, 2.0
"""What measuring takes beside the rounds: inputs and traces; the first run of a row, and holding its numbers against
the default's."""
_COPYING = 1.5
"""A run with the copying of what the step takes over, over the step; and rows slower than XLA's default."""
_FEWEST_ROUNDS = 3
_START_AFRESH = "move it and its folder away, or name another folder with --out"


class Cell:
    """A cell on its way through the stages; each takes up what the last run left in its files."""

    def __init__(self, args: argparse.Namespace, settings: Settings, name: CellName) -> None:
        self.args, self.name, self.out = args, name, settings.directory
        self.record = Record.open(self.out, name)
        self.files = step.Files(self.out, name)
        self.request = step.request_of(name.model, name.size)
        step.keep_tuner_results(self.request, self.out)
        if len(self.request.devices) != name.devices:
            raise ValueError(f"--devices is {name.devices}, jax has {len(self.request.devices)}")
        self.session = join(self.request, settings)
        self._module: bytes | None = None
        """XLA's own as an earlier run saw it, where there was one."""
        self.default: LoadedExecutable = None
        self.default_s = 0.0
        self.fdo_profile = b""
        self.left: list[Row] = []
        """To be compiled, XLA's default apart."""
        self.compiled: list[Compiled] = []
        self.ran: dict[str, Ran] = {}
        self._kept: Kept | None = None
        self._inputs_of: Runner | None = None
        """Large models' inputs take seconds to make: all that runs shares them."""
        self._compiling: set[str] = set()
        """Rows under way; threads add and remove their own."""

    def _say(self, text: str) -> None:
        print(f"{self.name.stem}: {text}", flush=True)

    def capture(self, environment: dict[str, str]) -> None:
        """The step's module: the one of the last run where there is one, so that all runs rewrite and compare
        the same matmul algorithms; else XLA's. Several cells' may be captured at once.

        Raises:
            DiscoError: the cell's files are of another step, or were made with other software.
        """
        record, facts = self.record, self.session.facts
        versions = {**step.versions(), "runtime": facts.runtime_version}
        before, self._module = record.fact("versions"), self.files.module()
        if before not in (None, versions):
            raise DiscoError(f"{record.path} was made with {before}; {_START_AFRESH}")
        with record.clock("capture"):
            self.captured = step.captured(self.request, self._module)
        graph, known = self.captured.source.graph, record.fact("fingerprint")
        sizes = moved_bytes(graph)[list(graph.collectives)].tolist()
        record.note(
            versions=versions, device=facts.device_kind, backend=facts.backend,
            environment=commands.described(environment), date=time.strftime("%Y-%m-%d", time.gmtime()),
            nodes=len(graph), all_reduces=len(sizes), all_reduce_bytes=sum(sizes),
            settings=msgspec.to_builtins(self.session.settings, enc_hook=str),
        )  # fmt: skip
        if known not in (None, graph.fingerprint):
            raise DiscoError(
                f"{record.path} is of another step ({known}, now {graph.fingerprint}); {_START_AFRESH}"
            )
        record.note(fingerprint=graph.fingerprint)
        if self._module is None:
            self.files.save_module(self.captured.module)

    def compile_first(self) -> None:
        """XLA's default, and what :meth:`profile` will trace where that was not done before; of several cells at
        once. The matmul autotuning of the capture serves all of them."""
        with self.record.clock("compile_first"), ThreadPoolExecutor(1, "default") as pool:
            default = pool.submit(self._compile_default)
            if self.files.profile() is None:
                self._kept = step.compile_for_profile(self.session, self.captured, self.out)
            default.result()

    def _compile_default(self) -> None:
        started = time.monotonic()
        self.default = compiles.compile_module(self.request, self._module)
        self.default_s = time.monotonic() - started

    def profile(self) -> None:
        """Measure what the cost model needs, with the devices to itself, where that was not done before."""
        if self._kept is not None:
            with self.record.clock("profile"):
                found = step.profile(self.session, self.captured, self.out, self._kept)
            self._inputs_of, self._kept = self._kept.runner, None  # their code lies on the devices
            self.files.save_profile(found)
            self._say(f"profiled in {self.record.fact('profile_s'):.1f} s")
        names, asynchronous = (
            chosen_names(self.args.rows),
            BACKENDS[self.captured.source.graph.backend].asynchronous,
        )
        if asynchronous and any(
            (not names or name in names) and not self.record.finished(name) for name in (PGLE, PGLE_BEST)
        ):
            with self.record.clock("pgle"):
                self._collect_fdo_profile()

    def _collect_fdo_profile(self) -> None:
        try:
            runner = Runner(self.request, self.default, self.args.seed, inputs_of=self._inputs_of)
            runner.run()
            self.fdo_profile = measure.fdo_profile(runner)
        except Exception as error:
            self.record.update(PGLE, kind=BASELINE, status=FAILED, reason=one_line(error)[:2000])

    def search(self) -> None:
        """Search by the profile, and otherwise where that is asked for, as far as it was not done before."""
        profile, plans, names = self.files.profile(), self.files.plans(), chosen_names(self.args.rows)
        assert profile is not None
        if plans is None:
            plans = step.search(self.captured, profile, self.session.settings)
            self.files.save_plans(plans)
            self._say(f"searched {counted(plans.evaluations, 'candidate')} in {plans.search_s:.1f} s")
        for name in step.OTHER_SEARCHES:
            if name not in plans.others and (not names or name in names):
                found = step.search_otherwise(self.captured, profile, self.session.settings, name)
                plans = msgspec.structs.replace(plans, others={**plans.others, name: found})
                self.files.save_plans(plans)
                self._say(
                    f"{name}: searched {counted(found.evaluations, 'candidate')} in {found.search_s:.1f} s"
                )

    def _found(self) -> tuple[step.FoundPlans, Profile]:
        """What the search found, and in which profile.

        Raises:
            DiscoError: there are no plans.
        """
        plans, profile = self.files.plans(), self.files.profile()
        if plans is None or profile is None:
            raise DiscoError(f"{self.files.folder} holds no plans: the search failed")
        return plans, profile

    def choose_rows(self) -> None:
        """Find what is left to compile, most important first; rows that this step or backend lacks are recorded so.

        Raises:
            DiscoError: there are no plans.
        """
        plans, profile = self._found()
        source, record = self.captured.source, self.record
        costs, ran = step.costs(profile, self.captured, plans), xla_ran(source)
        self.context = Context(
            self.request,
            source,
            ran.strategy,
            costs,
            self.args.seed,
            plans,
            self.fdo_profile,
            best_threshold_bytes(record),
        )
        bounds, others = predicting.bounds_of(plans), predicting.other_searches(plans)
        record.note(
            search_s=plans.search_s, evaluations=plans.evaluations, bounds=bounds, other_searches=others
        )
        default, *rows = wanted(rows_of(self.context), self.args.rows)
        for row in rows:
            if not record.finished(row.name) and row.absent:
                record.update(row.name, kind=row.kind, status=ABSENT, reason=row.absent)
        self.left = [row for row in rows if not record.finished(row.name)]
        if not self.left and record.finished(DEFAULT):
            self._say("nothing left to do")
            return
        record.begin(DEFAULT, default.kind)
        record.update(
            DEFAULT, compile_s=round(self.default_s, 3), memory=measure.memory_of(self.default),
            predicted=predicting.predicted(costs, ran),
        )  # fmt: skip
        self.compiled.append(Compiled(DEFAULT, default.kind, self.default, default.traced))
        self.ran[DEFAULT] = ran

    def compile(self, row: Row, left_s: Callable[[], float]) -> None:
        """Compile a row, if there is time for it; what fails is recorded as failed. Several may be compiled at once.

        Args:
            left_s: what is left beside the measuring of all that is, or is being, compiled: of this row, too.
        """
        self._compiling.add(row.name)
        if left_s() < self.default_s:
            reason = f"{max(0.0, left_s()):.0f} s are left, compiling takes {self.default_s:.0f} s"
            self.record.update(row.name, kind=row.kind, status=NO_TIME, reason=reason)
        else:
            self.record.begin(row.name, row.kind)
            try:
                self._compile(row)
            except Exception as error:
                self.record.update(row.name, status=FAILED, reason=one_line(error)[:2000])
        self._compiling.remove(row.name)

    def _compile(self, row: Row) -> None:
        """Compile one row, and record what compiling tells and what is predicted.

        Raises:
            Exception: the row is not legal, or XLA refuses it.
        """
        source, started, module = self.captured.source, time.monotonic(), None
        said: dict[str, Any] = {}
        with predicting.python_at_once:
            variant = row.make()
            if variant.strategy is not None:
                module = apply(variant.strategy, source)
                # As the plugin does; the numbers of the others are compared when they run, of orders only a few.
                if row.kind in (PLANNED, OTHER_SEARCH) or variant.strategy.regions:
                    verify(source, module, variant.strategy)
        options = dict(variant.options)
        if variant.strategy is not None:
            ran = Ran(source, variant.strategy)
            said["predicted"] = predicting.noted(self.context.costs, ran)
            if row.kind in AS_ENACTED:
                predicted_ns = round(1e6 * said["predicted"].get("step_ms", 0))
                said["launched_singly"] = launched_singly(source, variant.strategy, predicted_ns)
                options |= launch_options(self.session, said["launched_singly"])
        made_s = time.monotonic() - started
        executable = compiles.compile_module(variant.request, module, options)
        compile_s = time.monotonic() - started - made_s
        if variant.strategy is None:
            made = executables.read_executable(executable)
            self.files.save_row(row.name, made)
            ran = xla_ran(canonicalize(made))
            said["predicted"] = predicting.noted(self.context.costs, ran)
        memory = measure.memory_of(executable)
        self.record.update(
            row.name, make_s=round(made_s, 3), compile_s=round(compile_s, 3), memory=memory, **said
        )
        self.ran[row.name] = ran
        self.compiled.append(Compiled(row.name, row.kind, executable, row.traced))

    def predict(self) -> None:
        """Note what is predicted by the link as it was in the rounds.

        Raises:
            DiscoError: there are no plans.
        """
        plans, profile = self._found()
        predicting.predict_in_rounds(self.record, self.captured, profile, plans, self.ran)

    def measuring_s(self) -> float:
        """About what measuring all rows that are, or are being, compiled takes in as few rounds as tell
        anything, by the predicted step; nothing for none. More rounds are run if there is time."""
        count = len(self.compiled) + len(self._compiling)
        if not count:
            return 0.0
        run_s = float(self.record.row(DEFAULT)["predicted"]["step_ms"]) / 1e3
        if self.context.backend.queues:
            run_s *= steps_at_once(int(1e9 * run_s), 0) + 1
        rounds: int = min(self.args.rounds, _FEWEST_ROUNDS) + 2
        return CELL_S + count * (ROW_S + _COPYING * rounds * run_s)

    def rounds(self) -> Rounds | None:
        """What was compiled, to be run with the devices to itself; None where that is nothing."""
        if not self.compiled:
            return None
        return Rounds(
            self.request, self.compiled, self.record, self.args.seed, self._inputs_of,
            in_a_row=self.context.backend.queues, of_form=commands.is_form(self.name.model),
            promised_ns=promised_ns(self.context),
        )  # fmt: skip

    def release(self) -> None:
        """Leave the devices to others: what was compiled and the inputs are let go."""
        self.default = self._kept = self._inputs_of = None
        self.compiled.clear()
        gc.collect()
