"""The fast engine for an explicit order: one pass over it, and part of one for a local move.

DisCo, section 4.4, with XLA's own semantics in place of the ready queue: the compute stream goes
through the order from first to last; a transfer begins once the stream has reached the place
where it is issued and its channel is free; a wait holds the stream until a transfer has finished.
``docs/simulator.md`` has the model; ``tests/simulator/reference.py`` says the same, slowly.

Callable from Python and from functions compiled by numba::

    evaluate(order, tables, memo) -> int64                                makespan in ns
    evaluate_move(order, first, last, tables, memo, scratch) -> int64     makespan in ns

``order`` is int32[entries]: ``i`` runs or issues task i, ``~i`` waits for transfer i. Nothing is
checked here: :class:`~disco_hlo.simulator.problem.Problem` did.

How contention stays exact and cheap: all transfers under way run at one speed, so it is enough to
keep ``done``, the work that each of them did since a fixed moment, and for each channel the value
of it at which its transfer ends. Work is counted in millionths of a nanosecond of running alone,
and whatever ends, ends at the first whole nanosecond at which its work is done.

A transfer at the head of its channel's queue is held until the compute stream goes on: it begins as soon as the stream
waits, or as the kernel that runs has done its hold, all of its thread blocks having found a place. One that begins
beside a kernel has its wait to do as well. So between two entries a channel may hold a transfer that runs nothing.

A product loses beside transfers if one was there when it began. One that began before them goes at full speed; but
where it held one, it has to do besides half of what it would have lost during its hold: on half of the devices that
transfer had begun, and waited beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled
from disco_hlo.simulator.costs import BESIDE_COMPUTE, COMPUTE, NO_COMPUTE, PPM, PRODUCT
from disco_hlo.simulator.problem import Problem

HEAD, TAIL, ENDS_AT = 0, 1, 2
"""Columns of ``Memo.lane``."""
IDLE = np.int64(2**62)
"""``ENDS_AT`` of a channel that runs nothing, though it may hold a transfer."""
NOT_YET = -1
"""In place of what transfers take longer when they begin: that they do not."""
STRIDE = 64
"""The state is kept before every 64th entry of an order."""


class Tables(NamedTuple):
    """What a simulation reads besides the order, as in :class:`~disco_hlo.simulator.problem.Problem`."""

    duration_ns: NDArray[np.int64]
    """``[tasks]``"""
    resource: NDArray[np.int32]
    """``[tasks]``: 0 the compute stream, c + 1 channel c."""
    products: NDArray[np.bool_]
    """``[tasks]``"""
    speed_ppm: NDArray[np.int64]
    """``[4, channels + 1]``"""
    hold_ns: NDArray[np.int64]
    """``[tasks]``: how much of a kernel must be done before a transfer can begin beside it."""
    wait_ns: int
    """Of a transfer, unless the compute stream idles when it begins."""


class Memo(NamedTuple):
    """What a simulation writes. Needs no initialising, holds for the order evaluated last."""

    lane: NDArray[np.int64]
    """``[channels, 3]``: number of transfers finished, number issued, ``done`` when the one running ends."""
    queue: NDArray[np.int32]
    """``[channels, tasks]``: transfers in the order they were issued."""
    queued_ns: NDArray[np.int64]
    """``[channels, tasks]``: their durations."""
    place: NDArray[np.int32]
    """``[tasks]``: where in its queue each transfer stands."""
    spans_ns: NDArray[np.int64]
    """``[2, tasks]``: start and end of each task."""
    saved: NDArray[np.int64]
    """``[entries // 64 + 2, 1 + 3 * channels]``: time and lanes (with the work left in place of its end)
    before every 64th entry; the makespan in the first column of the last row."""


def tables_of(problem: Problem) -> Tables:
    """The arrays of a problem that a simulation reads, with times in the problem's unit."""
    products, hold_ns, unit_ns = problem.products, problem.hold_ns, problem.unit_ns
    return Tables(
        problem.duration_ns // unit_ns,
        problem.resource,
        np.zeros(len(problem), np.bool_) if products is None else products,
        problem.speed_ppm,
        np.zeros(len(problem), np.int64) if hold_ns is None else hold_ns // unit_ns,
        problem.transfer_wait_ns // unit_ns,
    )


def new_memo(problem: Problem, entries: int | None = None) -> Memo:
    """Room for simulations of a problem, one at a time, on orders of up to ``entries`` entries."""
    longest = entries or (0 if problem.order is None else len(problem.order))
    tasks, channels = len(problem), problem.channels
    return Memo(
        np.zeros((channels, 3), np.int64),
        np.zeros((channels, tasks), np.int32),
        np.zeros((channels, tasks), np.int64),
        np.zeros(tasks, np.int32),
        np.zeros((2, tasks), np.int64),
        np.zeros((longest // STRIDE + 2, 1 + 3 * channels), np.int64),
    )


@compiled
def evaluate(order: Any, tables: Any, memo: Any) -> Any:
    """Makespan of ``order`` in ns. ``memo`` afterwards describes this order."""
    memo.lane[:, HEAD] = 0
    memo.lane[:, TAIL] = 0
    memo.lane[:, ENDS_AT] = IDLE
    makespan = _pass(order, 0, -1, 0, 0, 0, IDLE, tables, memo, memo)
    memo.saved[-1, 0] = makespan
    return makespan


@compiled
def evaluate_move(order: Any, first: Any, last: Any, tables: Any, memo: Any, scratch: Any) -> Any:
    """Makespan of ``order`` in ns, given what :func:`evaluate` left in ``memo`` for a similar one.

    ``order`` must have as many entries as that one had and equal it outside first..last, both
    included; tasks that stand outside must have the durations they had. ``memo`` stays as it
    was: call :func:`evaluate` once the move is accepted. ``scratch`` is overwritten.
    """
    row = first // STRIDE
    busy, held, nearest = 0, 0, IDLE
    scratch.place[:] = memo.place
    for c in range(memo.lane.shape[0]):
        head, tail, left = memo.saved[row, 1 + 3 * c : 4 + 3 * c]
        scratch.lane[c, HEAD], scratch.lane[c, TAIL], scratch.lane[c, ENDS_AT] = head, tail, IDLE
        if head < tail:
            scratch.queue[c, head:tail] = memo.queue[c, head:tail]
            scratch.queued_ns[c, head:tail] = memo.queued_ns[c, head:tail]
            scratch.lane[c, ENDS_AT] = left
            nearest = min(nearest, left)
            busy += left != IDLE
            held += left == IDLE
    return _pass(order, row, last, memo.saved[row, 0], busy, held, nearest, tables, scratch, memo)


@compiled
def _pass(  # noqa: C901 - long for a reason, see below
    order: Any,
    row: Any,
    last: Any,
    now: Any,
    busy: Any,
    held: Any,
    nearest: Any,
    tables: Any,
    memo: Any,
    known: Any,
) -> Any:
    """Go through ``order`` from entry ``64 * row`` on; the time at its end.

    Long because numba counts references to every array that it hands to a function, which takes
    longer than a step does: only what happens once per transfer is a function of its own.

    Args:
        last: last entry that may differ from the order which ``known`` describes; negative: there
            is none such, and the state goes into ``memo``.
        busy: number of channels that run a transfer.
        held: number of channels that hold one.
        nearest: value of ``done`` at which the first of them ends.
    """
    duration_ns, resource, products, speed_ppm, hold_ns, wait_ns = tables
    lane, queue, queued_ns, place, spans_ns, saved = memo
    done = np.int64(0)
    for at in range(STRIDE * row, order.size):
        if at % STRIDE == 0:
            if last < 0:
                _save(now, done, lane, saved[at // STRIDE])
            elif at > last and _is_known(done, lane, queue, queued_ns, known, at // STRIDE):
                return known.saved[-1, 0] + now - known.saved[at // STRIDE, 0]
        entry = order[at]
        if entry < 0:
            c, own = resource[~entry] - 1, place[~entry]
            while lane[c, HEAD] <= own:  # ends: each pass begins what is held, or ends a transfer
                if held > 0:
                    busy, held, nearest = _go_on(now, done, 0, lane, queue, queued_ns, spans_ns)
                speed = speed_ppm[NO_COMPUTE, busy]
                elapsed = (nearest - done + speed - 1) // speed
                now += elapsed
                done += elapsed * speed
                busy, held, nearest = _go_on(now, done, NOT_YET, lane, queue, queued_ns, spans_ns)
        elif resource[entry] > 0:
            c = resource[entry] - 1
            own = lane[c, TAIL]
            queue[c, own], queued_ns[c, own], place[entry] = entry, duration_ns[entry], own
            lane[c, TAIL] = own + 1
            held += lane[c, HEAD] == own
        else:
            spans_ns[0, entry] = now
            work, kind = duration_ns[entry] * PPM, PRODUCT if products[entry] else COMPUTE
            behind_hold = work - hold_ns[entry] * PPM
            if held > 0 and 0 < work <= behind_hold:
                busy, held, nearest = _go_on(now, done, wait_ns, lane, queue, queued_ns, spans_ns)
            is_first = products[entry] and busy == 0
            # Ends: each pass does the work, ends a transfer, or begins those that are held.
            while busy + held > 0 and work > 0:
                speed, transfer_speed = speed_ppm[kind, busy], speed_ppm[BESIDE_COMPUTE, busy]
                if is_first:
                    speed = np.int64(PPM)
                to_do = work - behind_hold if held > 0 else work
                elapsed = (to_do + speed - 1) // speed
                if done + elapsed * transfer_speed >= nearest:
                    elapsed = (nearest - done + transfer_speed - 1) // transfer_speed
                elif held == 0:
                    now += elapsed
                    done += elapsed * transfer_speed
                    work = 0
                    break
                now += elapsed
                done += elapsed * transfer_speed
                work -= elapsed * speed
                begun_ns = NOT_YET
                if 0 < work <= behind_hold:
                    begun_ns = wait_ns
                    if is_first and held > 0:
                        lost = hold_ns[entry] * (PPM - speed_ppm[kind, 1]) // 2
                        work += lost
                        behind_hold += lost
                busy, held, nearest = _go_on(now, done, begun_ns, lane, queue, queued_ns, spans_ns)
            if work > 0:
                now += (work + PPM - 1) // PPM
            spans_ns[1, entry] = now
    return now


@compiled
def _go_on(now: Any, done: Any, begun_ns: Any, lane: Any, queue: Any, queued_ns: Any, spans_ns: Any) -> Any:
    """End transfers whose work is done and begin the next, which take ``begun_ns`` longer than their durations; where
    that is ``NOT_YET`` they do not begin. Number running, number held, nearest end."""
    busy, held, nearest = 0, 0, IDLE
    for c in range(lane.shape[0]):
        if lane[c, ENDS_AT] <= done:
            spans_ns[1, queue[c, lane[c, HEAD]]] = now
            lane[c, HEAD] += 1
            lane[c, ENDS_AT] = IDLE
        if lane[c, HEAD] == lane[c, TAIL]:
            continue
        if lane[c, ENDS_AT] == IDLE and begun_ns != NOT_YET:
            spans_ns[0, queue[c, lane[c, HEAD]]] = now
            lane[c, ENDS_AT] = done + (queued_ns[c, lane[c, HEAD]] + begun_ns) * PPM
        if lane[c, ENDS_AT] == IDLE:
            held += 1
        else:
            busy += 1
            nearest = min(nearest, lane[c, ENDS_AT])
    return busy, held, nearest


@compiled
def _save(now: Any, done: Any, lane: Any, row: Any) -> None:
    row[0] = now
    for c in range(lane.shape[0]):
        row[1 + 3 * c] = lane[c, HEAD]
        row[2 + 3 * c] = lane[c, TAIL]
        row[3 + 3 * c] = IDLE if lane[c, ENDS_AT] == IDLE else lane[c, ENDS_AT] - done


@compiled
def _is_known(done: Any, lane: Any, queue: Any, queued_ns: Any, known: Any, row: Any) -> Any:
    """Whether the channels are as ``known`` says, so that all that follows is but shifted."""
    for c in range(lane.shape[0]):
        head, tail, left = known.saved[row, 1 + 3 * c : 4 + 3 * c]
        if lane[c, HEAD] != head or lane[c, TAIL] != tail:
            return False
        if (lane[c, ENDS_AT] if lane[c, ENDS_AT] == IDLE else lane[c, ENDS_AT] - done) != left:
            return False
        for place in range(head, tail):
            if queue[c, place] != known.queue[c, place] or queued_ns[c, place] != known.queued_ns[c, place]:
                return False
    return True
