"""Algorithm 1 over its settings: tables 3 and 4 and figure 10 of the DisCo paper, in simulation.

    python scripts/sweep_search.py [--module MODULE.hlo.pb.gz ...] [--link staged] [--seeds 3]

Prints three tables as Markdown, predicted step time and seconds of search each: over alpha with beta 10, over
beta with alpha 1.05, and over the methods that the search may apply. Also into
``docs/benchmarks/search_sweep.json``, after every cell; what is there already is not run again. Every search
starts unfused and ends after 1000 candidates that did not improve the best, as in the paper. Without
``--module`` the step is the 12-layer transformer kept with the tests.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from searching.results import RESULTS
from searching.steps import FIXTURE, Case, count_processor_seconds

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.baselines import unfused
from disco_hlo.search.api import SearchSettings

SWEEP = RESULTS.with_name("search_sweep.json")
ALPHAS = (1.0, 1.05, 1.1)
BETAS = (1, 5, 10, 30)
METHODS = {
    "none": (),
    "non-duplicate": ("fuse",),
    "+ duplicate": ("fuse", "duplicate"),
    "+ all-reduce": ("fuse", "duplicate", "merge"),
    "all-reduce alone": ("merge",),
}
"""Figure 10 adds one method after the other."""


def settings() -> Iterator[tuple[str, str, SearchSettings]]:
    """(table, row, settings) of every cell."""
    for alpha in ALPHAS:
        yield "table 3: alpha", str(alpha), SearchSettings(method="backtracking", alpha=alpha)
    for beta in BETAS:
        yield "table 4: beta", str(beta), SearchSettings(method="backtracking", beta=beta)
    for name, moves in METHODS.items():
        yield "figure 10: methods", name, SearchSettings(method="backtracking", moves=moves)


def cell(case: Case, chosen: SearchSettings, seeds: int, seconds: float) -> dict[str, float]:
    """Medians over the seeds: predicted ms, processor seconds, candidates."""
    runs = [
        case.search(unfused(case.graph), replace(chosen, seed=seed, seconds=seconds)) for seed in range(seeds)
    ]
    return {
        "step_ms": round(statistics.median(run.predicted_ns for run in runs) / 1e6, 3),
        "search_s": round(statistics.median(run.wall_s for run in runs), 2),
        "candidates": statistics.median(run.evaluations for run in runs),
        "out_of_time": sum(run.stopped == "seconds" for run in runs),
    }


def main() -> None:
    """Search every cell for every module; print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--module", type=Path, nargs="*", default=[FIXTURE])
    parser.add_argument("--link", default="staged", choices=("nvlink", "staged", "sockets"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="most processor seconds of one search")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or not arguments.seconds > 0:
        parser.error("expected --seeds of at least 1 and --seconds above 0")
    for path in arguments.module:
        try:
            canonicalize(gzip.decompress(path.read_bytes()))
        except (OSError, EOFError, zlib.error, DiscoError) as error:
            parser.error(f"--module {path}: {error}")
    count_processor_seconds()
    found = json.loads(SWEEP.read_text()) if SWEEP.exists() else {}
    for path in arguments.module:
        name = path.name.removesuffix(".hlo.pb.gz")
        done = found.get(f"{name} {arguments.link}", {})
        cells = [one for one in settings() if one[1] not in done.get(one[0], {})]
        if not cells:
            continue
        case = Case(name, path, arguments.link)
        case.warm_up()
        known: dict[SearchSettings, dict[str, float]] = {}  # the paper's own settings stand in every table
        for table, row, chosen in cells:
            if chosen not in known:
                known[chosen] = cell(case, chosen, arguments.seeds, arguments.seconds)
            result = known[chosen]
            found.setdefault(f"{name} {arguments.link}", {}).setdefault(table, {})[row] = result
            temporary = SWEEP.with_suffix(".new")
            temporary.write_text(json.dumps(found, indent=1) + "\n")
            os.replace(temporary, SWEEP)
            print(name, table, row, result, flush=True)
    print(tables(found))


def tables(found: dict[str, dict[str, dict[str, dict[str, float]]]]) -> str:
    """Markdown: a table each, a column for every module, step ms / search s."""
    lines: list[str] = []
    for table in dict.fromkeys(name for entry in found.values() for name in entry):
        lines += ["", f"| {table} | " + " | ".join(found) + " |", "| --- |" + " --- |" * len(found)]
        rows = dict.fromkeys(row for entry in found.values() for row in entry.get(table, {}))
        for row in rows:
            cells = [entry.get(table, {}).get(row) for entry in found.values()]
            texts = ["" if one is None else f"{one['step_ms']} ms / {one['search_s']} s" for one in cells]
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
