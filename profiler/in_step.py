"""All-reduces as they run in the step itself, and the swept lines with the latency that they have there.

Where collectives block (CPU), what a small all-reduce costs is how soon a waiting rank is woken, and that depends
on what the cores do meanwhile: the sweep's chains compute a millisecond on all cores before each, a step with
short kernels leaves them idle. The step's own traces hold all of its all-reduces, one by one. So the bytes are the
sweep's, and the latency is the smaller one of both: where the step's own all-reduces are over sooner, what makes the
lines add up to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from disco_hlo.profiler.allreduce import AllReduceFit
from disco_hlo.profiler.checks import Checker

from disco_hlo.errors import ProfileError


@dataclass(frozen=True, slots=True)
class InStep:
    """What the all-reduces of one step take in it, transferred one by one."""

    sizes: tuple[tuple[int, int], ...]
    """(bytes, how many of that size), by ascending size."""
    total_ns: int
    """All of them together, in one run of the step."""
    spread_ns: int
    """Median absolute deviation."""
    samples: int

    def __post_init__(self) -> None:
        counts = [count for _, count in self.sizes]
        possible = (
            self.total_ns > 0 and self.spread_ns >= 0 and self.samples > 0 and min(counts, default=0) > 0
        )
        if not possible or not _ascend(self.sizes):
            raise ProfileError(f"not what a step's all-reduces take: {self}")


def counted(sizes_bytes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Sizes as :class:`InStep` has them."""
    return tuple(sorted(Counter(sizes_bytes).items()))


def with_latency_of(step: InStep, swept: AllReduceFit) -> AllReduceFit:
    """The swept lines, all lowered alike so that the step's all-reduces add up to what they took in it.

    They are never raised: in a trace an all-reduce also waits for the rank that comes later, and each rank for its
    profiler. And they are lowered by no more than the latency, what no bytes would take: no time becomes negative.
    """
    sizes = np.array([size for size, _ in step.sizes])
    counts = np.array([count for _, count in step.sizes])
    latency_ns = swept.pieces[0].base_ns
    excess_ns = (step.total_ns - int(counts @ swept.predict_ns(sizes))) / int(counts.sum())
    moved_ns = min(0.0, max(excess_ns, -latency_ns))
    pieces = tuple(replace(piece, base_ns=piece.base_ns + moved_ns) for piece in swept.pieces)
    return replace(swept, pieces=pieces)


def in_step_of(body: Any, check: Checker) -> InStep | None:
    """From a profile's JSON form."""
    if body is None:
        return None
    body = check.record(body, "in_step")
    sizes = []
    for index, row in enumerate(check.rows(body.get("sizes"), "in_step.sizes")):
        where = f"in_step.sizes[{index}]"
        size, count = check.row(row, 2, where)
        sizes.append((check.integer(size, where, minimum=0), check.integer(count, where, minimum=1)))
    if not _ascend(sizes):
        check.fail("in_step.sizes", "expected at least one size, each once, ascending")
    return InStep(
        tuple(sizes),
        check.integer(body.get("total_ns"), "in_step.total_ns", minimum=1),
        check.integer(body.get("spread_ns"), "in_step.spread_ns", minimum=0),
        check.integer(body.get("samples"), "in_step.samples", minimum=1),
    )


def _ascend(sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether there is at least one size, and each once."""
    return bool(sizes) and all(left < right for (left, _), (right, _) in pairwise(sizes))
