"""Steps with collectives inside the layer: every named schedule, XLA's order and ours, beside XLA's default.

    python scripts/bench_structure.py tp-forward tp-train --link staged --seconds 500 --out DIR
    python scripts/bench_structure.py adam-14 adam-20 adam-26 --link nvlink --schedules sharded-update --out DIR
    JAX_PLATFORMS=cpu python scripts/bench_structure.py tp-train attention-8 adam-10 --size tiny --link nvlink --out DIR

Steps: tp-forward, tp-train (examples/tensor_parallel.py), attention-8, attention-16, mlp-8, mlp-16
(examples/self_attention.py, CoCoNet figure 3 and section 6.2), adam-N (examples/sharded_adam.py, 2**N elements),
adam-replicated-N (the same with the moments whole on every device: all-reduce, then all of the update everywhere).

Every (step, link, devices) has a file DIR/<step>-<size>-<link>-<devices>.json, whole after every row; what a run did
not get to, the next one does. On GPU the times of transfers come from the profile that ships with the package for
the link; elsewhere they are measured first.

Exit status: 0 all that was asked for is done (rows that failed say why); 1 a step could not be measured;
2 bad arguments; 3 the time was up.
"""

from __future__ import annotations

import argparse
import os
import time

from checkout import find_package
from evaluation import commands


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    parser = commands.parser(__doc__, size="full", seconds=560)
    parser.add_argument("steps", nargs="+", metavar="STEP")
    parser.add_argument("--link", choices=list(commands.LINKS), required=True)
    parser.add_argument("--devices", type=int, choices=range(2, 65), default=2, metavar="N")
    parser.add_argument("--schedules", default="", help="names separated by commas (default: all that fit)")
    args = parser.parse_args(argv)
    commands.check(parser, args)
    return args


def main() -> int:
    """Measure what the command line names, one step after the other."""
    started = time.monotonic()
    args = arguments()
    commands.prepare(os.environ, args.link, args.devices)
    find_package()
    from evaluation import structured

    return structured.run(args, lambda: args.seconds - (time.monotonic() - started))


if __name__ == "__main__":
    raise SystemExit(main())
