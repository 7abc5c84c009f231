"""Which elements of an array a slice or an update touches, by their places in memory, and whether two of them meet.

Part of :mod:`~disco_hlo.plan.check_module`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from disco_hlo.hlo.proto import Message


@dataclass(frozen=True, slots=True)
class Stretch:
    """Which elements of an array a part of it is, in the part's order in memory."""

    first: int
    """The position in memory of the first element, as far as it is known."""
    runs: tuple[tuple[int, int], ...]
    """How many elements lie how far apart, from the fastest dimension to the slowest."""
    computed: tuple[tuple[int, int, Message], ...]
    """For each start that is computed: how far apart the places are that it chooses from, how many there are beside
    the first, and what computes it."""

    def meets_only_itself(self, first: int, moves: Sequence[tuple[int, int]]) -> bool:
        """Whether the same stretch elsewhere is this one or has no element of it.

        Args:
            first: where the other one begins, unless it is moved.
            moves: by which multiples, and how often at most, either is moved.
        """
        if len(self.runs) > 1:
            return False
        count, apart = self.runs[0] if self.runs else (1, 1)
        step = math.gcd(self.first - first, *(distance for distance, _ in moves))
        farthest = abs(self.first - first) + sum(distance * times for distance, times in moves)
        nearest = math.lcm(step, apart)  # the least that lets them meet, but for nothing at all
        return nearest >= count * apart or nearest > farthest


def stretch(
    part: Message, whole: Message, starts: Sequence[int | Message], steps: list[int]
) -> Stretch | None:
    """Which elements of ``whole`` a part of it is; None where that is not known."""
    order = list(whole.layout.minor_to_major)
    if order != list(part.layout.minor_to_major) or not len(order) == len(starts) == len(steps):
        return None
    first, distance = 0, 1
    runs: list[tuple[int, int]] = []
    computed: list[tuple[int, int, Message]] = []
    for place in order:
        size, start, room = part.dimensions[place], starts[place], whole.dimensions[place]
        if not isinstance(start, int):
            computed += [(distance, room - size, start)] if room > size else []
        else:
            first += (start if steps[place] != 1 else min(max(start, 0), room - size)) * distance
        apart = steps[place] * distance
        if size > 1 and runs and runs[-1][0] * runs[-1][1] == apart:
            runs[-1] = runs[-1][0] * size, runs[-1][1]
        elif size > 1:
            runs.append((size, apart))
        distance *= room
    return Stretch(first, tuple(runs), tuple(computed))
