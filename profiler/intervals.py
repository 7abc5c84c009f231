"""Stretches of time: what several cover together, and how much of one lies in others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
"""Start and end, ns."""


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """What all of them cover, disjoint and ascending."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length_ns(intervals: Iterable[Interval]) -> int:
    """Of all together; what several cover counts for each."""
    return sum(end - start for start, end in intervals)


def covered_ns(own: Interval, intervals: Sequence[Interval]) -> int:
    """How much of ``own`` lies in ``intervals``, which are disjoint and ascending."""
    start, end = own
    covered = 0
    for position in range(bisect_right(intervals, start, key=_end_of), len(intervals)):
        begins, ends = intervals[position]
        if begins >= end:
            break
        covered += min(end, ends) - max(start, begins)
    return covered


def _end_of(interval: Interval) -> int:
    return interval[1]
