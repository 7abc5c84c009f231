"""``disco search``: a plan for a captured step, found without a device (DisCo, section 4.5)."""

from __future__ import annotations

import contextlib
import gc
import gzip
import hashlib
import signal
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import UNSET, UnsetType

from disco_hlo import __version__
from disco_hlo.cli.costs import UNKNOWN_DEVICE, Costs, costs_for, find_profile
from disco_hlo.cli.modules import Opened, open_named
from disco_hlo.cli.options import AsJson, ModulePath, ProfilePath
from disco_hlo.cli.output import (
    as_argument,
    check_folder,
    check_place,
    print_json,
    say,
    show,
    warn_all,
    write_files,
)
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.inner_collectives import inner_collectives, not_simulated
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import apply
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.read import read, repeats
from disco_hlo.plan.store import DEFAULT_NAME, MODULE_NAME, PLAN_NAME, PROFILE_NAME
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin.phases.progress import search_progress
from disco_hlo.plugin.phases.ranking import memory_limit_bytes, prediction, searchable, starting_point
from disco_hlo.plugin.phases.searching import Budget, search_within
from disco_hlo.plugin.phases.sharding import advice_for, worth_saying
from disco_hlo.profiler.profile import Link, Profile, to_json
from disco_hlo.report.bundle import beside, read_module
from disco_hlo.report.facts import DEFAULT_NAME as XLA_DEFAULT
from disco_hlo.report.predict import lower_bound, predict
from disco_hlo.report.printable import printable, time_text
from disco_hlo.search.api import Finalist, SearchResult, SearchSettings
from disco_hlo.search.sharding_advice import sentence
from disco_hlo.simulator.costs import MachineModel

SAVED_EVERY_S = 30.0
"""How often the best plan so far is saved while the search goes on."""
_IS = SearchSettings()
"""What is used where an option is not given."""


def search(
    module: ModulePath,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="PLAN", help="Folder of the plan, or a file NAME.json.")
    ],
    profile: ProfilePath = None,
    method: Annotated[
        str, typer.Option(help="joint, or backtracking (the paper's Algorithm 1).")
    ] = _IS.method,
    alpha: Annotated[
        float, typer.Option(min=1, max=1e6, help="Explore candidates up to alpha times the best.")
    ] = _IS.alpha,
    beta: Annotated[int, typer.Option(min=1, max=10**6, help="Most moves of a method at once.")] = _IS.beta,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Equal seeds, equal plans.")] = _IS.seed,
    evaluations: Annotated[int | None, typer.Option(min=1, help="Stop after this many candidates.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.001, max=1e9, help="Longest to wait for a plan.")
    ] = None,
    patience: Annotated[
        int, typer.Option(min=1, help="Do not stop before this many candidates without improvement.")
    ] = _IS.unchanged,
    seeds: Annotated[
        int, typer.Option(min=1, max=64, help="Independent searches, which share the candidates (joint).")
    ] = _IS.seeds,
    as_json: AsJson = False,
) -> None:
    """Search a plan for a step. Ctrl-C ends it early and keeps the best plan found."""
    settings = SearchSettings(
        method=method,
        alpha=alpha,
        beta=beta,
        seed=seed,
        seeds=seeds,
        evaluations=evaluations,
        seconds=seconds,
        unchanged=patience,
    )  # fmt: skip
    plan_file = output if output.suffix == ".json" else output / PLAN_NAME
    if plan_file == output:
        check_place(plan_file)
    else:
        check_folder(output, PLAN_NAME)
    budget = Budget.of(seconds)
    opened = open_named(module)
    known = find_profile(profile, opened.profile)
    xla = read(opened.source)
    costs = costs_for(opened.source.graph, known, opened.device_kind, [xla])
    graph = opened.source.graph
    if method == "joint":
        settings = replace(settings, memory_limit_bytes=memory_limit_bytes(graph, xla, costs, costs.machine))
    gc.enable()  # a search may run for hours
    kept = time.monotonic()

    def keep(best: Finalist) -> None:
        """Save the best so far now and then: a search that is killed leaves a plan."""
        nonlocal kept
        if time.monotonic() - kept < SAVED_EVERY_S:
            return
        so_far = SearchResult(best.strategy, best.predicted_ns, 0, (), 0, 0, 0.0, "")
        _save(opened, known, plan_file, _judge(opened, costs, xla, best.strategy), so_far, settings)
        kept = time.monotonic()

    with _interruptible() as interruption:
        warn_all((*opened.missing, *costs.lines, *not_simulated(opened.source.index)))
        with search_progress(sys.stderr.isatty()) as on_progress:
            searched = search_within(
                budget, opened.source, xla, costs, costs.machine, settings,
                begin=lambda: _beginning(method, graph, xla, costs.machine),
                on_progress=on_progress, on_best=keep, stop=lambda: interruption.asked,
            )  # fmt: skip
        warn_all(searched.notes)
        result = searched.result
        found = _judge(opened, costs, xla, searched.plans[0].strategy)
        advice = advice_for(opened.source, found.strategy, costs, costs.machine)
        found = replace(found, sharding=UNSET if advice is None else advice)
        _save(opened, known, plan_file, found, result, settings)
    outcome = _outcome(opened, costs, plan_file, found, result, settings, interruption.asked)
    if as_json:
        print_json(outcome)
        return
    _print(outcome, found)


def _beginning(method: str, graph: Graph, xla: Strategy, machine: MachineModel) -> Strategy:
    return searchable(graph, xla) if method == "joint" else starting_point(graph, xla, machine)


@dataclass
class _Interruption:
    asked: bool = False


@contextlib.contextmanager
def _interruptible() -> Iterator[_Interruption]:
    """The first Ctrl-C ends the search between two candidates, the second ends the program."""
    interruption = _Interruption()
    previous = signal.getsignal(signal.SIGINT)

    def note(_number: int, _frame: types.FrameType | None) -> None:
        interruption.asked = True
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, note)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclass(frozen=True)
class _Found:
    """The plan to save."""

    strategy: Strategy
    chosen: str
    prediction: plans.Prediction
    notes: tuple[str, ...]
    sharding: plans.Sharding | UnsetType = UNSET


def _judge(opened: Opened, costs: Costs, xla: Strategy, strategy: Strategy) -> _Found:
    """The plan to save: what came out, unless XLA's own is predicted to be faster."""
    graph = opened.source.graph
    best, alone = (predict(graph, s, costs).timeline for s in (strategy, unfused(graph)))
    default = predict(graph, xla, costs, repeats(opened.source)).timeline
    limit = lower_bound(graph, [strategy, xla], costs)
    notes = [*costs.lines, "found offline: nothing was measured"]
    chosen = "plan"
    if best.makespan_ns >= default.makespan_ns:
        strategy, best, chosen = xla, default, XLA_DEFAULT
        notes.append("nothing found is predicted to be faster than XLA's own plan, so this is XLA's own")
    predicted = prediction(
        plan_ns=best.makespan_ns,
        peak_bytes=best.peak_bytes,
        default=default,
        unfused_ns=alone.makespan_ns,
        limit=limit,
    )
    return _Found(strategy, chosen, predicted, tuple(notes))


def _save(
    opened: Opened,
    profile: Profile | None,
    plan_file: Path,
    found: _Found,
    result: SearchResult,
    settings: SearchSettings,
) -> None:
    written = apply(found.strategy, opened.source)
    plan = plans.Plan(
        format=plans.FORMAT,
        version=plans.VERSION,
        target=_target(opened, profile),
        versions={**opened.versions, "disco_hlo": __version__},
        strategies=plans.in_entry(found.strategy),
        chosen=found.chosen,
        prediction=found.prediction,
        search=plans.SearchRecord(
            settings.method,
            {name: value for name, value in asdict(settings).items() if not isinstance(value, tuple)}
            | {"moves": " ".join(settings.moves)},
            result.evaluations,
            tuple((step.evaluation, step.cost_ns) for step in result.trace),
        ),
        module_sha256=hashlib.sha256(written).hexdigest(),
        notes=found.notes,
        sharding=found.sharding,
    )
    files = {
        MODULE_NAME: written,
        DEFAULT_NAME: gzip.compress(read_module(opened.path), 6, mtime=0),
        **({PROFILE_NAME: to_json(profile).encode()} if profile else {}),
    }
    write_files(
        plan_file.parent,
        {beside(plan_file, name).name: data for name, data in files.items()}
        | {plan_file.name: plans.encode(plan)},
    )


def _target(opened: Opened, profile: Profile | None) -> plans.Target:
    """Where the plan may be enacted; where the module alone is known, what the profile says."""
    if opened.target is not None:
        return opened.target
    graph = opened.source.graph
    link = Link(1, 1) if profile is None else profile.link
    return plans.Target(
        key=graph.key,
        fingerprint=graph.fingerprint,
        module_name=graph.module_name[:4096],
        backend=graph.backend,
        device_kind=UNKNOWN_DEVICE if profile is None else profile.platform.device_kind,
        device_count=link.device_count,
        process_count=link.process_count,
    )


def _outcome(
    opened: Opened,
    costs: Costs,
    plan_file: Path,
    found: _Found,
    result: SearchResult,
    settings: SearchSettings,
    interrupted: bool,
) -> dict[str, Any]:
    predicted = found.prediction
    return {
        "module": opened.source.graph.module_name,
        "fingerprint": opened.source.graph.fingerprint,
        "plan": str(plan_file),
        "chosen": found.chosen,
        "method": settings.method,
        "settings": asdict(settings),
        "evaluations": result.evaluations,
        "distinct_evaluations": result.distinct_evaluations,
        "evaluations_per_s": round(result.evaluations / max(result.wall_s, 1e-9), 1),
        "wall_s": round(result.wall_s, 6),
        "stopped": "interrupted" if interrupted else result.stopped,
        "predicted": {
            "default_ns": predicted.default_ns,
            "plan_ns": predicted.plan_ns,
            "unfused_ns": predicted.unfused_ns,
            "bound_ns": predicted.bound_ns,
            "full_overlap_ns": predicted.full_overlap_ns,
        },
        "speedup": predicted.default_ns / max(predicted.plan_ns, 1),
        "costs": list(costs.lines),
        "collectives_not_simulated": inner_collectives(opened.source.index),
        "notes": list(found.notes),
    }


def _print(outcome: dict[str, Any], found: _Found) -> None:
    predicted = found.prediction
    show(
        f"{outcome['evaluations']} candidates in {outcome['wall_s']:.1f} s "
        f"({outcome['evaluations_per_s']:.0f} a second), ended by: {outcome['stopped']}",
        f"XLA's default {time_text(predicted.default_ns)}, plan {time_text(predicted.plan_ns)} "
        f"({outcome['speedup']:.2f}x), bound {time_text(predicted.bound_ns)}, all predicted",
        f"saved {printable(outcome['plan'])}; look at it with: disco inspect {as_argument(outcome['plan'])}",
    )
    if found.sharding is not UNSET and worth_saying(found.sharding):
        show(sentence(found.sharding))
    if found.chosen == XLA_DEFAULT:
        say(found.notes[-1])
