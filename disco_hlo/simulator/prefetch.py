"""An order that keeps the kernels where they are and starts each collective as early as its operand allows.

XLA's schedule keeps one collective in flight, right before its reader. Here each starts when the kernels that compute
its operand have run, of several the one that is needed first, and each waits for its first reader. Kernels that only
prepare a collective, such as the slice and the conversion of a weight that is gathered, run right before it, wherever
they stood. How many all-gathers may be ahead of their readers bounds the memory that gathered weights take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disco_hlo.plan.units import UnitGraph

_LIGHT: float = 0.25
"""A kernel that prepares a collective runs early where it takes no more than this share of the collective's time."""


@dataclass
class Prefetch:
    """One run of the rule, which gives an order for ``units``; collectives have a start and a done in it."""

    units: UnitGraph
    kernels: Sequence[int]
    """The units that are no buckets, in an order in which they can run."""
    durations_ns: Sequence[int]
    """Time that each unit takes on the compute stream."""
    collectives_ns: Sequence[int]
    """Time that each bucket takes; 0 for other units."""
    moves_data: Sequence[bool]
    """Whether a unit moves or converts data and computes nothing: it may prepare a collective."""
    is_prefetched: Sequence[bool]
    """Whether a bucket counts against ``most_ahead``."""
    most_ahead: int
    """How many such buckets may be in flight at once."""

    def __post_init__(self) -> None:
        units = self.units
        self.buckets = [i for i, unit in enumerate(units.units) if unit.is_bucket]
        self.place = {i: place for place, i in enumerate(self.kernels)}
        self.before = {bucket: self._ancestors(bucket) for bucket in self.buckets}
        self.waiting_for: dict[int, list[int]] = {}
        """Buckets by what must be over before they start: what their operands come from, but for what prepares them."""
        self.missing = dict.fromkeys(self.buckets, 0)
        for bucket, ancestors in self.before.items():
            for i in ancestors:
                if not self._prepares(i, bucket):
                    self.waiting_for.setdefault(i, []).append(bucket)
                    self.missing[bucket] += 1
        needed = self._needed()
        self.unissued = sorted(self.buckets, key=lambda b: (needed[b], b))
        self.in_flight: dict[int, None] = {}
        self.finished: set[int] = set()
        """Kernels that ran and buckets that were waited for."""
        self.tokens: list[str] = []

    def order(self) -> tuple[str, ...]:
        """The order, as :class:`~disco_hlo.plan.plan.Strategy` holds it."""
        self._issue_ready()
        for kernel in self.kernels:
            self._run(kernel)
            self._issue_ready()
        for bucket in list(self.unissued):
            self._issue(bucket)
        for bucket in list(self.in_flight):
            self._wait(bucket)
        return tuple(self.tokens)

    def _prepares(self, unit: int, bucket: int) -> bool:
        is_light = self.durations_ns[unit] <= _LIGHT * self.collectives_ns[bucket]
        return self.moves_data[unit] and is_light

    def _ancestors(self, bucket: int) -> set[int]:
        found: set[int] = set()
        pending = list(self.units.dependencies[bucket])
        while pending:
            i = pending.pop()
            if i not in found:
                found.add(i)
                pending += self.units.dependencies[i]
        return found

    def _needed(self) -> dict[int, int]:
        """For each bucket the place of the first kernel that waits for it, through other buckets too."""
        last = len(self.kernels)
        needed: dict[int, int] = {}
        for bucket in sorted(self.buckets, key=lambda b: -len(self.before[b])):  # dependents first
            readers = self.units.dependents[bucket]
            places = (needed.get(i, last) if i in self.before else self.place[i] for i in readers)
            needed[bucket] = min(places, default=last)
        return needed

    def _issue_ready(self) -> None:
        ahead = sum(self.is_prefetched[b] for b in self.in_flight)
        for bucket in list(self.unissued):
            if self.is_prefetched[bucket] and ahead >= self.most_ahead:
                continue
            if self.missing[bucket]:
                continue
            ahead += self.is_prefetched[bucket]
            self._issue(bucket)

    def _issue(self, bucket: int) -> None:
        for kernel in sorted(
            self.before[bucket] - self.finished - self.before.keys(), key=self.place.__getitem__
        ):
            self._run(kernel)
        for other in self.units.dependencies[bucket]:
            if other in self.before:
                self._wait(other)
        if bucket in self.in_flight or bucket in self.finished:  # a kernel that ran just now waited for it
            return
        self.unissued.remove(bucket)
        self.in_flight[bucket] = None
        self.tokens.append(self.units.units[bucket].start_token(True))

    def _wait(self, bucket: int) -> None:
        if bucket in self.finished:
            return
        if bucket not in self.in_flight:
            self._issue(bucket)
        del self.in_flight[bucket]
        self.tokens.append(self.units.units[bucket].done_token(True))
        self._finish(bucket)

    def _run(self, kernel: int) -> None:
        if kernel in self.finished:
            return
        for other in self.units.dependencies[kernel]:
            if other in self.before:
                self._wait(other)
        self.tokens.append(self.units.units[kernel].start_token(True))
        self._finish(kernel)

    def _finish(self, unit: int) -> None:
        self.finished.add(unit)
        for bucket in self.waiting_for.get(unit, ()):
            self.missing[bucket] -= 1
