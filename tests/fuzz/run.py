"""A run of the fuzzer: programs by seed to as many workers as asked for, counts, and what was found."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import findings
from tests.fuzz.findings import Finding
from tests.fuzz.strategies import Wanted, wanted
from tests.fuzz.tally import FINDINGS, Tally
from tests.fuzz.worker import Worker

_PROGRESS_S = 5.0
_SHRINK_S = 120.0
"""The longest that one finding is made smaller."""
_WARM_LIMIT_S = 600.0


@dataclass(frozen=True)
class Settings:
    """How far to go, and on what."""

    seed: int = 0
    """Of the first program; each has the next number."""
    pairs: int | None = None
    programs: int | None = None
    seconds: float | None = None
    jobs: int = 1
    platform: str = "cpu"
    devices: int = 4
    """The most that a program runs on."""
    strategies: int = 12
    """For each program."""
    defaults: bool = False
    """Try no strategy: only whether the last gate accepts XLA's default."""
    searched: bool = True
    """Whether to try states of the search, which numba has to compile first."""
    keep: int = 8
    """So many findings are shrunk and saved."""
    folder: Path = findings.FOUND
    pair_limit_s: float = 60.0
    regions: bool = False
    """Leave out programs without loops and branches that can be written anew."""


@dataclass
class Run:
    """One run; ``go`` returns when it is over."""

    settings: Settings
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
    counts: Tally = field(default_factory=Tally)
    saved: list[Path] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """One for each finding of a sort that was new."""

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        seconds = self.settings.seconds
        self.deadline = float("inf") if seconds is None else self.began + seconds
        self.lock = threading.Lock()
        self.next_seed = self.settings.seed
        self.taken = 0
        self.pending: list[Finding] = []
        self.known: set[str] = set()
        self.accepted = 0
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        one = self.settings
        self.workers = [
            Worker(one.platform, one.devices, one.jobs, one.pair_limit_s) for _ in range(one.jobs)
        ]

    def go(self) -> Tally:
        """Work until pairs or seconds are used up, or Ctrl-C."""
        threads = [threading.Thread(target=self._work, args=(one,), daemon=True) for one in self.workers]
        try:
            self._warm()
            for thread in threads:
                thread.start()
            said = time.monotonic()
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.1)
                if self.failure is not None:
                    self._end(threads)
                if time.monotonic() - said > _PROGRESS_S:
                    said = time.monotonic()
                    self._progress()
        except KeyboardInterrupt:
            self.say("stopping: what is under way is given up")
            self._end(threads)
        self.counts.seconds = time.monotonic() - self.began
        if self.failure is not None:
            raise self.failure
        return self.counts

    def _end(self, threads: list[threading.Thread]) -> None:
        """End all workers; one may just be starting another process."""
        self.ended.set()
        while True:
            for worker in self.workers:
                worker.kill()
            if not any(thread.is_alive() for thread in threads):
                return
            time.sleep(0.1)

    def _progress(self) -> None:
        self.counts.seconds = time.monotonic() - self.began
        self.say(self.counts.line())

    def _warm(self) -> None:
        """Have numba compile the search before several workers do."""
        if not self.settings.searched:
            return
        self.say("compiling the search, once on a machine")
        self.workers[0].ask({"do": "warm"}, lambda _: None, self.deadline, _WARM_LIMIT_S)

    # One worker ---------------------------------------------------------------------------------

    def _work(self, worker: Worker) -> None:
        try:
            while time.monotonic() < self.deadline and not self.ended.is_set():
                if (finding := self._to_shrink()) is not None:
                    self._shrink(finding, worker)
                elif (seed := self._take_seed()) is not None:
                    self._try(seed, worker)
                else:
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            if not self.ended.is_set():
                self.failure = error
            self.ended.set()
        finally:
            worker.stop()

    def _take_seed(self) -> int | None:
        with self.lock:
            if self.settings.pairs is not None and self.counts.pairs >= self.settings.pairs:
                return None
            if self.settings.programs is not None and self.taken >= self.settings.programs:
                return None
            self.taken += 1
            self.next_seed += 1
            return self.next_seed - 1

    def _try(self, seed: int, worker: Worker) -> None:
        settings = self.settings
        count = 0 if settings.defaults else settings.strategies
        left = wanted(seed, count, settings.searched)
        heard, skipped = findings.outcomes(
            worker, seed, left, self.deadline, devices=settings.devices, regions=settings.regions
        )
        if time.monotonic() >= self.deadline or self.ended.is_set():
            return
        self._count(seed, heard)
        with self.lock:
            self.counts.programs += 1
            if skipped:
                self.counts.skipped[skipped.partition(":")[0]] += 1
                if not skipped.startswith("plain"):
                    self.say(f"skipped: program {seed}: {skipped[:300]}")

    def _count(self, seed: int, heard: list[tuple[Wanted, str, str]]) -> None:
        with self.lock:
            for one, kind, detail in heard:
                self.counts.kinds[kind] += 1
                if kind in FINDINGS:
                    self._note(seed, one, kind, detail)
                elif kind == "own-gated":
                    self.say(f"{kind}: program {seed}: {detail[:300]}")

    def _note(self, seed: int, one: Wanted, kind: str, detail: str) -> None:
        """Say of a finding of a new sort, and have it shrunk, as long as there are few."""
        from tests.fuzz.grammar import generate

        finding = Finding(generate(seed, self.settings.devices), one, kind, detail, seed)
        sort = f"{finding.alike} {seed if kind == 'different' else ''}"
        if sort in self.known:
            return
        self.known.add(sort)
        line = f"{kind}: program {seed}, strategy {one}, after {self.counts.pairs} pairs: {detail}"
        self.lines.append(line)
        self.say(line)
        if self.accepted < self.settings.keep:
            self.accepted += 1
            self.pending.append(finding)

    def _to_shrink(self) -> Finding | None:
        with self.lock:
            return self.pending.pop(0) if self.pending else None

    def _shrink(self, finding: Finding, worker: Worker) -> None:
        until = min(self.deadline, time.monotonic() + _SHRINK_S)
        small = findings.shrunk(finding, worker, until, self.ended.is_set)
        path = findings.save(small, self.settings.folder)
        with self.lock:
            self.saved.append(path)
        self.say(f"{path}: {small.kind}, strategy {small.strategy}, {len(small.program.body.ops)} ops")


def run(settings: Settings, say: Callable[[str], None]) -> int:
    """Do a run; 1 where anything was found, else 0."""
    counts = Run(settings, say).go()
    print(counts.line())
    return 1 if counts.found else 0
