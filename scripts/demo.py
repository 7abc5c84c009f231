"""`make demo`: train one unchanged script with XLA's default, with a search, and with the plan it found.

    python scripts/demo.py                     # 40 steps each; everything is kept in out/demo
    python scripts/demo.py --steps 100 --budget 120 --out somewhere/else

The table's step times come from the search's own run, where XLA's default and every candidate took turns
on the devices, and is read from the plan; the training runs below it are three separate jobs.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from demo_job import Watch, end_when_told, free_port, from_here, last_lines, log_tail, printable, run_job
from msgspec import structs
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.cost_model import Line
from disco_hlo.optimize.ablations import NO_FUSION, ONE_BUCKET, PLAN_BUCKETS
from disco_hlo.plan import plan as plans
from disco_hlo.plan.files import replace_files
from disco_hlo.plan.plan import DEFAULT, SEARCHED, Candidate, Plan
from disco_hlo.plan.store import PLAN_NAME, PlanStore
from disco_hlo.printable import counted

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "transformer_lm.py"
MARK = ".disco-demo"
"""Lies in every folder the demo made, so that it never empties another one."""
PROCESSES = 2
FINALISTS = 3
ALLOWED_LOSS_DIFFERENCE = 1e-4
BASELINES = (DEFAULT, NO_FUSION, ONE_BUCKET, PLAN_BUCKETS)
"""What the search phase measures beside the plans it found."""


class DemoError(Exception):
    """The demo cannot go on; the message is all the user sees."""


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


class Run(msgspec.Struct, frozen=True):
    """A finished training job, as its script says; how long it took, as it was seen from here."""

    median_step_s: float
    """Of all steps but the first two, which compile and allocate."""
    losses: list[float]
    wall_s: float = 0.0


class Result(msgspec.Struct, frozen=True):
    """Everything the demo found; ``demo.json``."""

    plan: Plan
    """With all candidates of the search, measured in turn."""
    place: str
    """Where it lies, as the user is to read it."""
    runs: dict[str, Run]
    loss_difference: float
    """Largest relative difference of any step's loss from XLA's default's, in either other run."""
    cores: int | None
    load: float
    """Of the machine before the demo began: how many processes were running or waiting to."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    numbers = (
        ("steps", 3, 40, "training steps of each run (40)"),
        ("seed", 0, 0, "of parameters and data (0)"),
        ("budget", 1, 60, "seconds of search (60)"),
        ("timeout", 1, 900, "longest a run may take, in seconds (900)"),
    )
    for name, lowest, default, what in numbers:
        parser.add_argument(f"--{name}", type=_at_least(lowest), default=default, help=what)
    out = ROOT / "out" / "demo"
    parser.add_argument("--out", type=Path, default=out, help="folder, emptied first (out/demo)")
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
    return exit_status("demo", lambda: demo(args))


def exit_status(name: str, run: Callable[[], None]) -> int:
    """Of a script of that name that does ``run``: 1 where it failed, 130 where it was stopped, with one line."""
    try:
        run()
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: stopped; its processes have ended\n")
        return 130
    except (DemoError, DiscoError, OSError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    return 0


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
    log = args.out / "enacted.log"
    if plan.chosen != DEFAULT and "disco: enacts the plan" not in log.read_text(errors="replace"):
        raise DemoError(f"the last run did not execute the plan{log_tail(log)}")
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
        env |= {"DISCO_WHEN": "compile", "DISCO_EXPLAIN": "1"}
    return env | {"DISCO_BUDGET_S": str(budget_s), "DISCO_FINALISTS": str(FINALISTS)}


def command(phase: Phase, folder: Path, steps: int, seed: int) -> list[str]:
    """What starts a job.

    Raises:
        DemoError: there is no mpiexec.
    """
    script = [str(SCRIPT), "--distributed", "--steps", str(steps), "--seed", str(seed)]
    record = ["--json", str(folder / f"{phase.name}.json")]
    return [*mpiexec(PROCESSES), sys.executable, *script, *record]


def mpiexec(processes: int) -> list[str]:
    """What starts so many ranks.

    Raises:
        DemoError: there is no mpiexec.
    """
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("mpiexec", path=here)
    if found is None:
        raise DemoError("mpiexec is not on PATH; `make demo` installs it, and so does pip install '.[mpi]'")
    return [found, "-n", str(processes)]


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
        record = msgspec.json.decode((args.out / f"{phase.name}.json").read_bytes(), type=Run)
    except (OSError, msgspec.MsgspecError) as error:
        raise DemoError(f"{phase.title}: its record cannot be read: {error}{log_tail(log)}") from None
    return structs.replace(record, wall_s=wall_s)


@contextlib.contextmanager
def progress(heading: str) -> Iterator[Watch]:
    """Show that a phase runs, and on a terminal for how long and what it prints."""
    columns = (
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}", markup=False),
    )
    shown = sys.stdout.isatty()
    if not shown:
        print(f"{heading} ...", flush=True)
    with Progress(*columns, transient=True, disable=not shown) as bar:
        task = bar.add_task(heading, total=None, said="")
        yield lambda log: bar.update(task, said="".join(last_lines(log, 1)))


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
    runs = [f"{phase.name}.{ending}" for phase in PHASES for ending in ("json", "log")]
    for name in (*runs, "demo.json", "demo.md"):
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


# --- what the runs say ------------------------------------------------------------


def rows_of(plan: Plan) -> dict[str, Candidate | None]:
    """The table's rows: the baselines, then the plan; None where XLA's fusions and those buckets do not go together, or
    there was no time to compile it.

    "The plan" is the one that was chosen; where a baseline was the fastest of all, the search's own best.

    Raises:
        DemoError: the plan lacks XLA's default, or itself.
    """
    candidates = {one.name: one for one in plan.measured.candidates} if plan.measured else {}
    found = SEARCHED if plan.chosen in BASELINES else plan.chosen
    missing = [name for name in (DEFAULT, found) if name not in candidates]
    if missing:
        raise DemoError(f"the plan holds no measurement of {missing[0]!r}; it has: {', '.join(candidates)}")
    return {**{name: candidates.get(name) for name in BASELINES}, "the plan": candidates[found]}


def loss_difference(expected: Sequence[float], got: Sequence[float]) -> float:
    """Largest relative difference of two loss curves; infinite where they cannot be compared."""
    if len(expected) != len(got) or not all(map(math.isfinite, (*expected, *got))):
        return math.inf
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, got, strict=True)), default=0.0)


def result_of(plan: Plan, place: str, runs: dict[str, Run], load: float) -> Result:
    """Put plan and runs together; ``place`` is where the plan lies, as the user is to read it."""
    apart = max(loss_difference(runs["default"].losses, run.losses) for run in runs.values())
    return Result(plan, place, runs, apart, os.cpu_count(), round(load, 1))


# --- what the user reads ------------------------------------------------------------

HEADINGS = ("", "step time", "spread", "vs default", "predicted")


def cells(name: str, row: Candidate | None, default_ns: int) -> tuple[str, ...]:
    """A row of the table as text."""
    predicted = f"{row.predicted_ns / 1e6:.1f} ms" if row and row.predicted_ns else "-"
    if row is None or not row.median_ns:
        return (name, "left out" if row is None else "failed", "-", "-", predicted)
    ratio = f"{default_ns / row.median_ns:.2f}x" if default_ns else "-"
    return (name, f"{row.median_ns / 1e6:.1f} ms", f"± {row.spread_ns / 1e6:.1f} ms", ratio, predicted)


def all_reduce_text(line: Line) -> str:
    """One piece of T = C x + D in words."""
    bandwidth = f"{1 / line.ns_per_byte:.2f} GB/s" if line.ns_per_byte else "no limit seen"
    fixed = "latency" if line.offset_ns >= 0 else "offset"
    start = f" from {line.from_bytes} bytes" if line.from_bytes else ""
    return (
        f"all-reduce{start}: {fixed} {line.offset_ns / 1e6:.3f} ms, bandwidth {bandwidth} "
        f"(T = C x + D, C = {line.ns_per_byte:.3g} ns/byte)"
    )


def facts(result: Result) -> list[str]:
    """The lines below the table."""
    runs, plan, measured = result.runs, result.plan, result.plan.measured
    assert measured is not None
    before, after = runs["default"].median_step_s, runs["enacted"].median_step_s
    steps = f"{1e3 * before:.1f} ms per step with XLA's default, {1e3 * after:.1f} ms with the plan"
    searched = f"{1e3 * runs['search'].median_step_s:.1f} ms in the searching run, once it had searched"
    lines = [
        f"training runs, {len(runs['enacted'].losses)} steps each: {steps} ({before / after:.2f}x); "
        f"{searched}",
        f"loss curves: {result.loss_difference:.1e} apart at most, relative "
        f"({ALLOWED_LOSS_DIFFERENCE:.0e} is allowed)",
        *map(all_reduce_text, measured.all_reduce),
        f"search: profiled in {measured.profile_s:.0f} s, {counted(plan.search.evaluations, 'candidate')} simulated in "
        f"{measured.search_s:.0f} s, finalists compiled and measured in {measured.measure_s:.0f} s",
    ]
    if plan.chosen in BASELINES:
        lines.append(f'nothing searched was faster than "{plan.chosen}", which is what the plan holds')
    lines += [f"note: {note}" for note in plan.notes]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(plan.versions.items()))
    where = f"{counted(plan.target.process_count, 'CPU process')} on {counted(result.cores or 1, 'core')}"
    return [*lines, f"{where}, load {result.load} before; {versions}"]


def markdown(result: Result) -> str:
    """Table and facts for a README."""
    rows = rows_of(result.plan)
    default = rows[DEFAULT]
    assert default is not None
    table = [HEADINGS, ("---", *["---:"] * (len(HEADINGS) - 1))]
    table += [cells(name, row, default.median_ns) for name, row in rows.items()]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([*lines, "", *(f"- {printable(line)}" for line in facts(result))]) + "\n"


def what_next(result: Result) -> str:
    """The plan, and what to try with it."""
    disco = shlex.quote(from_here(Path(sys.executable).parent / "disco"))
    place, page = shlex.quote(result.place), shlex.quote(f"{result.place}/report.html")
    return f"plan: {result.place}\n\nnext:\n  {disco} inspect {place}\n  {disco} report {place} -o {page}"


if __name__ == "__main__":
    end_when_told()
    sys.exit(main())
