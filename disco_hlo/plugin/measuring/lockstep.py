"""Running a step on all ranks, where a rank that fails alone must not leave the others in a collective.

What fails before a rank has dispatched its step (no memory for its inputs) is agreed on before anyone dispatches:
:func:`all_have` is for that. What fails on all ranks alike (XLA refuses a module) is agreed on afterwards. A rank
whose step fails while it runs, alone, is beyond both: the others wait for it where nobody can call them back, and
the collectives of its training would meet theirs and exchange the wrong numbers. So it ends, and the job with it. So
do all where a step does not come back at all, but not while one of them has yet to come to it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from disco_hlo.activation.channel import name_ranks
from disco_hlo.activation.kvstore import HANGS, LongWait
from disco_hlo.errors import ActivationError, GoneError, shared
from disco_hlo.plan.bans import note_hang, withdraw_marks
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.xla.jaxlink import CompileRequest

Result = TypeVar("Result")
Guard = Callable[[], contextlib.AbstractContextManager[None]]

SLICE_NS = 50_000_000
"""For how long the devices are taken between two steps of a training, unless one run takes longer."""
_ENDLESS_S = 600.0
"""No step takes so long. A loop of it may end with the training's numbers, and not with made-up ones."""
_HANGS_S, _CALLS = 54.0, 18
"""Nor so long, nor as long as so many calls of its training, where these are timed: with what ranks need to tell each
other it has ended within a minute, if a call takes no longer than three seconds."""
_PIECES = 60
_LOOPS = "it may have a loop that ends only with the training's own inputs"
_LAST_S = 0.2
"""Until all ranks have heard that they end: the others' connections to the first one that does break."""


def all_have(session: Session, what: str) -> contextlib.AbstractContextManager[None]:
    """Do the body on every rank; if any rank fails, all do. As a stage, without a line in the log."""
    return session.stage(what, logged=False)


def anywhere(session: Session, here: bool, what: str) -> bool:
    """Whether something is so on any rank: the same answer on all. Raises ActivationError: ranks were silent."""
    return any(session.gathered(here, what))


def training_ends(session: Session) -> bool:
    """Whether a training that goes on beside this ends on any rank: what fails then, says nothing of what was tried.
    The same answer on all. Raises as :func:`anywhere`."""
    return anywhere(session, session.over(), "over")


@dataclass(eq=False)
class FirstRuns:
    """As a runner's ``together``: ranks agree on the inputs of a module's first runs, and trust those of the others.

    What a step takes over is known after the first run, so the second needs as much memory as any later one; and where
    ranks meet before each run, a GPU's trace shows the later one's delay as a collective's time.
    """

    session: Session
    what: str
    left: float = 0.0
    """Runs that are still to be agreed on."""

    def begin(self, runs: float = math.inf) -> None:
        """Agree on the next ``runs``, on every rank; on all that follow where it is not said on how many."""
        self.left = runs

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """Around the making of one run's inputs."""
        if self.left == 0:
            return contextlib.nullcontext()
        self.left -= 1
        return all_have(self.session, self.what)


def run_on_all(
    session: Session, what: str, run: Callable[[], Result], guard: Guard = contextlib.nullcontext
) -> Result:
    """What ``run`` returns, which runs something with collectives on all ranks.

    Args:
        guard: around it, from its beginning until all ranks have said how it went.

    Raises:
        ActivationError: it failed on another rank, or ranks were silent before anything ran.
        Exception: what ``run`` raised on this rank; the others fail, too.
    """
    with contextlib.ExitStack() as stack:
        return _run_on_all(session, what, run, lambda: stack.enter_context(guard()))


def _run_on_all(
    session: Session, what: str, run: Callable[[], Result], begins: Callable[[], object]
) -> Result:
    failure: Exception | None = None
    try:
        with session.alone(what):
            begins()
            result = run()
    except Exception as error:
        failure = error
    reason = "" if failure is None else (one_line(failure) or type(failure).__name__)
    try:
        with coming_back(session.request, reason):  # the others may wait for it in their runs
            answers = session.channel.all_gather(reason.encode(), tag="ran", timeout_s=session.timeout_s)
    except ActivationError as silence:
        # Where ranks are gone, nobody waits in a collective: what failed here is what their death does to one. But one
        # that stood still goes on later, and would come to a collective that had no room on this rank.
        lacked_memory = isinstance(failure, MemoryError) or "RESOURCE_EXHAUSTED" in str(failure)
        alike = isinstance(failure, ActivationError) or (isinstance(silence, GoneError) and not lacked_memory)
        if failure is None or alike:
            raise shared(silence) from failure
        _end_job(session, what, reason, silence)
    else:
        if failure is not None:
            raise shared(failure)
    finally:
        failure = None  # whose traceback has this frame: in a circle what failed would keep its arrays on the devices
    others = {answer.decode(errors="replace"): rank for rank, answer in enumerate(answers) if answer}
    if others:
        listed = "; ".join(f"{name_ranks([rank])}: {why}" for why, rank in others.items())
        raise shared(ActivationError(f"{what}: {listed}"))
    return result


def repeated(
    session: Session,
    what: str,
    run: Callable[[], Result],
    count: int,
    guard: Guard = contextlib.nullcontext,
) -> list[Result]:
    """What ``run`` returns each of so many times, on all ranks, as :func:`run_on_all`.

    Between the steps of a training it runs once at first, and then as often in a row as a slice has time for.
    """
    if session.between_steps is None:
        return run_on_all(session, what, lambda: [run() for _ in range(count)], guard)
    longest_ns, now = 0, 1

    def timed() -> Result:
        nonlocal longest_ns
        began_ns = time.perf_counter_ns()
        result = run()
        longest_ns = max(longest_ns, time.perf_counter_ns() - began_ns)
        return result

    def one_slice() -> list[Result]:
        return [timed() for _ in range(now)]

    found: list[Result] = []
    while left := count - len(found):
        now = min(now, left)
        found += run_on_all(session, what, one_slice, guard)
        now = in_a_slice(session, longest_ns)
    return found


def in_a_slice(session: Session, run_ns: int) -> int:
    """How many runs that take so long on rank 0 a slice between two steps has time for; at least one."""
    return int(session.tell(max(1, SLICE_NS // max(1, run_ns)), "runs in a slice"))


def _end_job(session: Session, what: str, reason: str, silence: ActivationError) -> NoReturn:
    LOGGER.error(
        "%s failed on rank %d (%s), but not on all ranks (%s): the others wait for it in a collective that cannot be "
        "interrupted, so the job ends; start it again without ENABLE_SEARCH, or with another DISCO_SEED",
        what, session.channel.rank, reason, silence,
    )  # fmt: skip
    withdraw_marks()
    _end_now()


@contextlib.contextmanager
def coming_back(request: CompileRequest, went: str | None = None) -> Iterator[None]:
    """Around one run of a step that may never end: nothing can call a device back, so the job ends in its place. Time
    for which the process itself was stopped does not count.

    Beside the training of several ranks one that stands still keeps the others in its collectives, which is no fault of
    the step's. So each says when it has waited for so long, and it hangs once all are in it so or have come back.

    Args:
        went: why the run failed here, or empty, where this rank waits to hear of the others' runs.
    """
    wait = None if request.wait is None or not request.call_ns else request.wait(went)
    if wait is None and went is not None:
        yield
        return
    timed = wait is not None or (request.call_ns > 0 and len(request.process_indices) == 1)
    long_s = max(_HANGS_S, _CALLS * request.call_ns / 1e9) if timed else _ENDLESS_S
    piece_s, first = long_s / _PIECES, _PIECES if went is None else 1
    has_ended = threading.Event()

    def watch() -> None:
        if any(has_ended.wait(piece_s) for _ in range(first)):
            return
        for pieces in itertools.count(first):
            verdict = HANGS if wait is None else wait.verdict(piece_s)
            if has_ended.is_set() and not verdict:
                return
            if verdict or (went is None and pieces * piece_s >= _ENDLESS_S):
                waited_s = max(pieces * piece_s, long_s)
                _end_endless(request.module_name, waited_s, verdict if timed else _LOOPS, wait)
                return

    threading.Thread(target=watch, name="disco-endless", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()
        if wait is not None:
            wait.end()


def _end_endless(name: str, waited_s: float, why: str, wait: LongWait | None) -> None:
    leads = wait is None or wait.rank == 0
    LOGGER.log(
        logging.ERROR if leads or not why else logging.DEBUG,
        "a run of %s %s has not ended after %g s: %s; the run cannot be interrupted, so the job ends; start it again "
        "without ENABLE_SEARCH=1",
        name, "on made-up inputs" if why == _LOOPS else "beside its training", waited_s,
        why or "another rank stands still",
    )  # fmt: skip
    if why == HANGS:
        note_hang()
    elif why != _LOOPS:
        withdraw_marks()
    if wait is not None:
        time.sleep(_LAST_S)
    _end_now()


def _end_now() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # one may be closed, or None
            stream.flush()
    # An exit in order would wait for the other ranks (jax.distributed shuts down at a barrier).
    os._exit(1)
