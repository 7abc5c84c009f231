"""A training as its user runs it: by XLA's default and with the plan, in turn, and a record of that.

    python scripts/train_in_turn.py --out DIR -- python examples/llama.py --size full --steps 14
    python scripts/train_in_turn.py --out DIR --runs 3 -- mpiexec -n 2 python train.py

The command runs once with ``ENABLE_SEARCH=1 DISCO_WHEN=compile``, and then in turn without the switch and with
``ENABLE_SEARCH=0``. What else is to hold stands in the environment (``DISCO_*``, ``NCCL_*``, ``XLA_FLAGS``). The script
waits for each step, and prints a line with ``median 94.19 ms, last loss 1.9073`` at its end, as examples/llama.py does,
and one for its first step (``step 0 ... 7140.29 ms``). Where several processes print them, the first in the log count.

DIR/record.json has the commands' environment, what the search predicted and measured, and each run's figures: those
until then where one fails or is stopped. Beside it are the plan and the logs.

Exit status: 0 all ran; 1 a run failed, or no plan was saved; 2 bad arguments; 130 stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkout import find_package

find_package()

from demo import DemoError, exit_status, found_plan  # noqa: E402
from demo_job import end_when_told, log_tail, run_job  # noqa: E402
from evaluation.record import write_atomically  # noqa: E402

from disco_hlo.plan.plan import DEFAULT, Candidate, Plan  # noqa: E402

FORMAT, VERSION = "disco-hlo training in turn", 1
SWITCHED, SEARCHING = "with the switch", "with the switch, the run that searched"
_SHOWN = ("DISCO_", "NCCL_", "XLA_FLAGS", "JAX_PLATFORMS")
"""Begins the names of variables that a record tells."""
_ENACTS = "disco: enacts the plan"
_MEDIAN = re.compile(r"median (\d+(?:\.\d+)?) ms, last loss (-?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|inf|nan))")
_HELD = re.compile(r"^disco: the training was held for (\d+) s: ", re.MULTILINE)
_FIRST = re.compile(r"^step +0\b.*?(\d+(?:\.\d+)?) ms$", re.MULTILINE)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    usage = "%(prog)s [-h] --out OUT [--runs RUNS] [--timeout TIMEOUT] -- command ..."
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="folder, which must be new or empty")
    parser.add_argument("--runs", type=int, default=2, help="of each, in turn (2)")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, help="longest a run may take, in seconds (1800)"
    )
    parser.add_argument("command", nargs="+", help="the training, behind --")
    args = parser.parse_args(argv)
    if args.runs < 1 or not args.timeout > 0:  # nor nan
        parser.error("expected --runs of at least 1, and a --timeout above 0")
    args.out = args.out.absolute()
    try:
        taken = args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir()))
    except OSError as error:
        parser.error(f"cannot use --out: {error}")
    if taken:
        parser.error(f"expected --out to be a new or an empty folder: {args.out}")
    if shutil.which(args.command[0]) is None:
        parser.error(f"expected a command that can be run, got {args.command[0]!r}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, and save the record."""
    args = arguments(argv)
    end_when_told()

    def run() -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = in_turn(args.out, args.command, args.runs, args.timeout)
        print(f"{args.out / 'record.json'}: {summary(record)}")

    return exit_status("train_in_turn", run)


def in_turn(folder: Path, command: Sequence[str], runs: int, limit_s: float) -> dict[str, Any]:
    """All runs, and the record of them, which is saved whatever becomes of the later ones.

    Raises:
        DemoError: one failed, printed no figures, or did not enact the plan, or the search saved none.
    """
    search = _run(folder, "search", command, {"ENABLE_SEARCH": "1", "DISCO_WHEN": "compile"}, limit_s)
    plan, _ = found_plan(folder, folder / "search.log")
    figures: dict[str, list[dict[str, Any]]] = {SEARCHING: [search], DEFAULT: [], SWITCHED: []}
    held = _HELD.search((folder / "search.log").read_text(errors="replace"))
    held_s = int(held[1]) if held else None
    try:
        for number in range(runs):
            for name, switch in ((DEFAULT, {}), (SWITCHED, {"ENABLE_SEARCH": "0"})):
                run = f"{name.lower().replace(' ', '-')}-{number}"
                ran = _run(folder, run, command, switch, limit_s)
                if switch and plan.chosen != DEFAULT:
                    _check_enacted(folder / f"{run}.log")
                figures[name].append(ran)
    finally:
        record = record_of(command, plan, held_s, figures)
        write_atomically(folder / "record.json", (json.dumps(record, indent=1) + "\n").encode())
    return record


def record_of(
    command: Sequence[str],
    plan: Plan,
    held_s: int | None,
    figures: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """As it is saved. Times are in ms and s, as their names say.

    Args:
        held_s: from the first profile of the step to the last of its candidates, by the search's own log.
    """
    measured = plan.measured
    candidates = {} if not measured else {one.name: _told(one) for one in measured.candidates}
    [search] = figures[SEARCHING]
    pairs = zip(figures[SWITCHED], figures[DEFAULT], strict=False)  # the last one may have no other
    return {
        "format": FORMAT,
        "version": VERSION,
        "command": list(command),
        "environment": {
            name: one
            for name, one in sorted(os.environ.items())
            if name.startswith(_SHOWN) and name != "DISCO_DIR"  # that of the runs lies beside the record
        },
        "device": plan.target.device_kind,
        "devices": plan.target.device_count,
        "processes": plan.target.process_count,
        "versions": plan.versions,
        "created": measured.created if measured else "",
        "first_step_with_search_s": search["first_step_s"],
        "held_s": held_s,
        "stages_s": {
            name: getattr(measured, f"{name}_s") for name in ("profile", "search", "measure") if measured
        },
        "taken": {"name": plan.chosen, **candidates.get(plan.chosen, {})},
        "candidates": candidates,
        "runs": {
            name: {what: [one[what] for one in every] for what in search} for name, every in figures.items()
        },
        "of_default": [round(ours["median_ms"] / theirs["median_ms"], 3) for ours, theirs in pairs],
    }


def summary(record: Mapping[str, Any]) -> str:
    """One line."""
    medians = [statistics.median(record["runs"][name]["median_ms"]) for name in (DEFAULT, SWITCHED)]
    ratios = ", ".join(map(str, record["of_default"]))
    return f"{medians[0]:.2f} ms by default, {medians[1]:.2f} with {record['taken']['name']} ({ratios})"


def _told(one: Candidate) -> dict[str, Any]:
    if not one.samples:
        return {"predicted_ms": round(one.predicted_ns / 1e6, 2), "error": one.error}
    found = {"predicted_ms": round(one.predicted_ns / 1e6, 2), "measured_ms": round(one.median_ns / 1e6, 2)}
    for name, value in (("of_default", one.ratio), ("noise", one.ratio_noise)):
        if one.name != DEFAULT and isinstance(value, float):
            found[name] = round(value, 3)
    return found


def _run(
    folder: Path, name: str, command: Sequence[str], switch: Mapping[str, str], limit_s: float
) -> dict[str, Any]:
    """What one run says of itself."""
    log = folder / f"{name}.log"
    plain = {key: value for key, value in os.environ.items() if key != "ENABLE_SEARCH"}
    status = run_job(
        command, {**plain, "DISCO_DIR": str(folder / "plans"), **switch}, log, limit_s, lambda _: None
    )
    if status is None:
        raise DemoError(f"{name}: not finished after {limit_s:.0f} s{log_tail(log)}")
    if status != 0:
        raise DemoError(f"{name}: failed with exit status {status}{log_tail(log)}")
    text = log.read_text(errors="replace")
    median, first = _MEDIAN.search(text), _FIRST.search(text)
    if median is None or first is None or not float(median[1]):
        raise DemoError(
            f"{name}: expected lines like 'step 0 ... 7140.29 ms' and 'median 94.19 ms, last loss 1.9'{log_tail(log)}"
        )
    loss = float(median[2])
    found = {
        "median_ms": float(median[1]),
        "first_step_s": round(float(first[1]) / 1e3, 1),
        "last_loss": loss if math.isfinite(loss) else str(loss),  # JSON has no nan
    }
    print(f"{name}: {found['median_ms']:.2f} ms", flush=True)
    return found


def _check_enacted(log: Path) -> None:
    if _ENACTS not in log.read_text(errors="replace"):
        raise DemoError(
            f"{log.stem}: expected a line with {_ENACTS!r} (DISCO_LOG must not be above info){log_tail(log)}"
        )


if __name__ == "__main__":
    sys.exit(main())
