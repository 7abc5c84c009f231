"""The schedule of the paper's simulator (section 4.4): ready queues, first in, first out.

The compute stream and every channel have a queue of tasks whose predecessors have finished, so
all-reduces run in the order in which their gradients are produced, beside the ops or, where
collectives block, between them. At one instant: all tasks that end are retired; the tasks that
become ready by it join their queues by ascending node; every idle resource takes the head of its
queue. This is ``simulator.ready_queue``, run on the units of a state without building a problem.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from disco_hlo.search import layout as at
from disco_hlo.search.arrays import computes, holds_copy
from disco_hlo.search.jit import compiled
from disco_hlo.simulator.costs import BESIDE_COMPUTE, COMPUTE, NO_COMPUTE, PPM

# Parts of a unit: task 3 * head + part.
PACK: Final = 0
MAIN: Final = 1
UNPACK: Final = 2


@compiled
def ready_queue(step: Any, state: Any, scratch: Any, speed_ppm: Any, started: Any) -> Any:
    """Run a strategy through the queues.

    Args:
        speed_ppm: ``[3, channels + 1]``, see ``simulator.costs.MachineModel``.
        started: ``[3 * nodes]`` int32, receives the tasks (3 * head + part) as they start; a
            transfer also when it ends, as -1 - task.

    Returns:
        The time at which everything is done and the number of entries of ``started``; (-1, 0)
        where units wait for each other in a circle.
    """
    word, time_ns = state.word, state.time_ns
    missing, fresh = scratch.row[at.VALUE], scratch.row[at.NEIGHBOURS]
    tasks, resources = 3 * word.shape[1], speed_ppm.shape[1]
    queue = np.empty((resources, tasks), np.int32)
    head, tail = np.zeros(resources, np.int64), np.zeros(resources, np.int64)
    running, left = np.full(resources, -1), np.zeros(resources, np.int64)
    _count_missing(step, state, missing)
    found = 0
    for x in range(word.shape[1]):
        if word[at.OWNER, x] == x and missing[x] == 0:
            fresh[found] = _first_task(time_ns, x)
            found += 1
    now, count, busy, done, turn = np.int64(0), 0, 0, 0, 0
    while True:
        for k in range(found):
            r = 0
            if fresh[k] % 3 == MAIN and time_ns[at.ON_CHANNEL, fresh[k] // 3]:
                r = 1 + turn % (resources - 1)
                turn += 1
            queue[r, tail[r]] = fresh[k]
            tail[r] += 1
        for r in range(resources):
            if running[r] != -1 or head[r] == tail[r]:
                continue
            task = queue[r, head[r]]
            head[r] += 1
            started[count] = task
            count += 1
            running[r], left[r] = task, time_ns[task % 3, task // 3] * PPM
            busy += r > 0
        row = NO_COMPUTE if running[0] == -1 else BESIDE_COMPUTE
        elapsed = np.int64(-1)
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
            if part < UNPACK and time_ns[part + 1, unit] >= 0:
                found = _add(fresh, found, task + 1)
            else:
                done += 1
                found = _release(step, state, unit, missing, fresh, found)
    if done < word[at.TOTAL, at.UNITS]:
        return np.int64(-1), 0
    return now, count


@compiled
def _first_task(time_ns: Any, unit: Any) -> Any:
    return 3 * unit + (PACK if time_ns[PACK, unit] >= 0 else MAIN)


@compiled
def _count_missing(step: Any, state: Any, missing: Any) -> None:
    """For each unit, how many reads and orderings it waits for (several may concern one unit)."""
    word = state.word
    for x in range(word.shape[1]):
        missing[x] = 0
    for y in range(word.shape[1]):
        owner = word[at.OWNER, y]
        if owner == -1:
            continue
        _count_for(step, state, missing, owner, y)
        cell = word[at.COPIERS, y]
        while cell != -1:
            _count_for(step, state, missing, word[at.CELL_UNIT, cell], y)
            cell = word[at.NEXT_OF_NODE, cell]


@compiled
def _count_for(step: Any, state: Any, missing: Any, unit: Any, y: Any) -> None:
    node, edge, word = step.node, step.edge, state.word
    for e in range(node[at.SOURCES_AT, y], node[at.SOURCES_AT, y + 1]):
        if not computes(state, unit, edge[e]):
            missing[unit] += 1
    for e in range(node[at.EARLIER_AT, y], node[at.EARLIER_AT, y + 1]):
        x = edge[e]
        if word[at.OWNER, x] != unit:
            missing[unit] += 1
        cell = word[at.COPIERS, x]
        while cell != -1:
            if word[at.CELL_UNIT, cell] != unit:
                missing[unit] += 1
            cell = word[at.NEXT_OF_NODE, cell]


@compiled
def _release(step: Any, state: Any, unit: Any, missing: Any, fresh: Any, found: Any) -> Any:
    """Count a finished unit off; those that waited for nothing else join ``fresh``."""
    node, edge, word, time_ns = step.node, step.edge, state.word, state.time_ns
    x = unit
    while x != -1:
        for e in range(node[at.READERS_AT, x], node[at.READERS_AT, x + 1]):
            y = edge[e]
            owner = word[at.OWNER, y]
            if owner != unit and not holds_copy(state, owner, x):
                found = _count_off(time_ns, missing, fresh, found, owner)
            cell = word[at.COPIERS, y]
            while cell != -1:
                other = word[at.CELL_UNIT, cell]
                if not computes(state, other, x):
                    found = _count_off(time_ns, missing, fresh, found, other)
                cell = word[at.NEXT_OF_NODE, cell]
        found = _release_later(step, state, unit, x, missing, fresh, found)
        x = word[at.NEXT, x]
    cell = word[at.COPIES, unit]
    while cell != -1:
        found = _release_later(step, state, unit, word[at.CELL_NODE, cell], missing, fresh, found)
        cell = word[at.NEXT_OF_UNIT, cell]
    return found


@compiled
def _release_later(
    step: Any, state: Any, unit: Any, x: Any, missing: Any, fresh: Any, found: Any
) -> Any:
    node, edge, word, time_ns = step.node, step.edge, state.word, state.time_ns
    for e in range(node[at.LATER_AT, x], node[at.LATER_AT, x + 1]):
        y = edge[e]
        if word[at.OWNER, y] != unit:
            found = _count_off(time_ns, missing, fresh, found, word[at.OWNER, y])
        cell = word[at.COPIERS, y]
        while cell != -1:
            if word[at.CELL_UNIT, cell] != unit:
                found = _count_off(time_ns, missing, fresh, found, word[at.CELL_UNIT, cell])
            cell = word[at.NEXT_OF_NODE, cell]
    return found


@compiled
def _count_off(time_ns: Any, missing: Any, fresh: Any, found: Any, unit: Any) -> Any:
    missing[unit] -= 1
    if missing[unit] > 0:
        return found
    return _add(fresh, found, _first_task(time_ns, unit))


@compiled
def _add(fresh: Any, found: Any, task: Any) -> Any:
    """Insert a task that became ready, ascending."""
    i = found
    while i > 0 and fresh[i - 1] > task:
        fresh[i] = fresh[i - 1]
        i -= 1
    fresh[i] = task
    return found + 1
