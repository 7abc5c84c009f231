"""Why a simulated step takes as long as it does: the chain of tasks that ends at the makespan."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disco_hlo.simulator.problem import Problem


class Reason(enum.StrEnum):
    """What a task on the critical path had to wait for until it started."""

    BEGIN = "begins the step"
    DATA = "needs the result of"
    STREAM = "follows on the compute stream"
    ISSUE = "is issued after"
    WAIT = "comes after the wait for"
    CHANNEL = "follows on the channel"
    HOLD = "was held by"


@dataclass(frozen=True, slots=True)
class Link:
    """One task of the critical path."""

    task: int
    reason: Reason
    """Why it did not start earlier: with the link before it, "y needs the result of x"."""


def critical_path(problem: Problem, spans_ns: NDArray[np.int64], started: Sequence[int]) -> tuple[Link, ...]:
    """A gapless chain from time 0 to the makespan, in time order.

    Each link starts at the instant at which the one before it ends, but a collective that a kernel held starts while
    that runs. Where several reasons hold, the first in the order of :class:`Reason` is given.

    Args:
        spans_ns: ``[2, tasks]``, start and end of each task.
        started: tasks in the order in which they were issued.
    """
    if not len(problem):
        return ()
    start_ns, end_ns = spans_ns.tolist()
    held = _stream_holders(problem)
    before = _resource_holders(problem, started)
    task = max(reversed(started), key=lambda candidate: end_ns[candidate])
    path: list[Link] = []
    while True:
        candidates = _candidates(problem, task, held[task], before[task])
        cause = next((found for found in candidates if end_ns[found[1]] == start_ns[task]), None)
        if cause is None and problem.resource[task] > 0:
            beside = (
                (problem.resource == 0) & (spans_ns[0] < start_ns[task]) & (start_ns[task] <= spans_ns[1])
            )
            cause = next(((Reason.HOLD, kernel) for kernel in np.flatnonzero(beside).tolist()), None)
        if cause is None:
            path.append(Link(task, Reason.BEGIN))
            return tuple(reversed(path))
        path.append(Link(task, cause[0]))
        task = cause[1]


def _candidates(
    problem: Problem, task: int, holders: Sequence[int], before: int | None
) -> Iterator[tuple[Reason, int]]:
    for predecessor in problem.predecessors[task].tolist():
        yield Reason.DATA, predecessor
    on_channel = problem.resource[task] > 0
    for holder in holders:
        waited_for = problem.resource[holder] > 0
        yield Reason.WAIT if waited_for else Reason.ISSUE if on_channel else Reason.STREAM, holder
    if before is not None:
        yield Reason.CHANNEL if on_channel else Reason.STREAM, before


def _stream_holders(problem: Problem) -> dict[int, list[int]]:
    """For each task, the compute task before its place in the order and the collectives waited for since."""
    holders: dict[int, list[int]] = {}
    since: list[int] = []
    for entry in problem.order.tolist():
        if entry < 0:
            since.append(~entry)
            continue
        holders[entry] = list(since)
        if problem.resource[entry] == 0:
            since = [entry]
    return holders


def _resource_holders(problem: Problem, started: Sequence[int]) -> dict[int, int | None]:
    """For each task, the one before it on the same resource."""
    latest: dict[int, int] = {}
    before: dict[int, int | None] = {}
    for task in started:
        resource = int(problem.resource[task])
        before[task] = latest.get(resource)
        latest[resource] = task
    return before
