"""`make demo`: train one unchanged script with XLA's default, with a search, and with the plan it found.

    python scripts/demo.py                     # 40 steps each; everything is kept in out/demo
    python scripts/demo.py --steps 100 --budget 120 --out somewhere/else

The table's step times come from the search's own run, where XLA's default and every candidate took turns
on the devices; the training runs below it are three separate jobs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from demo_job import Watch, end_when_told, free_port, last_lines, log_tail, run_job
from demo_table import (
    ALLOWED_LOSS_DIFFERENCE,
    DEFAULT,
    DemoError,
    Run,
    from_here,
    markdown,
    result_of,
    what_next,
)

from disco_hlo.errors import DiscoError
from disco_hlo.plan import plan as plans
from disco_hlo.plan.files import replace_files
from disco_hlo.plan.plan import Plan
from disco_hlo.plan.store import PLAN_NAME, PlanStore

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "transformer_lm.py"
MARK = ".disco-demo"
"""Lies in every folder the demo made, so that it never empties another one."""
PROCESSES = 2
CLEARED = "\r\x1b[K"
"""Empties the terminal's line."""
FINALISTS = 3


@dataclass(frozen=True, slots=True)
class Phase:
    """One training job."""

    name: str
    title: str
    enable_search: str | None
    """The value of ``ENABLE_SEARCH``; None leaves it unset."""


PHASES = (
    Phase("default", "training with XLA's default", None),
    Phase("search", "the same script with ENABLE_SEARCH=1", "1"),
    Phase("enacted", "the same script with ENABLE_SEARCH=0", "0"),
)


class Record(msgspec.Struct, frozen=True):
    """What the training script says of its run."""

    losses: list[float]
    step_s: list[float]
    median_step_s: float


def environment(phase: Phase, folder: Path, budget_s: float, port: int) -> dict[str, str]:
    """A job's environment: the user's, but for everything that would make the three runs differ."""
    ours = ("ENABLE_SEARCH", "DISCO_", "JAX_", "XLA_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # mpiexec refuses root and more ranks than cores unless told.
    env.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
    env.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    env.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    # Bound to a core, a rank's communication threads would wait for its computation. (Open MPI 5 and 4.)
    env.setdefault("PRTE_MCA_hwloc_default_binding_policy", "none")
    env.setdefault("OMPI_MCA_hwloc_base_binding_policy", "none")
    env |= {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_PORT": str(port), "DISCO_DIR": str(folder / "plans")}
    if phase.enable_search is not None:
        env["ENABLE_SEARCH"] = phase.enable_search
    return env | {"DISCO_BUDGET_S": str(budget_s), "DISCO_FINALISTS": str(FINALISTS)}


def command(phase: Phase, folder: Path, steps: int, seed: int) -> list[str]:
    """What starts a job.

    Raises:
        DemoError: there is no mpiexec.
    """
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    mpiexec = shutil.which("mpiexec", path=here)
    if mpiexec is None:
        raise DemoError("mpiexec is not on PATH; `make demo` installs it, and so does pip install '.[mpi]'")
    script = [str(SCRIPT), "--distributed", "--steps", str(steps), "--seed", str(seed)]
    record = ["--json", str(folder / f"{phase.name}.json")]
    return [mpiexec, "-n", str(PROCESSES), sys.executable, *script, *record]


def run_phase(phase: Phase, args: argparse.Namespace, watch: Watch) -> Run:
    """Run one job to its end.

    Raises:
        DemoError: it failed or took too long; the message ends with the last lines of its log.
    """
    log = args.out / f"{phase.name}.log"
    started = time.monotonic()
    env = environment(phase, args.out, args.budget, free_port())
    status = run_job(command(phase, args.out, args.steps, args.seed), env, log, args.timeout, watch)
    wall_s = time.monotonic() - started
    if status is None:
        raise DemoError(f"{phase.title}: not finished after {args.timeout:.0f} s{log_tail(log)}")
    if status != 0:
        raise DemoError(f"{phase.title}: failed with exit status {status}{log_tail(log)}")
    try:
        record = msgspec.json.decode((args.out / f"{phase.name}.json").read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise DemoError(f"{phase.title}: its record cannot be read: {error}{log_tail(log)}") from None
    return Run(record.median_step_s, wall_s, record.losses)


@contextlib.contextmanager
def progress(heading: str) -> Iterator[Watch]:
    """Show that a phase runs, and on a terminal for how long and what it prints."""
    if not sys.stdout.isatty():
        print(f"{heading} ...", flush=True)
        yield lambda _log: None
        return
    started = time.monotonic()

    def watch(log: Path) -> None:
        line = "  ".join([heading, f"{time.monotonic() - started:.0f} s", *last_lines(log, 1)])
        print(f"{CLEARED}{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)

    try:
        yield watch
    finally:
        print(CLEARED, end="")


def prepare(folder: Path) -> None:
    """Empty the demo's folder: what is shown is a first search.

    Raises:
        DemoError: the folder holds something that the demo did not make.
    """
    if folder.exists() and not folder.is_dir():
        raise DemoError(f"{folder} is a file; name a folder with --out")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise DemoError(f"{folder} holds files that this demo did not make; name another folder with --out")
    shutil.rmtree(folder / "plans", ignore_errors=True)
    for phase in PHASES:
        for ending in ("json", "log"):
            (folder / f"{phase.name}.{ending}").unlink(missing_ok=True)
    for name in ("demo.json", "demo.md"):
        (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def found_plan(folder: Path, log: Path) -> tuple[Plan, Path]:
    """The plan that the search saved, and its folder.

    Raises:
        DemoError: there is none, or it cannot be used.
    """
    listed = PlanStore(folder / "plans").list_plans()
    if not listed:
        raise DemoError(f"the search saved no plan{log_tail(log)}")
    if listed[0].problem:
        raise DemoError(f"the saved plan cannot be used: {listed[0].problem}")
    return plans.decode(listed[0].plan_json, str(listed[0].path / PLAN_NAME)), listed[0].path


def check_enacted(plan: Plan, log: Path) -> None:
    """Raise DemoError unless the run that wrote ``log`` executed the plan."""
    if plan.chosen != DEFAULT and "disco: enacts the plan" not in log.read_text(errors="replace"):
        raise DemoError(f"the last run did not execute the plan{log_tail(log)}")


def demo(args: argparse.Namespace) -> None:
    """Train three times, print, save.

    Raises:
        DemoError: a run failed, or the losses disagree.
    """
    prepare(args.out)
    started, load = time.monotonic(), os.getloadavg()[0]
    runs: dict[str, Run] = {}
    for number, phase in enumerate(PHASES, 1):
        heading = f"{number}/{len(PHASES)}  {phase.title}"
        with progress(heading) as watch:
            run = runs[phase.name] = run_phase(phase, args, watch)
        print(f"{heading}: {run.wall_s:.0f} s, median step {1e3 * run.median_step_s:.1f} ms", flush=True)
        if phase.name == "search":
            plan, place = found_plan(args.out, args.out / "search.log")
    check_enacted(plan, args.out / "enacted.log")
    result = result_of(plan, from_here(place), runs, load)
    files = {
        "demo.json": msgspec.json.format(msgspec.json.encode(result)),
        "demo.md": markdown(result).encode(),
    }
    replace_files(args.out, files)
    print(f"\n{markdown(result)}\n{what_next(result)}\n")
    print(f"{time.monotonic() - started:.0f} s in all; table: {from_here(args.out / 'demo.md')}")
    if result.loss_difference > ALLOWED_LOSS_DIFFERENCE:
        raise DemoError(
            f"the loss curves differ by {result.loss_difference:.1e}, more than {ALLOWED_LOSS_DIFFERENCE:.0e}: "
            "the plan does not compute what XLA's default computes"
        )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=_at_least(3), default=40, help="training steps of each run (40)")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="of parameters and data (0)")
    parser.add_argument("--budget", type=_at_least(1), default=60, metavar="S", help="seconds of search (60)")
    parser.add_argument(
        "--timeout", type=_at_least(1), default=900, metavar="S", help="longest a run may take (900)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "demo", help="folder, emptied first (out/demo)"
    )
    args = parser.parse_args(argv)
    args.out = args.out.absolute()
    return args


def _at_least(lowest: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"expected a whole number, {lowest} or more, got {text!r}")
        return int(text)

    return read


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 1 where it failed, 130 where it was stopped."""
    args = arguments(argv)
    try:
        demo(args)
    except KeyboardInterrupt:
        sys.stderr.write("demo: stopped; its processes have ended\n")
        return 130
    except (DemoError, DiscoError, OSError) as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    end_when_told()
    sys.exit(main())
