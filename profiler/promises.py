"""What estimates promised of kernels that a search chose, and what these kernels took.

A search takes of all kernels that never ran those whose estimates err on the low side, so what it chooses takes
longer than estimated even where the estimator is right on average: the optimizer's curse (Smith and Winkler, "The
Optimizer's Curse: Skepticism and Postdecision Surprise in Decision Analysis", Management Science 52(3), 2006). The
share by which chosen kernels fell behind is what the next choice has to expect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from disco_hlo.profiler.checks import Checker

_HIGHEST = 2.0
"""Beyond this the estimator is wrong about this step, and its order among kernels as well as their times."""


@dataclass(frozen=True, slots=True)
class Promises:
    """Kernels that plans made up and that were measured afterwards, summed over plans."""

    estimated_ns: int
    measured_ns: int

    @property
    def factor(self) -> float:
        """By what estimates of kernels that never ran are multiplied, from 1 to 2."""
        if self.estimated_ns <= 0:
            return 1.0
        return min(max(self.measured_ns / self.estimated_ns, 1.0), _HIGHEST)

    def __add__(self, other: Promises) -> Promises:
        return Promises(self.estimated_ns + other.estimated_ns, self.measured_ns + other.measured_ns)


NONE = Promises(0, 0)
"""Nothing that was estimated has run."""


def promises_of(body: Any, check: Checker) -> Promises:
    """From a profile's JSON; a file without them has none."""
    if body is None:
        return NONE
    body = check.record(body, "promises")
    return Promises(
        *(
            check.integer(body.get(name), f"promises.{name}", minimum=0)
            for name in ("estimated_ns", "measured_ns")
        )
    )
