"""What a step returns, as one run shows it: shapes, which devices return the same, and what each output updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.tolerances import Span, same_bits, spans_of, widened
from disco_hlo.plugin.xla.dtypes import is_whole

_UPDATED = 0.3
"""An output that lies so near to an input of its shape, relative to its norm, updates it."""
_A_FEW = 1 << 10
_MOST_PASSES = 64
_EXPONENT_BYTES = {8: 2, 16: 2}


Spans = Mapping[int, Sequence[Span]]
"""By number of an output, the parts of it that one pass compares."""


@dataclass(frozen=True)
class Survey:
    """Of each output, in order."""

    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype[Any]]
    devices: list[int]
    """How many local devices return it."""
    alike: list[bool]
    """Whether all of these return the same bits."""
    updated: list[int | None]
    """The parameter that it is the new value of, by the values: what is donated or not does not say."""
    not_finite: int
    """How many numbers of all are infinite or none."""

    @property
    def sizes(self) -> list[int]:
        """Elements of each output on one device."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def elements(self) -> int:
        """Of all outputs on one device."""
        return sum(self.sizes)

    def kept_bytes(self, number: int) -> int:
        """Host memory that an element of an output takes while it is compared, on all local devices."""
        size = self.dtypes[number].itemsize
        own = 0 if is_whole(self.dtypes[number]) else _EXPONENT_BYTES.get(size, 1)
        copies = 1 if self.alike[number] else self.devices[number]
        return (size + own) * copies

    def name(self, number: int) -> str:
        """Type and shape of an output."""
        return f"{self.dtypes[number]}{list(self.shapes[number])}"

    def other_shape(self, number: int, values: NDArray[Any]) -> str:
        """What to say of a program whose output is of another type or shape; nothing where it is of this one."""
        if (values.dtype, values.shape) == (self.dtypes[number], self.shapes[number]):
            return ""
        return f"output {number} is {values.dtype}{list(values.shape)}, expected {self.name(number)}"


def survey_of(runner: Runner) -> Survey:
    """Run once, and see."""
    found = Survey([], [], [], [], [], 0)
    strange, inputs = 0, _samples(runner)
    first: NDArray[Any] = np.empty(0)
    for number, device, values in runner.each_output():
        if device == 0:
            first = values
            found.shapes.append(values.shape)
            found.dtypes.append(values.dtype)
            found.devices.append(0)
            found.alike.append(True)
            found.updated.append(_nearest(values, inputs))
        elif found.alike[number]:
            found.alike[number] = same_bits(first, values)
        found.devices[number] += 1
        strange += not_finite(values)
    return Survey(found.shapes, found.dtypes, found.devices, found.alike, found.updated, strange)


def passes(survey: Survey, limit_bytes: int | None) -> list[Spans]:
    """All parts of the outputs, in passes of which none keeps more than so much.

    Raises:
        UnsupportedError: there would be too many of them.
    """
    found: list[dict[int, list[Span]]] = [{}]
    used = 0
    for number, shape in enumerate(survey.shapes):
        for span in spans_of(shape):
            takes = (span.stop - span.start) * survey.kept_bytes(number)
            if limit_bytes is not None and used and used + takes > limit_bytes:
                found.append({})
                used = 0
            found[-1].setdefault(number, []).append(span)
            used += takes
    if len(found) > _MOST_PASSES:
        raise UnsupportedError(
            f"the host's free memory does not do for comparing {survey.elements} elements with XLA's default: "
            f"{limit_bytes} bytes may be taken, which makes {len(found)} passes; free memory, or use more hosts"
        )
    if len(found) > 1:
        LOGGER.debug("the outputs are compared in %d passes of at most %s bytes", len(found), limit_bytes)
    return [dict(spans) for spans in found]


def not_finite(values: NDArray[Any]) -> int:
    """How many numbers are infinite or none."""
    if is_whole(values.dtype):
        return 0
    return values.size - int(np.count_nonzero(np.isfinite(widened(values))))


_Samples = Mapping[tuple[str, tuple[int, ...]], Sequence[tuple[int, NDArray[Any]]]]
"""By type and shape, numbers of parameters and a few of their values."""


def _samples(runner: Runner) -> _Samples:
    found: dict[tuple[str, tuple[int, ...]], list[tuple[int, NDArray[Any]]]] = {}
    for index, parameter in enumerate(runner.parameters):
        places = _places(math.prod(parameter.shape))
        if places.size and not is_whole(parameter.dtype):
            few = widened(runner.floats(index, 0, places))
            found.setdefault((str(parameter.dtype), parameter.shape), []).append((index, few))
    return found


def _nearest(new: NDArray[Any], inputs: _Samples) -> int | None:
    candidates = inputs.get((str(new.dtype), new.shape), ())
    few = widened(new.reshape(-1)[_places(new.size)]) if candidates else new
    norm = max(float(np.linalg.norm(few)), 1e-30) if candidates else 0.0
    found = [(float(np.linalg.norm(few - old)) / norm, index) for index, old in candidates]
    apart, index = min(found, default=(_UPDATED, -1))
    return index if apart < _UPDATED else None


def _places(size: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, max(0, size - 1), min(size, _A_FEW)).astype(np.int64))
