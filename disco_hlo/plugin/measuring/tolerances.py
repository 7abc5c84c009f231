"""How far an element of a result may lie from XLA's default: four times as far as roundings move it there.

The default runs again on inputs that are changed by a rounding (``roundings``). How far
that moves an element of an output, beyond what moves the input that the output updates, is one sample of what its
roundings add up to. Another plan rounds in other places, so an element that happened not to move may lie as far off as
its neighbours moved: those of its row, of its column, or all where a row and a column are only a few elements. And the
last digits of an output are always rounded.

So one wrong element or tile stands out, where a norm over the result would hide it. What moves all elements a little is
seen in the norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from disco_hlo.plugin.xla.dtypes import is_whole

TIMES = 4.0
"""An element may lie so many times as far off as roundings move it."""
HIGH = 3.0
"""The largest of many neighbours moves so many times as far as they do by the root of their mean square."""
_NEXT = 0.7072
"""The power of two next to a number is above this part of it: the root of a half, or barely more."""
_LAYOUT: dict[int, tuple[Any, int, Any]] = {4: (np.uint32, 23, np.uint8), 8: (np.uint64, 52, np.uint16)}
"""By a float's bytes: bits of its size, bits below its exponent, and what holds the exponent."""
_A_FEW = 4
_MANY = 64
"""Of so many elements the norm is compared, too."""
_ELEMENTS = 1 << 20
"""Elements that are looked at at once: temporary arrays are a few times as large."""


@dataclass(frozen=True)
class Span:
    """A part of a flat array; rows of it where a row is no longer than a part."""

    start: int
    stop: int
    columns: int


def spans_of(shape: Sequence[int]) -> list[Span]:
    """The parts in which an array of this shape is compared."""
    size = math.prod(shape)
    columns = shape[-1] if shape else 1
    if columns > _ELEMENTS:
        return [
            Span(start, min(size, start + _ELEMENTS), min(size - start, _ELEMENTS))
            for start in range(0, size, _ELEMENTS)
        ]
    step = _ELEMENTS // max(1, columns) * columns
    return [Span(start, min(size, start + step), columns) for start in range(0, size, max(1, step))]


class Allowed:
    """What the default computed in one part of a result, and how far off another program may be.

    Args:
        values: flat; kept.
        before: what the step updates there; None where it updates nothing.
        columns: how many elements of it are a row.
    """

    def __init__(self, values: NDArray[Any], before: NDArray[Any] | None, columns: int) -> None:
        self.values = values
        self._rows, self._columns = values.size // max(1, columns), columns
        self._runs = 0
        self.is_float = not is_whole(values.dtype)
        if not self.is_float:
            return
        kind = ml_dtypes.finfo(values.dtype)
        wide = widened(values)
        largest = np.abs(wide)
        self.changed_square = _square(wide if before is None else wide - widened(before))
        if before is not None:
            np.maximum(largest, np.abs(widened(before)), out=largest)
        digit = float(kind.eps) * _NEXT  # the power of two next to it is what the last digit is worth
        last_digit = np.where(np.isfinite(largest), largest, 0) * largest.dtype.type(digit)
        last_digit += largest.dtype.type(kind.smallest_normal)
        self._last_digits_square = _square(last_digit)
        self._powers = _powers(last_digit)
        self._in_rows = np.zeros(self._rows)
        self._in_columns = np.zeros(self._columns)

    @property
    def moved_square(self) -> float:
        """The mean, over the runs, of the sum of squares of how far elements moved."""
        return float(self._in_rows.sum()) / max(1, self._runs)

    def learn(self, moved: NDArray[Any], shift: NDArray[Any] | None) -> None:
        """Take in what the default computes on changed inputs.

        Args:
            shift: how far the change of inputs moved what the step updates.
        """
        self._runs += 1
        with np.errstate(all="ignore"):
            change = widened(moved) - widened(self.values)
            if shift is not None:
                change -= shift
            size = np.nan_to_num(np.abs(change), nan=0.0, posinf=0.0)
        np.maximum(self._powers, _powers(size), out=self._powers)
        squares = np.square(size, dtype=np.float64).reshape(self._rows, self._columns)
        self._in_rows += squares.sum(1)
        self._in_columns += squares.sum(0)

    def unlike(self, got: NDArray[Any]) -> tuple[int, str]:
        """Where another program's values are too far off, and how far; no words where nowhere."""
        if same_bits(self.values, got):
            return 0, ""
        if not self.is_float:
            place = int(np.argmax(self.values != got))
            return place, f"it is {got[place]} and not {self.values[place]}"
        want, have = widened(self.values), widened(got)
        with np.errstate(all="ignore"):
            apart = np.abs(have - want)
        largest = apart.max()
        if not np.isfinite(largest):
            strange = ~(np.isfinite(want) & np.isfinite(have))
            wrong = strange & ~((want == have) | (np.isnan(want) & np.isnan(have)))
            if wrong.any():
                place = int(np.argmax(wrong))
                return place, f"it is {have[place]:.3g} and not {want[place]:.3g}"
            apart[strange] = 0
            largest = apart.max()
        return self._too_far(apart, float(largest))

    def _too_far(self, apart: NDArray[Any], largest: float) -> tuple[int, str]:
        """As :meth:`unlike`, of finite differences."""
        rows, columns = self._near()
        least = max(float(near.min()) for near in (rows, columns))
        if largest > TIMES * least:
            allowed = self._allowed(apart.dtype, rows, columns)
            if (apart > allowed).any():
                place = int(np.argmax(apart / allowed))
                return place, f"by {apart[place]:.2g}, where roundings make {allowed[place]:.2g}"
        limit = TIMES * (self.moved_square + self._last_digits_square) ** 0.5
        if (
            apart.size < _MANY
            or largest * apart.size**0.5 <= limit
            or (norm := _square(apart) ** 0.5) <= limit
        ):
            return 0, ""
        return int(np.argmax(apart)), f"by {norm:.2g} of its norm, where roundings make {limit:.2g}"

    def _near(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """How far the elements of each row and each column may move; 0 where these are only a few."""
        runs = max(1, self._runs)
        rows, columns = np.zeros(self._rows), np.zeros(self._columns)
        if self._columns >= _A_FEW:
            rows = np.sqrt(self._in_rows / (runs * self._columns))
        if self._rows >= _A_FEW:
            columns = np.sqrt(self._in_columns / (runs * self._rows))
        if max(self._rows, self._columns) < _A_FEW:
            rows += (self.moved_square / (self._rows * self._columns)) ** 0.5
        return HIGH * rows, HIGH * columns

    def _allowed(
        self, dtype: np.dtype[Any], rows: NDArray[np.float64], columns: NDArray[np.float64]
    ) -> NDArray[Any]:
        """By how much each element may differ."""
        allowed: NDArray[Any] = np.maximum(rows.astype(dtype)[:, None], columns.astype(dtype)[None]).reshape(
            -1
        )
        np.maximum(allowed, _sizes(self._powers, dtype), out=allowed)
        allowed *= dtype.type(TIMES)
        return allowed


def widened(part: NDArray[Any]) -> NDArray[Any]:
    """In a type that numpy computes in: itself, or f32."""
    return part if part.dtype.kind in "fc" and part.dtype.itemsize > 2 else part.astype(np.float32)


def same_bits(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two contiguous arrays of one type and size are equal, bit by bit."""
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))


def _powers(sizes: NDArray[Any]) -> NDArray[Any]:
    """The powers of two next to sizes, as floats have them in their exponent: a quarter of the sizes' memory."""
    integer, mantissa, kept = _LAYOUT[sizes.dtype.itemsize]
    near = sizes * sizes.dtype.type(_NEXT)
    powers: NDArray[Any] = ((near.view(integer) >> mantissa) + 1).astype(kept)
    return powers


def _sizes(powers: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The powers of two that :func:`_powers` kept."""
    integer, mantissa, _ = _LAYOUT[dtype.itemsize]
    return (powers.astype(integer) << mantissa).view(dtype)


def _square(values: NDArray[Any]) -> float:
    sizes = np.abs(values)
    return float(np.square(np.where(np.isfinite(sizes), sizes, 0), dtype=np.float64).sum())
