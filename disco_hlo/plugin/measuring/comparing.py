"""Whether programs compute what XLA's default computes: element by element, up to rounding.

All elements of all results of all local devices are compared, on the arguments of a call of the training where there is
one, else on two sets of made-up inputs. On the first of these, indices are permutations, so that every row is read; the
second is what steps are timed on. Whole numbers and truth values must be equal. How far a float may be off is said in
``tolerances``: the default runs a few times on inputs that are changed by a rounding (:class:`Reference`), and where
another program is too far off it runs some more times before that counts.

A step returns updated parameters and moments, of which the gradient is a thousandth: what is looked at is by how much
an output differs from the input that it updates. The default's first run shows which that is (:class:`Survey`).

Large outputs are compared on the devices. These hold what the default computed and a byte beside each number. Where
that takes more than what is free beside a run, the outputs are compared in several passes, for each of which all
programs run again.

On the training's own arguments calls are held within the training's share, and all that is kept lies in the host's
memory. Where devices have that, each run holds a call of its own, arguments are made before the call and results
compared by numpy after it, while the training goes on. Others have no room for a second state: a pass holds one call,
and runs all programs on the arguments of that one. So the host has these once, and all results; where it has no room
for them, a part of them in each of a few passes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import backend_of
from disco_hlo.errors import IllegalStrategyError, UnsupportedError, shared
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.inputs.arguments import SAMPLES, RealInputs, compile_changes, let_go
from disco_hlo.plugin.measuring.lockstep import all_have, anywhere, run_on_all, training_ends
from disco_hlo.plugin.measuring.room import in_passes, room_bytes
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.tolerances import (
    FRESH_RUNS,
    HIGH,
    TIMES,
    Allowed,
    are_compared_on_devices,
    compile_rules,
    kept_bytes,
    rounding_of,
    widened,
)
from disco_hlo.plugin.measuring.trial import Trial, marked
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla.executables import (
    LoadedExecutable,
    is_whole,
    memory,
    parameters,
    results,
    storage_taken,
)
from disco_hlo.plugin.xla.own_programs import Fact, compile_for_each_device, on_each_device

Result = TypeVar("Result")
_LONG_S = 5.0
"""Somebody who waits for longer is told how far it is."""
_ARRAYS = 3
"""Of the size of an output, that exist while it is compared."""
_RUNS, _FEWER_RUNS = (3, 8), (1, 4)
"""How often the default runs on changed inputs, at first and where a program is too far off; and that where it has many
elements."""
_MANY_ELEMENTS = 1 << 24
"""So many neighbours tell what one element does not."""
_UPDATED = 0.3
"""An output that lies so near to an input of its shape, relative to its norm, updates it."""
_MOST_PASSES = 64
_Samples = Mapping[tuple[str, tuple[int, ...]], tuple[list[int], NDArray[Any]]]
"""By type and shape, numbers of parameters and a few values of each, in a row."""


@dataclass(frozen=True)
class HeldPasses:
    """Passes that compare results, each on the arguments of a call that is held around it."""

    hold: Callable[[], contextlib.AbstractContextManager[None]]
    """Holds a call for a body, on all ranks, and has the inputs be its arguments."""
    most: int
    """Passes there may be."""
    given_back_bytes: int = 0
    """Memory of each device that the call's arguments leave for so long."""


def compare(
    session: Session,
    programs: Sequence[Trial],
    inputs: RealInputs | None = None,
    held: HeldPasses | None = None,
) -> None:
    """Compare programs with the first, XLA's default, on all ranks at once; what is wrong anywhere is noted in them.

    Args:
        inputs: of a call of the training, on all ranks of the same one. Without them what the step's graph says of
            inputs must stand in the session's request.
        held: where the inputs are those of the call that a pass holds; else each run holds a call.

    Raises:
        UnsupportedError: the default cannot be run on these inputs, or what it computes in the training is mostly not
            finite, or memory does not do for comparing.
        ActivationError: it cannot on another rank.
    """
    seed, hardly = session.settings.seed, Counter[str]()
    if inputs is not None:
        _say_hardly(session, _Inputs(session, programs, seed, real=inputs, held=held).compare())
        return
    for number, permuted in enumerate((True, False)):
        started = time.monotonic()
        # Timing and profiling have the seed itself.
        own_seed = seed + 1 if permuted else seed
        hardly |= _Inputs(session, programs, own_seed, permuted).compare()
        took_s = time.monotonic() - started
        say = session.say if took_s >= _LONG_S else LOGGER.debug
        say("compared on the %s of two sets of inputs (%.1f s)", "second" if number else "first", took_s)
    _say_hardly(session, hardly)


def compile_comparison(
    devices: tuple[Any, ...], default: LoadedExecutable, at_once: int = 1, *, real_inputs: bool = True
) -> None:
    """Compile what comparing with XLA's default, on real inputs or made-up ones, runs on the devices besides the step,
    so many programs at a time."""
    import jax

    changed = set(parameters(default)) if real_inputs else ()
    tasks = [functools.partial(compile_changes, devices, one) for one in changed]
    states = set(storage_taken(default).values())
    for output, updates in {(one, number in states) for number, one in enumerate(results(default))}:
        if are_compared_on_devices(jax.ShapeDtypeStruct(*output)):
            tasks.append(functools.partial(compile_look, devices, output))
            tasks.append(functools.partial(compile_rules, devices, output, updates))
    with ThreadPoolExecutor(at_once, "disco-compile") as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()


def settle_inputs(session: Session, default: Trial) -> None:
    """Give XLA's default a runner, and run it once, on the inputs that steps are timed on; whether these are positive
    is settled. Raises as :func:`compare`."""
    _Inputs(session, [default], session.settings.seed).settled()


def make_runner(
    session: Session,
    program: Trial,
    inputs_of: Runner | None,
    seed: int | None = None,
    permuted: bool = False,
    inputs: RealInputs | None = None,
) -> Runner:
    """A program's runner on made-up inputs, another runner's or real ones; on all ranks."""
    # Apart from the run: a rank that cannot hold the inputs must not leave the others in a collective.
    with session.stage(f"inputs of {program.name}"):
        return Runner(
            session.request,
            program.executable,
            session.settings.seed if seed is None else seed,
            inputs_of=inputs_of,
            together=lambda: all_have(session, "inputs"),
            permuted=permuted,
            inputs=inputs,
        )


def _say_hardly(session: Session, hardly: Counter[str]) -> None:
    if hardly:
        largest = max(hardly, key=lambda shape: hardly[shape])
        results, are, them = ("results", "are", "them") if len(hardly) > 1 else ("result", "is", "it")
        session.say(
            "%d %s of %s %s compared only roughly, the largest is %s: rounding the inputs once alters %s by a twelfth "
            "or more of the change that the step makes to %s",
            len(hardly), results, session.request.module_name, are, largest.split(" ", 1)[1], them, them,
        )  # fmt: skip


@dataclass
class _Inputs:
    """Programs, XLA's default first, on one set of inputs."""

    session: Session
    programs: Sequence[Trial]
    seed: int
    permuted: bool = False
    real: RealInputs | None = None
    held: HeldPasses | None = None
    first: list[list[Any]] | None = None
    """What the default's first run returned."""

    def compare(self) -> Counter[str]:
        """Compare the programs; returns which outputs are hardly compared, with the number of their elements."""
        try:
            return self._compared()
        finally:
            for program in self.programs:
                program.runner = None  # other inputs may have no room beside these

    def _compared(self) -> Counter[str]:
        hardly, hold = Counter[str](), self.held.hold if self.held else contextlib.nullcontext
        if self.real is not None:
            self._read_modules()
        with hold():
            try:
                survey = self.settled()
                half = survey.elements * len(self.session.request.devices) // 2
                if self.real is not None and self._not_finite(survey) > half:
                    why = "the training computes infinities and NaNs, by which candidates cannot be compared"
                    raise shared(UnsupportedError(why))
                every = self._passes(survey)
                if len(every) > 1 and not self.held:
                    self.first = None
                hardly |= self._pass(survey, every[0], self._taken_first())
            finally:  # where a call is held its arguments come back now, and have no room beside this
                self.first = None
        for outputs in every[1:]:
            if all(program.error for program in self.programs[1:]):
                break
            with hold():
                hardly |= self._pass(survey, outputs)
        return hardly

    def _taken_first(self) -> list[list[Any]] | None:
        """What the first run returned, which nobody here keeps any more."""
        first, self.first = self.first, None
        return first

    def _read_modules(self) -> None:
        """What needs no device, before a call is held: a large module takes a second."""
        default = self._make_runner(self.programs[0])
        rounding_of(default.module, backend_of(self.session.request.backend.platform))
        for program in self.programs[1:]:
            with self._noted(program):
                self._make_runner(program)

    def _pass(
        self,
        survey: Survey,
        outputs: frozenset[int],
        first: list[list[Any]] | None = None,
    ) -> Counter[str]:
        """Compare these outputs of all programs that are left."""
        default, on_host = self.programs[0], self.real is not None
        reference = Reference(self.session, default, survey, outputs, first, on_host)
        for program in self.programs[1:]:
            if not program.error:
                with self._noted(program):
                    if program.runner is None:
                        self._make_runner(program)
                    reference.check(program)
        return reference.hardly_compared()

    @contextlib.contextmanager
    def _noted(self, program: Trial) -> Iterator[None]:
        """What goes wrong with a program counts as its own, but that a training ends."""
        try:
            yield
        except Exception as error:
            if not program.differs and self.real is not None and training_ends(self.session):
                raise
            program.error = one_line(error)
            let_go(error)

    def settled(self) -> Survey:
        """The default's first run. Where signs among its inputs give infinities and NaNs that positive ones do not,
        its inputs and those of all that follow are positive."""
        session, request = self.session, self.session.request
        asked, survey = request.positive, self._first_run()
        if self.real is not None or asked is None or not (signed := self._not_finite(survey)):
            return survey
        request.positive = None
        survey = self._first_run()
        if self._not_finite(survey) < signed:
            session.say(
                "%s computes infinities or NaNs on inputs of both signs, and none on positive ones: plans are compared "
                "on positive inputs, and an error in what a mask leaves out there stays unseen",
                request.module_name,
            )
            return survey
        request.positive = asked
        return self._first_run()

    def _first_run(self) -> Survey:
        default, self.first = self.programs[0], None
        if self.real is None:
            default.runner = None
            self._make_runner(default)
        runner, samples = default.running, None
        if self.held is not None:
            with self.session.stage("numbers of the inputs"):
                samples = _samples(runner)

        def look(arrays: list[list[Any]]) -> Survey:
            # Once a call goes on devices have no room for it.
            self.first = arrays if self.real is None or self.real.beside or self.held else None
            return survey_of(runner, arrays, samples)

        found = _run(self.session, default, f"first run of {default.name}", look)
        if not self.session.request.trains:  # as long as no call has told, this does
            self.session.request.call_ns = runner.took_ns
        return found

    def _not_finite(self, survey: Survey) -> int:
        """How many numbers are not finite on all ranks together."""
        return sum(self.session.gathered(survey.not_finite, "not finite"))

    def _make_runner(self, program: Trial) -> Runner:
        inputs_of = self.programs[0].runner
        program.runner = make_runner(self.session, program, inputs_of, self.seed, self.permuted, self.real)
        return program.runner

    def _passes(self, survey: Survey) -> list[frozenset[int]]:
        """The outputs that are compared in one pass each; the same on every rank."""
        if self.held is not None:
            kept = [survey.kept_bytes(number) for number in range(len(survey.shapes))]
            return in_passes(kept, self.held.most)
        if self.real is not None:
            return [frozenset(range(len(survey.shapes)))]
        session, room = self.session, room_bytes(self.session)
        with session.stage("room for comparing"):
            needs = [memory(program.executable) for program in self.programs]
        # A run takes what it returns and writes in between; a look at an output, a few arrays like that. What the first
        # run returned is there already.
        run = max(one.outputs_bytes + one.temporaries_bytes for one in needs)
        look = _ARRAYS * max(map(survey.kept_bytes, range(len(survey.shapes))), default=0)
        mine = None if room is None else max(0, room + survey.output_bytes - run - look)
        answers = session.gathered(mine, "memory")
        return passes(survey, min((one for one in answers if one is not None), default=None))


def _run(session: Session, program: Trial, what: str, look: Callable[[list[list[Any]]], Result]) -> Result:
    """What ``look`` makes of all that a program returns, ``[output][local device]``, on all ranks."""
    runner, guard = program.running, functools.partial(marked, session, program, "run")
    if not runner.runs_on.beside:
        return run_on_all(session, what, lambda: look(runner.output_arrays()), guard)
    arguments = runner.inputs()
    arrays = run_on_all(session, what, lambda: runner.output_arrays(arguments), guard)
    with session.stage(what, logged=False):
        return look(arrays)


# --- the default, and who computes otherwise ------------------------------------------------------


@dataclass
class Reference:
    """What XLA's default computes in one pass, and how far its roundings move that."""

    session: Session
    default: Trial
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
    _most: int = 0
    _looked_farther: bool = False

    def __post_init__(self) -> None:
        """Run the default, and run it on changed inputs."""
        first, self.first = self.first, None
        self._run("a run of XLA's default", self._keep, first)
        backend = backend_of(self.session.request.backend.platform)
        self._rounding = rounding_of(self.default.running.module, backend)
        at_first, self._most = _RUNS if self.survey.elements < _MANY_ELEMENTS else _FEWER_RUNS
        self._learn(at_first, self._take_in)

    def check(self, program: Trial) -> None:
        """Compare another program; on all ranks at once. Raises IllegalStrategyError: it does not compute the same
        on this rank, ActivationError: nor on another."""
        unlike = self._unlike(program)
        looks_again = self._runs < self._most
        if anywhere(self.session, bool(unlike), "comparison") and looks_again:
            self._learn(self._most, self._take_in)
            unlike = self._unlike(program)
        if not self._looked_farther and anywhere(self.session, bool(unlike), "comparison"):
            self._looked_farther = True
            self._learn(self._most + FRESH_RUNS, self._look_farther)
            unlike = self._unlike(program)
        try:
            with self.session.stage("compared", logged=False):
                if unlike:
                    raise IllegalStrategyError(unlike)
        except Exception:  # ranks that are silent here too: what may be wrong is not saved
            program.differs = True
            raise

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
        def look(every: list[list[Any]]) -> None:
            for number, arrays in self._chosen(every):
                take(number, arrays)

        if ran is None:
            _run(self.session, self.default, what, look)
        else:
            with self.session.stage(what, logged=False):
                look(ran)

    def _chosen(self, arrays: list[list[Any]]) -> Iterator[tuple[int, list[Any]]]:
        """The outputs of the pass, one after the other. Those that are done with give their room back."""
        arrays.reverse()
        for number in range(len(arrays)):
            self.default.running.runs_on.check_goes_on()
            own = arrays.pop()
            if number in self.outputs:
                yield number, own

    def _keep(self, number: int, arrays: list[Any]) -> None:
        on_devices = False if self.default.running.runs_on.beside else None
        before, _ = self._befores(number)
        self._allowed[number] = Allowed(arrays, before, on_devices, self.kept_on_host)

    def _learn(self, runs: int, take: Callable[[int, list[Any]], None]) -> None:
        """Run on inputs that are changed by a rounding until that has been done so often."""
        inputs = self.default.running.runs_on
        try:
            while self._runs < runs:
                self._runs += 1
                with self.session.stage("inputs changed by a rounding"):
                    inputs.nudge(self._rounding, self._runs)
                self._run("a run on changed inputs", take)
        finally:
            with self.session.stage("inputs as they were"):
                inputs.nudge(0.0)

    def _take_in(self, number: int, arrays: list[Any]) -> None:
        if self._allowed[number].is_float:
            self._allowed[number].learn(arrays, *self._befores(number))

    def _look_farther(self, number: int, arrays: list[Any]) -> None:
        if self._allowed[number].is_float:
            self._allowed[number].look_farther(arrays, *self._befores(number))

    def _befores(self, number: int) -> tuple[list[Any] | None, list[Any] | None]:
        """What an output is the new value of, as the inputs were, and as they are now."""
        index = self.survey.updated[number]
        return (None, None) if index is None else self.default.running.runs_on.both(index)

    # --- another program --------------------------------------------------------------------------

    def _unlike(self, program: Trial) -> str:
        return _run(self.session, program, f"a run of {program.name}", self._first_unlike)

    def _first_unlike(self, every: list[list[Any]]) -> str:
        for number, arrays in self._chosen(every):
            if (why := self.survey.other_shape(number, arrays[0])) != "":
                return why
            place, how = self._allowed[number].unlike(arrays)
            if how:
                at = list(map(int, np.unravel_index(place, arrays[0].shape)))
                name = self.survey.name(number)
                return f"output {number} differs from XLA's default at {at} of {name}: {how}"
        return ""


# --- what a step returns --------------------------------------------------------------------------


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
        """As of ``tolerances``, of one output."""
        return kept_bytes(self.shapes[number], self.dtypes[number])

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


def survey_of(runner: Runner, arrays: list[list[Any]], samples: _Samples | None = None) -> Survey:
    """By what a run returned, ``[output][local device]``, and some of its inputs, or those ``samples`` that there are
    from before the run."""
    inputs = _samples(runner) if samples is None else samples
    shapes, dtypes, updated, strange = [], [], [], 0
    for own in arrays:
        first = own[0]
        few, count = _looked_at(own, runner.runs_on.beside)
        shapes.append(tuple(first.shape))
        dtypes.append(np.dtype(first.dtype))
        updated.append(_nearest(few, inputs.get((str(first.dtype), tuple(first.shape)))))
        strange += count
    return Survey(shapes, dtypes, updated, strange)


def passes(survey: Survey, limit_bytes: int | None) -> list[frozenset[int]]:
    """The outputs that are compared in one pass each: as many as fit into so much, or one. Raises UnsupportedError:
    there would be too many passes."""
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


def compile_look(devices: tuple[Any, ...], output: Fact) -> None:
    """Compile what :func:`survey_of` runs on the devices for a large output."""
    places = _places(math.prod(output[0]))
    compile_for_each_device(devices, _look, (), output, (places.shape, places.dtype))


def _looked_at(arrays: Sequence[Any], beside: bool) -> tuple[NDArray[Any], int]:
    """A few numbers of an output, on the first device, and how many are not finite, on all; ``beside`` a training by
    numpy."""
    places = _places(math.prod(arrays[0].shape))
    if beside or not are_compared_on_devices(arrays[0]):
        every = [np.asarray(one) for one in arrays]
        return every[0].reshape(-1)[places], sum(map(not_finite, every))
    devices = tuple(next(iter(one.devices())) for one in arrays)
    few, strange = on_each_device(devices, _look, (), arrays, [places] * len(devices))
    return np.asarray(few[0]), sum(int(np.asarray(one)[0]) for one in strange)


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


def _samples(runner: Runner) -> _Samples:
    found: dict[tuple[str, tuple[int, ...]], dict[int, NDArray[Any]]] = {}
    for index, parameter in enumerate(runner.runs_on.parameters):
        places = _places(math.prod(parameter.shape))
        if places.size and not is_whole(parameter.dtype):
            few = widened(runner.runs_on.floats(index, 0, places))
            found.setdefault((str(parameter.dtype), parameter.shape), {})[index] = few
    return {kind: (list(alike), np.stack(list(alike.values()))) for kind, alike in found.items()}


def _nearest(few: NDArray[Any], alike: tuple[list[int], NDArray[Any]] | None) -> int | None:
    """The parameter that a few values are nearest to, by those that are finite in both, or None."""
    if alike is None:
        return None
    indices, old = alike
    apart = _distances(widened(few), old)
    nearest = int(np.argmin(apart))
    return indices[nearest] if apart[nearest] < _UPDATED else None


def _distances(few: NDArray[Any], old: NDArray[Any]) -> NDArray[np.float64]:
    """For each row of ``old``, the norm of its difference to ``few`` over that of ``few``; infinite where no value is
    finite in both."""
    finite = np.isfinite(few) & np.isfinite(old)
    kind = np.result_type(few, old, np.float64)
    own, other = (np.where(finite, one, 0).astype(kind) for one in (few, old))
    # The square of a large number is infinite.
    scale = np.maximum(np.maximum(np.abs(own), np.abs(other)).max(axis=1, keepdims=True), 1e-30)
    own, other = own / scale, other / scale
    apart = np.linalg.norm(own - other, axis=1) / np.maximum(np.linalg.norm(own, axis=1), 1e-30)
    return np.where(finite.any(axis=1), apart, math.inf)


def _places(size: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, max(0, size - 1), min(size, SAMPLES)).astype(np.int64))
