"""Choose the order of a strategy's units by list scheduling toward the all-reduces.

DisCo (section 4.4) starts an all-reduce as soon as its gradient exists and leaves the order of the
gradients to chance. Here the order is chosen: the ancestors of the next all-reduce come first, it
starts at once, and whatever waits for a transfer comes as late as there is other work to do. So the
link is busy early, and no unit stands in front of a wait that it need not share.

The clock that decides what "late enough" means is a rough simulation: one compute stream, one
communication channel that serves transfers in the order they are issued.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from disco_hlo.plan.units import UnitGraph


def list_schedule(
    units: UnitGraph, durations_ns: Sequence[int], transfers_ns: Sequence[int], *, asynchronous: bool = True
) -> tuple[str, ...]:
    """An order for ``units``, as :class:`~disco_hlo.plan.strategy.Strategy` holds it.

    All-reduces come in the order in which their gradients could exist earliest. Takes time
    O(E log V) and depends on its arguments alone.

    Args:
        units: what has to run.
        durations_ns: time each unit takes on the compute stream; of a bucket, its packing.
        transfers_ns: time each bucket takes on the channel; ignored for other units.
        asynchronous: whether a bucket has the two tokens ``b2.start`` and ``b2.done``.

    Raises:
        ValueError: a sequence does not have one entry per unit.
    """
    count = len(units.units)
    if len(durations_ns) != count or len(transfers_ns) != count:
        raise ValueError(
            f"expected one duration and one transfer time for each of {count} units, "
            f"got {len(durations_ns)} and {len(transfers_ns)}"
        )
    return _Run(units, durations_ns, transfers_ns, asynchronous).order()


def issue_ranks(
    units: UnitGraph, durations_ns: Sequence[int], transfers_ns: Sequence[int]
) -> tuple[int, ...]:
    """For each unit the position, among all buckets, of the first bucket that waits for it.

    Buckets are ranked by the earliest time their last input could exist (the longest path to them),
    the longer transfer first among equals. A unit that no bucket waits for gets the number of buckets.
    """
    topological = _topological(units)
    finish = [0] * len(units.units)
    begin = [0] * len(units.units)
    for i in topological:
        begin[i] = max((finish[j] for j in units.dependencies[i]), default=0)
        finish[i] = begin[i] + durations_ns[i] + (transfers_ns[i] if units.units[i].is_bucket else 0)
    buckets = [i for i, unit in enumerate(units.units) if unit.is_bucket]
    buckets.sort(key=lambda i: (begin[i], -transfers_ns[i], min(units.units[i].nodes)))
    rank = [len(buckets)] * len(units.units)
    for position, bucket in enumerate(buckets):
        rank[bucket] = position
    for i in reversed(topological):
        rank[i] = min(rank[i], min((rank[j] for j in units.dependents[i]), default=rank[i]))
    return tuple(rank)


def _topological(units: UnitGraph) -> list[int]:
    missing = [len(needed) for needed in units.dependencies]
    found = [i for i, count in enumerate(missing) if count == 0]
    for i in found:
        for dependent in units.dependents[i]:
            missing[dependent] -= 1
            if missing[dependent] == 0:
                found.append(dependent)
    return found


class _Run:
    """One run of the scheduler: a clock, what is ready, and what waits for a transfer."""

    def __init__(
        self, units: UnitGraph, durations_ns: Sequence[int], transfers_ns: Sequence[int], asynchronous: bool
    ) -> None:
        self.units = units
        self.durations_ns = durations_ns
        self.transfers_ns = transfers_ns
        self.asynchronous = asynchronous
        self.rank = issue_ranks(units, durations_ns, transfers_ns)
        self.unissued = [len(needed) for needed in units.dependencies]
        self.now_ns = 0
        self.channel_free_ns = 0
        self.arrival_ns = [0] * len(units.units)
        """When the transfer of each issued bucket ends."""
        self.in_flight: dict[int, None] = {}
        """Buckets without a ``done``, in issue order."""
        self.ready: list[tuple[bool, int, int, int, int]] = []
        self.waiting: list[tuple[int, int]] = []
        self.tokens: list[str] = []

    def order(self) -> tuple[str, ...]:
        for i, count in enumerate(self.unissued):
            if count == 0:
                self._enqueue(i)
        while self.ready or self.waiting:
            if not self.ready:
                self.now_ns = max(self.now_ns, self.waiting[0][0])
            while self.waiting and self.waiting[0][0] <= self.now_ns:
                self._make_ready(*heapq.heappop(self.waiting))
            self._issue(heapq.heappop(self.ready)[-1])
        for bucket in list(self.in_flight):
            self._done(bucket)
        return tuple(self.tokens)

    def _enqueue(self, i: int) -> None:
        arrival_ns = max((self.arrival_ns[j] for j in self.units.dependencies[i]), default=0)
        if arrival_ns > self.now_ns:
            heapq.heappush(self.waiting, (arrival_ns, i))
        else:
            self._make_ready(arrival_ns, i)

    def _make_ready(self, arrival_ns: int, i: int) -> None:
        # Readers of what arrived first come first: should the real link be slower than the assumed
        # one, they wait least. What reads no transfer finishes what is begun, so it comes before.
        unit = self.units.units[i]
        heapq.heappush(self.ready, (not unit.is_bucket, self.rank[i], arrival_ns, min(unit.nodes), i))

    def _issue(self, i: int) -> None:
        unit = self.units.units[i]
        for bucket in self.units.dependencies[i]:
            if bucket in self.in_flight:
                self._done(bucket)
        self.tokens.append(unit.start_token(self.asynchronous))
        self.now_ns += self.durations_ns[i]
        if unit.is_bucket:
            self._transfer(i)
        for dependent in self.units.dependents[i]:
            self.unissued[dependent] -= 1
            if self.unissued[dependent] == 0:
                self._enqueue(dependent)

    def _transfer(self, bucket: int) -> None:
        if not self.asynchronous:
            self.now_ns += self.transfers_ns[bucket]
            return
        self.channel_free_ns = max(self.now_ns, self.channel_free_ns) + self.transfers_ns[bucket]
        self.arrival_ns[bucket] = self.channel_free_ns
        self.in_flight[bucket] = None

    def _done(self, bucket: int) -> None:
        del self.in_flight[bucket]
        self.tokens.append(self.units.units[bucket].done_token(True))
