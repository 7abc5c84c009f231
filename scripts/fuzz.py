"""Random programs under random legal strategies, each compared with XLA's default: looks for wrong numbers.

    make fuzz ARGS="--pairs 50000 --seed 1"
    python scripts/fuzz.py --platform gpu --devices 2 --jobs 4 --seconds 540 --add-to counts.json
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, help="stop after so many pairs of a program and a strategy")
    parser.add_argument("--programs", type=int, help="stop after so many programs")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds, whatever is under way")
    parser.add_argument("--seed", type=int, default=0, help="of the first program (default 0)")
    parser.add_argument("--jobs", type=int, default=cores, help=f"worker processes (default {cores})")
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--devices", type=int, default=4, help="the most that a program runs on (default 4)")
    parser.add_argument("--strategies", type=int, default=12, help="to try on each program (default 12)")
    parser.add_argument(
        "--defaults", action="store_true",
        help="try no strategy: only whether the last gate accepts XLA's default where that is right",
    )  # fmt: skip
    parser.add_argument(
        "--no-search", action="store_true", help="leave out what needs the search's compiled code"
    )
    parser.add_argument("--keep", type=int, default=8, help="findings to shrink and save (default 8)")
    parser.add_argument("--found", type=Path, help="where to save them (default tests/fuzz/found)")
    parser.add_argument("--pair-limit", type=float, default=60.0, help="seconds after which a pair hangs")
    parser.add_argument(
        "--by-hand-every", type=int, default=1, help="evaluate one program of so many op by op"
    )
    parser.add_argument(
        "--regions", action="store_true", help="leave out programs without loops and branches"
    )
    parser.add_argument("--past-gate", action="store_true", help="run what the last gate refuses, too")
    parser.add_argument(
        "--add-to", type=Path, help="JSON file that adds up counts; its programs are left out"
    )
    arguments = parser.parse_args()

    os.environ["JAX_PLATFORMS"] = "cpu"  # of this process, which writes programs and runs none
    from tests.fuzz.findings import FOUND
    from tests.fuzz.run import Settings, run

    settings = Settings(
        seed=arguments.seed, pairs=arguments.pairs, programs=arguments.programs, seconds=arguments.seconds,
        jobs=arguments.jobs, defaults=arguments.defaults,
        platform=arguments.platform, devices=arguments.devices, strategies=arguments.strategies,
        searched=not (arguments.no_search or arguments.defaults), keep=arguments.keep, folder=arguments.found or FOUND,
        pair_limit_s=arguments.pair_limit, by_hand_every=arguments.by_hand_every, past_gate=arguments.past_gate,
        regions=arguments.regions,
    )  # fmt: skip
    return run(settings, arguments.add_to, lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    sys.exit(main())
