"""One cell from start to end: profile, search, compile, measure, predict; each stage takes up what the last left."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.collectives import moved_bytes
from disco_hlo.optimize.costs import with_kernels
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.read import verify
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.measuring.profiling import Kept, kernel_times, kernels_of
from disco_hlo.plugin.measuring.runner import Runner, steps_at_once
from disco_hlo.plugin.measuring.traced_modules import Traceable
from disco_hlo.plugin.session import Session, join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.profiler.profile import Profile
from evaluation import commands, measure, predicting, step
from evaluation.measure import Compiled, Rounds
from evaluation.predicting import Ran, bounds_of, predict_in_rounds, predicted, xla_ran
from evaluation.record import ABSENT, FAILED, NO_TIME, CellName, Record
from evaluation.rows import BASELINE, PGLE, PLANNED, Context, Row, chosen_names, promised_ns, rows_of, wanted


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    rows: str
    rounds: int
    settings: Settings
    say: Callable[[str], None]
    left_s: Callable[[], float]
    one_by_one: bool = False
    """Whether each cell is measured before the next one is profiled, and nothing is traced besides."""


CELL_S, ROW_S = 15.0, 2.0
"""What measuring takes beside the rounds: inputs and traces; the first run of a row, and holding its numbers against
the default's."""
_COPYING = 1.5
"""A run with the copying of what the step takes over, over the step; and rows slower than XLA's default."""
_FEWEST_ROUNDS = 3
_START_AFRESH = "move it and its folder away, or name another folder with --out"


class Cell:
    """A cell on its way through the stages; each takes up what the last run left in its files."""

    def __init__(self, asked: Asked, name: CellName) -> None:
        self.asked = asked
        self.name = name
        self.record = Record.open(asked.settings.directory, name)
        self.files = step.Files(asked.settings.directory, name)
        self.request = step.request_of(name.model, name.size)
        step.keep_tuner_results(self.request, asked.settings.directory)
        if len(self.request.devices) != name.devices:
            raise ValueError(f"--devices is {name.devices}, jax has {len(self.request.devices)}")
        self.session = join(self.request, asked.settings)
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
        self._looked_at: Traceable | None = None
        self._compiling: set[str] = set()
        """Rows under way; threads add and remove their own."""

    def capture(self, environment: dict[str, str]) -> None:
        """The step's module: the one of the last run where there is one, so that all runs rewrite and compare
        the same matmul algorithms; else XLA's. Several cells' may be captured at once.

        Raises:
            DiscoError: the cell's files are of another step, or were made with other software.
        """
        versions = {**step.versions(), "runtime": self.session.facts.runtime_version}
        before, module = self.record.fact("versions"), self.files.module()
        if before not in (None, versions):
            raise DiscoError(f"{self.record.path} was made with {before}; {_START_AFRESH}")
        with self._clock("capture"):
            self.captured = step.captured(self.request, module)
        _describe(self.record, self.session, self.captured, environment, versions)
        fingerprint, known = self.captured.source.graph.fingerprint, self.record.fact("fingerprint")
        if known not in (None, fingerprint):
            raise DiscoError(
                f"{self.record.path} is of another step ({known}, now {fingerprint}); {_START_AFRESH}"
            )
        self.record.note("fingerprint", fingerprint)
        if module is None:
            self.files.save_module(self.captured.module)
        self._module = module

    def compile_first(self) -> None:
        """XLA's default, and what :meth:`profile` will trace where that was not done before; of several cells at
        once. The matmul autotuning of the capture serves all of them."""
        with self._clock("compile_first"), ThreadPoolExecutor(1, "default") as pool:
            default = pool.submit(self._compile_default)
            if self.files.profile() is None:
                self._kept = step.compile_for_profile(
                    self.session, self.captured, self.asked.settings.directory
                )
            default.result()

    def _compile_default(self) -> None:
        started = time.monotonic()
        self.default = compiles.compile_module(self.request, self._module)
        self.default_s = time.monotonic() - started

    def profile(self) -> None:
        """Measure what the cost model needs, with the devices to itself, where that was not done before."""
        if self._kept is not None:
            with self._clock("profile"):
                found = step.profile(self.session, self.captured, self.asked.settings.directory, self._kept)
            self._inputs_of, self._kept = self._kept.runner, None  # their code lies on the devices
            self.files.save_profile(found)
            self.asked.say(f"{self.name.stem}: profiled in {self.record.fact('profile_s'):.1f} s")
        if self._guides():
            with self._clock("pgle"):
                self._collect_fdo_profile()

    def search(self) -> None:
        """Search by the profile, where that was not done before."""
        if self.files.plans() is None:
            self._search(None)

    def _search(self, before: step.FoundPlans | None) -> None:
        profile = self.files.profile()
        assert profile is not None
        plans = step.search(self.captured, profile, self.asked.settings, before)
        self.files.save_plans(plans)
        self.asked.say(f"{self.name.stem}: searched {plans.evaluations} candidates in {plans.search_s:.1f} s")

    @property
    def looks(self) -> int:
        """How often the plan's kernels were measured and the search made again."""
        return self.record.fact("looks") or 0

    def compile_for_look(self) -> None:
        """The kernels of the search's first plan, for :meth:`look`; of several cells at once.

        Raises:
            DiscoError: there is no plan.
        """
        plans, _ = self._found()
        self._looked_at = kernels_of(self.session, self.captured.source, plans.searched[0])

    def look(self, number: int) -> None:
        """Measure the kernels of the search's first plan, with the devices to itself, and search once more with their
        times. It counts once that search has ended: one that was cut off is made again.

        Args:
            number: of this look, from 1.

        Raises:
            DiscoError: there is no plan, or it cannot be run.
        """
        plans, profile = self._found()
        source, first = self.captured.source, plans.searched[0]
        assert self._looked_at is not None
        with self._clock(f"look_{number}"):
            times = kernel_times(self.session, source, self._looked_at, profile.launch_ns, self._inputs_of)
        self._looked_at = None
        step.keep_kernel_times(profile, times, self.asked.settings.directory)
        told = step.costs(profile, self.captured, plans)
        profile, seen = with_kernels(told, times, source, first)
        self.files.save_profile(profile)
        self.record.note(f"look_{number}_kernels", seen.kernels)
        self.record.note(f"look_{number}_promises", round(seen.ratio, 4))
        self.asked.say(
            f"{self.name.stem}: measured {seen.kernels} kernels of the plan that had never run, "
            f"which take {seen.ratio:.2f} of what was estimated"
        )
        self._search(plans)
        self.record.note("looks", number)

    def _guides(self) -> bool:
        names = chosen_names(self.asked.rows)
        on_gpu = self.captured.source.graph.backend == "gpu"
        return on_gpu and (not names or PGLE in names) and not self.record.finished(PGLE)

    def _collect_fdo_profile(self) -> None:
        try:
            runner = Runner(self.request, self.default, self.asked.settings.seed, inputs_of=self._inputs_of)
            runner.run()
            self.fdo_profile = measure.fdo_profile(runner)
        except Exception as error:
            self.record.update(PGLE, kind=BASELINE, status=FAILED, reason=one_line(error)[:2000])

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
        """Find what is left to compile, most important first.

        Raises:
            DiscoError: there are no plans.
        """
        plans, profile = self._found()
        source, record = self.captured.source, self.record
        costs, ran = step.costs(profile, self.captured, plans), xla_ran(self.captured.source)
        self.context = Context(
            self.request, source, ran.strategy, costs, self.asked.settings.seed, plans, self.fdo_profile
        )
        record.note_all(search_s=plans.search_s, evaluations=plans.evaluations, bounds=bounds_of(plans))
        default, *rows = wanted(rows_of(self.context), self.asked.rows)
        self.left = possible(record, [row for row in rows if not record.finished(row.name)])
        if not self.left and record.finished(DEFAULT):
            self.asked.say(f"{self.name.stem}: nothing left to do")
            return
        record.begin(DEFAULT, default.kind)
        record.update(
            DEFAULT,
            compile_s=round(self.default_s, 3),
            memory=measure.memory_of(self.default),
            predicted=predicted(costs, ran),
        )
        self.compiled.append(Compiled(DEFAULT, default.kind, self.default, default.traced))
        self.ran[DEFAULT] = ran

    def compile(self, row: Row, left_s: Callable[[], float]) -> None:
        """Compile a row, if there is time for it. Several may be compiled at once.

        Args:
            left_s: what is left beside the measuring of all that is, or is being, compiled: of this row, too.
        """
        self._compiling.add(row.name)
        found = try_row(self.context, self.record, row, left_s, self.default_s)
        if found is not None:
            compiled, self.ran[row.name] = found
            self.compiled.append(compiled)
        self._compiling.remove(row.name)

    def predict(self) -> None:
        """Note what is predicted by the link as it was in the rounds.

        Raises:
            DiscoError: there are no plans.
        """
        plans, profile = self._found()
        predict_in_rounds(self.record, self.captured, profile, plans, self.ran)

    def measuring_s(self) -> float:
        """About what measuring all rows that are, or are being, compiled takes in as few rounds as tell
        anything, by the predicted step; nothing for none. More rounds are run if there is time."""
        count = len(self.compiled) + len(self._compiling)
        if not count:
            return 0.0
        run_s = self.record.row(DEFAULT)["predicted"]["step_ms"] / 1e3
        if self.context.on_gpu:
            run_s *= steps_at_once(int(1e9 * run_s), 0) + 1
        rounds = min(self.asked.rounds, _FEWEST_ROUNDS) + 2
        return CELL_S + count * (ROW_S + _COPYING * rounds * run_s)

    def rounds(self) -> Rounds | None:
        """What was compiled, to be run with the devices to itself; None where that is nothing."""
        if not self.compiled:
            return None
        return Rounds(
            request=self.request,
            compiled=self.compiled,
            record=self.record,
            seed=self.asked.settings.seed,
            inputs_of=self._inputs_of,
            in_a_row=self.context.on_gpu,
            of_form=commands.is_form(self.name.model),
            say=self.asked.say,
            promised_ns=promised_ns(self.context),
        )

    def release(self) -> None:
        """Leave the devices to others: what was compiled and the inputs are let go."""
        self.default = self._kept = self._inputs_of = None
        self.compiled.clear()
        gc.collect()

    @contextlib.contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.record.note(f"{stage}_s", round(time.monotonic() - started, 3))


def _describe(
    record: Record, session: Session, captured: Step, environment: dict[str, str], versions: dict[str, str]
) -> None:
    graph, facts = captured.source.graph, session.facts
    sizes = moved_bytes(graph)[list(graph.all_reduces)].tolist()
    record.note_all(
        versions=versions,
        device=facts.device_kind,
        backend=facts.backend,
        environment=commands.described(environment),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        nodes=len(graph),
        all_reduces=len(sizes),
        all_reduce_bytes=sum(sizes),
        settings=session.settings.as_dict(),
    )


AT_A_TIME = max(1, min(16, (os.cpu_count() or 2) // 2))
"""Compiles at once: each takes a core and some gigabytes."""


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
