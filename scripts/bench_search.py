"""How fast the search is, and how good what it finds: every figure of ``docs/search.md``.

    python scripts/bench_search.py throughput     candidates a second, with either estimator
    python scripts/bench_search.py algorithm-1    Algorithm 1 with the paper's settings, per model
    python scripts/bench_search.py race           how soon the joint search is where Algorithm 1 ends
    python scripts/bench_search.py curves         quality against time, four methods, five seeds
    python scripts/bench_search.py gap            share of the gap to the bound that is closed
    python scripts/bench_search.py optimum        200 small steps against the true optimum
    python scripts/bench_search.py plot           the curves as one picture (needs matplotlib)
    python scripts/bench_search.py tables         the tables of docs/search.md

The steps are those in ``tests/data``; ``--modules DIR`` takes others, ``NAME.hlo.pb.gz``. Results go into
``docs/benchmarks/search.json``, a section each, after every run; what is there already is not run again
(``--again`` runs it). Seconds are seconds of this process on
a processor (nothing runs in parallel), so that other work on the machine does not matter; wall time is
recorded beside them where a user would wait for it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from searching.quality import METHODS, curves, gap, optimum, plot  # noqa: E402
from searching.speed import algorithm_1, one, race, throughput  # noqa: E402
from searching.tables import tables  # noqa: E402


def main() -> None:
    """Parse the command line and run one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for name, run, seconds in (
        ("throughput", throughput, 1.5), ("algorithm-1", algorithm_1, 600.0), ("one", one, 600.0),
        ("race", race, 100.0), ("curves", curves, 10.0), ("gap", gap, 60.0), ("optimum", optimum, 0.0),
        ("plot", plot, 0.0), ("tables", tables, 0.0),
    ):  # fmt: skip
        command = commands.add_parser(name)
        command.set_defaults(run=run, also_unfused=run is algorithm_1)
        command.add_argument("--modules", type=Path, default=ROOT / "tests" / "data" / "h200_models")
        command.add_argument("--module", type=Path)
        command.add_argument("--link", default="staged", choices=("nvlink", "staged", "sockets"))
        command.add_argument("--links", nargs="*", default=["nvlink", "staged", "sockets"])
        command.add_argument("--seconds", type=float, default=seconds)
        command.add_argument("--seeds", type=int, default=5)
        command.add_argument("--count", type=int, default=200)
        command.add_argument("--only", nargs="*", help="steps by name")
        command.add_argument("--again", action="store_true", help="run what has a result already, too")
        command.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    arguments = parser.parse_args()
    if arguments.module is not None and not arguments.module.is_file():
        parser.error(f"--module {arguments.module}: no such file")
    if not any(arguments.modules.glob("*.hlo.pb.gz")):
        parser.error(f"--modules {arguments.modules}: no NAME.hlo.pb.gz in it")
    arguments.run(arguments)


if __name__ == "__main__":
    main()
