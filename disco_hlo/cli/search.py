"""``disco search``: a plan for a captured step, found without a device (DisCo, section 4.5)."""

from __future__ import annotations

import gc
import gzip
import hashlib
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import UNSET, to_builtins

from disco_hlo import __version__
from disco_hlo.cli.inputs import AsJson, ModulePath, Opened, ProfilePath, open_named
from disco_hlo.cli.output import (
    as_argument,
    check_folder,
    check_place,
    print_json,
    region_table,
    regions_as_json,
    say,
    show,
    warn_all,
    write_files,
)
from disco_hlo.hlo.regions import inner_collectives, not_simulated
from disco_hlo.optimize.costs import UNKNOWN_DEVICE, costs_for
from disco_hlo.optimize.pipeline import Budget, Case, Optimized, optimize, search_progress, search_record
from disco_hlo.optimize.regions import launched_singly, step_times
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import apply
from disco_hlo.plan.read import read
from disco_hlo.plan.store import DEFAULT_NAME, MODULE_NAME, PLAN_NAME, PROFILE_NAME
from disco_hlo.plugin.session import Interruption
from disco_hlo.printable import counted, printable, time_text
from disco_hlo.profiler.profile import Link, Profile, load, to_json
from disco_hlo.report.bundle import beside, read_module
from disco_hlo.report.regions import RegionFacts, region_facts
from disco_hlo.search.api import Finalist, SearchResult, SearchSettings

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
        method=method, alpha=alpha, beta=beta, seed=seed, seeds=seeds, evaluations=evaluations,
        seconds=seconds, unchanged=patience,
    )  # fmt: skip
    plan_file = output if output.suffix == ".json" else output / PLAN_NAME
    if plan_file == output:
        check_place(plan_file)
    else:
        check_folder(output, PLAN_NAME)
    budget = Budget.of(seconds)
    opened = open_named(module)
    known = opened.profile if profile is None else load(profile)
    source, xla = opened.source, read(opened.source)
    case = Case(source, xla, costs_for(source, known, opened.device_kind, [xla]))
    gc.enable()  # a search may run for hours
    kept = time.monotonic()

    def keep(best: Finalist) -> None:
        """Save the best so far now and then: a search that is killed leaves a plan."""
        nonlocal kept
        if time.monotonic() - kept < SAVED_EVERY_S:
            return
        so_far = SearchResult(best.strategy, best.predicted_ns, 0, (), 0, 0, 0.0, "")
        _save(opened, known, plan_file, Optimized(case, so_far, (case.simulated(best.strategy),)), settings)
        kept = time.monotonic()

    with Interruption().watched() as stop:
        warn_all((*opened.missing, *case.costs.lines, *not_simulated(source)))
        with search_progress(sys.stderr.isatty()) as on_progress:
            found = optimize(
                case, settings, budget, on_progress=on_progress, on_best=keep, stop=lambda: bool(stop)
            )
        warn_all(found.notes)
        saved = _save(opened, known, plan_file, found, settings)
    outcome = _outcome(found, saved, plan_file, settings, "interrupted" if stop else found.result.stopped)
    regions = _regions(found)
    if as_json:
        print_json({**outcome, "regions": regions_as_json(regions)})
        return
    show(*region_table(regions))
    _print(outcome, saved)


def _regions(found: Optimized) -> list[RegionFacts]:
    """The step's regions under what is saved, next to XLA's own."""
    _, best = found.unmeasured
    source, case = found.case.source, found.case
    if best.strategy == case.xla:
        return region_facts(source, case.times)
    times = step_times(source, best.strategy, case.costs)
    return region_facts(source, times, best.strategy, case.times)


def _save(
    opened: Opened, profile: Profile | None, plan_file: Path, found: Optimized, settings: SearchSettings
) -> plans.Plan:
    """Write the best plan, or XLA's own where nothing is predicted to be faster."""
    chosen, best = found.unmeasured
    notes = [*found.case.costs.lines, "found offline: nothing was measured"]
    if chosen == plans.DEFAULT:
        notes.append("nothing found is predicted to be faster than XLA's own plan, so this is XLA's own")
    singly = chosen != plans.DEFAULT and launched_singly(opened.source, best.strategy, best.predicted_ns)
    written = apply(best.strategy, opened.source)
    plan = plans.Plan(
        format=plans.FORMAT,
        version=plans.VERSION,
        target=_target(opened, profile),
        versions={**opened.versions, "disco_hlo": __version__},
        strategies=plans.by_region(best.strategy),
        chosen=chosen,
        prediction=found.case.prediction(best),
        search=search_record(settings, found),
        module_sha256=hashlib.sha256(written).hexdigest(),
        notes=tuple(notes),
        launched_singly=singly or UNSET,
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
    return plan


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
    found: Optimized, plan: plans.Plan, plan_file: Path, settings: SearchSettings, stopped: str
) -> dict[str, Any]:
    predicted, result, source = plan.prediction, found.result, found.case.source
    return {
        "module": source.graph.module_name,
        "fingerprint": source.graph.fingerprint,
        "plan": str(plan_file),
        "chosen": plan.chosen,
        "method": settings.method,
        "settings": asdict(settings),
        "evaluations": result.evaluations,
        "distinct_evaluations": result.distinct_evaluations,
        "evaluations_of_regions": {one.name: one.evaluations for one in found.regions},
        "evaluations_per_s": round(result.evaluations / max(result.wall_s, 1e-9), 1),
        "wall_s": round(result.wall_s, 6),
        "stopped": stopped,
        "predicted": to_builtins(predicted),
        "speedup": predicted.default_ns / max(predicted.plan_ns, 1),
        "costs": list(found.case.costs.lines),
        "collectives_not_simulated": inner_collectives(source),
        "notes": list(plan.notes),
    }


def _print(outcome: dict[str, Any], plan: plans.Plan) -> None:
    predicted = plan.prediction
    show(
        f"{counted(outcome['evaluations'], 'candidate')} in {outcome['wall_s']:.1f} s "
        f"({outcome['evaluations_per_s']:.0f} a second), ended by: {outcome['stopped']}",
        f"XLA's default {time_text(predicted.default_ns)}, plan {time_text(predicted.plan_ns)} "
        f"({outcome['speedup']:.2f}x), bound {time_text(predicted.bound_ns)}, all predicted",
        f"saved {printable(outcome['plan'])}; look at it with: disco inspect {as_argument(outcome['plan'])}",
    )
    if plan.chosen == plans.DEFAULT:
        say(plan.notes[-1])
