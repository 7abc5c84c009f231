r"""One training step against every baseline, in one run: DisCo's evaluation (section 6).

    python scripts/benchmark.py gpt12 bert --link sockets --rows minimum --seconds 500 --out DIR
    JAX_PLATFORMS=cpu python scripts/benchmark.py transformer --link nvlink --size tiny --out DIR
    python scripts/benchmark.py tp-forward tp-train --link staged --seconds 500 --out DIR

Steps whose collectives lie inside the layer are measured otherwise: by every named schedule, in XLA's order and ours.
These are tp-forward, tp-train (examples/tensor_parallel.py), attention-8, attention-16, mlp-8, mlp-16
(examples/self_attention.py, CoCoNet figure 3 and section 6.2), adam-N (examples/sharded_adam.py, 2**N elements) and
adam-replicated-N (the same with the moments whole on every device: all-reduce, then all of the update everywhere). On
GPU their times of transfers come from the profile that ships with the package for the link.

Between processes, over gloo on CPU, how well plans are predicted is measured. The plans are XLA's default, nothing
fused, fixed combine thresholds, what a search finds and its parts, and legal plans by dice. A batch runs them in turn,
--rounds times, and then profiles the machine anew, both within half a minute, since what others use of it changes; the
predictions are those of all batches' profiles together. How much of the machine other programs used is noted with each
batch, and only the quietest count. Such a record is whole after every batch; another run begins it anew.

    JAX_PLATFORMS=cpu mpiexec -n 2 --bind-to none python scripts/benchmark.py transformer_lm --link gloo --size tiny \
        --rounds 3 --out DIR

Every (model, link, devices) has a file DIR/<model>-<size>-<link>-<devices>.json, whole after every row; what a run
did not get to, the next one does. Beside it lie the step's module, its profile and the plans found.

Exit status: 0 all that was asked for is done (rows that failed say why); 1 a model could not be measured;
2 bad arguments; 3 the time was up.
"""

from __future__ import annotations

import argparse
import os
import time

from checkout import find_package
from evaluation import commands

MODELS = ("bert", "gpt12", "reformer", "resnet50", "rnnlm", "transformer", "transformer_lm", "vgg19")
_EXPECTED = f"{', '.join(MODELS)}, {commands.FORM_EXPECTED}, {commands.STRUCTURED_EXPECTED}"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    parser = commands.parser(__doc__, size="full", seconds=560)
    parser.add_argument("models", nargs="+", type=_model, metavar="MODEL", help=_EXPECTED)
    parser.add_argument("--link", choices=[*commands.LINKS, commands.GLOO], required=True)
    parser.add_argument("--devices", type=int, choices=range(1, 65), default=2, metavar="N")
    parser.add_argument("--rows", default="all", help="all, minimum, form, xla, or names with commas between")
    parser.add_argument("--search-seconds", type=float, default=20.0, help="of each search (default 20)")
    parser.add_argument("--finalists", type=int, default=3)
    alone = "measure a model before the next one is profiled, without traces"
    parser.add_argument("--one-by-one", action="store_true", help=alone)
    schedules = "of steps with collectives inside the layer: names with commas between (default all)"
    parser.add_argument("--schedules", default="", help=schedules)
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log", choices=levels, default="warning", help="default warning")
    args = parser.parse_args(argv)
    commands.check(parser, args)
    if not args.search_seconds > 0 or args.finalists < 1:
        parser.error("expected --search-seconds above 0, --finalists of at least 1")
    if len({bool(commands.STRUCTURED.fullmatch(model)) for model in args.models}) > 1:
        parser.error("steps with collectives inside the layer need a command of their own")
    if args.link == commands.GLOO and ("OMPI_COMM_WORLD_RANK" not in os.environ or len(args.models) > 1):
        parser.error(
            "--link gloo: expected one model, in a job: mpiexec -n 2 python scripts/benchmark.py ..."
        )
    return args


def _model(name: str) -> str:
    if name in MODELS or commands.is_form(name) or commands.STRUCTURED.fullmatch(name):
        return name
    raise argparse.ArgumentTypeError(f"invalid choice: {name!r} (choose from {_EXPECTED})")


def main() -> int:
    """Run the cells that the command line names."""
    started = time.monotonic()
    args = arguments()
    find_package()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.link == commands.GLOO:
        from evaluation import ranks

        return ranks.run(args)
    commands.prepare(os.environ, args.link, args.devices)
    from evaluation import running, structured

    kind = structured if commands.STRUCTURED.fullmatch(args.models[0]) else running
    code: int = kind.run(args, lambda: args.seconds - (time.monotonic() - started))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
