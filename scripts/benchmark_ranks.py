"""Predicted against measured: many plans of one training step, several processes on one machine.

    python scripts/benchmark_ranks.py transformer_lm bert rnnlm --out DIR
    python scripts/make_tables.py DIR --out TABLES

Each model runs on CPU in a job of its own, `mpiexec -n 2`. The plans are XLA's default, nothing fused, fixed combine
thresholds, what a search finds and its parts, and legal plans by dice. A batch runs them in turn, `--rounds` times, and
then profiles the machine anew, both within half a minute, since what others use of it changes; the predictions are
those of all batches' profiles together. How much of the machine other programs used is noted with each batch, and only
the quietest count.

DIR/<model>-<size>-gloo-2.json is whole after every batch; another run begins it anew.
Exit status: 0 done; 1 a model could not be measured; 2 bad arguments; 130 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmark import MODELS
from checkout import find_package
from evaluation import commands

PROCESSES = 2
RANKS_MODELS = ("transformer_lm", *MODELS)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    parser = commands.parser(__doc__, size="tiny", seconds=600, of="longest for each model")
    names = ", ".join(RANKS_MODELS)
    parser.add_argument("models", nargs="+", choices=RANKS_MODELS, metavar="MODEL", help=names)
    parser.set_defaults(rounds=3)
    args = parser.parse_args(argv)
    commands.check(parser, args)
    return args


def job(args: argparse.Namespace, model: str) -> int:
    """Run one model's job to its end; its exit status."""
    import demo
    from demo_job import free_port, log_tail, run_job

    args.out.mkdir(parents=True, exist_ok=True)
    phase = demo.Phase("benchmark", "", None)
    environment = demo.environment(phase, args.out, commands.RANKS_SEARCH_S, free_port())
    command = [*demo.mpiexec(PROCESSES), sys.executable, __file__, model, "--out", str(args.out)]
    for name in ("rounds", "size", "seconds", "seed"):
        command += [f"--{name}", str(getattr(args, name))]
    log = args.out / f"{model}.log"
    status = run_job(command, environment, log, args.seconds + 400, lambda _log: None)
    if status == 0:
        return commands.DONE
    how = "not finished in time" if status is None else f"exit status {status}"
    print(f"benchmark_ranks.py: {model}: {how}{log_tail(log)}", file=sys.stderr)
    return commands.NOT_MEASURED


def jobs(args: argparse.Namespace) -> int:
    """Every model's job in turn; however this ends, none of their processes is left."""
    from demo import DemoError
    from demo_job import end_when_told

    end_when_told()
    try:
        return max([job(args, model) for model in args.models])
    except DemoError as error:
        print(f"benchmark_ranks.py: {error}", file=sys.stderr)
        return commands.NOT_MEASURED
    except KeyboardInterrupt:
        print("benchmark_ranks.py: stopped; its processes have ended", file=sys.stderr)
        return 130


def main() -> int:
    """One job for each model; inside a job, one rank of it."""
    args = arguments()
    find_package()
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return jobs(args)
    from evaluation import ranks

    return ranks.run(args)


if __name__ == "__main__":
    raise SystemExit(main())
