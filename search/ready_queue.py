"""The schedule of the paper's simulator (section 4.4): ready queues, first in, first out.

The compute stream and every channel have a queue of tasks whose predecessors have finished, so
all-reduces run in the order in which their gradients are produced, beside the ops or, where
collectives block, between them. At one instant: all tasks that end are retired; the tasks that
become ready by it join their queues by ascending node; every idle resource takes the head of its
queue. This is ``simulator.ready_queue``, run on the units of a state without building a problem.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from disco_hlo.search import layout as at
from disco_hlo.search.neighbours import mark_computing

from disco_hlo.compiled import compiled, inner
from disco_hlo.simulator.costs import BESIDE_COMPUTE, COMPUTE, NO_COMPUTE, PPM


@inner
def ready_queue(g: Any, s: Any, w: Any, speed_ppm: Any, started: Any) -> Any:
    """Run a strategy through the queues. One long function, as in the simulator, for the same reason.

    Args:
        speed_ppm: ``[3, channels + 1]``, see ``simulator.costs.MachineModel``.
        started: ``[4 * nodes]`` int64, receives the tasks (3 * head + part) as they start, transfers
            as they are issued, and once more when they end, as -1 - task.

    Returns:
        The time at which everything is done and the number of entries of ``started``; (-1, 0)
        where units wait for each other in a circle.
    """
    resources = speed_ppm.shape[1]
    queue = np.empty((resources, 3 * g.nodes), np.int64)
    head, tail = np.zeros(resources, np.int64), np.zeros(resources, np.int64)
    running, left = np.full(resources, -1), np.zeros(resources, np.int64)
    found = 0
    for x in range(g.nodes):
        w.value[x] = s.waits[x]
        if s.owner[x] == x and w.value[x] == 0:
            w.neighbours[found] = _first_task(s, x)
            found += 1
    now = count = busy = done = turn = 0
    while True:
        for k in range(found):
            task, r = w.neighbours[k], 0
            if task % 3 == at.MAIN and s.time_ns[at.TIME_COLUMNS * (task // 3) + at.ON_CHANNEL]:
                r = 1 + turn % (resources - 1)
                turn += 1
                started[count] = task
                count += 1
            queue[r, tail[r]] = task
            tail[r] += 1
        for r in range(resources):
            if running[r] != -1 or head[r] == tail[r]:
                continue
            task = queue[r, head[r]]
            head[r] += 1
            if r == 0:
                started[count] = task
                count += 1
            running[r], left[r] = task, s.time_ns[at.TIME_COLUMNS * (task // 3) + task % 3] * PPM
            busy += r > 0
        row = NO_COMPUTE if running[0] == -1 else BESIDE_COMPUTE
        elapsed = -1
        for r in range(resources):
            if running[r] != -1:
                speed = speed_ppm[row if r > 0 else COMPUTE, busy]
                needed = (left[r] + speed - 1) // speed
                elapsed = needed if elapsed == -1 else min(elapsed, needed)
        if elapsed == -1:
            break
        now += elapsed
        found, transfers = 0, busy
        for r in range(resources):
            if running[r] == -1:
                continue
            left[r] -= elapsed * speed_ppm[row if r > 0 else COMPUTE, transfers]
            if left[r] > 0:
                continue
            task = running[r]
            running[r] = -1
            if r > 0:
                started[count] = -1 - task
                count += 1
                busy -= 1
            unit, part = task // 3, task % 3
            if part < at.UNPACK and s.time_ns[at.TIME_COLUMNS * unit + part + 1] >= 0:
                found = _add(w.neighbours, found, task + 1)
            else:
                done += 1
                found = _release(g, s, w, unit, found)
    if done < s.total[at.UNITS]:
        return -1, 0
    return now, count


@inner
def _first_task(s: Any, unit: Any) -> Any:
    return 3 * unit + (at.PACK if s.time_ns[at.TIME_COLUMNS * unit + at.PACK] >= 0 else at.MAIN)


@inner
def _release(g: Any, s: Any, w: Any, unit: Any, found: Any) -> Any:
    """Count a finished unit off; those that waited for nothing else join row ``neighbours``."""
    x = unit
    while x != -1:
        computing = mark_computing(s, w, x)
        for e in range(g.readers_at[x], g.readers_at[x + 1]):
            reader = g.edge[e]
            other, cell = s.owner[reader], s.copiers[reader]
            while True:
                if w.inside[other] != computing:
                    found = _count_off(s, w, found, other)
                if cell == -1:
                    break
                other = s.cell_unit[cell]
                cell = s.next_of_node[cell]
        found = _release_later(g, s, w, unit, x, found)
        x = s.next[x]
    cell = s.copies[unit]
    while cell != -1:
        found = _release_later(g, s, w, unit, s.cell_node[cell], found)
        cell = s.next_of_unit[cell]
    return found


@inner
def _release_later(g: Any, s: Any, w: Any, unit: Any, x: Any, found: Any) -> Any:
    for e in range(g.later_at[x], g.later_at[x + 1]):
        y = g.edge[e]
        other, cell = s.owner[y], s.copiers[y]
        while True:
            if other != unit:
                found = _count_off(s, w, found, other)
            if cell == -1:
                break
            other = s.cell_unit[cell]
            cell = s.next_of_node[cell]
    return found


@inner
def _count_off(s: Any, w: Any, found: Any, unit: Any) -> Any:
    w.value[unit] -= 1
    if w.value[unit] != 0:
        return found
    return _add(w.neighbours, found, _first_task(s, unit))


@compiled
def _add(fresh: Any, found: Any, task: Any) -> Any:
    """Insert a task that became ready, ascending."""
    i = found
    while i > 0 and fresh[i - 1] > task:
        fresh[i] = fresh[i - 1]
        i -= 1
    fresh[i] = task
    return found + 1
