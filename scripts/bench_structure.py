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
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkout import find_package
from evaluation import commands
from evaluation.commands import BAD_ARGUMENTS, DONE, LINKS, NOT_MEASURED, described, prepare
from evaluation.record import CellName, Record, RecordError


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    parser = commands.parser(__doc__, size="full", seconds=560)
    parser.add_argument("steps", nargs="+", metavar="STEP")
    parser.add_argument("--link", choices=list(LINKS), required=True)
    parser.add_argument("--devices", type=int, choices=range(2, 65), default=2, metavar="N")
    parser.add_argument("--schedules", default="", help="names separated by commas (default: all that fit)")
    args = parser.parse_args(argv)
    commands.check(parser, args)
    return args


def _measured(args: argparse.Namespace, record: Record, left_s: Callable[[], float]) -> bool:
    """Measure one step; whether that worked."""
    import jax
    from evaluation.step import structured_request_of, versions
    from evaluation.structured import Asked, measure_cell

    from disco_hlo.plugin.logs import one_line

    step = record.cell.model
    try:
        if jax.device_count() != args.devices:
            raise ValueError(f"--devices is {args.devices}, jax has {jax.device_count()}")
        request = structured_request_of(step, args.size)
        record.note_all(
            versions=versions(),
            device=str(request.devices[0].device_kind),
            backend=str(request.backend.platform),
            environment=described(os.environ),
            date=time.strftime("%Y-%m-%d", time.gmtime()),
        )
        print(f"{record.cell.stem}:", flush=True)
        asked = Asked(
            only=frozenset(filter(None, args.schedules.split(","))),
            rounds=args.rounds,
            seed=args.seed,
            profile=lambda request: _profile(args, request),
            say=lambda text: print(text, flush=True),
            left_s=left_s,
        )
        measure_cell(asked, record, request)
    except Exception as error:  # noqa: BLE001 -- the other steps are measured nevertheless
        print(f"bench_structure.py: {step}: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return False
    return True


def _profile(args: argparse.Namespace, request: Any) -> Any:
    """Transfer times, device constants and contention: shipped for the link on GPU, measured elsewhere."""
    from disco_hlo.profiler.profile import load

    if request.backend.platform != "cpu":
        import disco_hlo

        return load(Path(disco_hlo.__path__[0]) / "data" / "profiles" / f"nvidia-h200-{args.link}.json")
    from evaluation import step

    from disco_hlo.plugin.session import join
    from disco_hlo.plugin.settings import Settings

    session = join(request, Settings(search=True, directory=args.out))
    return step.profile(session, step.captured(request), args.out)


def main() -> int:
    """Measure what the command line names, one step after the other."""
    started = time.monotonic()
    args = arguments()
    prepare(os.environ, args.link, args.devices)
    find_package()
    from evaluation.step import STRUCTURED, STRUCTURED_EXPECTED

    from disco_hlo.plugin.logs import configure

    configure("warning")
    unknown = [step for step in args.steps if not STRUCTURED.fullmatch(step)]
    if unknown:
        print(
            f"bench_structure.py: {unknown[0]!r} is no step: expected {STRUCTURED_EXPECTED}", file=sys.stderr
        )
        return BAD_ARGUMENTS
    args.out.mkdir(parents=True, exist_ok=True)

    def left_s() -> float:
        return float(args.seconds - (time.monotonic() - started))

    cells = [CellName(step, args.size, args.link, args.devices) for step in args.steps]
    watchdog = commands.end_in(left_s(), "bench_structure.py", lambda: commands.stop(args.out, cells))
    try:
        fine = [_measured(args, Record.open(args.out, cell), left_s) for cell in cells]
    except RecordError as error:
        print(f"bench_structure.py: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    finally:
        watchdog.cancel()
    return DONE if all(fine) else NOT_MEASURED


if __name__ == "__main__":
    raise SystemExit(main())
