"""Which of the modules that a script calls is its training step, by what its calls show.

A step returns the state that it takes, changed (or gradients of the same shapes); an evaluation returns numbers or
predictions. Among those that do, the step is the module on which the devices spend most of their time. A script may
have several: they come by their share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_CALLS = 5
"""Before them a module is not taken for a step: a function is compiled once for the arrays that a script makes and
again for those that its step returns, and the first of the two is called once."""
LEAST_SHARE = 0.05
"""Of the devices' time: what takes less is not worth a search."""
_LEAST_RETURNED = 0.5


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An argument or result, over all devices."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int

    @property
    def is_number(self) -> bool:
        """Whether it is a single one, as a loss is, or a count of steps."""
        return math.prod(self.shape) == 1


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one module's calls."""

    calls: int
    device_ns: int
    """Of all calls that were timed."""
    of_ns: int
    """Of the calls of all modules since this one was loaded: a step may come late, after another."""

    @property
    def share(self) -> float:
        """Of the devices' time, what its calls took."""
        return self.device_ns / self.of_ns if self.of_ns else 0.0


def keeps_state(takes: Sequence[ArrayType], returns: Sequence[ArrayType]) -> bool:
    """Whether half of what a module returns, by bytes, has the types of what it takes; single numbers aside."""
    free = Counter(one for one in takes if not one.is_number)
    total = returned = 0
    for one in returns:
        if one.is_number:
            continue
        total += one.bytes
        if free[one]:
            free[one] -= 1
            returned += one.bytes
    return returned > 0 and returned >= _LEAST_RETURNED * total


def steps(seen: Sequence[Seen]) -> list[int]:
    """Indices of those that are steps, the one that takes most of the devices' time first."""
    found = [
        index for index, one in enumerate(seen) if one.calls >= FEWEST_CALLS and one.share >= LEAST_SHARE
    ]
    return sorted(found, key=lambda index: (-seen[index].share, index))
