"""Whether two runs of a program on equal inputs computed the same.

Integers and booleans are compared bit by bit. A float may lie from the default's four times as far as moving every
input to a neighbouring number moved the default, and a few last digits of the largest number that was on the way
besides: another fusion rounds in other places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.fuzz.program import Body, Program

Outputs = list[list[NDArray[Any]]]
"""``[result][device]``."""

_TIMES_AS_FAR = 4.0
_ROUNDINGS = 12.0
_ROUNDING = {"f32": 2.0**-24, "bf16": 2.0**-9}
"""Half of a last digit."""


@dataclass(frozen=True)
class Reference:
    """What XLA's default gives, and how sure that is."""

    outputs: Outputs
    moved: tuple[Outputs, ...]
    """The same on inputs that were moved by a bit."""
    rounding: float
    """Of the coarsest float that the program has."""
    largest: float
    """The largest number on the way, as far as that is known."""
    roundings: float = _ROUNDINGS
    """How many roundings of it may differ."""

    def with_largest(self, largest: float) -> Reference:
        """The same with numbers on the way that only an evaluation by hand sees."""
        return replace(self, largest=max(self.largest, largest))

    def difference(self, outputs: Outputs, looser: float = 1.0) -> str:
        """Where ``outputs`` are others, in one line; empty where they are the same."""
        if len(outputs) != len(self.outputs):
            return f"{len(outputs)} results, expected {len(self.outputs)}"
        for number, (want, have) in enumerate(zip(self.outputs, outputs, strict=True)):
            for device, (one, other) in enumerate(zip(want, have, strict=True)):
                moved = [run[number][device] for run in self.moved]
                found = self._apart(one, other, moved, looser)
                if found:
                    return f"result {number} on device {device}: {found}"
        return ""

    def _apart(
        self, want: NDArray[Any], have: NDArray[Any], moved: Sequence[NDArray[Any]], looser: float
    ) -> str:
        if want.shape != have.shape or want.dtype != have.dtype:
            return f"{have.dtype}{have.shape}, expected {want.dtype}{want.shape}"
        if want.dtype.kind in "iub":
            wrong = want != have
            return _counted(wrong, want, have) if wrong.any() else ""
        left, right = want.astype(np.float64), have.astype(np.float64)
        runs = [one.astype(np.float64) for one in moved]
        sure = np.isfinite(left)
        for run in runs:
            sure &= np.isfinite(run)
        unlike = np.isfinite(left) & ~np.isfinite(right) & sure
        left, right = np.where(sure, left, 0), np.where(sure & ~unlike, right, 0)
        limit = np.full(left.shape, self.roundings * self.rounding * self.largest)
        for run in runs:
            limit = np.maximum(limit, _TIMES_AS_FAR * np.abs(np.where(sure, run, 0) - left) + limit)
        wrong = unlike | (np.abs(left - right) > looser * limit)
        return _counted(wrong, want, have) if wrong.any() else ""


def _counted(wrong: NDArray[np.bool_], want: NDArray[Any], have: NDArray[Any]) -> str:
    at = tuple(int(x) for x in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    return f"{int(wrong.sum())} of {wrong.size} elements, the first at {list(at)}: {have[at]}, expected {want[at]}"


def reference(
    program: Program, inputs: Sequence[NDArray[Any]], outputs: Outputs, *moved: Outputs
) -> Reference:
    """What a program's default gave on its inputs, and on moved ones."""
    arrays = [*inputs, *(part for result in outputs for part in result)]
    largest = max(map(largest_of, arrays), default=0.0)
    roundings = _ROUNDINGS + _most_terms(program.body) / 4
    return Reference(outputs, moved, _rounding(program.body), largest, roundings)


def largest_of(array: NDArray[Any]) -> float:
    """The largest finite number of an array of floats, by its size."""
    if array.dtype.kind in "iub" or not array.size:
        return 0.0
    magnitudes = np.abs(array.astype(np.float64))
    return float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))


def _most_terms(body: Body) -> float:
    """How many numbers one op makes one of, at most: a loop adds them one by one, a tree in pairs."""
    types = body.types
    found = [1.0]
    for op in body.ops:
        read = max((types[x].elements for x in op.operands), default=0)
        found += [read / one.elements for one in op.results if one.elements]
        found += map(_most_terms, op.bodies)
    return max(found)


def _rounding(body: Body) -> float:
    found = [_ROUNDING[one.dtype] for one in body.types if one.dtype in _ROUNDING]
    found += [_rounding(inner) for op in body.ops for inner in op.bodies]
    return max(found, default=0.0)
