"""What XLA's default computes on one set of inputs, how far its roundings move that, and who computes otherwise."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disco_hlo.backends import backend_of
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.plugin.measuring.lockstep import Guard, anywhere, run_on_all
from disco_hlo.plugin.measuring.roundings import rounding_of
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.survey import Survey
from disco_hlo.plugin.measuring.tolerances import HIGH, TIMES, Allowed
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import executables
from disco_hlo.plugin.xla.executables import LoadedExecutable

_RUNS, _FEWER_RUNS, _MORE_RUNS = 3, 1, 8
"""How often the default runs on changed inputs: at first, at first where it has many elements, and where a program is
too far off."""
_MANY_ELEMENTS = 1 << 24
"""So many neighbours tell what one element does not."""


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
    outputs: frozenset[int]
    """Those of the pass."""
    first: list[list[Any]] | None = None
    """What a run of the default returned, all of it, where that is there."""
    kept_on_host: bool = False
    """Whether what the default computed lies in the host's memory."""
    _allowed: dict[int, Allowed] = field(default_factory=dict)
    """By output."""
    _runs: int = 0

    def __post_init__(self) -> None:
        """Run the default, and run it on changed inputs."""
        first, self.first = self.first, None
        self._run("a run of XLA's default", self._keep, first)
        module = executables.read_executable(self.default.executable)
        self._rounding = rounding_of(module, backend_of(self.session.request.backend.platform))
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
        for number, allowed in self._allowed.items():
            if allowed.is_float:
                moved, changed = allowed.moved_square**0.5, allowed.changed_square**0.5
                if moved and TIMES * HIGH * moved >= changed:
                    found[f"{number} {self.survey.name(number)}"] = self.survey.sizes[number]
        return found

    # --- the default ------------------------------------------------------------------------------

    def _run(
        self, what: str, take: Callable[[int, list[Any]], None], ran: list[list[Any]] | None = None
    ) -> None:
        runner, guard = self.default.runner, self.default.guard
        assert runner is not None

        def run() -> None:
            for number, arrays in self._chosen(ran or runner.output_arrays()):
                take(number, arrays)

        with guard():
            run_on_all(self.session, what, run)

    def _chosen(self, arrays: list[list[Any]]) -> Iterator[tuple[int, list[Any]]]:
        """The outputs of the pass, one after the other. Those that are done with give their room back."""
        arrays.reverse()
        for number in range(len(arrays)):
            own = arrays.pop()
            if number in self.outputs:
                yield number, own

    def _keep(self, number: int, arrays: list[Any]) -> None:
        self._allowed[number] = Allowed(arrays, self._before(number), kept_on_host=self.kept_on_host)

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

    def _take_in(self, number: int, arrays: list[Any]) -> None:
        index, runner = self.survey.updated[number], self.default.runner
        assert runner is not None
        if self._allowed[number].is_float:
            before = None if index is None else runner.inputs_as_they_were(index)
            self._allowed[number].learn(arrays, before, self._before(number))

    def _before(self, number: int) -> list[Any] | None:
        """What an output is the new value of, as the inputs are now."""
        index, runner = self.survey.updated[number], self.default.runner
        assert runner is not None
        return None if index is None else runner.input_arrays(index)

    # --- another program --------------------------------------------------------------------------

    def _unlike(self, program: Program) -> str:
        runner = program.runner
        assert runner is not None
        with program.guard():
            return run_on_all(self.session, f"a run of {program.name}", lambda: self._first_unlike(runner))

    def _first_unlike(self, runner: Runner) -> str:
        for number, arrays in self._chosen(runner.output_arrays()):
            if (why := self.survey.other_shape(number, arrays[0])) != "":
                return why
            place, how = self._allowed[number].unlike(arrays)
            if how:
                at = list(map(int, np.unravel_index(place, arrays[0].shape)))
                return (
                    f"output {number} differs from XLA's default at {at} of {self.survey.name(number)}: {how}"
                )
        return ""
