"""How fast the search is: candidates a second of both methods, and of another checkout in turn.

    python scripts/bench_search.py                                    the seven captured steps of tests/data
    python scripts/bench_search.py --steps vgg19 gpt12 --against ../before

A run is one seed and a fixed number of candidates, so that two checkouts do the same work; it is a process of its own,
and the checkouts take turns. Seconds are seconds of that process on a processor: other work on the machine matters
little. Everything is compiled before they count, nothing is known of any candidate. Kernels are estimated as a user's
are, by the profile and the weights that ship for the H200.

For every step and method: distinct legal candidates a second, the median of all seeds; with ``--against`` the other
checkout's, the ratio of both, and whether they predict the same times of what they found.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evaluation.tables import markdown

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
STEPS = {
    "gpt12": DATA / "h200_transformer_default.hlo.pb.gz",
    **{path.name.split(".")[0]: path for path in sorted((DATA / "h200_models").glob("*.hlo.pb.gz"))},
}
METHODS = ("joint", "backtracking")


# --- one run, in a process of its own -------------------------------------------------------------


def load_package(checkout: Path) -> None:
    """Import the package of a checkout, whatever is installed.

    Raises:
        SystemExit: there is none.
    """
    sys.path.insert(0, str(checkout))
    import disco_hlo

    if Path(disco_hlo.__path__[0]).resolve().parent != checkout:
        raise SystemExit(f"bench_search.py: {checkout} holds no package disco_hlo")
    disco_hlo.__path__.append(str(checkout))  # estimator/, profiler/ and search/ lie beside it


def run_once(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Search every step by both methods with one seed: candidates a second, and the time predicted of what it found."""
    load_package(arguments.run)
    from disco_hlo.hlo.canonical import canonicalize
    from disco_hlo.optimize.costs import costs_for
    from disco_hlo.plan.read import read
    from disco_hlo.plan.variants import unfused
    from disco_hlo.profiler.profile import load
    from disco_hlo.search.api import SearchSettings
    from disco_hlo.search.run import search
    from disco_hlo.search.warm import warm_up

    profiles = arguments.run / "disco_hlo" / "data" / "profiles"
    profile = load(profiles / f"nvidia-h200-{arguments.link}.json")
    for name in arguments.steps:
        source = canonicalize(gzip.decompress(STEPS[name].read_bytes()))
        for method in METHODS:
            costs = costs_for(source, profile, None)
            start = unfused(source.graph) if method == "backtracking" else read(source)
            settings = SearchSettings(
                method=method, seed=arguments.seed, evaluations=arguments.candidates, seeds=1, finalists=1
            )
            warm_up(source.graph, costs, costs.machine, settings)
            costs = costs_for(source, profile, None)  # which has seen no candidate
            began = time.process_time()
            found = search(source.graph, costs, costs.machine, start=start, settings=settings)
            spent_s = time.process_time() - began
            per_s, predicted_ns = found.distinct_evaluations / spent_s, found.predicted_ns
            yield {"step": name, "method": method, "per_s": per_s, "predicted_ns": predicted_ns}


# --- all runs -------------------------------------------------------------------------------------


def runs_of(checkouts: Sequence[Path], arguments: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """What the runs of every checkout gave, seed by seed, the checkouts in turn."""
    found: list[list[dict[str, Any]]] = [[] for _ in checkouts]
    for seed in range(arguments.seeds):
        for number, checkout in enumerate(checkouts):
            command = [sys.executable, __file__, "--run", str(checkout), "--seed", str(seed)]
            command += ["--link", arguments.link, "--candidates", str(arguments.candidates)]
            command += ["--steps", *arguments.steps]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[number] += map(json.loads, done.stdout.splitlines())
    return found


def table(found: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Markdown: a row for each step and method."""
    against = len(found) > 1
    header = ["step", "method", "candidates a second"]
    header += ["the other checkout's", "ratio", "same times predicted"] if against else []
    rows = []
    for step, method in dict.fromkeys((run["step"], run["method"]) for run in found[0]):
        own = [[run for run in runs if (run["step"], run["method"]) == (step, method)] for runs in found]
        rates = [statistics.median(run["per_s"] for run in runs) for runs in own]
        cells = [step, method, *(f"{rate:,.0f}" for rate in rates)]
        if against:
            times = [[run["predicted_ns"] for run in runs] for runs in own]
            cells += [f"{rates[0] / rates[1]:.2f}", "yes" if times[0] == times[1] else "no"]
        rows.append(tuple(cells))
    return markdown((tuple(header), rows)).rstrip()


def main() -> int:
    """Print the table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS), metavar="STEP")
    parser.add_argument("--link", default="staged", choices=("nvlink", "staged", "sockets"))
    parser.add_argument("--candidates", type=int, default=20_000, help="of each search (default 20000)")
    parser.add_argument("--seeds", type=int, default=3, help="searches of each kind (default 3)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, to compare with")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        for one in run_once(arguments):
            print(json.dumps(one), flush=True)
        return 0
    if arguments.candidates < 1 or arguments.seeds < 1:
        parser.error("expected --candidates and --seeds of at least 1")
    checkouts = [ROOT]
    if arguments.against is not None:
        checkouts.append(arguments.against.resolve())
        if not (checkouts[1] / "disco_hlo").is_dir():
            parser.error(f"--against {arguments.against}: no checkout, it holds no folder disco_hlo")
    try:
        print(table(runs_of(checkouts, arguments)))
    except subprocess.CalledProcessError as error:
        print(f"bench_search.py: a run ended with exit status {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
