"""One measuring process of scripts/sample_fused_ops.py: claims samples, packs, compiles and times them.

Several of these share one file and one device: each compiles on threads while another measures.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draw_fused_ops import Config, say  # first: it finds the packages

import numpy as np  # isort: skip

from disco_hlo.cores import own_cores
from disco_hlo.errors import IllegalStrategyError, ProfileError, UnsupportedError
from disco_hlo.estimator.dataset import Dataset, Measurement, Sample
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan.pack import PackedKernel
from disco_hlo.plugin.measuring.packs import CompiledPack, Inputs, PackCompiler, load_per_core

_REFUSALS = (IllegalStrategyError, UnsupportedError, ProfileError, RuntimeError, ValueError)
_BROKEN_DEVICE = ("ILLEGAL_ADDRESS", "illegal memory access", "LAUNCH_FAILED", "unspecified launch failure")
"""What CUDA says when nothing works any more in this process."""

Pending = tuple[list[Sample], int, Callable[[], CompiledPack]]


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
        """Measure all that is pending; False where time ran out before."""
        with self.compiler:
            return self.measure_all(self.killed(), 0) and self.rounds()

    def killed(self) -> Iterator[tuple[int, list[Sample]]]:
        """The halves of what was begun and never ended, since it killed the process."""
        for samples in self.data.interrupted(self.worker, self.workers):
            half = len(samples) // 2
            if not half:
                self.data.fail(samples[0], "it killed the process while it was compiled or run")
                continue
            for part in (samples[:half], samples[half:]):
                yield self.data.begin(part, self.worker), part

    def rounds(self) -> bool:
        """Every sample once, then as many of them again as the configuration says."""
        limits = self.config.measure
        if limits.by_model:
            for source in self.sources:
                if source % self.workers == self.worker:
                    self.module(source)
        return all(
            self.measure_all(self.claimed(number, limits.rounds - number + 1), limits.compile_threads)
            for number in range(1, math.ceil(limits.rounds) + 1)
        )

    # What comes next ------------------------------------------------------------------------------

    def claimed(self, number: int, share: float) -> Iterator[tuple[int, list[Sample]]]:
        """Packs of this round until no sample of its ``share`` is left.

        Where only a part is measured again, that happens in between: a run cut short must show the noise, too.
        """
        again = share - 1 if 1 < share < 2 else 0.0
        for count in itertools.count(1):
            pack, ids = 0, []
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
        """The canonical module of a step, by its id."""
        if source not in self.modules:
            self.modules[source] = canonicalize(self.data.module(self.sources[source]))
        return self.modules[source]

    # Measuring ------------------------------------------------------------------------------------

    def measure_all(self, packs: Iterator[tuple[int, list[Sample]]], threads: int) -> bool:
        """Measure packs in order, while ``threads`` compile the next ones; False where time ran out."""
        waiting: deque[Pending] = deque()
        pool = ThreadPoolExecutor(max(threads, 1))
        try:
            while self.has_time():
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

    def has_time(self) -> bool:
        """Whether another pack may be begun."""
        return time.time() + 1.5 * self.longest_s < self.deadline

    def compiling(
        self, samples: Sequence[Sample], pool: ThreadPoolExecutor, threads: int
    ) -> Callable[[], CompiledPack]:
        """Something that returns the compiled pack: begun at once where there are threads for it."""
        kernels = [self.kernel(sample) for sample in samples]
        if not threads:
            return lambda: self.compiler.compile(kernels)
        future = pool.submit(self.compiler.compile, kernels)
        return lambda: self.awaited(future)

    def awaited(self, future: Future[CompiledPack]) -> CompiledPack:
        """The result, unless the deadline comes first."""
        try:
            return future.result(timeout=max(0.0, self.deadline - time.time()))
        except TimeoutError:
            raise OutOfTimeError from None

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
