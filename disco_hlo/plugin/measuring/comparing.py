"""Whether a candidate computes what XLA's default computes: on made-up inputs, up to rounding.

A step returns updated parameters and moments, of which the gradient is a thousandth: what is compared is by how much an
output differs from the input that it updates. Another fusion or bucket rounds in other places, and how much of an
update may change for that depends on the update: a bias's gradient before a normalization is 0 but for rounding, and
of a deep network in bf16 half of a gradient may be. So an output that lies further from the default's than rounding
usually takes it is looked at again: the default runs once more on inputs that are changed by one rounding of each
number, in the coarsest type that the step computes in, and the output may lie twice as far from itself as that took it,
but not as far as no update would. Of an update that is nothing but rounding only the size is compared: it may be larger
by the root of what lies between rounding and what is rounded.

On inputs of both signs that is seldom needed (docs/limits.md): sums of positive ones cancel worse, behind every mean
that is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.inputs.made_up import is_integer, rounding_of
from disco_hlo.plugin.measuring.lockstep import anywhere, run_on_all
from disco_hlo.plugin.measuring.runner import Outputs, Runner
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import executables
from disco_hlo.plugin.xla.executables import LoadedExecutable

Before = Callable[[int, int], NDArray[Any] | None]
"""Of an output on a local device, by numbers, what it was before the step; None where it updates nothing."""

_RELATIVE_ERROR = {2: 5e-2, 1: 3e-1}
"""How far, relative to its norm, an update may be from the default's at any rate, by bytes of its type."""
_USUAL_ERROR = 1e-2
_LAST_DIGITS = 2
"""By so many last digits of the output an update may differ besides."""
_TIMES_AS_FAR = 2.0
"""Plans of seven models were up to 1.6 times as far from the default as it was from itself."""
_ZEROS = 0.9
"""An update of zeros is 1 from any other. One that moves so far by itself is nothing but rounding."""
_UPDATED = 0.3
"""An output that lies so near to an input of its shape, relative to its norm, updates it."""
_ELEMENTS = 1 << 18
_A_FEW = 1 << 10


@dataclass(frozen=True)
class _Apart:
    """How far two outputs lie from each other, and what of that says nothing."""

    error: float
    """Relative to the norm of the update."""
    digits: float
    """What the output's last digits are of it."""

    def beyond(self, limit: float) -> bool:
        """Whether they are too far from each other."""
        return self.error > limit + self.digits


class Reference:
    """What XLA's default computes on this rank's devices, and how sure that is.

    Args:
        runner: the default's.
        outputs: :func:`thinned` outputs of it.
    """

    def __init__(
        self, session: Session, executable: LoadedExecutable, runner: Runner, outputs: Outputs
    ) -> None:
        self._session = session
        self._executable = executable
        self._runner = runner
        self._outputs = outputs
        self._updated = _updated_parameters(outputs, runner)
        self._limits: list[float] | None = None

    def check(self, outputs: Outputs) -> None:
        """Compare another program's thinned outputs; on all ranks at once.

        Raises:
            IllegalStrategyError: they are not the same on this rank.
            ActivationError: nor on another.
        """
        session = self._session
        unlike = difference(self._outputs, outputs, self._before())
        if anywhere(session, bool(unlike), "comparison"):
            if self._limits is None:
                self._limits = self._look_again()
            unlike = difference(self._outputs, outputs, self._before(), self._limits)
        with session.stage("compared", logged=False):
            if unlike:
                raise IllegalStrategyError(unlike)

    def _before(self, nudge: float = 0.0) -> Before:
        def before(number: int, device: int) -> NDArray[Any] | None:
            index = self._updated[number]
            if index is None:
                return None
            every = _every(self._runner.parameters[index].shape)
            return self._runner.sampled_input(index, device, every, nudge)

        return before

    def _look_again(self) -> list[float]:
        """How far each output may be from the default's, by how far the default itself moves."""
        session, runner = self._session, self._runner
        module = executables.read_executable(self._executable)
        rounding = rounding_of(module, session.request.backend.platform)
        try:
            with session.stage("inputs changed by a rounding"):
                runner.nudge(rounding)
            moved = run_on_all(session, "a run on changed inputs", lambda: thinned(runner.outputs()))
        finally:
            with session.stage("inputs as they were"):
                runner.nudge(0.0)
        limits = limits_of(self._outputs, moved, rounding, self._before(), self._before(rounding))
        LOGGER.debug(
            "changed by %.1e, the inputs change outputs so that they may differ by up to %.2g",
            rounding, max(limits, default=0.0),
        )  # fmt: skip
        return limits


def _no_update(_number: int, _device: int) -> None:
    return None


def limits_of(
    outputs: Outputs,
    moved: Outputs,
    rounding: float,
    before: Before = _no_update,
    moved_before: Before = _no_update,
) -> list[float]:
    """How far, relative to the norm of its update, each output may be from another program's.

    Args:
        moved: the same program's outputs on inputs that were changed by ``rounding`` of each.
        moved_before: what those update.
    """
    limits = []
    for number, (want, have) in enumerate(zip(outputs, moved, strict=True)):
        parts = [
            _apart(a, b, before(number, device), moved_before(number, device)).error
            for device, (a, b) in enumerate(zip(want, have, strict=True))
        ]
        unsure = max(parts, default=0.0)
        limit = min(_TIMES_AS_FAR * unsure, _ZEROS) if unsure < _ZEROS else rounding**-0.5
        limits.append(max(limit, *(_usual_error(part) for part in want)))
    return limits


def difference(
    expected: Outputs, got: Outputs, before: Before = _no_update, limits: Sequence[float] | None = None
) -> str:
    """Why two runs on equal inputs do not compute the same, in one line; empty where they do.

    Another order of rounding is allowed for; what this catches is a wrong program.

    Args:
        limits: how far each output may differ, relative to its update; None: as far as its type usually makes it.
    """
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        for device, (left, right) in enumerate(zip(want, have, strict=True)):
            if left.dtype != right.dtype or left.shape != right.shape:
                return f"output {number} is {right.dtype}{right.shape}, expected {left.dtype}{left.shape}"
            found = _apart(left, right)
            if found.error <= found.digits:
                continue
            start = before(number, device)
            if start is not None:
                found = _apart(left, right, start, start)
            if found.beyond(_usual_error(left) if limits is None else limits[number]):
                what = "its norm" if start is None else "its update's norm"
                return f"output {number} differs from XLA's default by {found.error:.2g} of {what}"
    return ""


def thinned(outputs: Outputs) -> Outputs:
    """At most some 250,000 elements of each output, evenly spread: gigabytes of parameters need neither be
    kept nor compared whole."""
    return tuple(
        tuple(np.ascontiguousarray(part.reshape(-1)[:: _every(part.shape)]) for part in output)
        for output in outputs
    )


def not_finite(outputs: Outputs) -> int:
    """How many numbers are infinite or none."""
    parts = [part for output in outputs for part in output if part.dtype.kind not in "biu"]
    return sum(part.size - int(np.count_nonzero(np.isfinite(_widened(part)))) for part in parts)


def _every(shape: Sequence[int]) -> int:
    """One of so many elements is looked at; odd, or of an array with 2 ** n columns the same few columns would be."""
    return max(1, int(np.prod(shape)) // _ELEMENTS) | 1


def _updated_parameters(outputs: Outputs, runner: Runner) -> list[int | None]:
    """Of each output the parameter that it is the new value of, by the values: what is donated or not does not say."""
    alike: dict[tuple[str, int], list[tuple[int, NDArray[Any]]]] = {
        (str(output[0].dtype), output[0].size): [] for output in outputs if output
    }
    for index, parameter in enumerate(runner.parameters):
        every = _every(parameter.shape)
        size = -(-int(np.prod(parameter.shape)) // every)
        candidates = alike.get((str(parameter.dtype), size))
        if candidates is not None and size and not is_integer(parameter):
            few = runner.sampled_input(index, 0, every * max(1, size // _A_FEW))
            candidates.append((index, _widened(few)))
    return [_nearest(output[0], alike) if output and output[0].size else None for output in outputs]


def _nearest(
    new: NDArray[Any], alike: Mapping[tuple[str, int], Sequence[tuple[int, NDArray[Any]]]]
) -> int | None:
    few = _widened(new)[:: max(1, new.size // _A_FEW)]
    norm = max(float(np.linalg.norm(few)), 1e-30)
    found = [
        (float(np.linalg.norm(few - old)) / norm, index) for index, old in alike[str(new.dtype), new.size]
    ]
    apart, index = min(found, default=(_UPDATED, -1))
    return index if apart < _UPDATED else None


def _apart(
    left: NDArray[Any],
    right: NDArray[Any],
    before: NDArray[Any] | None = None,
    right_before: NDArray[Any] | None = None,
) -> _Apart:
    if left.dtype.kind in "biu" or "int" in left.dtype.name:
        return _Apart(0.0 if np.array_equal(left, right) else 1.0, 0.0)
    a, b = _widened(left), _widened(right)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return _Apart(float("inf"), 0.0)
    whole = float(np.linalg.norm(a[finite]))
    if before is not None and right_before is not None:
        a, b = a - _widened(before), b - _widened(right_before)
    norm = max(float(np.linalg.norm(a[finite])), 1e-30)
    error = float(np.linalg.norm(a[finite] - b[finite]))
    return _Apart(error / norm, _LAST_DIGITS * float(ml_dtypes.finfo(left.dtype).eps) * whole / norm)


def _usual_error(part: NDArray[Any]) -> float:
    return _RELATIVE_ERROR.get(part.dtype.itemsize, _USUAL_ERROR)


def _widened(part: NDArray[Any]) -> NDArray[Any]:
    """In a type that numpy computes in."""
    return part.astype(np.complex128 if part.dtype.kind == "c" else np.float64)
