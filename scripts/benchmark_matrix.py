"""The whole evaluation, or as much of it as the time allows: many runs of the benchmarks, side by side where GPUs are.

    python scripts/benchmark_matrix.py configs/evaluation/h200.toml --gpus 2 --seconds 3000 --out DIR
    python scripts/benchmark_matrix.py configs/evaluation/h200.toml --only nvlink --seconds 570 --out DIR

The file lists runs, each one command: a benchmark script with its arguments, how many GPUs it has to itself, and
whether nothing may run beside it (links that go through the host's memory or network). They start in the order of the
file, as soon as enough GPUs are free; each gets its own GPUs and its share of the cores. What is not done when the time
is up, the same command takes up, since every benchmark resumes from its records in DIR.

Exit status: 0 every run ended with 0; 1 one did not (its log in DIR says why); 2 bad arguments; 3 the time was up.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

SCRIPTS = Path(__file__).resolve().parent
DONE, FAILED, BAD_ARGUMENTS, OUT_OF_TIME = 0, 1, 2, 3
GRACE_S = 10.0
"""What a benchmark that was told its time may take beyond it before it is killed."""
LEAST_S = 30.0
"""Nothing is begun with less time left."""


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One command of the matrix."""

    name: str
    arguments: tuple[str, ...]
    """Of the script, but for ``--seconds`` and ``--out``."""
    gpus: int = 2
    """How many it has to itself; also its ``--devices`` where the script is benchmark.py."""
    script: str = "benchmark.py"
    alone: bool = False
    """Nothing else runs meanwhile."""


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of runs, the first to start first."""

    runs: tuple[Run, ...]


@dataclass
class Machine:
    """What is free of one host."""

    gpus: tuple[int, ...]
    cores: tuple[int, ...]
    busy: dict[int, Run] = field(default_factory=dict)
    """By GPU."""

    def free(self) -> tuple[int, ...]:
        """GPUs nobody uses."""
        return tuple(gpu for gpu in self.gpus if gpu not in self.busy)

    def cores_of(self, gpus: Sequence[int]) -> set[int]:
        """The share of the cores that belongs to some GPUs."""
        share = max(1, len(self.cores) // len(self.gpus))
        begins = [share * self.gpus.index(gpu) % len(self.cores) for gpu in gpus]
        return {core for begin in begins for core in self.cores[begin : begin + share]}


def matrix_in(path: Path) -> Matrix:
    """What a file asks for.

    Raises:
        ValueError: it cannot be read, is no TOML or lists no proper runs; the message says what and where.
    """
    try:
        matrix = msgspec.convert(tomllib.loads(path.read_text()), Matrix)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error
    names = [run.name for run in matrix.runs]
    for run in matrix.runs:
        if names.count(run.name) > 1:
            raise ValueError(f"{path}: two runs are called {run.name!r}")
        if run.gpus < 1:
            raise ValueError(f"{path}: {run.name}: expected gpus of at least 1, came {run.gpus}")
        if not (SCRIPTS / run.script).is_file():
            raise ValueError(f"{path}: {run.name}: there is no scripts/{run.script}")
    return matrix


def next_run(waiting: Sequence[Run], machine: Machine) -> tuple[Run, tuple[int, ...]] | None:
    """The first run that may start now, and its GPUs. A smaller one may overtake one for which too few GPUs are free;
    none overtakes one that must be alone, which would wait for ever."""
    free = machine.free()
    if any(other.alone for other in machine.busy.values()):
        return None
    for run in waiting:
        if run.alone and machine.busy:
            return None
        if run.gpus <= len(free):
            return run, free[: run.gpus]
    return None


def command_of(run: Run, seconds: float, out: Path) -> list[str]:
    """What is executed."""
    command = [sys.executable, str(SCRIPTS / run.script), *run.arguments, "--out", str(out)]
    if run.script == "benchmark.py":
        command += ["--devices", str(run.gpus), "--seconds", f"{seconds:.0f}"]
    return command


@dataclass
class Running:
    """A run under way."""

    run: Run
    gpus: tuple[int, ...]
    process: subprocess.Popen[bytes]
    began: float


def run_all(
    matrix: Matrix, machine: Machine, out: Path, left_s: Callable[[], float], say: Callable[[str], None]
) -> int:
    """Run everything that fits the machine; the exit status of the command."""
    waiting = []
    for run in matrix.runs:
        if run.gpus <= len(machine.gpus):
            waiting.append(run)
        else:
            say(f"{run.name}: left out, needs {run.gpus} GPUs, the machine has {len(machine.gpus)}")
    under_way: list[Running] = []
    failed = False
    while (waiting and left_s() > LEAST_S) or under_way:
        while left_s() > LEAST_S and (found := next_run(waiting, machine)):
            run, gpus = found
            waiting.remove(run)
            under_way.append(_start(run, gpus, machine, out, left_s()))
            say(f"{run.name}: began on GPU {', '.join(map(str, gpus))}")
        if left_s() < -GRACE_S:
            for one in under_way:
                _kill(one.process)
        for one in [one for one in under_way if one.process.poll() is not None]:
            under_way.remove(one)
            for gpu in one.gpus:
                del machine.busy[gpu]
            _kill(one.process)  # ranks that outlive their launcher hold the GPU
            status = one.process.returncode
            if status == OUT_OF_TIME or (status == -signal.SIGKILL and left_s() < -GRACE_S):
                waiting.append(one.run)
            elif status != DONE:
                failed = True
            took_s = time.monotonic() - one.began
            say(f"{one.run.name}: ended with {status} after {took_s:.0f} s, {left_s():.0f} s are left")
        time.sleep(0.2)
    if waiting:
        say(f"the time is up; run again to go on with {', '.join(run.name for run in waiting)}")
    return FAILED if failed else OUT_OF_TIME if waiting else DONE


def _start(run: Run, gpus: tuple[int, ...], machine: Machine, out: Path, seconds: float) -> Running:
    for gpu in gpus:
        machine.busy[gpu] = run
    cores = set(machine.cores) if run.alone else machine.cores_of(gpus)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    with (out / f"{run.name}.log").open("ab") as log:
        process = subprocess.Popen(
            command_of(run, seconds, out), env=environment, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    os.sched_setaffinity(process.pid, cores)
    return Running(run, gpus, process, time.monotonic())


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started in its own session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 where it is wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("matrix", type=Path, metavar="FILE", help="such as configs/evaluation/h200.toml")
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="of this machine (default 2)")
    parser.add_argument("--seconds", type=float, default=3000, help="time for everything (default 3000)")
    parser.add_argument("--only", default="", metavar="WORD", help="runs with this word in their name")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records and logs")
    args = parser.parse_args(argv)
    if not args.seconds > 0 or args.gpus < 1:
        parser.error("expected --seconds above 0 and --gpus of at least 1")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is not a directory")
    return args


def main() -> int:
    """Run the matrix."""
    started = time.monotonic()
    args = arguments()
    try:
        matrix = matrix_in(args.matrix)
    except ValueError as error:
        print(f"benchmark_matrix.py: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    chosen = Matrix(tuple(run for run in matrix.runs if args.only in run.name))
    if not chosen.runs:
        names = ", ".join(run.name for run in matrix.runs)
        print(
            f"benchmark_matrix.py: no run has {args.only!r} in its name; there are {names}", file=sys.stderr
        )
        return BAD_ARGUMENTS
    args.out.mkdir(parents=True, exist_ok=True)
    machine = Machine(tuple(range(args.gpus)), tuple(sorted(os.sched_getaffinity(0))))

    def left_s() -> float:
        return args.seconds - (time.monotonic() - started)

    return run_all(chosen, machine, args.out, left_s, lambda text: print(text, flush=True))


if __name__ == "__main__":
    raise SystemExit(main())
