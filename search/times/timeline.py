"""The order of a state as the simulator's engine takes it, and what that takes.

``ORDER`` has every unit once. A transfer is issued right behind the last unit it waits for, and
waited for right before the first one that reads it: earlier issues and later waits are never worse, but for what
transfers and kernels cost each other.
The entries follow ``simulator.build`` to the letter, so that what the search predicts is what the
simulator says of the strategy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import inner
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import NOWHERE, cut_slot
from disco_hlo.search.rules.neighbours import predecessors, successors
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.engine import Memo, Tables, evaluate


class Stage(NamedTuple):
    """Working space to run one order through the engine. Task 3 * head + part, as in ``ready_queue``."""

    order: NDArray[np.int32]
    """``[entries]``"""
    tables: Tables
    memo: Memo
    first: NDArray[np.int64]
    """``[3, slots + 1]``: first bucket that is issued behind a slot, first that is waited for before it,
    first gradient that is sliced out before it; -1 where there is none."""
    following: NDArray[np.int64]
    """``[3, nodes]``: the next of each."""


ISSUED, AWAITED, SLICED = 0, 1, 2


def new_stage(nodes: int, machine: MachineModel) -> Stage:
    """Room for any order of a step of so many nodes."""
    speed_ppm = machine.speed_ppm()
    tasks, channels = 3 * nodes, speed_ppm.shape[1] - 1
    entries = 4 * nodes + 4
    return Stage(
        np.zeros(entries, np.int32),
        Tables(
            np.zeros(tasks, np.int64),
            np.zeros(tasks, np.int32),
            np.zeros(tasks, np.bool_),
            speed_ppm,
            np.zeros(tasks, np.int64),
            machine.wait_ns,
        ),
        Memo(
            np.zeros((channels, 3), np.int64),
            np.zeros((channels, tasks), np.int32),
            np.zeros((channels, tasks), np.int64),
            np.zeros(tasks, np.int32),
            np.zeros((2, tasks), np.int64),
            np.zeros((entries // 64 + 2, 1 + 3 * channels), np.int64),
        ),
        np.full((3, nodes + 2), -1, np.int64),
        np.full((3, nodes), -1, np.int64),
    )


@inner
def order_ns(g: Any, s: Any, w: Any, stage: Any, ranked: Any) -> Any:
    """Makespan of the state in its order, and the number of entries in ``stage.order``.

    Args:
        ranked: ``[all-reduces]``, their nodes.
    """
    entries = write_entries(g, s, w, stage, ranked)
    return evaluate(stage.order[:entries], stage.tables, stage.memo), entries


@inner
def write_entries(g: Any, s: Any, w: Any, stage: Any, ranked: Any) -> Any:
    """Fill ``stage.order``, durations and resources from the state; number of entries."""
    order, first, following = stage.order, stage.first, stage.following
    duration, resource = stage.tables.duration_ns, stage.tables.resource
    end = s.total[at.SLOTS]
    channels = stage.tables.speed_ppm.shape[1] - 1
    for i in range(ranked.size):
        if s.owner[ranked[i]] == ranked[i]:
            _hang_up(g, s, w, stage, ranked[i], end)
    count, turn = 0, 0
    for slot in range(-1, end + 1):
        for kind in (AWAITED, SLICED):
            x = first[kind, slot + 1]
            first[kind, slot + 1] = -1
            while x != -1:  # ends with the list
                task = 3 * x + (at.MAIN if kind == AWAITED else at.UNPACK)
                if kind == SLICED:
                    duration[task] = g.slice_ns[x]
                order[count] = task if kind == SLICED else ~task
                count += 1
                x = following[kind, x]
        unit = s.order[slot] if 0 <= slot < end else -1
        if unit != -1 and not g.flags[unit] & at.ALL_REDUCE:
            duration[3 * unit + at.MAIN] = s.time_ns[at.TIME_COLUMNS * unit + at.MAIN]
            stage.tables.products[3 * unit + at.MAIN] = has_product(g, s, unit)
            stage.tables.hold_ns[3 * unit + at.MAIN] = hold_ns(g, s, unit)
            order[count] = 3 * unit + at.MAIN
            count += 1
        x = first[ISSUED, slot + 1]
        first[ISSUED, slot + 1] = -1
        while x != -1:  # ends with the list
            times = at.TIME_COLUMNS * x
            if s.time_ns[times + at.PACK] >= 0:
                duration[3 * x + at.PACK] = s.time_ns[times + at.PACK]
                order[count] = 3 * x + at.PACK
                count += 1
            duration[3 * x + at.MAIN] = s.time_ns[times + at.MAIN]
            resource[3 * x + at.MAIN] = 0
            if s.time_ns[times + at.ON_CHANNEL]:
                resource[3 * x + at.MAIN] = 1 + turn % channels
                turn += 1
            order[count] = 3 * x + at.MAIN
            count += 1
            x = following[ISSUED, x]
    return count


@inner
def hold_ns(g: Any, s: Any, unit: Any) -> Any:
    """How much of a unit must be done before a transfer begins beside it."""
    longest = np.int64(0)
    x = unit
    while x != -1:  # ends with the list
        longest = max(longest, g.hold_ns[x])
        x = s.next[x]
    return max(np.int64(0), min(longest, s.time_ns[at.TIME_COLUMNS * unit + at.MAIN] - 1))


@inner
def has_product(g: Any, s: Any, unit: Any) -> Any:
    """Whether one of a unit's ops is a product."""
    x = unit
    while x != -1:  # ends with the list
        if g.flags[x] & at.PRODUCT:
            return True
        x = s.next[x]
    return False


@inner
def _hang_up(g: Any, s: Any, w: Any, stage: Any, bucket: Any, end: Any) -> None:
    """Note behind which slot a bucket is issued, and before which it is waited for and sliced apart."""
    issued, awaited = -1, end
    for i in range(predecessors(g, s, w, bucket, w.neighbours)):
        other = w.neighbours[i]
        # Another transfer is waited for at this one's own slot, for it is one of its readers.
        issued = max(issued, s.place[bucket if g.flags[other] & at.ALL_REDUCE else other])
    for i in range(successors(g, s, w, bucket, w.neighbours)):
        awaited = min(awaited, s.place[w.neighbours[i]])
    _insert(s, stage, ISSUED, issued + 1, bucket)
    if s.time_ns[at.TIME_COLUMNS * bucket + at.ON_CHANNEL]:
        _insert(s, stage, AWAITED, awaited + 1, bucket)
    if s.time_ns[at.TIME_COLUMNS * bucket + at.PACK] < 0:
        return
    x = bucket
    while x != -1:  # ends with the list
        needed = cut_slot(s, g.edge, g.uncut_at[x], g.uncut_at[x + 1], -1)
        if needed != NOWHERE:
            _insert(s, stage, SLICED, needed + 1, x)
        x = s.next[x]


@inner
def _insert(s: Any, stage: Any, kind: Any, cell: Any, x: Any) -> None:
    """Into the list of a slot: buckets by their places, gradients by those of their buckets' heads, then their own."""
    first, following = stage.first, stage.following
    before, after = -1, first[kind, cell]
    while after != -1 and _comes_before(s, kind, after, x):  # ends with the list
        before, after = after, following[kind, after]
    following[kind, x] = after
    if before == -1:
        first[kind, cell] = x
    else:
        following[kind, before] = x


@inner
def _comes_before(s: Any, kind: Any, a: Any, b: Any) -> Any:
    if kind != SLICED:
        return s.place[a] < s.place[b]
    return s.owner[a] < s.owner[b] or (s.owner[a] == s.owner[b] and a < b)
