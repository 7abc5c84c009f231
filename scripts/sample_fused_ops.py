"""Measure random fused ops of real training steps: the data that the estimator learns from.

    JAX_PLATFORMS=cpu python scripts/sample_fused_ops.py configs/estimator/samples_cpu.toml -o cpu.sqlite
    python scripts/sample_fused_ops.py configs/estimator/samples_h200.toml -o h200.sqlite --seconds 400

Training steps are captured as XLA would compile them here, random legal fused ops are drawn from them (DisCo,
section 5.2), packed by the hundred into one module and timed from traces. Run it again with the same file to
go on where it stopped; a pack that kills its process is halved until the culprit is known. Whatever ends the
run, the file holds all packs measured by then, of all models alike.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draw_fused_ops import Config, drawn_mark, prepare, read_config, say  # first: it finds the packages

import msgspec  # isort: skip

from measure_fused_ops import Measuring

from disco_hlo.cores import own_cores
from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.estimator.dataset import Dataset
from disco_hlo.profiler.profile import host_cpu_kind

CRASHES_ALLOWED = 40
_OUT_OF_TIME = 3
_DRAWING_SHARE = 0.35
"""Of the time; what is drawn by then is measured."""
_GRACE_SECONDS = 8
"""How long children may go on after their time before they are killed."""


def facts(config: Config) -> dict[str, Any]:
    """What a time in the file depends on."""
    import jax

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    return {
        "backend": "cpu" if on_cpu else "gpu",
        "device_kind": host_cpu_kind() if on_cpu else str(device.device_kind),
        "driver": "" if on_cpu else " ".join(str(device.client.platform_version).split()),
        "jax": jax.__version__,
        "parallelism": len(own_cores()) if on_cpu else 1,
        "config": msgspec.to_builtins(config),
    }


# --- children: one captures a step and draws from it, several measure --------------------------------


def child(args: argparse.Namespace, config: Config) -> int:
    """The work of one child process; 3 when time ran out."""
    with Dataset(args.out) as data:
        step = None if args.draw is None else config.steps[args.draw]
        if step is None or not step.file:  # no device has a part in what is drawn from a file
            data.describe(facts(config))
        if step is not None:
            prepare(config, data, step, args.round)
            return 0
        measuring = Measuring(config, data, args.until, args.measure, config.measure.processes)
        return 0 if measuring.run() else _OUT_OF_TIME


# --- the parent -----------------------------------------------------------------------------------


class Crew:
    """Child processes of one parent, and the time they have."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--until", str(until)]
        # Of the steps only ops are wanted that no autotuning changes.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
        self.environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "XLA_FLAGS": flags}
        self.environment.pop("ENABLE_SEARCH", None)
        self.crashes = 0

    def run(self, task: str, numbers: Iterable[int], at_once: int, until: float) -> list[int]:
        """Exit codes of the children for this task, ``at_once`` at a time; those that crash start again."""
        waiting, codes = list(numbers), []
        # Those that draw compile and run nothing: XLA shall see the whole device.
        share = 0.9 if task == "--draw" else 0.9 / len(waiting)
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}", **self.environment}
        running: dict[subprocess.Popen[bytes], int] = {}
        try:
            while waiting or running:
                if time.time() >= until:
                    codes += [_OUT_OF_TIME] * len(waiting)
                    waiting.clear()
                while waiting and len(running) < at_once:
                    number = waiting.pop(0)
                    command = [*self.command, task, str(number)]
                    running[subprocess.Popen(command, env=environment)] = number
                for process in [p for p in running if has_ended(p, until + _GRACE_SECONDS)]:
                    number, code = running.pop(process), process.returncode
                    if code < 0 and time.time() >= until:
                        codes.append(_OUT_OF_TIME)
                    elif code < 0 and self.may_start_again(f"{task} {number}", code):
                        waiting.append(number)
                    else:
                        codes.append(code)
                time.sleep(0.05)
        finally:
            for process in running:
                process.send_signal(signal.SIGINT)
        return codes

    def may_start_again(self, job: str, code: int) -> bool:
        """Count a crash; False after too many."""
        self.crashes += 1
        name = signal.Signals(-code).name
        say(f"process {job} died of {name} ({self.crashes} of {CRASHES_ALLOWED} allowed)")
        return self.crashes <= CRASHES_ALLOWED


def has_ended(process: subprocess.Popen[bytes], latest: float) -> bool:
    """Whether a child ended, by itself or because its time is long over."""
    if process.poll() is None and time.time() > latest:
        process.kill()
        process.wait()
        say(f"killed process {process.pid}, which did not end")
    return process.returncode is not None


def parent(args: argparse.Namespace, config: Config) -> int:
    """Draw what the file lacks, measure what is pending, and say what came of it."""
    crew = Crew(time.time() + args.seconds)
    with Dataset(args.out) as data:
        there = data.about()
    missing = [
        number
        for number, step in enumerate(config.steps)
        if drawn_mark(step, args.round) not in there
        and (args.round == 1 or step.searches)
        and (step.file or not args.until_drawn)
    ]
    drawing_until = time.time() + (1.0 if args.until_drawn else _DRAWING_SHARE) * args.seconds
    drawn = crew.run("--draw", missing, len(own_cores()), drawing_until)
    say(f"{drawn.count(0)} of {len(missing)} missing steps drawn from")
    refused = [code for code in drawn if code not in (0, _OUT_OF_TIME)]
    if refused and len(refused) == len(missing):
        return max(refused)
    if args.until_drawn:
        return 1 if refused else _OUT_OF_TIME if any(drawn) else 0
    processes = range(config.measure.processes)
    codes = crew.run("--measure", processes, len(processes), crew.until)
    finished = not any(codes) and not any(drawn)
    with Dataset(args.out) as data:
        print_totals(data)
    if refused or any(code not in (0, _OUT_OF_TIME) for code in codes):
        return 1
    if not finished:
        say("out of time: run again to go on")
    return 0 if finished else _OUT_OF_TIME


def print_totals(data: Dataset) -> None:
    """How much of every model is measured."""
    sources = {source.id: source.model for source in data.sources()}
    measured, failed = data.measurements(), data.failures()
    samples = data.samples()
    for model in sorted(set(sources.values())):
        own = [sample.id for sample in samples if sources[sample.source] == model]
        done, lost = sum(id_ in measured for id_ in own), sum(id_ in failed for id_ in own)
        say(f"{model}: {done} of {len(own)} samples measured, {lost} failed")


def main() -> int:
    """Parse, check, and run the parent or a child."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="for instance configs/estimator/samples_cpu.toml")
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FILE", help="data set, made or continued"
    )
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="stop within this much time (default 540)"
    )
    parser.add_argument(
        "--round",
        type=int,
        choices=range(1, 100),
        default=1,
        metavar="N",
        help="from 2 on searches choose again, by the weights as they are now",
    )
    parser.add_argument(
        "--until-drawn",
        action="store_true",
        help="measure nothing, and draw only from steps that are files: that needs no device",
    )
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        config = read_config(args.config)
        if not args.out.absolute().parent.is_dir():
            raise ProfileError(f"the directory {args.out.absolute().parent} does not exist")
        if not args.seconds >= 0:  # nor is it where it is no number
            raise ProfileError(f"--seconds {args.seconds:g}: expected a number from 0 on")
        if args.until is None:
            return parent(args, config)
        code = child(args, config)
    except (DiscoError, OSError, ValueError) as error:
        print(f"sample_fused_ops.py: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    if args.until is not None:
        # A thread may still be compiling what nobody waits for any more.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
