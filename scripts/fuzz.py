"""Random programs under random legal strategies, each compared with XLA's default: looks for wrong numbers.

    make fuzz ARGS="--pairs 50000 --seed 1"
    python scripts/fuzz.py --platform gpu --devices 2 --jobs 4 --seconds 540
    python scripts/fuzz.py --defaults --programs 10000

Goes on until Ctrl-C where neither pairs, programs nor seconds are named. What it finds is made smaller and saved in
tests/fuzz/found/, where every file is a test. Ends with one line of counts; the exit status is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from checkout import ROOT, find_package

sys.path.insert(0, str(ROOT))
find_package()

from disco_hlo.cores import own_cores  # noqa: E402


def main() -> int:
    """Read the command line and run."""
    cores = len(own_cores())
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    for name, kind, default, what in (
        ("pairs", int, None, "stop after so many pairs of a program and a strategy"),
        ("programs", int, None, "stop after so many programs"),
        ("seconds", float, None, "stop after so many seconds, whatever is under way"),
        ("seed", int, 0, "of the first program (default 0)"),
        ("jobs", int, cores, f"worker processes (default {cores})"),
        ("devices", int, 4, "the most that a program runs on (default 4)"),
        ("strategies", int, 12, "to try on each program (default 12)"),
        ("keep", int, 8, "findings to shrink and save (default 8)"),
        ("found", Path, None, "where to save them (default tests/fuzz/found)"),
        ("pair-limit", float, 60.0, "seconds after which a pair hangs"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=what)
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    for name, what in (
        ("defaults", "try no strategy: only whether the last gate accepts XLA's default where that is right"),
        ("no-search", "leave out what needs the search's compiled code"),
        ("regions", "leave out programs without loops and branches"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    arguments = parser.parse_args()

    os.environ["JAX_PLATFORMS"] = "cpu"  # of this process, which writes programs and runs none
    from tests.fuzz.findings import FOUND
    from tests.fuzz.run import Settings, run

    settings = Settings(
        seed=arguments.seed, pairs=arguments.pairs, programs=arguments.programs, seconds=arguments.seconds,
        jobs=arguments.jobs, defaults=arguments.defaults,
        platform=arguments.platform, devices=arguments.devices, strategies=arguments.strategies,
        searched=not (arguments.no_search or arguments.defaults), keep=arguments.keep, folder=arguments.found or FOUND,
        pair_limit_s=arguments.pair_limit, regions=arguments.regions,
    )  # fmt: skip
    return int(run(settings, lambda line: print(line, file=sys.stderr)))


if __name__ == "__main__":
    sys.exit(main())
