"""The fast engine for the policy of DisCo, section 4.4: ready queues, first in, first out.

The compute stream and every channel have a queue of tasks whose predecessors have finished, so
all-reduces run in the order in which their gradients are produced. Where several things happen
at one instant, the rule is: (1) tasks that end are retired, all of them; (2) the tasks that
become ready by it join their queues by ascending id; (3) every idle resource takes the head of
its queue; (4) transfers begin, without a wait where the compute stream found nothing to take, with it where what that
runs has done its hold; others are held. What products lose is as in ``engine``.
A task without duration ends in the instant it starts, and the instant goes back to (1).

Callable from Python and from functions compiled by numba::

    evaluate_ready_queue(tables, offset, member, missing, started, spans_ns) -> int64   makespan in ns
"""

from __future__ import annotations

from typing import Any

import numpy as np

from disco_hlo.compiled import compiled
from disco_hlo.simulator.costs import BESIDE_COMPUTE, COMPUTE, NO_COMPUTE, PPM, PRODUCT

NONE = -1


@compiled
def evaluate_ready_queue(  # noqa: C901 - one function for the reason that engine._pass is
    tables: Any, offset: Any, member: Any, missing: Any, started: Any, spans_ns: Any
) -> Any:
    """Makespan in ns.

    Args:
        tables: :class:`~disco_hlo.simulator.engine.Tables`.
        offset: ``int32[tasks + 1]``, where each task's successors begin in ``member``.
        member: ``int32[]``, successors of all tasks.
        missing: ``int64[tasks]``, number of predecessors of each task; 0 afterwards.
        started: ``int32[tasks]``, receives the tasks in the order in which they start.
        spans_ns: ``int64[2, tasks]``, receives start and end of each task.
    """
    duration_ns, resource, products, speed_ppm, hold_ns, wait_ns = tables
    tasks, resources = duration_ns.size, speed_ppm.shape[1]
    queue = np.empty((resources, tasks), np.int32)
    head, tail = np.zeros(resources, np.int64), np.zeros(resources, np.int64)
    running, left = np.full(resources, NONE), np.zeros(resources, np.int64)
    begun = np.zeros(resources, np.bool_)
    held, is_first, lost = False, False, np.int64(0)
    ready, ready_count = np.empty(tasks, np.int32), 0
    for task in range(tasks):
        if missing[task] == 0:
            ready[ready_count] = task
            ready_count += 1
    now, count, busy = np.int64(0), 0, 0
    # Ends: each pass ends a task, or begins transfers that one was holding, which it does twice at most.
    while True:
        for k in range(ready_count):
            r = resource[ready[k]]
            queue[r, tail[r]] = ready[k]
            tail[r] += 1
        begins = False
        for r in range(resources):
            if running[r] != NONE or head[r] == tail[r]:
                continue
            task = queue[r, head[r]]
            head[r] += 1
            started[count] = task
            count += 1
            spans_ns[0, task] = now
            running[r], left[r] = task, duration_ns[task] * PPM
            begun[r] = r == 0
            begins = begins or r == 0
        op = running[0]
        if begins:
            lost = np.int64(0)
        kind = PRODUCT if op != NONE and products[op] else COMPUTE
        hold = (left[0] - (duration_ns[op] - hold_ns[op]) * PPM - lost) if op != NONE else np.int64(0)
        if held and is_first and not begins and op != NONE and left[0] > 0 and hold <= 0:
            lost = hold_ns[op] * (PPM - speed_ppm[kind, 1]) // 2
            left[0] += lost
        held = False
        for r in range(1, resources):
            if running[r] == NONE or begun[r]:
                continue
            if op == NONE or (left[0] > 0 and hold <= 0):
                begun[r] = True
                busy += 1
                spans_ns[0, running[r]] = now
                left[r] += 0 if op == NONE else wait_ns * PPM
            held = held or not begun[r]
        if begins:
            is_first = kind == PRODUCT and busy == 0
        transfer_row = NO_COMPUTE if op == NONE else BESIDE_COMPUTE
        op_speed = speed_ppm[kind, busy]
        if is_first:
            op_speed = np.int64(PPM)
        elapsed = np.int64(NONE)
        for r in range(resources):
            if running[r] != NONE and begun[r]:
                speed = speed_ppm[transfer_row, busy] if r > 0 else op_speed
                to_do = hold if r == 0 and held and hold > 0 else left[r]
                needed = (to_do + speed - 1) // speed
                elapsed = needed if elapsed == NONE else min(elapsed, needed)
        if elapsed == NONE:
            return now
        now += elapsed
        ready_count, transfers = 0, busy
        for r in range(resources):
            if running[r] == NONE or not begun[r]:
                continue
            left[r] -= elapsed * (speed_ppm[transfer_row, transfers] if r > 0 else op_speed)
            if left[r] > 0:
                continue
            task = running[r]
            running[r] = NONE
            spans_ns[1, task] = now
            busy -= r > 0
            for k in range(offset[task], offset[task + 1]):
                missing[member[k]] -= 1
                if missing[member[k]] == 0:
                    ready[ready_count] = member[k]
                    ready_count += 1
        if ready_count > 1:
            _sort(ready, ready_count)


@compiled
def _sort(values: Any, count: Any) -> None:
    """Sort the first ``count`` values by insertion: they are few, or nearly sorted already."""
    for i in range(1, count):
        value = values[i]
        j = i
        while j > 0 and values[j - 1] > value:  # ends: j goes down to 0
            values[j] = values[j - 1]
            j -= 1
        values[j] = value
