"""Does the trained estimator find better plans? Search with it and with the analytical one; run both plans.

    JAX_PLATFORMS=cpu python scripts/compare_estimators.py rnnlm bert --link nvlink --size tiny --out DIR
    python scripts/compare_estimators.py gpt12 vgg19 --link sockets --out DIR

One profile and one budget for both; the plans and XLA's default run in turn (DisCo, section 6.7 asks the same of
its estimator). DIR/estimators.json has the figures, whole after every model; the table is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmark import MODELS
from checkout import find_package
from evaluation.links import LINKS, prepare

ANALYTICAL, TRAINED = "analytical estimate", "trained network"


def compare(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model: predicted and measured step times by estimator."""
    from evaluation import step as steps

    from disco_hlo.optimize.costs import Costs, costs_of
    from disco_hlo.optimize.pipeline import Budget, Case, optimize
    from disco_hlo.optimize.select import ratio_noise, ratio_to
    from disco_hlo.plan.plan import DEFAULT
    from disco_hlo.plan.read import read
    from disco_hlo.plugin.measuring.candidates import Trial, compile_trials, measure
    from disco_hlo.plugin.phases.finding import COMPILE_S
    from disco_hlo.plugin.settings import Settings
    from disco_hlo.search.api import SearchSettings

    settings = Settings(search=True, directory=args.out, seed=args.seed)
    request = steps.request_of(model, args.size)
    step = steps.captured(request)
    session = steps.session_of(request, settings)
    profile = steps.profile(session, step, args.out)
    xla = read(step.source)
    trained = costs_of(profile, step.source.graph)
    if not hasattr(trained.estimator, "analytic"):
        raise SystemExit(f"compare_estimators.py: no weights ship for {profile.platform.device_kind}")
    models = {TRAINED: trained, ANALYTICAL: Costs(profile, trained.estimator.analytic)}
    trials = [Trial(DEFAULT, None, 0)]
    found: dict[str, Any] = {}
    for name, costs in models.items():
        case, budget = Case(step.source, xla, costs), Budget.of(args.search_seconds, COMPILE_S)
        searched = optimize(case, SearchSettings(seed=args.seed), budget)
        best = searched.best
        trials.append(Trial(name, best.strategy, best.predicted_ns))
        found[name] = {"predicted_ms": best.predicted_ns / 1e6, "evaluations": searched.result.evaluations}
    compile_trials(session, step.source, trials, tag="estimators")
    measure(session, trials, budget_s=args.measure_seconds)
    for trial in trials:
        found.setdefault(trial.name, {})
        if trial.error:
            found[trial.name]["error"] = trial.error
            continue
        found[trial.name] |= {
            "median_ms": trial.median_ns / 1e6,
            "of_default": ratio_to(trial.times_ns, trials[0].times_ns),
            "noise": ratio_noise(trial.times_ns, trials[0].times_ns),
        }
    return found


def table(figures: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row a model."""
    lines = [
        "| | XLA default, ms | analytical: of default | predicted, ms | trained: of default | predicted, ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model, found in figures.items():
        cells = [f"{found['XLA default']['median_ms']:.2f}"]
        for name in (ANALYTICAL, TRAINED):
            one = found[name]
            ran = "error" not in one
            cells.append(f"{one['of_default']:.3f} ± {one['noise']:.3f}" if ran else one["error"][:60])
            cells.append(f"{one['predicted_ms']:.2f}")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Compare on the models that the command line names."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("models", nargs="+", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--link", choices=list(LINKS), required=True)
    parser.add_argument("--devices", type=int, choices=range(2, 65), default=2, metavar="N")
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--search-seconds", type=float, default=20.0, help="of each search (default 20)")
    parser.add_argument("--measure-seconds", type=float, default=20.0, help="for each model (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not (args.search_seconds > 0 and args.measure_seconds > 0):
        parser.error("expected --search-seconds and --measure-seconds above 0")
    prepare(os.environ, args.link, args.devices)
    find_package()
    args.out.mkdir(parents=True, exist_ok=True)
    from evaluation.record import write_atomically

    figures: dict[str, dict[str, Any]] = {}
    for model in args.models:
        figures[model] = compare(model, args)
        write_atomically(args.out / "estimators.json", json.dumps(figures, indent=1).encode())
        print(table({model: figures[model]}), flush=True)
    print(table(figures))


if __name__ == "__main__":
    main()
