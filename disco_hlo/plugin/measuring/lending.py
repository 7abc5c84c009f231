"""The arguments of a call of the training, for what runs while that call is held (``docs/calls.md``).

One rule for comparing and for profiling. What is taken over is copied to the host before, and comes back bit by bit
before the call goes on. What has no room is left out: a profile within ``job.MAY_RISE``, a candidate in what is free.
Candidates are compared on copies, as all of them need the same numbers. What is only timed runs on the arguments
themselves and hands its results on, as a training does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from disco_hlo.errors import UnsupportedError, shared
from disco_hlo.plugin.measuring.inputs.arguments import Kept, LentInputs, RealInputs, coming_back_to
from disco_hlo.plugin.measuring.lockstep import SLICE_NS, all_have, anywhere
from disco_hlo.plugin.measuring.room import lack_of_memory, room_bytes
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.measuring.trial import Trial
from disco_hlo.plugin.session import OnCalls, Session
from disco_hlo.plugin.xla.executables import LoadedExecutable, Parameter, memory, parameters, storage_taken
from disco_hlo.plugin.xla.own_programs import compile_for_copies

_COPYING = 3
"""A slice lasts so many times as long as copying what a run takes over, there and back."""


def real_inputs(
    session: Session,
    parameters: Sequence[Parameter],
    arguments: Sequence[Any],
    on_host_bytes: int,
    stop: Callable[[], bool],
) -> RealInputs | None:
    """For a copy of a call's arguments, on all ranks; None where a host lacks room, or no call was held.

    Args:
        on_host_bytes: what it takes on the host for each device, with what else will be there.
    """
    if not _have_room(session, arguments, on_host_bytes):
        return None
    together = lambda: all_have(session, "inputs")  # noqa: E731
    return RealInputs(session.request, parameters, session.settings.seed, together, stop)


def _have_room(session: Session, arguments: Sequence[Any], on_host_bytes: int) -> bool:
    room = room_bytes(session, on_host=True)
    lacking = room is not None and on_host_bytes > room
    return not anywhere(session, lacking or not arguments, "real inputs")


@dataclass(frozen=True)
class Loan:
    """What runs on arguments of calls; read before a call is held for it."""

    parameters: tuple[Parameter, ...]
    taken: frozenset[int]
    """Those that a run takes over."""
    taken_bytes: int
    largest: LoadedExecutable
    """Of those that run, the one that needs most memory."""

    @staticmethod
    def of(default: LoadedExecutable, run: Sequence[LoadedExecutable]) -> Loan:
        """For these executables, in calls of XLA's ``default``.

        Raises:
            UnsupportedError: one does not take over what a call does.
        """
        taken = storage_taken(default)
        if any(storage_taken(one) != taken for one in run):
            raise shared(UnsupportedError("it does not hand on the storage that a call takes over"))
        largest = max(run, key=_beside_arguments)
        return Loan(parameters(default), frozenset(taken), memory(default).aliased_bytes, largest)


def _beside_arguments(executable: LoadedExecutable) -> int:
    needs = memory(executable)
    return needs.total_bytes - needs.arguments_bytes


@contextlib.contextmanager
def lent(session: Session, loan: Loan, arguments: list[Any], ready_bytes: int = 0) -> Iterator[LentInputs]:
    """The arguments of a call that is held, for the body, on all ranks. Copies are made in memory of the host, of which
    for each device ``ready_bytes`` are there.

    Raises:
        UnsupportedError: memory lacks.
    """
    given_back = memory(loan.largest).arguments_bytes
    if lacks := lack_of_memory(session, "profile", loan.largest, given_back_bytes=given_back):
        raise shared(UnsupportedError(lacks))
    if not _have_room(session, arguments, max(0, loan.taken_bytes - ready_bytes)):
        raise shared(
            UnsupportedError("the host has no room for a copy of the step's arguments, or no call was held")
        )
    import jax

    began_ns = time.perf_counter_ns()
    with session.stage("a copy of what a step takes over"):
        kept = Kept.of(arguments, loan.taken)
    copied_ns = 2 * (time.perf_counter_ns() - began_ns)
    with coming_back_to(arguments, kept, loan.taken):
        inputs = LentInputs(session.request, loan.parameters, arguments, copied_ns)
        try:
            yield inputs
        finally:
            inputs.leave(loan.taken)
    jax.block_until_ready([arguments[index] for index in loan.taken])


class Slices:
    """Turns at the devices between calls of the training, each on the arguments of a call. One lasts three times as
    long as copying these takes, which is then a quarter of what the training loses, and no less than a slice or one
    run."""

    def __init__(self, session: Session, calls: OnCalls, trials: Sequence[Trial]) -> None:
        """None has begun.

        Args:
            trials: that run in them, compiled.

        Raises:
            UnsupportedError: as :meth:`Loan.of`.
        """
        self._session, self._calls = session, calls
        run = [one.executable for one in trials]
        self._loan = Loan.of(session.request.call_default(), run) if run else None
        # Before a call is held: a large module takes a second to read.
        self._runners = dict[str, Runner]()
        if self._loan is not None:
            self._runners = _runners(session, self._loan, trials)
            for one in {self._loan.parameters[index] for index in self._loan.taken}:
                compile_for_copies(session.request.local_devices, (one.shape, one.dtype))
        self._lent = contextlib.ExitStack()
        self._inputs: LentInputs | None = None
        self._end_ns = 0
        self.idle_ns = 0
        """How long the devices have only copied, where a slice has just begun; whoever warms them up sets it to 0."""

    def __enter__(self) -> Slices:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._inputs = None
        self._lent.__exit__(*raised)

    def runner(self, trial: Trial, run_ns: int = 0) -> tuple[Runner, int]:
        """A runner of ``trial``, for now, and how many runs that take so long it may do before it asks again. Raises as
        :meth:`OnCalls.lend`."""
        if self._inputs is None or not (count := self._count(run_ns)):
            self._inputs = None
            self._lent.close()
            self._inputs = self._lent.enter_context(self._calls.lend(self._loan))
            self._end_ns = time.perf_counter_ns() + max(SLICE_NS, _COPYING * self._inputs.copied_ns)
            count = max(1, self._count(run_ns))
            self.idle_ns = self._inputs.copied_ns
        runner = self._runners[trial.name]
        runner.runs_on = self._inputs
        return runner, count

    def _count(self, run_ns: int) -> int:
        left_ns = max(0, self._end_ns - time.perf_counter_ns())
        return int(self._session.tell(left_ns // max(1, run_ns), "runs in a slice"))


def _runners(session: Session, loan: Loan, trials: Sequence[Trial]) -> dict[str, Runner]:
    """By name, for arguments that are lent later."""
    found: dict[str, Runner] = {}
    for trial in trials:
        found[trial.name] = Runner(
            session.request, trial.executable, session.settings.seed,
            inputs_of=next(iter(found.values()), None),
            inputs=LentInputs(session.request, loan.parameters, ()),
            module=trial.executed,
        )  # fmt: skip
    return found
