"""The schedule of the paper's simulator (section 4.4): ready queues, first in, first out.

The compute stream and the channel have a queue each of tasks whose predecessors have finished, so
collectives run in the order in which their gradients are produced, beside the ops or, where
collectives block, between them. At one instant: all tasks that end are retired; the tasks that
become ready by it join their queues by ascending node; every idle resource takes the head of its
queue. Kernels hold no transfers here, and are not told apart. ``tests/simulator/reference.py`` says the same, slowly.

While no transfer is under way, which is most of the time, an instant is one op that ends: nothing is
divided, and no channel is looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from disco_hlo.compiled import Ints, compiled, inner
from disco_hlo.search import layout as at
from disco_hlo.search.layout import GraphView, ScratchView, StateView, open_views
from disco_hlo.search.ordering import mark_computing, sort_runs
from disco_hlo.search.state import Scratch, State
from disco_hlo.search.step import Step
from disco_hlo.simulator.contention import (
    BUSY,
    DONE,
    ENDS_AT,
    HEAD,
    HELD,
    NOT_YET,
    NOW,
    Progress,
    ProgressView,
    advance,
    alone_ns,
    compute_speed_ppm,
    go_on,
    idle,
    issue,
    open_progress,
    restart,
)
from disco_hlo.simulator.costs import ANY_COMPUTE, PPM


@inner
def ready_queue(g: GraphView, s: StateView, w: ScratchView, p: ProgressView, started: Ints) -> Any:
    """Run a strategy through the queues.

    Args:
        p: progress of collectives by the heads of their buckets.
        started: ``[4 * nodes]`` int64, receives the tasks (3 * head + part) as they start, transfers
            as they are issued, and once more when they end, as -1 - task.

    Returns:
        The time at which everything is done and the number of entries of ``started``; (-1, 0)
        where units wait for each other in a circle.
    """
    ops = np.empty(3 * g.nodes, np.int64)
    op_head = op_tail = count = done = 0
    op, left = -1, 0
    number = p.number
    restart(p)
    found = _begin(g, s, w)
    while True:  # ends: each pass ends a task
        sort_runs(w.neighbours, w.queue, found)
        for k in range(found):
            task = w.neighbours[k]
            if _is_transfer(g, s, task):
                issue(p, task // 3, _time_ns(s, task))
                started[count] = task
                count += 1
            else:
                ops[op_tail] = task
                op_tail += 1
        found = 0
        if op == -1 and op_head < op_tail:
            op = ops[op_head]
            op_head += 1
            started[count] = op
            count += 1
            left = _time_ns(s, op) * PPM
        if number[HELD] > 0 and (op == -1 or left > 0):
            go_on(p, 0 if op == -1 else p.wait_ns)
        if op == -1:
            if number[BUSY] == 0:
                break
            idle(p)
        elif number[BUSY] == 0:
            number[NOW] += alone_ns(left)
            left = 0
        else:
            speed = compute_speed_ppm(p, ANY_COMPUTE)
            left -= speed * advance(p, left, speed)
        if op != -1 and left <= 0:
            done, found = _retire(g, s, w, op, done, found)
            op = -1
        if number[DONE] >= number[ENDS_AT]:
            task = 3 * p.queue[number[HEAD]] + at.MAIN
            started[count] = -1 - task
            count += 1
            done, found = _retire(g, s, w, task, done, found)
            go_on(p, NOT_YET)
    if done < s.total[at.UNITS]:
        return -1, 0
    return number[NOW], count


@inner
def _is_transfer(g: GraphView, s: StateView, task: int) -> Any:
    """Whether a task runs on the channel."""
    unit = task // 3
    on_channel = s.time_ns[at.TIME_COLUMNS * unit + at.ON_CHANNEL]
    return g.flags[unit] & at.COLLECTIVE and task % 3 == at.MAIN and on_channel


@inner
def _time_ns(s: StateView, task: int) -> Any:
    return s.time_ns[at.TIME_COLUMNS * (task // 3) + task % 3]


@inner
def _begin(g: GraphView, s: StateView, w: ScratchView) -> Any:
    """What every unit waits for into row ``value``, the tasks that wait for nothing into ``neighbours``; their
    number."""
    found = 0
    for x in range(g.nodes):
        w.value[x] = s.waits[x]
        if s.waits[x] == 0 and s.owner[x] == x:
            w.neighbours[found] = _first_task(g, s, x)
            found += 1
    return found


@inner
def _retire(g: GraphView, s: StateView, w: ScratchView, task: int, done: int, found: int) -> Any:
    """A task has ended: the next part of its unit becomes ready, or whatever waited for the unit alone."""
    unit, part = task // 3, task % 3
    sliced = part == at.MAIN and s.time_ns[at.TIME_COLUMNS * unit + at.UNPACK] > 0
    if g.flags[unit] & at.COLLECTIVE and (part == at.PACK or sliced):
        w.neighbours[found] = task + 1
        return done, found + 1
    return done + 1, _release(g, s, w, unit, found)


@inner
def _first_task(g: GraphView, s: StateView, unit: int) -> Any:
    if g.flags[unit] & at.COLLECTIVE and s.time_ns[at.TIME_COLUMNS * unit + at.PACK] >= 0:
        return 3 * unit + at.PACK
    return 3 * unit + at.MAIN


@inner
def _release(g: GraphView, s: StateView, w: ScratchView, unit: int, found: int) -> Any:
    """Count a finished unit off; those that waited for nothing else join row ``neighbours``."""
    x = unit
    while x != -1:  # ends with the list
        shared = s.copiers[x] != -1
        computing = mark_computing(s, w, x) if shared else 0
        for e in range(g.readers_at[x], g.readers_at[x + 1]):
            other, cell = s.owner[g.edge[e]], s.copiers[g.edge[e]]
            while True:  # ends with the list
                if other != unit and not (shared and w.inside[other] == computing):
                    found = _count_off(g, s, w, found, other)
                if cell == -1:
                    break
                other = s.cell_unit[cell]
                cell = s.next_of_node[cell]
        if g.flags[x] & at.ORDERED:
            found = _release_later(g, s, w, unit, x, found)
        x = s.next[x]
    cell = s.copies[unit]
    while cell != -1:  # ends with the list
        found = _release_later(g, s, w, unit, s.cell_node[cell], found)
        cell = s.next_of_unit[cell]
    return found


@inner
def _release_later(g: GraphView, s: StateView, w: ScratchView, unit: int, x: int, found: int) -> Any:
    for e in range(g.later_at[x], g.later_at[x + 1]):
        other, cell = s.owner[g.edge[e]], s.copiers[g.edge[e]]
        while True:  # ends with the list
            if other != unit:
                found = _count_off(g, s, w, found, other)
            if cell == -1:
                break
            other = s.cell_unit[cell]
            cell = s.next_of_node[cell]
    return found


@inner
def _count_off(g: GraphView, s: StateView, w: ScratchView, found: int, unit: int) -> Any:
    w.value[unit] -= 1
    if w.value[unit] != 0:
        return found
    w.neighbours[found] = _first_task(g, s, unit)
    return found + 1


@compiled
def schedule(step: Step, state: State, scratch: Scratch, progress: Progress, started: Ints) -> Any:
    """Cost in ns of a priced state, and number of entries of its order in ``started``."""
    g, s, w = open_views(step, state, scratch)
    return ready_queue(g, s, w, open_progress(progress), started)
