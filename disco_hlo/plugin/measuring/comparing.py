"""Whether programs compute what XLA's default computes: on made-up inputs, element by element, up to rounding.

All elements of all results of all local devices are compared, on two sets of inputs. On the first, indices are
permutations, so that every row is read; the second is what steps are timed on. Whole numbers and truth values must be
equal. How far a float may be off is said in ``tolerances``: the default runs a few times on inputs that are changed by
a rounding, and where another program is too far off it runs some more times before that counts.

A step returns updated parameters and moments, of which the gradient is a thousandth: what is looked at is by how much
an output differs from the input that it updates.

Host memory holds what the default computed and a byte beside each number, once for all devices that hold the same, and
of other runs one output at a time. Where that takes more than a part of what the host has free, the outputs are compared
in several passes, for each of which all programs run again.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import IllegalStrategyError, UnsupportedError
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.cores import compiles_at_once
from disco_hlo.plugin.measuring.lockstep import all_have, anywhere, run_on_all
from disco_hlo.plugin.measuring.roundings import rounding_of
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.survey import Survey, survey_of
from disco_hlo.plugin.measuring.tolerances import HIGH, TIMES, Allowed, Span, same_bits, spans_of, widened
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla import executables
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.job import free_host_bytes

_RUNS, _FEWER_RUNS, _MORE_RUNS = 3, 1, 8
"""How often the default runs on changed inputs: at first, at first where it has many elements, and where a program is
too far off."""
_MANY_ELEMENTS = 1 << 24
"""So many neighbours tell what one element does not."""
_OF_FREE_MEMORY = 4
"""A part of so many of the host's free memory is taken."""
_MOST_PASSES = 64

Guard = Callable[[], contextlib.AbstractContextManager[None]]
Spans = Mapping[int, Sequence[Span]]
"""By number of an output, the parts of it that one pass compares."""


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


def compare(session: Session, programs: Sequence[Program]) -> None:
    """Compare programs with the first, XLA's default, on all ranks at once; what is wrong anywhere is noted in them.

    What the step's graph says of inputs must stand in the session's request.

    Raises:
        UnsupportedError: the default cannot be run on made-up inputs, or memory does not do for comparing.
        ActivationError: it cannot on another rank.
    """
    seed, hardly = session.settings.seed, Counter[str]()
    with ThreadPoolExecutor(compiles_at_once(session), "disco-compare") as pool:
        for number, permuted in enumerate((True, False)):
            for program in programs:
                program.runner = None  # before other inputs are made: both may not have room
            # Timing and profiling have the seed itself.
            own_seed = seed + 1 if permuted else seed
            hardly |= _Inputs(session, programs, own_seed, permuted, pool).compare()
            LOGGER.debug("compared on inputs %d", number)
    _say_hardly(session, hardly)


def _say_hardly(session: Session, hardly: Counter[str]) -> None:
    if hardly:
        largest = max(hardly, key=lambda shape: hardly[shape])
        session.say(
            "%d results of %s, the largest of them %s, are hardly compared: one rounding of the inputs changes them by "
            "a twelfth or more of what the step does",
            len(hardly), session.request.module_name, largest.split(" ", 1)[1],
        )  # fmt: skip


class _Inputs:
    """Programs on one set of inputs."""

    def __init__(
        self, session: Session, programs: Sequence[Program], seed: int, permuted: bool, pool: Executor
    ) -> None:
        self._session = session
        self._default, self._others = programs[0], programs[1:]
        self._seed, self._permuted, self._pool = seed, permuted, pool

    def compare(self) -> Counter[str]:
        """Compare the programs; returns which outputs are hardly compared, with the number of their elements."""
        survey = self._settled()
        assert self._default.runner is not None
        hardly = Counter[str]()
        for spans in _passes(self._session, survey):
            reference = Reference(self._session, self._default, survey, spans, self._pool)
            for program in self._others:
                if not program.error:
                    self._check(reference, program)
            hardly |= reference.hardly_compared()
        return hardly

    def _check(self, reference: Reference, program: Program) -> None:
        """Note what is wrong with a program on any rank."""
        try:
            if program.runner is None:
                self._make_runner(program)
            reference.check(program)
        except Exception as error:
            program.error = one_line(error)

    def _settled(self) -> Survey:
        """The default's first run. Where signs among its inputs give infinities and NaNs that positive ones do not,
        its inputs and those of all that follow are positive."""
        session, request = self._session, self._session.request
        asked, survey = request.positive, self._first_run()
        if asked is None or not (signed := self._not_finite(survey)):
            return survey
        request.positive = None
        survey = self._first_run()
        if self._not_finite(survey) < signed:
            session.say(
                "inputs of both signs give %s infinities or NaNs that positive ones do not: plans are compared on "
                "positive ones, which do not show what is wrong behind a mask",
                request.module_name,
            )
            return survey
        request.positive = asked
        return self._first_run()

    def _first_run(self) -> Survey:
        default = self._default
        default.runner = None
        runner = self._make_runner(default)
        with default.guard():
            return run_on_all(self._session, f"first run of {default.name}", lambda: survey_of(runner))

    def _not_finite(self, survey: Survey) -> int:
        """How many numbers are not finite on all ranks together."""
        session, mine = self._session, str(survey.not_finite).encode()
        answers = session.channel.all_gather(mine, tag="not finite", timeout_s=session.timeout_s)
        return sum(map(int, answers))

    def _make_runner(self, program: Program) -> Runner:
        session = self._session
        # Apart from the run: a rank that cannot hold the inputs must not leave the others in an all-reduce.
        with session.stage(f"inputs of {program.name}"):
            program.runner = Runner(
                session.request,
                program.executable,
                self._seed,
                inputs_of=self._default.runner,
                together=lambda: all_have(session, "inputs"),
                permuted=self._permuted,
            )
        assert program.runner is not None
        return program.runner


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
                shift = None
                before = self._before(number, device, span)
                if before is not None:
                    shift = widened(self._before(number, device, span, changed=True)) - widened(before)
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


# --- passes ---------------------------------------------------------------------------------------


def _passes(session: Session, survey: Survey) -> Iterator[Spans]:
    """The parts of the outputs that are compared in one pass each; the same on every rank.

    Raises:
        UnsupportedError: memory does not do for it.
    """
    mine = [socket.gethostname(), free_host_bytes(), survey.alike]
    answers = session.channel.all_gather(json.dumps(mine).encode(), tag="memory", timeout_s=session.timeout_s)
    ranks = [json.loads(answer) for answer in answers]
    on_host = Counter(host for host, _, _ in ranks)
    limits = [free // _OF_FREE_MEMORY // on_host[host] for host, free, _ in ranks if free is not None]
    survey.alike[:] = [all(alike) for alike in zip(*(alike for _, _, alike in ranks), strict=True)]
    return iter(passes(survey, min(limits, default=None)))


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
