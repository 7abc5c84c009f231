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

A transfer begins with its wait to do as well. Where the stream turns out to wait at that very moment, what did
nothing yet, which shows in the work it has left, has the wait taken off: so no state says what began when.
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
"""``ENDS_AT`` of a channel that runs nothing."""
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
    wait_ns: int
    """Of a transfer, unless the compute stream idles when it begins."""


class Memo(NamedTuple):
    """What a simulation writes. Needs no initialising, holds for the order evaluated last."""

    lane: NDArray[np.int64]
    """``[channels, 3]``: number of transfers finished, number issued, ``done`` when the one running ends."""
    queue: NDArray[np.int32]
    """``[channels, tasks]``: transfers in the order they were issued."""
    queued_ns: NDArray[np.int64]
    """``[channels, tasks]``: their durations, with the wait that they may have."""
    place: NDArray[np.int32]
    """``[tasks]``: where in its queue each transfer stands."""
    spans_ns: NDArray[np.int64]
    """``[2, tasks]``: start and end of each task."""
    saved: NDArray[np.int64]
    """``[entries // 64 + 2, 1 + 3 * channels]``: time and lanes (with the work left in place of its end)
    before every 64th entry; the makespan in the first column of the last row."""


def tables_of(problem: Problem) -> Tables:
    """The arrays of a problem that a simulation reads."""
    products = problem.products
    if products is None:
        products = np.zeros(len(problem), np.bool_)
    return Tables(
        problem.duration_ns, problem.resource, products, problem.speed_ppm, problem.transfer_wait_ns
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
    makespan = _pass(order, 0, -1, 0, 0, IDLE, tables, memo, memo)
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
    busy, nearest = 0, IDLE
    scratch.place[:] = memo.place
    for c in range(memo.lane.shape[0]):
        head, tail, left = memo.saved[row, 1 + 3 * c : 4 + 3 * c]
        scratch.lane[c, HEAD], scratch.lane[c, TAIL], scratch.lane[c, ENDS_AT] = head, tail, IDLE
        if head < tail:
            scratch.queue[c, head:tail] = memo.queue[c, head:tail]
            scratch.queued_ns[c, head:tail] = memo.queued_ns[c, head:tail]
            scratch.lane[c, ENDS_AT] = left
            nearest = min(nearest, left)
            busy += 1
    return _pass(order, row, last, memo.saved[row, 0], busy, nearest, tables, scratch, memo)


@compiled
def _pass(  # noqa: C901 - long for a reason, see below
    order: Any, row: Any, last: Any, now: Any, busy: Any, nearest: Any, tables: Any, memo: Any, known: Any
) -> Any:
    """Go through ``order`` from entry ``64 * row`` on; the time at its end.

    Long because numba counts references to every array that it hands to a function, which takes
    longer than a step does: only what happens once per transfer is a function of its own.

    Args:
        last: last entry that may differ from the order which ``known`` describes; negative: there
            is none such, and the state goes into ``memo``.
        busy: number of channels that run a transfer.
        nearest: value of ``done`` at which the first of them ends.
    """
    duration_ns, resource, products, speed_ppm, wait_ns = tables
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
            while lane[c, HEAD] <= own:
                if wait_ns > 0:
                    nearest = _take_waits_off(done, wait_ns, lane, queued_ns)
                speed = speed_ppm[NO_COMPUTE, busy]
                elapsed = (nearest - done + speed - 1) // speed
                now += elapsed
                done += elapsed * speed
                busy, nearest = _retire(now, done, busy, lane, queue, queued_ns, spans_ns)
        elif resource[entry] > 0:
            c = resource[entry] - 1
            own = lane[c, TAIL]
            queue[c, own], queued_ns[c, own], place[entry] = entry, duration_ns[entry] + wait_ns, own
            lane[c, TAIL] = own + 1
            if lane[c, HEAD] == own:
                spans_ns[0, entry] = now
                lane[c, ENDS_AT] = done + queued_ns[c, own] * PPM
                busy, nearest = _retire(now, done, busy + 1, lane, queue, queued_ns, spans_ns)
        else:
            spans_ns[0, entry] = now
            work, kind = duration_ns[entry] * PPM, PRODUCT if products[entry] else COMPUTE
            while busy > 0 and work > 0:
                speed, transfer_speed = speed_ppm[kind, busy], speed_ppm[BESIDE_COMPUTE, busy]
                elapsed = (work + speed - 1) // speed
                if done + elapsed * transfer_speed < nearest:
                    now += elapsed
                    done += elapsed * transfer_speed
                    work = 0
                    break
                elapsed = (nearest - done + transfer_speed - 1) // transfer_speed
                now += elapsed
                done += elapsed * transfer_speed
                work -= elapsed * speed
                busy, nearest = _retire(now, done, busy, lane, queue, queued_ns, spans_ns)
            if work > 0:
                now += (work + PPM - 1) // PPM
            spans_ns[1, entry] = now
    return now


@compiled
def _retire(now: Any, done: Any, busy: Any, lane: Any, queue: Any, queued_ns: Any, spans_ns: Any) -> Any:
    """End transfers whose work is done and begin the next; number running, nearest end."""
    nearest = IDLE
    for c in range(lane.shape[0]):
        while lane[c, ENDS_AT] <= done:
            spans_ns[1, queue[c, lane[c, HEAD]]] = now
            lane[c, HEAD] += 1
            if lane[c, HEAD] == lane[c, TAIL]:
                lane[c, ENDS_AT] = IDLE
                busy -= 1
                continue
            spans_ns[0, queue[c, lane[c, HEAD]]] = now
            lane[c, ENDS_AT] = done + queued_ns[c, lane[c, HEAD]] * PPM
        nearest = min(nearest, lane[c, ENDS_AT])
    return busy, nearest


@compiled
def _take_waits_off(done: Any, wait_ns: Any, lane: Any, queued_ns: Any) -> Any:
    """Of transfers that begin now, at which the stream waits; the nearest end."""
    nearest = IDLE
    for c in range(lane.shape[0]):
        head = lane[c, HEAD]
        if head < lane[c, TAIL] and lane[c, ENDS_AT] - done == queued_ns[c, head] * PPM:
            lane[c, ENDS_AT] -= wait_ns * PPM
        nearest = min(nearest, lane[c, ENDS_AT])
    return nearest


@compiled
def _save(now: Any, done: Any, lane: Any, row: Any) -> None:
    row[0] = now
    for c in range(lane.shape[0]):
        row[1 + 3 * c] = lane[c, HEAD]
        row[2 + 3 * c] = lane[c, TAIL]
        row[3 + 3 * c] = lane[c, ENDS_AT] - done


@compiled
def _is_known(done: Any, lane: Any, queue: Any, queued_ns: Any, known: Any, row: Any) -> Any:
    """Whether the channels are as ``known`` says, so that all that follows is but shifted."""
    for c in range(lane.shape[0]):
        head, tail, left = known.saved[row, 1 + 3 * c : 4 + 3 * c]
        if lane[c, HEAD] != head or lane[c, TAIL] != tail:
            return False
        if head < tail and lane[c, ENDS_AT] - done != left:
            return False
        for place in range(head, tail):
            if queue[c, place] != known.queue[c, place] or queued_ns[c, place] != known.queued_ns[c, place]:
                return False
    return True
