"""What XLA's default computes on one set of inputs, how far its roundings move that, and who computes otherwise."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.plugin.measuring.lockstep import anywhere, run_on_all
from disco_hlo.plugin.measuring.roundings import rounding_of
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.survey import Spans, Survey
from disco_hlo.plugin.measuring.tolerances import HIGH, TIMES, Allowed, Span, same_bits, widened
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import executables
from disco_hlo.plugin.xla.executables import LoadedExecutable

_RUNS, _FEWER_RUNS, _MORE_RUNS = 3, 1, 8
"""How often the default runs on changed inputs: at first, at first where it has many elements, and where a program is
too far off."""
_MANY_ELEMENTS = 1 << 24
"""So many neighbours tell what one element does not."""

Guard = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass
class Program:
    """What is run."""

    name: str
    executable: LoadedExecutable
    guard: Guard = contextlib.nullcontext
    """Around whatever runs it."""
    runner: Runner | None = None
    """On the inputs that it was compared on last."""
    error: str = ""
    """Why it is not what the default is."""


@dataclass
class Reference:
    """What XLA's default computes in one pass, and how far its roundings move that."""

    session: Session
    default: Program
    survey: Survey
    spans: Spans
    pool: Executor
    _allowed: dict[tuple[int, int], list[Allowed]] = field(default_factory=dict)
    """By output and local device."""
    _runs: int = 0

    def __post_init__(self) -> None:
        """Run the default, and run it on changed inputs."""
        self._run("a run of XLA's default", self._keep)
        module = executables.read_executable(self.default.executable)
        self._rounding = rounding_of(module, self.session.request.backend.platform)
        self._learn(_RUNS if self.survey.elements < _MANY_ELEMENTS else _FEWER_RUNS)

    def check(self, program: Program) -> None:
        """Compare another program; on all ranks at once.

        Raises:
            IllegalStrategyError: it does not compute the same on this rank.
            ActivationError: nor on another.
        """
        unlike = self._unlike(program)
        looks_again = self._runs < _MORE_RUNS
        if anywhere(self.session, bool(unlike), "comparison") and looks_again:
            self._learn(_MORE_RUNS)
            unlike = self._unlike(program)
        with self.session.stage("compared", logged=False):
            if unlike:
                raise IllegalStrategyError(unlike)

    def hardly_compared(self) -> Counter[str]:
        """Outputs of which an element could be missing, with the number of their elements."""
        found = Counter[str]()
        for (number, _), parts in self._allowed.items():
            moved, changed = (
                sum(getattr(part, what) for part in parts if part.is_float) ** 0.5
                for what in ("moved_square", "changed_square")
            )
            if moved and TIMES * HIGH * moved >= changed:
                found[f"{number} {self.survey.name(number)}"] = self.survey.sizes[number]
        return found

    # --- the default ------------------------------------------------------------------------------

    def _run(self, what: str, take: Callable[[int, int, NDArray[Any]], None]) -> None:
        runner, guard = self.default.runner, self.default.guard
        assert runner is not None

        def run() -> None:
            for number, device, values in runner.each_output():
                if number in self.spans and not (device and self.survey.alike[number]):
                    take(number, device, values.reshape(-1))

        with guard():
            run_on_all(self.session, what, run)

    def _keep(self, number: int, device: int, values: NDArray[Any]) -> None:
        def keep(span: Span) -> Allowed:
            part = values[span.start : span.stop].copy()
            return Allowed(part, self._before(number, device, span), span.columns)

        self._allowed[number, device] = list(self.pool.map(keep, self.spans[number]))

    def _learn(self, runs: int) -> None:
        """Run on inputs that are changed by a rounding until that has been done so often."""
        assert self.default.runner is not None
        try:
            while self._runs < runs:
                self._runs += 1
                with self.session.stage("inputs changed by a rounding"):
                    self.default.runner.nudge(self._rounding, self._runs)
                self._run("a run on changed inputs", self._take_in)
        finally:
            with self.session.stage("inputs as they were"):
                self.default.runner.nudge(0.0)

    def _take_in(self, number: int, device: int, values: NDArray[Any]) -> None:
        def take_in(span: Span, part: Allowed) -> None:
            if part.is_float:
                before = self._before(number, device, span)
                moved = self._before(number, device, span, changed=True)
                shift = None if before is None or moved is None else widened(moved) - widened(before)
                part.learn(values[span.start : span.stop], shift)

        list(self.pool.map(take_in, self.spans[number], self._allowed[number, device]))

    def _before(self, number: int, device: int, span: Span, *, changed: bool = False) -> NDArray[Any] | None:
        index, runner = self.survey.updated[number], self.default.runner
        if index is None or runner is None:
            return None
        places = np.arange(span.start, span.stop)
        return runner.floats(index, device, places, *((self._rounding, self._runs) if changed else ()))

    # --- another program --------------------------------------------------------------------------

    def _unlike(self, program: Program) -> str:
        runner = program.runner
        assert runner is not None
        with program.guard():
            return run_on_all(self.session, f"a run of {program.name}", lambda: self._first_unlike(runner))

    def _first_unlike(self, runner: Runner) -> str:
        first: NDArray[Any] = np.empty(0)
        for number, device, values in runner.each_output():
            if number not in self.spans:
                continue
            if (why := self.survey.other_shape(number, values)) != "":
                return why
            flat = values.reshape(-1)
            if device == 0:
                first = flat
            elif self.survey.alike[number] and same_bits(first, flat):
                continue
            parts = self._allowed[number, 0 if self.survey.alike[number] else device]
            for span, (place, how) in zip(
                self.spans[number],
                self.pool.map(partial(_unlike, flat), self.spans[number], parts),
                strict=True,
            ):
                if how:
                    at = list(map(int, np.unravel_index(span.start + place, values.shape)))
                    return f"output {number} differs from XLA's default at {at} of {self.survey.name(number)}: {how}"
        return ""


def _unlike(values: NDArray[Any], span: Span, part: Allowed) -> tuple[int, str]:
    return part.unlike(values[span.start : span.stop])
