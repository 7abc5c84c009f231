"""Measure random fused ops of real training steps: the data that the estimator learns from.

    JAX_PLATFORMS=cpu python scripts/sample_fused_ops.py configs/estimator/samples_cpu.toml -o cpu.sqlite
    python scripts/sample_fused_ops.py configs/estimator/samples_h200.toml -o h200.sqlite --seconds 400

Training steps are captured as XLA would compile them here, random legal fused ops are drawn from them (DisCo,
section 5.2), packed by the hundred into one module and timed from traces. Run it again with the same file to
go on where it stopped; a pack that kills its process is halved until the culprit is known. Whatever ends the
run, the file holds all packs measured by then, of all models alike.

Several processes measure into one file on one device: each compiles on threads while another measures.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from draw_fused_ops import Config, mark, prepare, read_config, say
from pack import PackedKernel
from packs import CompiledPack, Inputs, PackCompiler, load_per_core

from disco_hlo.cores import own_cores
from disco_hlo.errors import DiscoError, IllegalStrategyError, ProfileError, UnsupportedError
from disco_hlo.estimator.dataset import Dataset, Measurement, Sample
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.printable import counted
from disco_hlo.profiler.profile import host_cpu_kind

CRASHES_ALLOWED = 40
_OUT_OF_TIME = 3
_DRAWING_SHARE = 0.35
"""Of the time; what is drawn by then is measured."""
_GRACE_SECONDS = 8
"""How long children may go on after their time before they are killed."""
_REFUSALS = (IllegalStrategyError, UnsupportedError, ProfileError, RuntimeError, ValueError)
_BROKEN_DEVICE = ("ILLEGAL_ADDRESS", "illegal memory access", "LAUNCH_FAILED", "unspecified launch failure")
"""What CUDA says when nothing works any more in this process."""
Pending = tuple[list[Sample], int, Callable[[], CompiledPack]]


def main() -> int:
    """Parse, check, and run the parent or a child."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("config", type=Path, help="for instance configs/estimator/samples_cpu.toml")
    out = "data set, made or continued"
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help=out)
    time_ = "stop within this much time (default 540)"
    parser.add_argument("--seconds", type=float, default=540.0, help=time_)
    turn = "from 2 on searches choose again, by the weights as they are now"
    parser.add_argument("--round", type=int, choices=range(1, 100), default=1, metavar="N", help=turn)
    only = "measure nothing, and draw only from steps that are files: that needs no device"
    parser.add_argument("--until-drawn", action="store_true", help=only)
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


def parent(args: argparse.Namespace, config: Config) -> int:
    """Draw what the file lacks, measure what is pending, and say what came of it."""
    crew = Crew(time.time() + args.seconds)
    with Dataset(args.out) as data:
        there = data.about()
    missing = [
        number
        for number, step in enumerate(config.steps)
        if mark("drawn", step.name, args.round) not in there
        and (args.round == 1 or step.searches)
        and (step.file or not args.until_drawn)
    ]
    drawing_until = time.time() + (1.0 if args.until_drawn else _DRAWING_SHARE) * args.seconds
    drawn = crew.run("--draw", missing, len(own_cores()), drawing_until)
    say(f"{drawn.count(0)} of {counted(len(missing), 'missing step')} drawn from")
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
        say(f"{model}: {done} of {counted(len(own), 'sample')} measured, {lost} failed")


# --- children: one captures a step and draws from it, several measure -----------------------------


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
                    if code < 0 and time.time() < until and self.may_start_again(f"{task} {number}", code):
                        waiting.append(number)
                    else:
                        codes.append(_OUT_OF_TIME if code < 0 and time.time() >= until else code)
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


class OutOfTimeError(Exception):
    """The deadline came while a pack was compiled."""


@dataclass
class Measuring:
    """The work of process ``worker`` of ``workers`` on the file."""

    config: Config
    data: Dataset
    deadline: float
    worker: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        self.modules: dict[int, CanonicalModule] = {}
        self.sources = {source.id: source for source in self.data.sources()}
        self.samples = {sample.id: sample for sample in self.data.samples()}
        self.place = {id_: random.Random(sample.key).random() for id_, sample in self.samples.items()}
        self.total = Counter(sample.source for sample in self.samples.values())
        limits = self.config.measure
        self.inputs = Inputs(limits.input_bytes)
        self.compiler = PackCompiler(len(own_cores()), limits.reuse_after_bytes, limits.held_bytes or None)
        self.longest_s = 0.0
        self.done = 0

    def run(self) -> bool:
        """Measure all that is pending: every sample once, then as many of them again as the configuration says. False
        where time ran out before."""
        limits = self.config.measure
        with self.compiler:
            if not self.measure_all(self.killed(), 0):
                return False
            for source in self.sources if limits.by_model else ():
                if source % self.workers == self.worker:
                    self.module(source)
            return all(
                self.measure_all(self.claimed(number, limits.rounds - number + 1), limits.compile_threads)
                for number in range(1, math.ceil(limits.rounds) + 1)
            )

    def killed(self) -> Iterator[tuple[int, list[Sample]]]:
        """The halves of what was begun and never ended, since it killed the process."""
        for samples in self.data.interrupted(self.worker, self.workers):
            half = len(samples) // 2
            if not half:
                self.data.fail(samples[0], "it killed the process while it was compiled or run")
                continue
            for part in (samples[:half], samples[half:]):
                yield self.data.begin(part, self.worker), part

    # What comes next ------------------------------------------------------------------------------

    def claimed(self, number: int, share: float) -> Iterator[tuple[int, list[Sample]]]:
        """Packs of this round until no sample of its ``share`` is left.

        Where only a part is measured again, that happens in between: a run cut short must show the noise, too.
        """
        again = share - 1 if 1 < share < 2 else 0.0
        for count in itertools.count(1):
            pack, ids = 0, list[int]()
            if again and count % (round(1 / again) + 1) == 0:
                pack, ids = self.claim(number + 1, again, number)
            if not ids:
                pack, ids = self.claim(number, share, 0)
            if not ids:
                return
            yield pack, [self.samples[id_] for id_ in ids]

    def claim(self, times: int, share: float, at_least: int) -> tuple[int, list[int]]:
        """The next pack of samples measured fewer than ``times`` times."""
        return self.data.claim(times, lambda ids: self.chosen(ids, times, share), self.worker, at_least)

    def chosen(self, pending: Sequence[int], number: int, share: float) -> list[int]:
        """A pack of limited count and bytes, shuffled, differently in each round."""
        limits = self.config.measure
        wanted = [id_ for id_ in pending if self.place.get(id_, math.inf) < share]
        if limits.by_model and wanted:
            source = self.next_source(wanted)
            wanted = [id_ for id_ in wanted if self.samples[id_].source == source]
        random.Random(f"{self.config.seed} {number}").shuffle(wanted)
        size_bytes = 0
        taken: list[int] = []
        for id_ in wanted[: limits.pack_samples]:
            size_bytes += self.kernel(self.samples[id_]).moved_bytes
            if taken and size_bytes > limits.pack_bytes:
                break
            taken.append(id_)
        return taken

    def next_source(self, pending: Sequence[int]) -> int:
        """The step that is furthest behind; of those that fall to this process, while these last."""
        left = Counter(self.samples[id_].source for id_ in pending)
        own = [source for source in left if source % self.workers == self.worker]
        return min(own or left, key=lambda source: (-left[source] / self.total[source], source))

    def kernel(self, sample: Sample) -> PackedKernel:
        """The sample as a pack wants it."""
        op = sample.op
        return PackedKernel(self.module(sample.source), op.members, op.results, op.kind, op.config)

    def module(self, source: int) -> CanonicalModule:
        """The entry or region of a step, by its id."""
        if source not in self.modules:
            self.modules[source] = self.data.computation(self.sources[source])
        return self.modules[source]

    # Measuring ------------------------------------------------------------------------------------

    def measure_all(self, packs: Iterator[tuple[int, list[Sample]]], threads: int) -> bool:
        """Measure packs in order, while ``threads`` compile the next ones; False where time ran out."""
        waiting: deque[Pending] = deque()
        pool = ThreadPoolExecutor(max(threads, 1))
        try:
            while time.time() + 1.5 * self.longest_s < self.deadline:
                while len(waiting) <= threads and (claimed := next(packs, None)) is not None:
                    pack, samples = claimed
                    waiting.append((samples, pack, self.compiling(samples, pool, threads)))
                if not waiting:
                    return True
                self.measure(*waiting[0])
                waiting.popleft()
        except OutOfTimeError:
            pass
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for _, pack, _ in waiting:
            self.data.forget(pack)
        return False

    def compiling(
        self, samples: Sequence[Sample], pool: ThreadPoolExecutor, threads: int
    ) -> Callable[[], CompiledPack]:
        """Something that returns the compiled pack: begun at once where there are threads for it."""
        kernels = [self.kernel(sample) for sample in samples]
        if not threads:
            return lambda: self.compiler.compile(kernels)
        future = pool.submit(self.compiler.compile, kernels)

        def awaited() -> CompiledPack:
            try:
                return future.result(timeout=max(0.0, self.deadline - time.time()))
            except TimeoutError:
                raise OutOfTimeError from None

        return awaited

    def measure(self, samples: list[Sample], number: int, compiled: Callable[[], CompiledPack]) -> None:
        """Measure one pack; in halves where XLA refuses it."""
        limits = self.config.measure
        try:
            started = time.time()
            ready = compiled()
            waited = time.time() - started
            times = ready.measure(
                self.inputs, limits.sessions, limits.repeats, limits.pack_seconds, self.alone()
            )
        except _REFUSALS as error:
            self.refused(samples, number, error)
            return
        load = load_per_core()
        measured = {s.id: summary(row, load) for s, row in zip(samples, times, strict=True) if row.all()}
        for sample in samples:
            if sample.id not in measured:
                self.data.fail(sample, "the trace shows no execution of it")
        self.data.record(number, measured)
        self.done += len(samples)
        spent = time.time() - started - waited
        self.longest_s = max(self.longest_s, spent)
        name = self.sources[samples[0].source].name if limits.by_model else "all steps"
        self.say(
            f"pack {number}, {self.done} done: {len(measured)} of {name}, waited {waited:.1f} s, measured {spent:.1f} s"
        )

    def refused(self, samples: list[Sample], number: int, error: Exception) -> None:
        """Note why a single sample cannot be measured; try halves of more."""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.say(f"pack {number} of {len(samples)} failed: {reason[:300]}")
        if any(sign in reason for sign in _BROKEN_DEVICE):
            os.kill(os.getpid(), signal.SIGKILL)  # as if it had killed the process: begun, never ended
        self.data.forget(number)
        half = len(samples) // 2
        if not half:
            self.data.fail(samples[0], reason)
            self.done += 1
            return
        halves = ((self.data.begin(part, self.worker), part) for part in (samples[:half], samples[half:]))
        if not self.measure_all(halves, 0):
            raise OutOfTimeError

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other process that measures into this file uses the device."""
        with Path(f"{self.data.path}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def say(self, text: str) -> None:
        """One line of progress, with the process that writes it."""
        say(f"{self.worker}: {text}" if self.workers > 1 else text)


def summary(times: Any, load: float) -> Measurement:
    """A row of times as it is stored."""
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75))
    return Measurement(round(low), round(middle), round((high - low) / 2), len(times), round(load, 2))


if __name__ == "__main__":
    raise SystemExit(main())
