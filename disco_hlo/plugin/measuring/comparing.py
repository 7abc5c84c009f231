"""Whether programs compute what XLA's default computes: element by element, up to rounding.

All elements of all results of all local devices are compared, on the arguments of a call of the training where there is
one, else on two sets of made-up inputs. On the first of these, indices are permutations, so that every row is read; the
second is what steps are timed on. Whole numbers and truth values must be equal. How far a float may be off is said in
``tolerances``: the default runs a few times on inputs that are changed by a rounding, and where another program is too
far off it runs some more times before that counts.

A step returns updated parameters and moments, of which the gradient is a thousandth: what is looked at is by how much
an output differs from the input that it updates.

Large outputs are compared on the devices. These hold what the default computed and a byte beside each number. Where
that takes more than what is free beside a run, the outputs are compared in several passes, for each of which all
programs run again. On the training's own arguments all this lies in the host's memory, and one output after the other
is brought to the devices, which hold no second state.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.inputs.real import RealInputs, compile_changes
from disco_hlo.plugin.measuring.lockstep import all_have, run_on_all
from disco_hlo.plugin.measuring.reference import Program, Reference
from disco_hlo.plugin.measuring.room import room_bytes
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.survey import Survey, compile_look, passes, survey_of
from disco_hlo.plugin.measuring.tolerances import are_compared_on_devices, compile_rules
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla.executables import LoadedExecutable, memory, parameters, results, storage_taken

_LONG_S = 5.0
"""Somebody who waits for longer is told how far it is."""
_ARRAYS = 3
"""Of the size of an output, that exist while it is compared."""


def compare(session: Session, programs: Sequence[Program], inputs: RealInputs | None = None) -> None:
    """Compare programs with the first, XLA's default, on all ranks at once; what is wrong anywhere is noted in them.

    Args:
        inputs: of a call of the training, on all ranks of the same one. Without them what the step's graph says of
            inputs must stand in the session's request.

    Raises:
        UnsupportedError: the default cannot be run on these inputs, or memory does not do for comparing.
        ActivationError: it cannot on another rank.
    """
    seed, hardly = session.settings.seed, Counter[str]()
    if inputs is not None:
        _say_hardly(session, _Inputs(session, programs, seed, False, inputs).compare())
        return
    for number, permuted in enumerate((True, False)):
        started = time.monotonic()
        for program in programs:
            program.runner = None  # before other inputs are made: both may not have room
        # Timing and profiling have the seed itself.
        own_seed = seed + 1 if permuted else seed
        hardly |= _Inputs(session, programs, own_seed, permuted).compare()
        took_s = time.monotonic() - started
        say = session.say if took_s >= _LONG_S else LOGGER.debug
        say("compared on the %s of two sets of inputs (%.1f s)", "second" if number else "first", took_s)
    _say_hardly(session, hardly)


def compile_comparison(devices: tuple[Any, ...], default: LoadedExecutable) -> None:
    """Compile what comparing with XLA's default on real inputs runs on the devices besides the step."""
    import jax

    for parameter in set(parameters(default)):
        compile_changes(devices, parameter)
    states = set(storage_taken(default).values())
    for output, updates in {(one, number in states) for number, one in enumerate(results(default))}:
        if are_compared_on_devices(jax.ShapeDtypeStruct(*output)):
            compile_look(devices, output)
            compile_rules(devices, output, updates)


def settle_inputs(session: Session, default: Program) -> Runner:
    """A runner of XLA's default, which has run once, on the inputs that steps are timed on; whether these are positive
    is settled.

    Raises:
        As :func:`compare`.
    """
    _Inputs(session, [default], session.settings.seed, False).settled()
    assert default.runner is not None
    return default.runner


def make_runner(
    session: Session,
    program: Program,
    inputs_of: Runner | None,
    seed: int | None = None,
    permuted: bool = False,
    inputs: RealInputs | None = None,
) -> Runner:
    """A program's runner on made-up inputs, those of another runner or real ones where these are given; on all
    ranks."""
    # Apart from the run: a rank that cannot hold the inputs must not leave the others in an all-reduce.
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
        session.say(
            "%d results of %s are compared only roughly, the largest is %s: rounding the inputs once alters them by a "
            "twelfth or more of the change that the step makes to them",
            len(hardly), session.request.module_name, largest.split(" ", 1)[1],
        )  # fmt: skip


class _Inputs:
    """Programs on one set of inputs."""

    def __init__(
        self,
        session: Session,
        programs: Sequence[Program],
        seed: int,
        permuted: bool,
        real: RealInputs | None = None,
    ) -> None:
        self._session = session
        self._real = real
        self._default, self._others = programs[0], programs[1:]
        self._seed, self._permuted = seed, permuted
        self._first: list[list[Any]] | None = None
        """What the default's first run returned."""

    def compare(self) -> Counter[str]:
        """Compare the programs; returns which outputs are hardly compared, with the number of their elements."""
        survey = self.settled()
        assert self._default.runner is not None
        hardly = Counter[str]()
        every = self._passes(survey)
        first, self._first = self._first if len(every) == 1 else None, None
        for outputs in every:
            on_host = self._real is not None
            reference = Reference(self._session, self._default, survey, outputs, first, on_host)
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

    def settled(self) -> Survey:
        """The default's first run. Where signs among its inputs give infinities and NaNs that positive ones do not,
        its inputs and those of all that follow are positive."""
        session, request = self._session, self._session.request
        asked, survey = request.positive, self._first_run()
        if self._real is not None or asked is None or not (signed := self._not_finite(survey)):
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
        default = self._default
        default.runner = self._first = None
        runner = self._make_runner(default)
        with default.guard():
            survey, self._first = run_on_all(
                self._session, f"first run of {default.name}", lambda: survey_of(runner)
            )
        return survey

    def _not_finite(self, survey: Survey) -> int:
        """How many numbers are not finite on all ranks together."""
        session, mine = self._session, str(survey.not_finite).encode()
        answers = session.channel.all_gather(mine, tag="not finite", timeout_s=session.timeout_s)
        return sum(map(int, answers))

    def _make_runner(self, program: Program) -> Runner:
        runner = make_runner(
            self._session, program, self._default.runner, self._seed, self._permuted, self._real
        )
        program.runner = runner
        return runner

    def _passes(self, survey: Survey) -> list[frozenset[int]]:
        """The outputs that are compared in one pass each; the same on every rank.

        Raises:
            UnsupportedError: memory does not do for it.
        """
        if self._real is not None:
            return [frozenset(range(len(survey.shapes)))]
        session, room = self._session, room_bytes(self._session)
        with session.stage("room for comparing"):
            needs = [memory(program.executable) for program in (self._default, *self._others)]
        # A run takes what it returns and writes in between; a look at an output, a few arrays like that. What the first
        # run returned is there already.
        run = max(one.outputs_bytes + one.temporaries_bytes for one in needs)
        look = _ARRAYS * max(map(survey.kept_bytes, range(len(survey.shapes))), default=0)
        mine = b"" if room is None else b"%d" % max(0, room + survey.output_bytes - run - look)
        answers = session.channel.all_gather(mine, tag="memory", timeout_s=session.timeout_s)
        return passes(survey, min(map(int, filter(None, answers)), default=None))
