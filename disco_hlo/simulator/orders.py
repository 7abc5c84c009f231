"""Orders by rule: a list schedule toward the collectives, and collectives started early around kernels as they are.

DisCo (section 4.4) starts an all-reduce as soon as its gradient exists and leaves the order of the
gradients to chance. A list schedule chooses it: the ancestors of the next collective come first, it
starts at once, and whatever waits for a collective comes as late as there is other work to do. So the
link is busy early, and no unit stands in front of a wait that it need not share. What "late enough" means
a rough simulation decides: one compute stream, one communication channel that serves collectives in the
order they are issued.

XLA's schedule keeps one collective in flight, right before its reader. :class:`Prefetch` leaves its kernels where they
are: each collective starts when the kernels that compute its operand have run, of several the one that is needed first,
and each waits for its first reader. Kernels that only prepare a collective, such as the slice and the conversion of a
weight that is gathered, run right before it, wherever they stood. How many all-gathers may be ahead of their readers
bounds the memory that gathered weights take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from disco_hlo.compiled import compiled, inner
from disco_hlo.hlo.graph import Graph, flat_lists
from disco_hlo.hlo.walks import reached
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph

_LIGHT: float = 0.25
"""A kernel that prepares a collective runs early where it takes no more than this share of the collective's time."""
_ENDLESS: Final = 1 << 40
"""A collective's time that no step's kernels, counted as one each, come near; and a rank that no bucket has."""


def beside_transfers(graph: Graph, strategy: Strategy) -> Strategy:
    """The same kernels and buckets in an order that has as many kernels overlap with collectives as it can.

    For measuring what they cost each other. Without times of kernels: every collective starts once its
    gradients exist, these come early, and what waits for it comes last.
    """
    units = unit_graph(graph, strategy)
    transfers = [_ENDLESS if unit.is_bucket else 0 for unit in units.units]
    return replace(strategy, order=list_schedule(units, [1] * len(units.units), transfers))


def list_schedule(
    units: UnitGraph, durations_ns: Sequence[int], transfers_ns: Sequence[int], *, asynchronous: bool = True
) -> tuple[str, ...]:
    """An order for ``units``, as :class:`~disco_hlo.plan.plan.Strategy` holds it.

    Args:
        units: what has to run.
        durations_ns: time each unit takes on the compute stream; of a bucket, its packing.
        transfers_ns: time each bucket takes on the channel; 0 for other units.
        asynchronous: whether a bucket has the two tokens ``b2.start`` and ``b2.done``.
    """
    by_node = sorted(range(len(units.units)), key=lambda i: min(units.units[i].nodes))
    number = {i: place for place, i in enumerate(by_node)}
    needed_at, needed = flat_lists([[number[j] for j in units.dependencies[i]] for i in by_node])
    issued = issue_order(
        needed_at,
        needed,
        np.array([durations_ns[i] for i in by_node], np.int64),
        np.array([transfers_ns[i] for i in by_node], np.int64),
        np.array([units.units[i].is_bucket for i in by_node], np.int64),
        asynchronous,
    )
    return _tokens(units, [by_node[place] for place in issued.tolist()], asynchronous)


def _tokens(units: UnitGraph, issued: Sequence[int], asynchronous: bool) -> tuple[str, ...]:
    """Units as they are issued, and each bucket's ``done`` right before the first that waits for it."""
    in_flight: dict[int, None] = {}
    tokens: list[str] = []
    for i in issued:
        for bucket in units.dependencies[i]:
            if bucket in in_flight:
                del in_flight[bucket]
                tokens.append(units.units[bucket].done_token(True))
        tokens.append(units.units[i].start_token(asynchronous))
        if units.units[i].is_bucket and asynchronous:
            in_flight[i] = None
    return (*tokens, *(units.units[bucket].done_token(True) for bucket in in_flight))


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
        needs = units.dependencies
        self.before = {b: {*reached(needs[b], needs.__getitem__)} for b in self.buckets}
        self.waiting_for: dict[int, list[int]] = {}
        """Buckets by what must be over before they start: what their operands come from, but for what prepares them."""
        self.needed = self._needed()
        for bucket, ancestors in self.before.items():
            for i in ancestors:
                if not self._prepares(i, bucket):
                    self.waiting_for.setdefault(i, []).append(bucket)
        self._begin()

    def with_ahead(self, most: int) -> Prefetch:
        """The same with another number in flight; what was found of the units is not found again."""
        other = copy(self)
        other.most_ahead = most
        other._begin()
        return other

    def _begin(self) -> None:
        self.missing = Counter(bucket for waiting in self.waiting_for.values() for bucket in waiting)
        self.unissued = sorted(self.buckets, key=lambda b: (self.needed[b], b))
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


@compiled
def issue_order(
    needed_at: Any, needed: Any, compute_ns: Any, transfer_ns: Any, is_bucket: Any, asynchronous: Any
) -> Any:
    """Units in the order in which they start; fewer of them where units wait for each other in a circle.

    Takes time O(E log V) and depends on its arguments alone. Units are numbered by their smallest nodes.

    Args:
        needed_at, needed: unit i waits for ``needed[needed_at[i] : needed_at[i + 1]]``.
        compute_ns, transfer_ns, is_bucket: ``[units]`` int64, see :func:`list_schedule`.
        asynchronous: whether collectives run on the channel, not on the compute stream.
    """
    dependent_at, dependent = dependents(needed_at, needed)
    topological = _topological(needed_at, dependent_at, dependent)
    if topological.size < compute_ns.size:
        return topological
    rank = _issue_ranks(
        topological, needed_at, needed, dependent_at, dependent, compute_ns, transfer_ns, is_bucket
    )
    on_channel, takes_ns = np.zeros(rank.size, np.int64), np.empty(rank.size, np.int64)
    for i in range(rank.size):  # numba compiles arithmetic of whole arrays for a long time
        takes_ns[i] = compute_ns[i]
        if not is_bucket[i]:
            rank[i] += _ENDLESS
        elif asynchronous:
            on_channel[i] = 1
        else:
            takes_ns[i] += transfer_ns[i]
    return _issue(needed_at, dependent_at, dependent, takes_ns, transfer_ns, on_channel, rank)


@inner
def counts(begin: Any) -> Any:
    """The lengths of flat lists, by where each begins."""
    found = np.empty(begin.size - 1, np.int64)
    for i in range(found.size):
        found[i] = begin[i + 1] - begin[i]
    return found


@inner
def dependents(needed_at: Any, needed: Any) -> Any:
    """For each unit those that wait for it, ascending, as flat lists."""
    count = needed_at.size - 1
    begin = np.zeros(count + 2, np.int64)
    for other in needed:
        begin[other + 2] += 1
    for i in range(count):
        begin[i + 2] += begin[i + 1]
    found = np.empty(needed.size, np.int64)
    for i in range(count):
        for e in range(needed_at[i], needed_at[i + 1]):
            found[begin[needed[e] + 1]] = i
            begin[needed[e] + 1] += 1
    return begin[:-1], found


@inner
def _topological(needed_at: Any, dependent_at: Any, dependent: Any) -> Any:
    """Units, each behind all it waits for; without those that wait for each other in a circle."""
    missing = counts(needed_at)
    found, queued, done = np.empty(missing.size, np.int64), 0, 0
    for i in range(missing.size):
        if missing[i] == 0:
            found[queued] = i
            queued += 1
    while done < queued:  # ends: each unit is queued once
        for e in range(dependent_at[found[done]], dependent_at[found[done] + 1]):
            missing[dependent[e]] -= 1
            if missing[dependent[e]] == 0:
                found[queued] = dependent[e]
                queued += 1
        done += 1
    return found[:queued]


@inner
def _issue_ranks(
    topological: Any,
    needed_at: Any,
    needed: Any,
    dependent_at: Any,
    dependent: Any,
    compute_ns: Any,
    transfer_ns: Any,
    is_bucket: Any,
) -> Any:
    """For each unit the position, among all buckets, of the first bucket that waits for it.

    Buckets are ranked by the earliest time their last input could exist (the longest path to them),
    the longer collective first among equals. A unit that no bucket waits for gets the number of buckets.
    """
    count = topological.size
    begin, finish = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for i in topological:
        for e in range(needed_at[i], needed_at[i + 1]):
            begin[i] = max(begin[i], finish[needed[e]])
        finish[i] = begin[i] + compute_ns[i] + transfer_ns[i]
    heap, left, shorter = np.empty(count, np.int64), 0, np.empty(count, np.int64)
    for i in range(count):
        shorter[i] = -transfer_ns[i]
        if is_bucket[i]:
            left = push(heap, left, i, begin, shorter)
    buckets = left
    rank = np.full(count, buckets)
    while left > 0:  # ends: left goes down
        rank[heap[0]] = buckets - left
        left = pop(heap, left, begin, shorter)
    for k in range(count - 1, -1, -1):
        i = topological[k]
        for e in range(dependent_at[i], dependent_at[i + 1]):
            rank[i] = min(rank[i], rank[dependent[e]])
    return rank


@inner
def _issue(
    needed_at: Any,
    dependent_at: Any,
    dependent: Any,
    compute_ns: Any,
    transfer_ns: Any,
    on_channel: Any,
    key: Any,
) -> Any:
    """Units as they start. Ready ones go by: their keys, when their inputs arrived, smallest node.

    Readers of what arrived first come first: should the real link be slower than the assumed one, they wait least.
    What reads no collective finishes what is begun, so it comes before.
    """
    missing, arrival, ready_at = counts(needed_at), np.zeros(key.size, np.int64), np.zeros(key.size, np.int64)
    issued, count, alike = np.empty(key.size, np.int64), 0, np.zeros(key.size, np.int64)
    ready, readies = np.empty(key.size, np.int64), 0
    waiting, waits = np.empty(key.size, np.int64), 0
    for i in range(key.size):
        if missing[i] == 0:
            waits = push(waiting, waits, i, ready_at, alike)
    now: Any = np.int64(0)
    channel_free: Any = np.int64(0)
    while readies + waits > 0:  # ends: each pass issues a unit
        if readies == 0:
            now = max(now, ready_at[waiting[0]])
        while waits > 0 and ready_at[waiting[0]] <= now:  # ends: one waits no more each time
            readies = push(ready, readies, waiting[0], key, ready_at)
            waits = pop(waiting, waits, ready_at, alike)
        i = ready[0]
        readies = pop(ready, readies, key, ready_at)
        issued[count] = i
        count += 1
        now += compute_ns[i]
        if on_channel[i]:
            channel_free = max(now, channel_free) + transfer_ns[i]
            arrival[i] = channel_free
        for e in range(dependent_at[i], dependent_at[i + 1]):
            other = dependent[e]
            ready_at[other] = max(ready_at[other], arrival[i])
            missing[other] -= 1
            if missing[other] == 0:
                waits = push(waiting, waits, other, ready_at, alike)
    return issued


@inner
def push(heap: Any, count: Any, item: Any, first: Any, second: Any) -> Any:
    """Put an item into a heap of ``count``, in which the one with the least ``first``, then ``second``, then number
    lies at 0; how many there are then. Numba takes ten times as long to compile ``heapq``."""
    hole = count
    while hole > 0 and _is_less(item, heap[(hole - 1) // 2], first, second):  # ends: hole goes down
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item
    return count + 1


@inner
def pop(heap: Any, count: Any, first: Any, second: Any) -> Any:
    """Take the item at 0 out of such a heap; how many are left."""
    count -= 1
    item, hole, child = heap[count], 0, 1
    while child < count:  # ends: child doubles
        if child + 1 < count and _is_less(heap[child + 1], heap[child], first, second):
            child += 1
        if not _is_less(heap[child], item, first, second):
            break
        heap[hole] = heap[child]
        hole, child = child, 2 * child + 1
    heap[hole] = item
    return count


@inner
def _is_less(a: Any, b: Any, first: Any, second: Any) -> Any:
    if first[a] != first[b]:
        return first[a] < first[b]
    return second[a] < second[b] or (second[a] == second[b] and a < b)
