"""One cell from start to end: profile, search, compile, measure; each stage takes up what the last run left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation import links, measure, step
from evaluation.compiling import Compiled, compile_default, compile_rows, predict
from evaluation.record import FAILED, OK, CellName, Record
from evaluation.rows import DEFAULT, PGLE, PLAN, PLANNED, Context, rows_of, wanted

from disco_hlo.errors import DiscoError
from disco_hlo.plan.read import read
from disco_hlo.plugin import search_phase
from disco_hlo.plugin.candidates import Trial, ratio_noise, ratio_to
from disco_hlo.plugin.costing import pieces_of
from disco_hlo.plugin.logs import one_line
from disco_hlo.plugin.runner import Runner
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step
from disco_hlo.simulator.bound import Bound

STAGES = ("profile", "search", "measure")


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    rows: str
    rounds: int
    until: str
    settings: Settings
    out: Path
    say: Callable[[str], None]
    left_s: Callable[[], float]


def run_cell(asked: Asked, name: CellName, environment: dict[str, str]) -> None:
    """Do what is left of a cell. What fails is recorded; the next cell can go on.

    Raises:
        DiscoError: the step cannot be profiled, searched or compiled at all.
    """
    record = Record.open(asked.out, name)
    files = step.Files(asked.out, name)
    clock = _Clock(record)
    request = step.request_of(name.model, name.size)
    with clock("capture"):
        session = step.session_of(request, asked.settings)
        captured = step.captured(request)
    _describe(record, session, captured, environment)
    _forget_other_step(record, files, captured)
    files.save_module(captured.module)
    profile = files.profile()
    if profile is None:
        with clock("profile"):
            profile = step.profile(session, captured, asked.out)
        files.save_profile(profile)
    asked.say(f"{name.stem}: profiled in {clock.seconds('profile'):.1f} s")
    if asked.until == "profile":
        return
    plans = files.plans()
    if plans is None:
        plans = search(asked, files, record, captured, profile)
    if asked.until == "search":
        return
    _measure(asked, record, clock, request, captured, step.costs(profile, captured), plans)


def search(
    asked: Asked, files: step.Files, record: Record, captured: Step, profile: Any
) -> step.FoundPlans:
    """Search for plans and keep them."""
    plans = step.search(captured, profile, asked.settings)
    files.save_plans(plans)
    record.note("search_s", plans.search_s)
    record.note("search_settings", {"seed": asked.settings.seed, "budget_s": asked.settings.budget_s})
    record.note("evaluations", plans.evaluations)
    asked.say(f"{record.cell.stem}: searched {plans.evaluations} candidates in {plans.search_s:.1f} s")
    return plans


class _Clock:
    """Seconds of each stage, in the record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._stage = ""
        self._started = 0.0

    def __call__(self, stage: str) -> _Clock:
        self._stage = stage
        return self

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_error: object) -> None:
        self._record.note(f"{self._stage}_s", round(time.monotonic() - self._started, 3))

    def seconds(self, stage: str) -> float:
        return float(self._record.fact(f"{stage}_s") or 0.0)


def _describe(record: Record, session: Session, captured: Step, environment: dict[str, str]) -> None:
    graph, facts = captured.source.graph, session.facts
    sizes = [graph.nodes[node].shape.size_bytes for node in graph.all_reduces]
    record.note("versions", {**step.versions(), "runtime": facts.runtime_version})
    record.note("device", facts.device_kind)
    record.note("backend", facts.backend)
    record.note("environment", links.described(environment))
    record.note("date", time.strftime("%Y-%m-%d", time.gmtime()))
    record.note("nodes", len(graph))
    record.note("all_reduces", len(sizes))
    record.note("all_reduce_bytes", sum(sizes))


def _forget_other_step(record: Record, files: step.Files, captured: Step) -> None:
    """A profile and a plan are of one step."""
    fingerprint = captured.source.graph.fingerprint
    known = record.fact("fingerprint")
    if known not in (None, fingerprint):
        raise DiscoError(
            f"{record.path} and {files.folder} are of another step ({known}, now {fingerprint}); "
            "move them away, or name another folder with --out"
        )
    record.note("fingerprint", fingerprint)


# --- measuring ------------------------------------------------------------------------------------


def _measure(
    asked: Asked,
    record: Record,
    clock: _Clock,
    request: Any,
    captured: Step,
    costs: step.Costs,
    plans: step.FoundPlans,
) -> None:
    guided: list[bytes] = []

    def fdo_profile() -> bytes:
        if not guided:
            raise DiscoError("jax collected no profile of the default step")
        return guided[0]

    context = Context(
        request, captured.source, read(captured.source), costs, plans, fdo_profile, asked.settings.seed
    )
    _note_bounds(record, context, plans)
    rows = wanted(rows_of(context), asked.rows)
    todo = [row for row in rows if not record.finished(row.name)]
    if not todo:
        asked.say(f"{record.cell.stem}: nothing left to do")
        return
    started = time.monotonic()
    reference = compile_default(context, record, rows[0])
    expected_s = time.monotonic() - started
    runner = measure.runner_of(request, reference.executable, asked.settings.seed, None)
    runner.run()
    if context.on_gpu and any(row.name == PGLE for row in todo):
        try:
            guided.append(measure.fdo_profile(runner))
        except Exception as error:
            record.note("pgle_error", one_line(error))
    with clock("compile"):
        compiled = compile_rows(
            context, record, [row for row in todo if row.name != DEFAULT], asked.left_s, expected_s
        )
    asked.say(f"{record.cell.stem}: {len(compiled) + 1} rows compiled in {clock.seconds('compile'):.1f} s")
    with clock("measure"):
        _run_all(asked, record, request, [reference, *compiled], runner)


def _note_bounds(record: Record, context: Context, plans: step.FoundPlans) -> None:
    record.note(
        "bounds",
        {
            "full_overlap_ms": plans.prediction.full_overlap_ns / 1e6,
            "bound_ms": plans.prediction.bound_ns / 1e6,
            "predicted_plan_ms": plans.prediction.plan_ns / 1e6,
            "predicted_default_ms": plans.prediction.default_ns / 1e6,
            **_parts(context),
        },
    )
    record.note("predicted_default", predict(context, context.source.graph, context.xla))


def _parts(context: Context) -> dict[str, Any]:
    """C, r, M and q of the bound over XLA's kernels and over the plan's."""
    from disco_hlo.plan.baselines import unfused
    from disco_hlo.simulator.bound import bound, least_communication_ns
    from disco_hlo.simulator.build import build

    graph, costs = context.source.graph, context.costs
    pieces = pieces_of(costs.profile)
    sizes = [graph.nodes[node].shape.size_bytes for node in graph.all_reduces]
    least = 0 if pieces is None else least_communication_ns(sizes, pieces, costs.machine)

    def of(groups: Any) -> dict[str, float]:
        problem = build(graph, unfused(graph, groups), costs.model, costs.machine).problem
        found: Bound = bound(problem, least, costs.machine.asynchronous)
        return {
            "compute_ms": found.compute_ns / 1e6,
            "before_ms": found.before_ns / 1e6,
            "communication_ms": found.communication_ns / 1e6,
            "after_ms": found.after_ns / 1e6,
            "bound_ms": found.makespan_ns / 1e6,
            "full_overlap_ms": found.full_overlap_ns / 1e6,
        }

    return {"of XLA's kernels": of(context.xla.groups), "of the plan's kernels": of(context.plan.groups)}


def _run_all(
    asked: Asked, record: Record, request: Any, compiled: Sequence[Compiled], runner: Runner
) -> None:
    """First runs with their numbers, rounds in turn, and traces."""
    expected = measure.outputs_on_device(compiled[0].executable, runner)
    alive: list[tuple[Compiled, Runner, Trial]] = []
    for one in compiled:
        try:
            own = measure.runner_of(request, one.executable, asked.settings.seed, runner)
            own.run()
            numbers = measure.compare(expected, measure.outputs_on_device(one.executable, own))
        except Exception as error:
            record.update(one.row.name, status=FAILED, reason=one_line(error)[:2000])
            continue
        record.update(one.row.name, numbers=numbers)
        alive.append((one, own, Trial(one.row.name, None, 0)))
    del expected
    for _ in range(asked.rounds):
        started = time.monotonic()
        for _, own, trial in alive:
            trial.times_ns.append(own.run())
        record.update_all({trial.name: _times(trial, alive[0][2]) for _, _, trial in alive})
        if asked.left_s() < 2 * (time.monotonic() - started) + 5:
            break
    _choose(record, alive)
    for one, own, trial in alive:
        chosen = record.fact("chosen") == trial.name
        if (one.row.traced or chosen) and asked.left_s() > 10:
            try:
                record.update(trial.name, trace=measure.overlap(own, one.module_name))
            except Exception as error:
                record.update(trial.name, trace={"error": one_line(error)[:500]})
    for _, _, trial in alive:
        asked.say(f"  {trial.name}: {trial.median_ns / 1e6:.2f} ms, {ratio_to(trial, alive[0][2]):.3f} of default")


def _times(trial: Trial, default: Trial) -> dict[str, Any]:
    return {
        "status": OK,
        "median_ms": trial.median_ns / 1e6,
        "spread_ms": trial.spread_ns / 1e6,
        "of_default": ratio_to(trial, default),
        "of_default_noise": ratio_noise(trial, default),
        "default_median_ms": default.median_ns / 1e6,
        "times_ms": [round(ns / 1e6, 4) for ns in trial.times_ns],
    }


def _choose(record: Record, alive: Sequence[tuple[Compiled, Runner, Trial]]) -> None:
    """What the tool would take: by its own rule, out of XLA's default and the search's finalists."""
    if not any(trial.name == PLAN for _, _, trial in alive):
        return
    found = [trial for one, _, trial in alive if trial.name == DEFAULT or one.row.kind == PLANNED]
    for trial in found:
        trial.predicted_ns = round(1e6 * record.row(trial.name)["predicted"].get("step_ms", 0.0))
    record.note("chosen", found[search_phase._winner(found)].name)
