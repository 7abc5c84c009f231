"""One program with one strategy after the other, each compared with XLA's default.

Integers and booleans are compared bit by bit. A float may lie from the default's four times as far as moving every
input to a neighbouring number moved the default, and a few last digits of the largest number that was on the way
besides: another fusion rounds in other places.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError, IllegalStrategyError, ModuleError, PlanError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan.apply import apply
from disco_hlo.plan.check_module import faults
from disco_hlo.plan.read import verify
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.fuzz import interpret
from tests.fuzz.interpret import abstract_arguments, make_inputs, moved_by_a_bit, place, step_of
from tests.fuzz.program import Body, Program
from tests.fuzz.strategies import LostError, Wanted, digest, strategy_of
from tests.fuzz.tally import FINDINGS
from tests.steps.intercept import intercepted

KINDS = ("accepted", "same", "repeated", "gated", "own-gated", "refused", *FINDINGS)
"""All outcomes of a pair. accepted: XLA's default passes the last gate (default-gated: the gate refuses it, though it
computes what its ops do one by one; a training step would be left alone for nothing); repeated: the module was compared
before; gated: the last gate before XLA refused it (own-gated: of XLA's own plan); refused: ``apply`` did; lost: a state
of the search is no strategy; uncompiled: XLA refused the module; unverified: ``verify`` did; broken: an exception that
nothing of ours may raise."""
LOOSER = 4.0
"""The default may lie so many times further from what is computed op by op than a strategy from the default."""
_GATE = "check_module.py"
_UNFUSED = {"xla_disable_hlo_passes": "fusion,multi_output_fusion"}
_NO_SMALL_CALLS = {"xla_disable_hlo_passes": "small-while-loop-hoisting"}
_numbers = itertools.count()
_TIMES_AS_FAR = 4.0
_ROUNDINGS = 12.0
_ROUNDING = {"f32": 2.0**-24, "bf16": 2.0**-9}
"""Half of a last digit."""
Outputs = list[list[NDArray[Any]]]
"""``[result][device]``."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a pair."""

    kind: str
    detail: str = ""


class SkippedError(Exception):
    """A program of which no strategy is judged: XLA's default is at fault, or the module is none of ours.

    The first word of the message says why. default: XLA does not run it; unread: its module is none of ours; and where
    the default computes something else than its ops do one by one: default-known: the last gate says so, and a training
    step is left alone; default-earlier: without fusions it computes the same, so what is wrong stands in the program
    that XLA's kernels are made of, and with it in every plan; default-missed: neither.
    """


class Case:
    """A program that XLA's default has run: ready to be compared with.

    Raises:
        SkippedError: it is not compared with anything; the first word of the message says why.
    """

    def __init__(self, program: Program, by_hand_too: bool = True) -> None:
        self.program = program
        self.inputs = make_inputs(program)
        try:
            self.request = _request_of(program)
            default, module = compiles.compile_seen(self.request)
            self.reference = self._reference(default)
        except Exception as error:
            raise SkippedError(f"default: XLA does not run it: {_one_line(error)}") from error
        try:
            self.source: CanonicalModule = canonicalize(module)
        except DiscoError as error:
            raise SkippedError(f"unread: {_one_line(error)}") from error
        self.faults = faults(module, self.source.graph.backend)
        """Why the last gate refuses XLA's default."""
        self._evaluated = False
        if by_hand_too:
            self._evaluate()
        self._seen: set[bytes] = set()

    def _reference(self, default: Any) -> Reference:
        runs = [self._run(default, self.inputs)]
        runs += [self._run(default, moved_by_a_bit(self.inputs, seed)) for seed in (1, 2)]
        return reference(self.program, self.inputs, *runs)

    def _run(self, executable: Any, inputs: Sequence[NDArray[Any]]) -> Outputs:
        result = executables.execute(executable, place(self.program, inputs))
        return [[np.array(part) for part in output] for output in executables.result_arrays(result)]

    def _evaluate(self) -> None:
        """Hear the third opinion.

        Raises:
            SkippedError: XLA's default computes something else than its ops one by one.
        """
        if self._evaluated:
            return
        self._evaluated = True
        found = interpret.evaluate(self.program)
        self.reference = self.reference.with_largest(found.largest)
        difference = self.reference.difference(found.outputs, LOOSER)
        if difference:
            raise SkippedError(f"{self._why_wrong()}: op by op it is another: {difference}")

    def _why_wrong(self) -> str:
        if self.faults:
            return "default-known"
        unfused = compiles.compile_module(self.request, None, _UNFUSED)
        is_alike = not self.reference.difference(self._run(unfused, self.inputs))
        return "default-earlier" if is_alike else "default-missed"

    def attempt(self, one: Wanted) -> Outcome:
        """Compile and run one strategy of the program, and compare.

        Raises:
            SkippedError: as the constructor; the third opinion may be heard only here.
        """
        try:
            return self._attempt(one)
        except LostError as error:
            return Outcome("lost", _one_line(error))
        except SkippedError:
            raise
        except Exception as error:  # noqa: BLE001 - any other is a finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Outcome("broken", f"{_one_line(error)} ({where.name}:{where.lineno})")

    def _attempt(self, one: Wanted) -> Outcome:
        if one.kind == "default":
            return self._default()
        strategy = strategy_of(self.source, one)
        gated = Outcome("own-gated" if one.kind == "xla" else "gated")
        try:
            module = apply(strategy, self.source)
        except (IllegalStrategyError, PlanError) as error:
            if _raised_in(error, _GATE):
                return replace(gated, detail=_one_line(error))
            own = one.kind not in ("random", "order", "one-kernel", "one-bucket")
            return Outcome("lost" if own else "refused", f"apply: {_one_line(error)}")
        digested = digest(module)
        if digested in self._seen:
            return Outcome("repeated")
        self._seen.add(digested)
        try:
            verify(self.source, module, strategy)
        except (PlanError, ModuleError) as error:
            if not _raised_in(error, _GATE):
                return Outcome("unverified", _one_line(error))
            return replace(gated, detail=_one_line(error))
        return self._ran(module)

    def _default(self) -> Outcome:
        if not self.faults:
            return Outcome("accepted")
        self._evaluate()
        return Outcome("default-gated", "; ".join(self.faults)[:400])

    def _ran(self, module: bytes) -> Outcome:
        try:
            executable = compiles.compile_module(self.request, module)
        except IllegalStrategyError as error:
            return Outcome("uncompiled", _one_line(error))
        return self._compared(self._run(executable, self.inputs))

    def _compared(self, outputs: Outputs) -> Outcome:
        if not self.reference.difference(outputs):
            return Outcome("same")
        self._evaluate()
        difference = self.reference.difference(outputs)
        return Outcome("different", difference) if difference else Outcome("same")


def _request_of(program: Program) -> CompileRequest:
    """The compile that JAX asks for to run the program; nothing is run."""
    name = f"fuzz{next(_numbers)}"
    lowered = step_of(program, name).lower(*abstract_arguments(program))
    options = {} if program.small_calls else _NO_SMALL_CALLS
    request: CompileRequest = intercepted(
        lowered, lambda one: one.module_name == f"jit_{name}", lambda one: one, options
    )
    return request


def _raised_in(error: BaseException, file: str) -> bool:
    return any(frame.filename.endswith(file) for frame in traceback.extract_tb(error.__traceback__))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


# Comparing --------------------------------------------------------------------------------------


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
