"""What a step returns, as one run shows it: shapes, what is not finite, and what each output updates."""

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
from disco_hlo.plugin.measuring.tolerances import are_compared_on_devices, widened
from disco_hlo.plugin.xla.executables import is_whole
from disco_hlo.plugin.xla.own_programs import Fact, compile_for_each_device, on_each_device

_UPDATED = 0.3
"""An output that lies so near to an input of its shape, relative to its norm, updates it."""
_A_FEW = 1 << 10
_MOST_PASSES = 64
_EXPONENT_BYTES = {8: 2, 16: 2}


@dataclass(frozen=True)
class Survey:
    """Of each output, in order."""

    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype[Any]]
    updated: list[int | None]
    """The parameter that it is the new value of, by the values: what is donated or not does not say."""
    not_finite: int
    """How many numbers of all are infinite or none, on all local devices."""

    @property
    def sizes(self) -> list[int]:
        """Elements of each output on one device."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def elements(self) -> int:
        """Of all outputs on one device."""
        return sum(self.sizes)

    def kept_bytes(self, number: int) -> int:
        """Memory of each device that an output takes while it is compared."""
        size = self.dtypes[number].itemsize
        own = 0 if is_whole(self.dtypes[number]) else _EXPONENT_BYTES.get(size, 1)
        return self.sizes[number] * (size + own)

    @property
    def output_bytes(self) -> int:
        """Memory of each device that all outputs take."""
        return sum(size * dtype.itemsize for size, dtype in zip(self.sizes, self.dtypes, strict=True))

    def name(self, number: int) -> str:
        """Type and shape of an output."""
        return f"{self.dtypes[number]}{list(self.shapes[number])}"

    def other_shape(self, number: int, values: Any) -> str:
        """What to say of a program whose output is of another type or shape; nothing where it is of this one."""
        if (values.dtype, values.shape) == (self.dtypes[number], self.shapes[number]):
            return ""
        return f"output {number} is {values.dtype}{list(values.shape)}, expected {self.name(number)}"


def survey_of(runner: Runner) -> tuple[Survey, list[list[Any]]]:
    """Run once, and see; returns the outputs, too, ``[output][local device]``."""
    inputs, arrays = _samples(runner), runner.output_arrays()
    shapes, dtypes, updated, strange = [], [], [], 0
    for own in arrays:
        first = own[0]
        few, count = _looked_at(own)
        shapes.append(tuple(first.shape))
        dtypes.append(np.dtype(first.dtype))
        updated.append(_nearest(few, inputs.get((str(first.dtype), tuple(first.shape)), ())))
        strange += count
    return Survey(shapes, dtypes, updated, strange), arrays


def passes(survey: Survey, limit_bytes: int | None) -> list[frozenset[int]]:
    """The outputs that are compared in one pass each: as many as fit into so much, or one.

    Raises:
        UnsupportedError: there would be too many passes.
    """
    found: list[set[int]] = [set()]
    used, kept = 0, [survey.kept_bytes(number) for number in range(len(survey.shapes))]
    for number, takes in enumerate(kept):
        if limit_bytes is not None and used and used + takes > max(limit_bytes, *kept):
            found.append(set())
            used = 0
        found[-1].add(number)
        used += takes
    if len(found) > _MOST_PASSES:
        raise UnsupportedError(
            f"the devices' free memory does not do for comparing {survey.elements} elements with XLA's default: "
            f"{limit_bytes} bytes of each may be taken, which makes {len(found)} passes; free memory, or use more "
            "devices"
        )
    if len(found) > 1:
        LOGGER.debug("the outputs are compared in %d passes of at most %s bytes", len(found), limit_bytes)
    return [frozenset(numbers) for numbers in found]


def _looked_at(arrays: Sequence[Any]) -> tuple[NDArray[Any], int]:
    """A few numbers of an output, on the first device, and how many are not finite, on all."""
    places = _places(math.prod(arrays[0].shape))
    if not are_compared_on_devices(arrays[0]):
        every = [np.asarray(one) for one in arrays]
        return every[0].reshape(-1)[places], sum(map(not_finite, every))
    devices = tuple(next(iter(one.devices())) for one in arrays)
    few, strange = on_each_device(devices, _look, (), arrays, [places] * len(devices))
    return np.asarray(few[0]), sum(int(np.asarray(one)[0]) for one in strange)


def compile_look(devices: tuple[Any, ...], output: Fact) -> None:
    """Compile what :func:`survey_of` runs on the devices for a large output."""
    places = _places(math.prod(output[0]))
    compile_for_each_device(devices, _look, (), output, (places.shape, places.dtype))


def _look(values: Any, places: Any) -> tuple[Any, Any]:
    import jax.numpy as jnp

    strange = jnp.zeros(1, np.int64)
    if not is_whole(values.dtype):
        strange = (~jnp.isfinite(values)).sum(dtype=np.int64).reshape(1)
    return values.reshape(-1)[places], strange


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


def _nearest(few: NDArray[Any], candidates: Sequence[tuple[int, NDArray[Any]]]) -> int | None:
    if not candidates:
        return None
    few = widened(few)
    norm = max(float(np.linalg.norm(few)), 1e-30)
    apart, index = min((float(np.linalg.norm(few - old)) / norm, index) for index, old in candidates)
    return index if apart < _UPDATED else None


def _places(size: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, max(0, size - 1), min(size, _A_FEW)).astype(np.int64))
