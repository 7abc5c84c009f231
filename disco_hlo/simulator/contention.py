"""What kernels and collectives cost each other while they run: the one place that says so, for compiled code.

A simulated step is the compute stream, which runs one kernel after the other, and the channel, which runs the
collectives issued to it in turn. Whoever decides what comes next (an explicit order in ``engine``, the search's moves,
the paper's ready queue) calls :func:`restart` once and then, as the step goes on, :func:`compute`, :func:`issue` and
:func:`wait`; the ready queue, which has something to decide whenever anything ends, takes the smaller steps these are
made of. ``docs/simulator.md`` has the model; ``tests/simulator/reference.py`` says the same, slowly.

How contention stays exact and cheap: it is enough to keep ``DONE``, the work that collectives did since a fixed moment,
and the value of it at which the one under way ends. Work is counted in millionths of a nanosecond of running alone, and
whatever ends, ends at the first whole nanosecond at which its work is done.

A collective at the head of the channel's queue is held until the compute stream goes on: it begins as soon as the
stream waits, or as the kernel that runs has done its hold, all of its thread blocks having found a place. One that
begins while a kernel runs has its wait to do as well. So the channel may hold a collective that runs nothing.

A matmul loses to collectives if one was there when it began. One that began before them goes at full speed; but where
it held one, it has to do besides half of what it would have lost during its hold: on half of the devices that
collective had begun, and waited.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Row, inner, pointer_to
from disco_hlo.simulator.costs import BESIDE_COMPUTE, NO_COMPUTE, PPM, PRODUCT, Pace

# Progress.number.
NOW: Final = 0
"""Time so far, in ns."""
DONE: Final = 1
"""Work that collectives did so far."""
BUSY: Final = 2
"""1 while a collective is under way, else 0."""
HELD: Final = 3
"""1 while one is held, else 0."""
ENDS_AT: Final = 4
"""Value of ``DONE`` at which the collective under way ends."""
HEAD: Final = 5
"""Number of collectives finished."""
TAIL: Final = 6
"""Number issued."""
_NUMBERS: Final = 7

IDLE: Final = 2**62
"""``ENDS_AT`` while nothing is under way, though a collective may be held."""
NOT_YET: Final = -1
"""In place of what collectives take longer when they begin: that they do not."""


class Progress(NamedTuple):
    """How far a step is, and what happened when. Needs no initialising but by :func:`restart`."""

    number: NDArray[np.int64]
    queue: NDArray[np.int64]
    """``[2, collectives]``: collectives in the order in which they were issued, and their durations."""
    turn: NDArray[np.int64]
    """``[collectives]``: where in the queue each collective that was issued stands."""
    spans_ns: NDArray[np.int64]
    """``[2, collectives]``: start and end of each."""
    pace: Pace


class ProgressView(NamedTuple):
    """Pointers into :class:`Progress`."""

    number: Row
    queue: Row
    queued_ns: Row
    turn: Row
    start_ns: Row
    end_ns: Row
    speeds: int
    """Columns of ``speed_ppm``: 2, or 1 where collectives block the compute stream."""
    speed_ppm: Row
    wait_ns: int


def new_progress(collectives: int, pace: Pace) -> Progress:
    """Room for simulations, one at a time, of steps with collectives of numbers below ``collectives``."""
    return Progress(
        np.zeros(_NUMBERS, np.int64),
        np.zeros((2, collectives), np.int64),
        np.zeros(collectives, np.int64),
        np.zeros((2, collectives), np.int64),
        Pace(np.ascontiguousarray(pace.speed_ppm), pace.wait_ns),
    )


@inner
def open_progress(progress: Any) -> Any:
    """Pointers into a record, valid while it lives."""
    room = progress.turn.size
    return ProgressView(
        pointer_to(progress.number.ctypes.data),
        pointer_to(progress.queue.ctypes.data),
        pointer_to(progress.queue.ctypes.data + 8 * room),
        pointer_to(progress.turn.ctypes.data),
        pointer_to(progress.spans_ns.ctypes.data),
        pointer_to(progress.spans_ns.ctypes.data + 8 * room),
        progress.pace.speed_ppm.shape[1],
        pointer_to(progress.pace.speed_ppm.ctypes.data),
        progress.pace.wait_ns,
    )


@inner
def restart(p: Any) -> None:
    """Go back to the beginning of a step."""
    p.number[NOW] = p.number[DONE] = p.number[BUSY] = p.number[HELD] = p.number[HEAD] = p.number[TAIL] = 0
    p.number[ENDS_AT] = IDLE


@inner
def compute(p: Any, work_ns: Any, hold_ns: Any, row: Any, is_product: Any) -> None:
    """Let the compute stream work for so long, counted in time of running alone.

    Args:
        hold_ns: how much of that must be done before a collective that is held begins; less than all.
        row: of the table of speeds, at which the work is done while collectives run.
        is_product: whether it goes at full speed where it came first, and has more to do for what it holds.
    """
    number, work = p.number, work_ns * PPM
    behind_hold = work - hold_ns * PPM
    if number[HELD] > 0 and 0 < work <= behind_hold:
        go_on(p, p.wait_ns)
    is_first = is_product and number[BUSY] == 0
    # Ends: each pass does the work, ends a collective, or begins those that are held.
    while number[BUSY] + number[HELD] > 0 and work > 0:
        speed = compute_speed_ppm(p, row)
        if is_first:
            speed = np.int64(PPM)
        work -= speed * advance(p, work - behind_hold if number[HELD] > 0 else work, speed)
        begun_ns: Any = NOT_YET
        if 0 < work <= behind_hold:
            begun_ns = p.wait_ns
            if is_first and number[HELD] > 0:
                lost = hold_ns * (PPM - p.speed_ppm[PRODUCT * p.speeds + 1]) // 2
                work += lost
                behind_hold += lost
        if begun_ns != NOT_YET or number[DONE] >= number[ENDS_AT]:
            go_on(p, begun_ns)
    if work > 0:
        number[NOW] += alone_ns(work)


@inner
def compute_speed_ppm(p: Any, row: Any) -> Any:
    """How fast the compute stream works beside what is under way, by a row of the table of speeds."""
    return p.speed_ppm[row * p.speeds + p.number[BUSY]]


@inner
def issue(p: Any, collective: Any, duration_ns: Any) -> None:
    """Let a collective queue up for the channel."""
    own = p.number[TAIL]
    p.turn[collective] = own
    p.queue[own], p.queued_ns[own] = collective, duration_ns
    p.number[TAIL] = own + 1
    if p.number[HEAD] == own:
        p.number[HELD] = 1


@inner
def is_over(p: Any, collective: Any) -> Any:
    """Whether a collective that was issued has ended."""
    return p.number[HEAD] > p.turn[collective]


@inner
def wait(p: Any, collective: Any) -> None:
    """Let the compute stream idle until a collective has ended."""
    while not is_over(p, collective):  # ends: each pass ends a collective
        _end_next(p)


@inner
def drain(p: Any) -> None:
    """Let the compute stream idle until every collective that was issued has ended."""
    while p.number[BUSY] + p.number[HELD] > 0:  # ends: each pass ends a collective
        _end_next(p)


@inner
def _end_next(p: Any) -> None:
    """Let the compute stream idle, so that what is held begins, until a collective ends."""
    if p.number[HELD] > 0:
        go_on(p, 0)
    idle(p)
    go_on(p, NOT_YET)


@inner
def advance(p: Any, work: Any, speed: Any) -> Any:
    """Let time pass until the compute stream has done ``work`` at ``speed`` or the collective under way is done,
    whichever comes first; how long that takes. :func:`go_on` then ends what is done."""
    beside = compute_speed_ppm(p, BESIDE_COMPUTE)
    elapsed = quotient(work, speed)
    if p.number[DONE] + elapsed * beside >= p.number[ENDS_AT]:
        elapsed = quotient(p.number[ENDS_AT] - p.number[DONE], beside)
    p.number[NOW] += elapsed
    p.number[DONE] += elapsed * beside
    return elapsed


@inner
def idle(p: Any) -> None:
    """Let time pass until the collective under way is done, while the compute stream does nothing."""
    speed = compute_speed_ppm(p, NO_COMPUTE)
    elapsed = quotient(p.number[ENDS_AT] - p.number[DONE], speed)
    p.number[NOW] += elapsed
    p.number[DONE] += elapsed * speed


@inner
def go_on(p: Any, begun_ns: Any) -> None:
    """End the collective whose work is done and begin the next, which takes ``begun_ns`` longer than its duration;
    where that is ``NOT_YET`` it does not begin."""
    number, done = p.number, p.number[DONE]
    if number[ENDS_AT] <= done:
        p.end_ns[p.queue[number[HEAD]]] = number[NOW]
        number[HEAD] += 1
        number[ENDS_AT] = IDLE
    place = number[HEAD]
    if place < number[TAIL] and number[ENDS_AT] == IDLE and begun_ns != NOT_YET:
        p.start_ns[p.queue[place]] = number[NOW]
        number[ENDS_AT] = done + (p.queued_ns[place] + begun_ns) * PPM
    number[BUSY] = 1 if number[ENDS_AT] != IDLE else 0
    number[HELD] = 1 if place < number[TAIL] and number[ENDS_AT] == IDLE else 0


@inner
def alone_ns(work: Any) -> Any:
    """How long work takes at full speed."""
    return (work + PPM - 1) // PPM


@inner
def quotient(work: Any, speed: Any) -> Any:
    """``work / speed`` rounded up. Processors divide floats several times faster; the rest makes it exact."""
    found = np.int64(work / speed)
    while found * speed < work:  # ends: a float is off by one or two
        found += 1
    while (found - 1) * speed >= work:  # ends: likewise
        found -= 1
    return found
