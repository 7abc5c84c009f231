"""What the engine runs: tasks on a compute stream and on a channel, as arrays that were checked.

A problem knows no HLO. It has an explicit order, as XLA's schedule does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError
from disco_hlo.simulator.costs import COMPUTE, MAX_TOTAL, MAX_WAIT_NS, MIN_SPEED_PPM, PPM, PRODUCT, UNITS_NS


@dataclass(frozen=True, eq=False)
class Lists:
    """A list of integers for each of some items, in compressed rows."""

    offset: NDArray[np.int32]
    """``[items + 1]``: the list of item i is ``member[offset[i]:offset[i + 1]]``."""
    member: NDArray[np.int32]

    @staticmethod
    def of(rows: Iterable[Iterable[int]]) -> Lists:
        """Compressed rows of ordinary lists."""
        listed = [list(row) for row in rows]
        offset = np.zeros(len(listed) + 1, np.int32)
        np.cumsum([len(row) for row in listed], out=offset[1:])
        return Lists(offset, np.array([item for row in listed for item in row], np.int32))

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, item: int) -> NDArray[np.int32]:
        return self.member[self.offset[item] : self.offset[item + 1]]

    @property
    def owner(self) -> NDArray[np.int32]:
        """For each entry of ``member``, the item in whose list it stands."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.offset))

    def reversed(self, items: int) -> Lists:
        """For each of ``items`` members, the items in whose lists it stands, ascending."""
        by_member = np.argsort(self.member, kind="stable")
        offset = np.zeros(items + 1, np.int32)
        np.cumsum(np.bincount(self.member, minlength=items), out=offset[1:])
        return Lists(offset, self.owner[by_member])


@dataclass(frozen=True, eq=False)
class Buffers:
    """What tasks leave in memory: allocated when the producer is issued, freed after the last reader."""

    size_bytes: NDArray[np.int64]
    producer: NDArray[np.int32]
    """Task that allocates each buffer."""
    readers: Lists
    """Tasks that must have finished before a buffer is freed; the producer always must."""
    returned: NDArray[np.bool_]
    """Buffers that are never freed."""

    @staticmethod
    def of(rows: Sequence[tuple[int, int, Iterable[int], bool]]) -> Buffers:
        """Buffers from rows of (bytes, producer, readers, returned)."""
        return Buffers(
            np.array([row[0] for row in rows], np.int64),
            np.array([row[1] for row in rows], np.int32),
            Lists.of(row[2] for row in rows),
            np.array([row[3] for row in rows], np.bool_),
        )


@dataclass(frozen=True, eq=False)
class Problem:
    """Tasks, where they run, what they wait for, and how they are ordered.

    Raises:
        DiscoError: an array has the wrong type or length, a number is negative or beyond what
            the engine can hold, an id is out of range, or the order is incomplete or contradicts
            the dependencies. The message names the task.
    """

    names: tuple[str, ...]
    """Name of each task, for messages and timelines."""
    duration_ns: NDArray[np.int64]
    """``[tasks]``: time of each task when it runs alone."""
    resource: NDArray[np.int32]
    """``[tasks]``: 0 for the compute stream, 1 for the channel."""
    predecessors: Lists
    """For each task, the tasks that must have finished before it starts."""
    communicates: NDArray[np.bool_]
    """``[tasks]``: counted as communication; always so on the channel."""
    speed_ppm: NDArray[np.int64]
    """``[4, 2]``, or ``[4, 1]`` without a channel: speeds alone and beside a running collective, of compute, of a
    collective while the compute stream idles, of one while it computes, and of :attr:`products`."""
    products: NDArray[np.bool_]
    """``[tasks]``: tasks on the compute stream that go at the speeds of the last row if a collective ran when they
    began, at full speed if none did, and pay for what they hold (:mod:`disco_hlo.simulator.contention`)."""
    hold_ns: NDArray[np.int64]
    """``[tasks]``: how much of a task on the compute stream must be done before one on the channel can begin during it,
    less than all, so that one which is held to the end begins during it, too."""
    order: NDArray[np.int32]
    """What the compute stream goes through: ``i`` runs task i, or issues it to the channel; ``~i``
    waits until collective i has finished, which it must do once at least."""
    transfer_wait_ns: int = 0
    """What a task on the channel has more to do, unless the compute stream idles when it begins."""
    buffers: Buffers = field(default_factory=lambda: Buffers.of(()))
    resident_bytes: int = 0
    """Memory in use throughout: parameters and constants."""
    unit_ns: int = 1
    """What time is counted in: all durations, holds and the wait are multiples of it."""

    def __post_init__(self) -> None:
        _check_arrays(self)
        _check_durations(self)
        _check_lists(self)
        _check_order(self, self.order)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def successors(self) -> Lists:
        """The reverse of :attr:`predecessors`."""
        return self.predecessors.reversed(len(self))

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """All tasks, each after its predecessors."""
        missing = np.diff(self.predecessors.offset).tolist()
        found = [task for task, count in enumerate(missing) if count == 0]
        for task in found:  # grows as it goes
            for successor in self.successors[task].tolist():
                missing[successor] -= 1
                if missing[successor] == 0:
                    found.append(successor)
        return tuple(found)

    def name(self, task: int) -> str:
        """How messages call a task."""
        return f"task {task} ({self.names[task]})"


def _check_arrays(problem: Problem) -> None:
    tasks = (len(problem),)
    expected: list[tuple[str, NDArray[Any], type, tuple[int, ...]]] = [
        ("duration_ns", problem.duration_ns, np.int64, tasks),
        ("resource", problem.resource, np.int32, tasks),
        ("communicates", problem.communicates, np.bool_, tasks),
        ("predecessors", problem.predecessors.offset, np.int32, (len(problem) + 1,)),
        ("predecessors", problem.predecessors.member, np.int32, problem.predecessors.member.shape),
        ("speed_ppm", problem.speed_ppm, np.int64, (4, 1 if problem.speed_ppm.shape[1:] == (1,) else 2)),
        ("products", problem.products, np.bool_, tasks),
        ("hold_ns", problem.hold_ns, np.int64, tasks),
    ]
    for name, array, dtype, shape in expected:
        if array.dtype != dtype or array.shape != shape:
            raise DiscoError(
                f"Problem of {len(problem)} tasks: {name} is {array.dtype}{list(array.shape)}, "
                f"expected {np.dtype(dtype)}{list(shape)}."
            )
    speeds = problem.speed_ppm
    if speeds.size == 0 or speeds.min() < MIN_SPEED_PPM or speeds.max() > PPM:
        raise DiscoError(f"Problem: speeds are {speeds.tolist()}, expected {MIN_SPEED_PPM} to {PPM}.")
    if (speeds[[COMPUTE, PRODUCT], 0] != PPM).any():
        raise DiscoError(
            f"Problem: beside no transfer compute goes at {speeds[:, 0].tolist()}, expected {PPM}."
        )


def _check_durations(problem: Problem) -> None:
    negative = np.flatnonzero(problem.duration_ns < 0)
    if negative.size:
        task = int(negative[0])
        raise DiscoError(
            f"Duration of {problem.name(task)} is {problem.duration_ns[task]} ns, expected 0 or more."
        )
    wrong = np.flatnonzero((problem.hold_ns < 0) | (problem.hold_ns > np.maximum(problem.duration_ns - 1, 0)))
    if wrong.size:
        task = int(wrong[0])
        raise DiscoError(
            f"{problem.name(task)} holds transfers for {problem.hold_ns[task]} ns, expected 0 or less than its "
            f"{problem.duration_ns[task]} ns."
        )
    if not 0 <= problem.transfer_wait_ns <= MAX_WAIT_NS:
        raise DiscoError(
            f"Problem: transfers wait {problem.transfer_wait_ns} ns, expected 0 to {MAX_WAIT_NS}."
        )
    _check_unit(problem)
    # A float sum cannot wrap, and one part in 2**53 does not matter to a limit.
    total = float(problem.duration_ns.sum(dtype=np.float64))
    total += float(problem.transfer_wait_ns) * np.count_nonzero(problem.resource)
    if total > MAX_TOTAL * problem.unit_ns:
        task = int(problem.duration_ns.argmax())
        raise DiscoError(
            f"Durations add up to {total:.3g} ns, expected at most {MAX_TOTAL * problem.unit_ns}; the longest is "
            f"{problem.name(task)} with {problem.duration_ns[task]} ns."
        )


def _check_unit(problem: Problem) -> None:
    if problem.unit_ns not in UNITS_NS:
        raise DiscoError(f"Problem: time is counted in {problem.unit_ns} ns, expected one of {UNITS_NS}.")
    counted = (problem.duration_ns, problem.hold_ns, np.array([problem.transfer_wait_ns], np.int64))
    if problem.unit_ns > 1 and any((times % problem.unit_ns).any() for times in counted):
        raise DiscoError(
            f"Problem: times are no multiples of {problem.unit_ns} ns, which they are counted in."
        )


def _check_lists(problem: Problem) -> None:
    every_task = np.arange(len(problem), dtype=np.int32)
    _check_range(problem, "resource", problem.resource, problem.speed_ppm.shape[1], every_task)
    needed = problem.predecessors
    _check_range(problem, "predecessor", needed.member, len(problem), needed.owner)
    _check_range(problem, "buffer producer", problem.buffers.producer, len(problem))
    _check_range(problem, "buffer reader", problem.buffers.readers.member, len(problem))
    buffers = (len(problem.buffers.producer), len(problem.buffers.readers), len(problem.buffers.returned))
    if {*buffers} != {len(problem.buffers.size_bytes)}:
        raise DiscoError(
            f"Problem: {len(problem.buffers.size_bytes)} buffer sizes, but {buffers[0]} producers, "
            f"{buffers[1]} lists of readers and {buffers[2]} flags."
        )
    silent = np.flatnonzero((problem.resource > 0) & ~problem.communicates)
    if silent.size:
        raise DiscoError(f"{problem.name(int(silent[0]))} runs on the channel but is not communication.")
    if problem.buffers.size_bytes.size and problem.buffers.size_bytes.min() < 0:
        buffer = int(problem.buffers.size_bytes.argmin())
        raise DiscoError(
            f"A buffer of {problem.name(int(problem.buffers.producer[buffer]))} has "
            f"{problem.buffers.size_bytes[buffer]} bytes, expected 0 or more."
        )


def _check_range(
    problem: Problem, what: str, ids: NDArray[Any], limit: int, owner: NDArray[np.int32] | None = None
) -> None:
    """Refuse ids outside 0..limit-1, naming the task ``owner`` gives for the entry."""
    outside = np.flatnonzero((ids < 0) | (ids >= limit))
    if not outside.size:
        return
    entry = int(outside[0])
    where = "" if owner is None else f" of {problem.name(int(owner[entry]))}"
    raise DiscoError(f"Problem: {what}{where} is {ids[entry]}, expected 0 to {limit - 1}.")


def _check_order(problem: Problem, order: NDArray[np.int32]) -> None:
    if order.dtype != np.int32 or order.ndim != 1:
        raise DiscoError(f"Problem: the order is {order.dtype}{list(order.shape)}, expected int32[entries].")
    places = np.arange(len(order))
    task = np.where(order < 0, ~order, order)
    _check_range(problem, "order entry", task, len(problem))
    runs = np.bincount(task[order >= 0], minlength=len(problem))
    if (runs != 1).any():
        first = int(np.flatnonzero(runs != 1)[0])
        raise DiscoError(f"{problem.name(first)} stands {runs[first]} times in the order, expected once.")
    issued = np.empty(len(problem), np.int64)
    issued[task[order >= 0]] = places[order >= 0]
    for wrong, what in (
        ((order < 0) & (problem.resource[task] == 0), "which runs on the compute stream"),
        ((order < 0) & (issued[task] > places), "which it issues later"),
    ):
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            name = problem.name(int(task[place]))
            raise DiscoError(f"The order waits at place {place} for {name}, {what}.")
    settled = settled_places(order, problem.resource)
    if (settled == len(order)).any():
        raise DiscoError(f"The order never waits for {problem.name(int(settled.argmax()))}.")
    _check_dependencies(problem, issued, settled)


def _check_dependencies(problem: Problem, issued: NDArray[np.int64], settled: NDArray[np.int64]) -> None:
    later, earlier = problem.predecessors.owner, problem.predecessors.member
    wrong = np.flatnonzero(settled[earlier] >= issued[later])
    if not wrong.size:
        return
    first, second = int(earlier[wrong[0]]), int(later[wrong[0]])
    raise DiscoError(
        f"The order starts {problem.name(second)} at place {issued[second]}, before it is sure that "
        f"{problem.name(first)} has finished."
    )


def settled_places(order: NDArray[np.int32], resource: NDArray[np.int32]) -> NDArray[np.int64]:
    """For each task, the place in ``order`` after which it is sure to have finished.

    That is where a compute task runs, and where a collective is first waited for;
    ``len(order)`` if it never is.
    """
    settled = np.full(len(resource), len(order), np.int64)
    places = np.arange(len(order), dtype=np.int64)
    runs = (order >= 0) & (resource[order] == 0)
    settled[order[runs]] = places[runs]
    waits = (order < 0) & (resource[~order] > 0)
    np.minimum.at(settled, ~order[waits], places[waits])
    return settled
