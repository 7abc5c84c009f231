"""Running a step on all ranks, where a rank that fails alone must not leave the others in a collective.

What fails before a rank has dispatched its step (no memory for its inputs) is agreed on before anyone dispatches:
:func:`all_have` is for that. What fails on all ranks alike (XLA refuses a module) is agreed on afterwards. A rank
whose step fails while it runs, alone, is beyond both: the others wait for it where nobody can call them back, and
the collectives of its training would meet theirs and exchange the wrong numbers. So it ends, and the job with it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from disco_hlo.activation.channel import name_ranks
from disco_hlo.errors import ActivationError, GoneError, shared
from disco_hlo.plan.bans import withdraw_marks
from disco_hlo.plugin.hangs import Guard, coming_back, end_now
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.session import Session

Result = TypeVar("Result")

SLICE_NS = 50_000_000
"""For how long the devices are taken between two steps of a training, unless one run takes longer."""


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
    end_now()
