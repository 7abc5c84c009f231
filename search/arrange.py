"""Buckets and order of a state by rule for the kernels it has, without leaving the arrays.

The rules are those of ``schedule``, which says why they are good: a list schedule that brings gradients forward, the
best buckets of neighbouring gradients for the order it leads to, and the list schedule again. There a strategy is
written, read, and simulated for each; here it takes milliseconds, so a search can afford it first and often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Ints, compiled
from disco_hlo.hlo.graph import stretches
from disco_hlo.search import layout as at
from disco_hlo.search.kernels import count_unit
from disco_hlo.search.layout import open_views
from disco_hlo.search.ordering import predecessors
from disco_hlo.search.state import Scratch, State, note_change, retire
from disco_hlo.search.step import Step
from disco_hlo.simulator.orders import issue_order

MOST_GRADIENTS = 1024
"""Of more of them not every run is looked at: that would be millions."""


def list_order(step: Step, state: State, scratch: Scratch) -> bool:
    """Put the units of a priced state into the order of a list schedule (``simulator.orders.list_schedule``).

    Whatever order they had is lost. Returns False, and leaves the state as it was, where units wait for
    each other in a circle.
    """
    heads, needed_at, needed = _units(step, state, scratch)
    times = state.times[heads]
    main, on_channel = times[:, at.MAIN], times[:, at.ON_CHANNEL] != 0
    compute = np.maximum(times[:, at.PACK], 0) + times[:, at.UNPACK] + np.where(on_channel, 0, main)
    is_bucket = (step.node[at.FLAGS, heads] & at.COLLECTIVE != 0).astype(np.int64)
    issued = issue_order(needed_at, needed, compute, np.where(on_channel, main, 0), is_bucket, True)
    if issued.size < heads.size:
        return False
    word, ordered = state.word, heads[issued]
    ends = np.cumsum(word[at.COUNT, ordered])
    word[at.ORDER, : word[at.TOTAL, at.SLOTS]] = -1
    word[at.PLACE, ordered] = ends - word[at.COUNT, ordered]
    word[at.ORDER, word[at.PLACE, ordered]] = ordered
    return True


def heads_by_position(step: Step, state: State, scratch: Scratch, position: Ints) -> Ints:
    """The units in a topological order, of those that are ready always the one with the smallest position, then
    the smallest node; without those that wait for each other in a circle.

    Args:
        position: ``[nodes]`` int64, of heads.
    """
    heads, needed_at, needed = _units(step, state, scratch)
    count, waits = heads.size, np.diff(needed_at)
    # Numbers alone, which Python's collector does not look at: a place and a unit are one.
    keys = ((position[heads] + 1) * count + np.arange(count)).tolist()
    by_needed = np.argsort(needed, kind="stable")
    dependents = np.repeat(np.arange(count), waits)[by_needed].tolist()
    begin = np.searchsorted(needed[by_needed], np.arange(count + 1)).tolist()
    missing, found = waits.tolist(), []
    ready = [key for key, left in zip(keys, missing, strict=True) if not left]
    heapify(ready)
    while ready:  # ends: each unit is ready once
        first = heappop(ready) % count
        found.append(first)
        for unit in dependents[begin[first] : begin[first + 1]]:
            missing[unit] -= 1
            if not missing[unit]:
                heappush(ready, keys[unit])
    ordered: Ints = heads[np.array(found, np.int64)]
    return ordered


@compiled
def _units(step: Step, state: State, scratch: Scratch) -> Any:
    """Heads of all units, ascending, and for each the units that it waits for, as flat lists."""
    g, s, w = open_views(step, state, scratch)
    count = 0
    number = np.empty(g.nodes, np.int64)
    for x in range(g.nodes):
        number[x] = count
        count += s.owner[x] == x
    heads = np.empty(count, np.int64)
    needed_at, needed = np.zeros(count + 1, np.int64), np.empty(4 * g.nodes, np.int64)
    total = 0
    for x in range(g.nodes):
        if s.owner[x] != x:
            continue
        heads[number[x]] = x
        waits = predecessors(g, s, w, x, w.neighbours)
        if total + waits > needed.size:
            larger = np.empty(2 * needed.size + waits, np.int64)
            for k in range(total):
                larger[k] = needed[k]
            needed = larger
        for k in range(waits):
            needed[total] = number[w.neighbours[k]]
            total += 1
        needed_at[number[x] + 1] = total
    return heads, needed_at, needed[:total]


@compiled
def regroup(step: Step, state: State, scratch: Scratch, members: Ints, run_at: Ints) -> None:
    """Make collectives into other buckets: number i has ``members[run_at[i] : run_at[i + 1]]``, ascending.

    The buckets are noted as changed. Follow it up with prices and :func:`list_order`.
    """
    g, s, w = open_views(step, state, scratch)
    before = 0
    for x in members:
        if s.owner[x] == x:
            before += 1
            retire(g, s, w, x)
    for i in range(run_at.size - 1):
        head = members[run_at[i]]
        for k in range(run_at[i], run_at[i + 1]):
            x = members[k]
            s.owner[x] = head
            s.next[x] = members[k + 1] if k + 1 < run_at[i + 1] else -1
            s.count[x] = 0
            s.place[x] = -1
        s.count[head] = run_at[i + 1] - run_at[i]
        count_unit(s, head)  # a gradient leaves any bucket alike
        note_change(w, head)
    s.total[at.UNITS] += run_at.size - 1 - before
    w.number[at.LOGGED] = 0


def gradients_ready(step: Step, state: State, ends_ns: Ints, ranked: Ints) -> Ints:
    """When each collective (``ranked``) could start, by the ends of the units (``segments.order_ns``)."""
    begin, end = step.node[at.SOURCES_AT, ranked], step.node[at.SOURCES_AT, ranked + 1]
    sources = step.edge[stretches(begin, end - begin)]
    ready = np.zeros(ranked.size, np.int64)
    np.maximum.at(
        ready, np.repeat(np.arange(ranked.size), end - begin), ends_ns[state.word[at.OWNER, sources]]
    )
    return ready


def contiguous_buckets(
    ready_ns: Sequence[int],
    sizes_bytes: Sequence[int],
    kinds: Sequence[object],
    transfer_ns: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    wait_ns: int = 0,
) -> list[list[int]]:
    """Split gradients, in the order in which they become ready, into runs that travel together.

    The channel serves the runs in turn; a run starts when the channel is free and its last gradient is
    ready. Of all ways to cut, this is one whose last transfer ends first, with the fewest runs among
    equals. O(n^2) for n gradients; of more than :data:`MOST_GRADIENTS` neighbours are taken together first.

    Args:
        ready_ns: when each gradient exists, ascending.
        sizes_bytes: its size.
        kinds: only equal kinds may travel together.
        transfer_ns: times of collectives of so many bytes.
        wait_ns: what each takes longer where it begins beside compute: here all do.
    """
    count = len(ready_ns)
    if not count:
        return []
    if count > MOST_GRADIENTS:
        blocks = _blocks(kinds, -(-count // MOST_GRADIENTS))
        if len(blocks) > 2 * MOST_GRADIENTS:  # few of them may travel with their neighbours
            return blocks
        found = _best_runs(
            [ready_ns[block[-1]] for block in blocks],
            [sum(sizes_bytes[i] for i in block) for block in blocks],
            [kinds[block[0]] for block in blocks],
            transfer_ns,
            wait_ns,
        )
        return [[i for block in run for i in blocks[block]] for run in found]
    return _best_runs(ready_ns, sizes_bytes, kinds, transfer_ns, wait_ns)


def _best_runs(
    ready_ns: Sequence[int],
    sizes_bytes: Sequence[int],
    kinds: Sequence[object],
    transfer_ns: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    wait_ns: int,
) -> list[list[int]]:
    count = len(ready_ns)
    ends = np.cumsum([0, *sizes_bytes], dtype=np.int64)
    together_ns = np.asarray(transfer_ns(np.maximum(ends[None, :] - ends[:, None], 0)), np.int64) + wait_ns
    alike = np.zeros(count, np.int64)
    for i in range(1, count):
        alike[i] = alike[i - 1] if kinds[i] == kinds[i - 1] else i
    cut = _cuts(np.array(ready_ns, np.int64), together_ns, alike)
    found: list[list[int]] = []
    end = count
    while end:
        found.append(list(range(cut[end], end)))
        end = int(cut[end])
    return found[::-1]


def _blocks(kinds: Sequence[object], most: int) -> list[list[int]]:
    """Runs of neighbours of one kind, so many at most."""
    blocks: list[list[int]] = []
    for i, kind in enumerate(kinds):
        if blocks and len(blocks[-1]) < most and kinds[blocks[-1][0]] == kind:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks


@compiled
def _cuts(ready_ns: Any, together_ns: Any, alike: Any) -> Any:
    """Where the last run begins if gradients end there, for each number of gradients.

    Args:
        together_ns: ``[gradients + 1, gradients + 1]``: time of a run by where it begins and where it ends.
        alike: for each gradient the first that it may travel with.
    """
    count = ready_ns.size
    finish, runs, cut = (
        np.zeros(count + 1, np.int64),
        np.zeros(count + 1, np.int64),
        np.zeros(count + 1, np.int64),
    )
    for end in range(1, count + 1):
        for start in range(alike[end - 1], end):
            total = max(finish[start], ready_ns[end - 1]) + together_ns[start, end]
            fewer = total == finish[end] and runs[start] + 1 < runs[end]
            if start == alike[end - 1] or total < finish[end] or fewer:
                finish[end], runs[end], cut[end] = total, runs[start] + 1, start
    return cut
