"""Measure random fused ops of real training steps: the data that the estimator learns from.

    JAX_PLATFORMS=cpu python scripts/sample_fused_ops.py configs/estimator/samples_cpu.toml -o cpu.sqlite
    python scripts/sample_fused_ops.py configs/estimator/samples_h200.toml -o h200.sqlite --seconds 540

Training steps are captured as XLA would compile them here, random legal fused ops are drawn from them (DisCo,
section 5.2), packed by the hundred into one module and timed from traces. Run it again with the same file to
go on where it stopped; a pack that kills the process is halved until the culprit is known.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draw_fused_ops import Config, prepare, read_config, say  # first: it finds the packages

import msgspec  # isort: skip
import numpy as np  # isort: skip

from disco_hlo.estimator.dataset import Dataset, Measurement, Sample, Source
from disco_hlo.profiler.profile import host_cpu_kind

from disco_hlo.errors import DiscoError, IllegalStrategyError, ProfileError, UnsupportedError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan.pack import PackedKernel
from disco_hlo.plugin.packs import CompiledPack, Inputs, PackCompiler, load_per_core

CRASHES_ALLOWED = 40
_GRACE_SECONDS = 60
"""How long the child may go on after its time before it is killed."""
_REFUSALS = (IllegalStrategyError, UnsupportedError, ProfileError, RuntimeError, ValueError)


@dataclass
class Measuring:
    """One process's work on the file."""

    config: Config
    data: Dataset
    deadline: float

    def __post_init__(self) -> None:
        self.sources: dict[int, CanonicalModule] = {}
        self.stored: dict[int, Source] = {source.id: source for source in self.data.sources()}
        self.inputs = Inputs(self.config.measure.input_bytes)
        self.compiler = PackCompiler(_cores(), self.config.measure.reuse_after_bytes)
        self.longest_s = 0.0
        self.done = 0
        self.total = 0

    def run(self) -> bool:
        """Measure all that is pending; False where time ran out before."""
        with self.compiler:
            return self.measure_all(self.killed(), 0) and self.rounds()

    def killed(self) -> Iterator[list[Sample]]:
        """The halves of what was begun and never ended, since it killed the process."""
        for samples in self.data.interrupted():
            half = len(samples) // 2
            if half:
                yield samples[:half]
                yield samples[half:]
            else:
                self.data.fail(samples[0], "it killed the process while it was compiled or run")

    def rounds(self) -> bool:
        """Every sample once, then as many of them again as the configuration says."""
        rounds = self.config.measure.rounds
        for number in range(1, math.ceil(rounds) + 1):
            share = rounds - number + 1
            chosen = [s for s in self.data.pending(number) if random.Random(s.key).random() < share]
            self.total = self.done + len(chosen)
            threads = self.config.measure.compile_threads
            if not self.measure_all(self.packs(chosen, number), threads):
                return False
        return True

    def packs(self, samples: Sequence[Sample], number: int) -> Iterator[list[Sample]]:
        """Shuffled, differently in each round, into packs of limited count and bytes."""
        limits = self.config.measure

        def place(sample: Sample) -> tuple[int, float]:
            first = sample.source if limits.by_model else 0
            return first, random.Random(f"{self.config.seed} {number} {sample.key}").random()

        current: list[Sample] = []
        held_bytes = 0
        for sample in sorted(samples, key=place):
            size_bytes = self.kernel(sample).moved_bytes
            is_full = len(current) == limits.pack_samples or held_bytes + size_bytes > limits.pack_bytes
            if current and (is_full or (limits.by_model and current[-1].source != sample.source)):
                yield current
                current, held_bytes = [], 0
            current.append(sample)
            held_bytes += size_bytes
        if current:
            yield current

    def kernel(self, sample: Sample) -> PackedKernel:
        """The sample as a pack wants it."""
        if sample.source not in self.sources:
            self.sources[sample.source] = canonicalize(self.data.module(self.stored[sample.source]))
        op = sample.op
        return PackedKernel(self.sources[sample.source], op.members, op.results, op.kind, op.config)

    def measure_all(self, packs: Iterator[list[Sample]], threads: int) -> bool:
        """Measure packs in order, while ``threads`` compile the next ones; False where time ran out."""
        waiting: deque[tuple[list[Sample], int, Callable[[], CompiledPack]]] = deque()
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            while self.has_time():
                while len(waiting) <= threads and (samples := next(packs, None)) is not None:
                    waiting.append(
                        (samples, self.data.begin(samples), self.compiling(samples, pool, threads))
                    )
                if not waiting:
                    return True
                self.measure(*waiting.popleft())
            for _, number, _ in waiting:
                self.data.forget(number)
            pool.shutdown(wait=False, cancel_futures=True)
        return False

    def has_time(self) -> bool:
        """Whether another pack may be begun."""
        return time.time() + 1.5 * self.longest_s < self.deadline

    def compiling(
        self, samples: Sequence[Sample], pool: ThreadPoolExecutor, threads: int
    ) -> Callable[[], CompiledPack]:
        """Something that returns the compiled pack: begun at once where there are threads for it."""
        kernels = [self.kernel(sample) for sample in samples]
        if threads:
            return pool.submit(self.compiler.compile, kernels).result
        return lambda: self.compiler.compile(kernels)

    def measure(self, samples: list[Sample], number: int, compiled: Callable[[], CompiledPack]) -> None:
        """Measure one pack; in halves where XLA refuses it."""
        started = time.time()
        limits = self.config.measure
        try:
            times = compiled().measure(self.inputs, limits.sessions, limits.repeats, limits.pack_seconds)
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
        spent = time.time() - started
        self.longest_s = max(self.longest_s, spent)
        middle = np.median([m.low_ns for m in measured.values()]) / 1e3 if measured else 0.0
        say(f"{self.done}/{self.total}: {len(measured)} in {spent:.1f} s, median {middle:.1f} us")

    def refused(self, samples: list[Sample], number: int, error: Exception) -> None:
        """Note why a single sample cannot be measured; try halves of more."""
        self.data.forget(number)
        reason = " ".join(str(error).split())
        say(f"pack {number} of {len(samples)} failed: {type(error).__name__}: {reason[:300]}")
        half = len(samples) // 2
        if not half:
            self.data.fail(samples[0], f"{type(error).__name__}: {reason}")
            self.done += 1
        elif not self.measure_all(iter((samples[:half], samples[half:])), 0):
            say("out of time: the rest of this pack is left for the next run")


def summary(times: Any, load: float) -> Measurement:
    """A row of times as it is stored."""
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75))
    return Measurement(round(low), round(middle), round((high - low) / 2), len(times), round(load, 2))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        "parallelism": _cores() if on_cpu else 1,
        "config": msgspec.to_builtins(config),
    }


def work(args: argparse.Namespace, config: Config) -> int:
    """The child: capture, draw, measure. 0 when all is measured, 3 when time ran out."""
    with Dataset(args.out) as data:
        data.describe(facts(config))
        prepare(config, data, args.models, args.until)
        finished = Measuring(config, data, args.until).run()
        totals = f"{len(data.measurements())} of {len(data.samples())} samples measured, {len(data.failures())} failed"
    say(totals if finished else f"out of time: {totals}; run again to go on")
    return 0 if finished else 3


def parent(args: argparse.Namespace) -> int:
    """Run the child until it ends by itself, again where a kernel killed it."""
    until = time.time() + args.seconds
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--until", str(until)]
    # Of the steps only ops are wanted that no autotuning changes.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ, "XLA_FLAGS": flags}
    environment.pop("ENABLE_SEARCH", None)
    for crash in range(1, CRASHES_ALLOWED + 1):
        with subprocess.Popen(command, env=environment) as child:
            try:
                code = child.wait(timeout=max(1.0, until + _GRACE_SECONDS - time.time()))
            except subprocess.TimeoutExpired:
                child.kill()
                print("sample_fused_ops.py: killed a measurement that did not end", file=sys.stderr)
                return 3
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)
                return 130
        if code >= 0:
            return code
        say(f"the process died of {signal.Signals(-code).name} ({crash} of {CRASHES_ALLOWED} allowed)")
    print("sample_fused_ops.py: too many crashes", file=sys.stderr)
    return 1


def main() -> int:
    """Parse, check, and run the child or the parent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="for instance configs/estimator/samples_cpu.toml")
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FILE", help="data set, made or continued"
    )
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="stop before this much time (default 540)"
    )
    parser.add_argument("--models", nargs="*", default=[], metavar="MODEL", help="only steps of these models")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        config = read_config(args.config)
        if not args.out.absolute().parent.is_dir():
            raise ProfileError(f"the directory {args.out.absolute().parent} does not exist")
        return parent(args) if args.until is None else work(args, config)
    except (DiscoError, OSError, ValueError) as error:
        print(f"sample_fused_ops.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
