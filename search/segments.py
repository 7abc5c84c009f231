"""What a state's order takes: to the nanosecond, and in the time of its transfers rather than of its units.

``ORDER`` has every unit once. A transfer is issued right behind the last unit it waits for, and waited for right before
the first one that reads it: earlier issues and later waits are never worse, but for what transfers and kernels cost
each other. :func:`order_ns` runs such an order as ``simulator.build`` and the simulator's engine run the strategy that
it stands for, and says the same. :func:`segments_ns` says nearly the same, sooner.

Between two moments at which a bucket is issued or waited for, kernels run back to back on the compute stream, and all
that matters of them is their sum. Sums by slot, and a digest of the order, follow every move. They are made anew when a
climb begins (:func:`count_all`). After a move the log that would undo it tells which slots and times were written
(:func:`catch_up`): whatever writes through ``state.put`` is seen here, and since the sums are written through it too,
``roll_back`` restores them with the rest. The digest depends on which unit follows which, not on the slots.

In the engine every kernel that runs beside a transfer ends at a whole nanosecond, here a whole segment
does. Where transfers do not slow compute down both say the same; where they do, what is said here differs
by less than a nanosecond for each unit, mostly down, and by the wait of a transfer where that decides whether the
stream idles when it begins. And of kernels that hold transfers only the first of a segment does here, which runs by
itself as in the engine, not one that runs when a transfer's turn comes. All others go at one speed beside transfers,
products or not. A climb compares such scores with each other alone; what is noted as best and what is predicted is what
the engine says.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Row, address_of, compiled, inner, pointer_to
from disco_hlo.hlo.graph import stretches
from disco_hlo.search import layout as at
from disco_hlo.search.layout import GraphView, ScratchView, StateView, open_views
from disco_hlo.search.state import NOWHERE, Scratch, State, cut_slot, put
from disco_hlo.search.step import Step
from disco_hlo.simulator.contention import (
    HELD,
    NOW,
    Progress,
    ProgressView,
    compute,
    drain,
    is_over,
    issue,
    new_progress,
    open_progress,
    restart,
    wait,
)
from disco_hlo.simulator.costs import ANY_COMPUTE, COMPUTE, PRODUCT, MachineModel

BLOCK: Final = 64
"""Slots whose times are kept as one sum."""
_PLACE_BITS: Final = 24
_KIND_BITS: Final = 1

# Segments.number.
ORDER_DIGEST: Final = 0
"""Hash of the order of the units."""
CUTS: Final = 1
"""Gradients that are cut out of their buckets."""
EVENTS: Final = 2
"""Events that happen."""
NUMBERS: Final = 3

# Events: number 2 * rank + kind, in the order in which they happen between two slots.
ISSUED: Final = 0
AWAITED: Final = 1
KINDS: Final = 2
TIES: Final = 5
"""Lists of ``Segments.tie`` for each collective."""
NEVER: Final = 2**62
"""The key of an event that does not happen."""
_OTHER, _END = np.uint64(0x5851F42D4C957F2D), np.uint64(0x9E3779B97F4A7C15)


class Segments(NamedTuple):
    """Working space of one search thread for orders of one step."""

    slot: NDArray[np.int64]
    """``[2, nodes + 1]``: the unit counted at each slot (-1: none), and what it adds to the compute stream."""
    block: NDArray[np.int64]
    """``[blocks]``: the sum of the latter."""
    number: NDArray[np.int64]
    event: NDArray[np.int64]
    """``[2, KINDS * collectives]``: when each event happens; all of them, in the order of the last candidate."""
    cut: NDArray[np.int64]
    """``[2, collectives]``: the slots before which gradients are cut out of their buckets, and these gradients."""
    ranked: NDArray[np.int64]
    """``[collectives]``: their nodes, by rank."""
    tie_at: NDArray[np.int64]
    """``[TIES * collectives + 1]``: number i reads ``tie[tie_at[TIES * i] : tie_at[TIES * i + 1]]``; then come those
    that must run before it, its readers, those that must run after it, and who does not find it inside a bucket
    (``UNCUT_AT``). Near each other they are fast to read, and candidates are scored by little else."""
    tie: NDArray[np.int64]
    loop: NDArray[np.int64]
    """Ops that run collectives of their own, ascending."""
    progress: Progress
    """Of collectives by rank."""
    started: NDArray[np.int64]
    """``[entries]``: what ran when an order was run last (``segments.order_ns``)."""
    ends_ns: NDArray[np.int64]
    """``[nodes]``: when the unit of each head ended then."""


class SegmentsView(NamedTuple):
    """Rows of :class:`Segments`."""

    unit: Row
    time_ns: Row
    block: Row
    number: Row
    key: Row
    by_time: Row
    cut_at: Row
    cut: Row
    ranked: Row
    buckets: int
    """Number of collectives."""
    tie_at: Row
    tie: Row
    loop: Row
    loops: int
    """Number of these."""
    progress: ProgressView
    started: Row
    ends_ns: Row


def new_segments(step: Step, ranked: NDArray[np.int64], machine: MachineModel) -> Segments:
    """Working space for orders of a step, whose collectives are ``ranked``."""
    nodes, events = int(step.node.shape[1]) - 1, KINDS * ranked.size
    rows = (at.SOURCES_AT, at.EARLIER_AT, at.READERS_AT, at.LATER_AT, at.UNCUT_AT)
    begin, end = (step.node[np.ix_(rows, beside)].T.ravel() for beside in (ranked, ranked + 1))
    return Segments(
        np.full((2, nodes + 1), -1, np.int64),
        np.zeros(nodes // BLOCK + 1, np.int64),
        np.zeros(NUMBERS, np.int64),
        np.array([np.full(events, NEVER), np.arange(events)], np.int64),
        np.zeros((2, ranked.size), np.int64),
        ranked,
        np.concatenate([[0], np.cumsum(end - begin)]),
        step.edge[stretches(begin, end - begin)],
        np.flatnonzero(step.node[at.FLAGS] & at.RUNS_COLLECTIVES),
        new_progress(ranked.size, machine.pace()),
        np.zeros(4 * nodes, np.int64),
        np.zeros(nodes, np.int64),
    )


@inner
def open_segments(segments: Segments) -> Any:
    """Pointers into the working space, valid while it lives."""
    slots, events, buckets = segments.slot.shape[1], segments.event.shape[1], segments.ranked.size
    return SegmentsView(
        pointer_to(segments.slot.ctypes.data),
        pointer_to(segments.slot.ctypes.data + 8 * slots),
        pointer_to(segments.block.ctypes.data),
        pointer_to(segments.number.ctypes.data),
        pointer_to(segments.event.ctypes.data),
        pointer_to(segments.event.ctypes.data + 8 * events),
        pointer_to(segments.cut.ctypes.data),
        pointer_to(segments.cut.ctypes.data + 8 * buckets),
        pointer_to(segments.ranked.ctypes.data),
        buckets,
        pointer_to(segments.tie_at.ctypes.data),
        pointer_to(segments.tie.ctypes.data),
        pointer_to(segments.loop.ctypes.data),
        segments.loop.size,
        open_progress(segments.progress),
        pointer_to(segments.started.ctypes.data),
        pointer_to(segments.ends_ns.ctypes.data),
    )


@inner
def count_all(g: GraphView, s: StateView, c: SegmentsView) -> None:
    """Sums and digest of a state, from nothing."""
    for block in range(g.nodes // BLOCK + 1):
        c.block[block] = 0
    digest: Any = np.uint64(0)
    before: Any = np.int64(-1)
    for slot in range(g.nodes + 1):
        unit = s.order[slot] if slot < s.total[at.SLOTS] else -1
        c.unit[slot] = unit
        c.time_ns[slot] = compute_ns(g, s, unit)
        c.block[slot // BLOCK] += c.time_ns[slot]
        if unit != -1:
            digest += _follows(g, before, unit)
            before = unit
    c.number[ORDER_DIGEST] = np.int64(digest + _follows(g, before, -1))


@inner
def catch_up(g: GraphView, s: StateView, w: ScratchView, c: SegmentsView, mark: int) -> None:
    """Bring sums and digest up to date with what was written since the log had ``mark`` entries."""
    order: Any = address_of(s.order)
    times: Any = address_of(s.time_ns)
    width = address_of(s.copies) - order  # the next row
    digest = np.uint64(c.number[ORDER_DIGEST])
    for entry in range(mark, w.number[at.LOGGED]):
        address = w.log[2 * entry]
        if order <= address < order + width:
            slot = (address - order) >> 3
            if c.unit[slot] != s.order[slot]:
                digest += _change_of_digest(g, s, c, slot)
                put(w, c.unit, slot, s.order[slot])
                _count_anew(g, s, w, c, slot)
        elif times <= address < times + at.TIME_COLUMNS * width:
            unit = (address - times) // (8 * at.TIME_COLUMNS)
            # Where it came to stand at a slot only now, that slot was written, too.
            if s.place[unit] != -1 and c.unit[s.place[unit]] == unit:
                _count_anew(g, s, w, c, s.place[unit])
    if np.int64(digest) != c.number[ORDER_DIGEST]:
        put(w, c.number, ORDER_DIGEST, np.int64(digest))


@inner
def _change_of_digest(g: GraphView, s: StateView, c: SegmentsView, slot: int) -> Any:
    """What it does to the digest that a slot gets the unit that stands there now."""
    before, after, end = slot - 1, slot + 1, s.total[at.SLOTS]
    while before >= 0 and c.unit[before] == -1:  # ends: it goes down
        before -= 1
    while after < end and c.unit[after] == -1:  # ends: it goes up
        after += 1
    first = c.unit[before] if before >= 0 else -1
    last = c.unit[after] if after < end else -1
    return _through(g, first, s.order[slot], last) - _through(g, first, c.unit[slot], last)


@inner
def _count_anew(g: GraphView, s: StateView, w: ScratchView, c: SegmentsView, slot: int) -> None:
    """Bring the sums up to date with what a slot's unit adds to them."""
    change_ns = compute_ns(g, s, c.unit[slot]) - c.time_ns[slot]
    if change_ns != 0:
        put(w, c.block, slot // BLOCK, c.block[slot // BLOCK] + change_ns)
        put(w, c.time_ns, slot, c.time_ns[slot] + change_ns)


@inner
def compute_ns(g: GraphView, s: StateView, unit: int) -> Any:
    """What a unit adds to the compute stream at its own place."""
    if unit == -1 or g.flags[unit] & at.COLLECTIVE:
        return 0
    return s.time_ns[at.TIME_COLUMNS * unit + at.MAIN]


@inner
def _through(g: GraphView, first: int, unit: int, last: int) -> Any:
    if unit == -1:
        return _follows(g, first, last)
    return _follows(g, first, unit) + _follows(g, unit, last)


@inner
def _follows(g: GraphView, a: int, b: int) -> Any:
    """Hash of ``b`` running next after ``a``; -1 stands for both ends."""
    mixed_a = np.uint64(g.mixed[a]) if a != -1 else _END
    mixed_b = np.uint64(g.mixed[b]) if b != -1 else _END
    return (mixed_a ^ _OTHER) * (mixed_b + _END)


# --- events -------------------------------------------------------------------------------------------


@inner
def _place_events(g: GraphView, s: StateView, c: SegmentsView) -> None:
    """When every bucket is issued and waited for, and what is cut out of it where."""
    events = cuts = 0
    for i in range(c.buckets):
        bucket = c.ranked[i]
        if s.owner[bucket] != bucket:
            c.key[KINDS * i + ISSUED] = c.key[KINDS * i + AWAITED] = NEVER
            continue
        issued, awaited = -1, s.total[at.SLOTS]
        times = at.TIME_COLUMNS * bucket
        is_cut = s.time_ns[times + at.UNPACK] > 0
        x = bucket
        while x != -1:  # ends with the list
            rank = g.rank[x]
            issued = max(issued, _last_needed(g, s, c, bucket, rank))
            awaited = min(awaited, _first_waiting(s, c, bucket, rank))
            slot: Any = NOWHERE
            if is_cut:
                slot = cut_slot(s, c.tie, c.tie_at[TIES * rank + 4], c.tie_at[TIES * rank + 5], -1)
            if slot != NOWHERE:
                c.cut_at[cuts], c.cut[cuts] = slot, x
                cuts += 1
            x = s.next[x]
        place = s.place[bucket]
        c.key[KINDS * i + ISSUED] = _key(issued + 1, ISSUED, place)
        on_channel = s.time_ns[times + at.ON_CHANNEL]
        c.key[KINDS * i + AWAITED] = _key(awaited, AWAITED, place) if on_channel else NEVER
        events += 1 + on_channel
    c.number[EVENTS], c.number[CUTS] = events, cuts


@inner
def _key(slot: int, kind: int, place: int) -> Any:
    """Events sort by the slot they come before, kind, and place of the bucket."""
    return ((slot << _KIND_BITS | kind) << _PLACE_BITS) | place


@inner
def _last_needed(g: GraphView, s: StateView, c: SegmentsView, bucket: int, rank: int) -> Any:
    """The last slot of what must have run before a collective is issued."""
    last, earlier = -1, c.tie_at[TIES * rank + 1]
    for e in range(c.tie_at[TIES * rank], c.tie_at[TIES * rank + 2]):
        unit, cell = s.owner[c.tie[e]], s.copiers[c.tie[e]] if e >= earlier else -1
        while True:  # ends with the list
            # Another transfer is waited for at this one's own slot, for it is one of its readers.
            if unit != bucket:
                last = max(last, s.place[bucket if g.flags[unit] & at.COLLECTIVE else unit])
            if cell == -1:
                break
            unit = s.cell_unit[cell]
            cell = s.next_of_node[cell]
    return last


@inner
def _first_waiting(s: StateView, c: SegmentsView, bucket: int, rank: int) -> Any:
    """The first slot of what must wait for a collective."""
    first = s.total[at.SLOTS]
    for e in range(c.tie_at[TIES * rank + 2], c.tie_at[TIES * rank + 4]):
        unit, cell = s.owner[c.tie[e]], s.copiers[c.tie[e]]
        while True:  # ends with the list
            if unit != bucket:
                first = min(first, s.place[unit])
            if cell == -1:
                break
            unit = s.cell_unit[cell]
            cell = s.next_of_node[cell]
    return first


@inner
def _sort_events(c: SegmentsView) -> None:
    """By insertion: the events of one candidate come nearly as those of the last one did, and behind the last that
    happens are only such as do not."""
    i, left = 0, c.number[EVENTS]
    while left > 0:  # ends: so many of these events happen
        event = c.by_time[i]
        key, k = c.key[event], i
        left -= key != NEVER
        while k > 0 and c.key[c.by_time[k - 1]] > key:  # ends: k goes down
            c.by_time[k] = c.by_time[k - 1]
            k -= 1
        c.by_time[k] = event
        i += 1


# --- to the nanosecond --------------------------------------------------------------------------------


@inner
def order_ns(g: GraphView, s: StateView, c: SegmentsView) -> Any:
    """Makespan of the state in its order, and how many entries ``c.started`` then has: the tasks (3 * head + part) as
    they start, transfers as they are issued, and once more when they are waited for, as -1 - task. ``c.ends_ns`` has
    the end of every unit."""
    _place_events(g, s, c)
    _sort_events(c)
    _sort_cuts(s, c)
    p, end = c.progress, s.total[at.SLOTS]
    restart(p)
    count: Any = np.int64(0)
    k = cut = 0
    for slot in range(end + 1):  # behind the last unit the entry root may need something cut out
        while k < c.number[EVENTS] and _slot_of(c, c.by_time[k]) == slot:  # ends: k goes up
            count = _run_event(s, c, c.by_time[k], count)
            k += 1
        while cut < c.number[CUTS] and c.cut_at[cut] == slot:  # ends: cut goes up
            c.started[count] = 3 * c.cut[cut] + at.UNPACK
            count += 1
            compute(p, g.slice_ns[c.cut[cut]], 0, COMPUTE, False)
            cut += 1
        unit = s.order[slot] if slot < end else -1
        if unit != -1 and not g.flags[unit] & at.COLLECTIVE:
            c.started[count] = 3 * unit + at.MAIN
            count += 1
            is_product = _has_product(g, s, unit)
            row = PRODUCT if is_product else COMPUTE
            left_ns = compute_ns(g, s, unit)
            if g.flags[unit] & at.RUNS_COLLECTIVES:
                compute(p, g.head_ns[unit], 0, COMPUTE, False)
                drain(p)
                left_ns -= g.head_ns[unit]
            compute(p, left_ns, _hold_ns(g, s, unit), row, is_product)
            c.ends_ns[unit] = p.number[NOW]
    return p.number[NOW], count


@inner
def _run_event(s: StateView, c: SegmentsView, event: int, count: int) -> Any:
    """Issue a bucket, or wait for one: what there are of entries then."""
    p, rank = c.progress, event // KINDS
    bucket = c.ranked[rank]
    times = at.TIME_COLUMNS * bucket
    if event % KINDS == AWAITED:
        c.started[count] = -1 - (3 * bucket + at.MAIN)
        wait(p, rank)
        c.ends_ns[bucket] = p.end_ns[rank]
        return count + 1
    if s.time_ns[times + at.PACK] >= 0:
        c.started[count] = 3 * bucket + at.PACK
        count += 1
        compute(p, s.time_ns[times + at.PACK], 0, COMPUTE, False)
    c.started[count] = 3 * bucket + at.MAIN
    if s.time_ns[times + at.ON_CHANNEL]:
        issue(p, rank, s.time_ns[times + at.MAIN])
        return count + 1
    compute(p, s.time_ns[times + at.MAIN], 0, COMPUTE, False)
    c.ends_ns[bucket] = p.number[NOW]
    return count + 1


@inner
def _sort_cuts(s: StateView, c: SegmentsView) -> None:
    """By slot, then by the heads of their buckets, then by gradient: by insertion, as they are few."""
    for i in range(1, c.number[CUTS]):
        slot, x, k = c.cut_at[i], c.cut[i], i
        while k > 0 and _comes_before(s, slot, x, c.cut_at[k - 1], c.cut[k - 1]):  # ends: k goes down
            c.cut_at[k], c.cut[k] = c.cut_at[k - 1], c.cut[k - 1]
            k -= 1
        c.cut_at[k], c.cut[k] = slot, x


@inner
def _comes_before(s: StateView, slot: int, x: int, other_slot: int, y: int) -> Any:
    if slot != other_slot:
        return slot < other_slot
    return s.owner[x] < s.owner[y] or (s.owner[x] == s.owner[y] and x < y)


@inner
def _hold_ns(g: GraphView, s: StateView, unit: int) -> Any:
    """How much of a unit must be done before a transfer begins beside it."""
    longest = 0
    x = unit
    while x != -1:  # ends with the list
        longest = max(longest, g.hold_ns[x])
        x = s.next[x]
    return max(0, min(longest, compute_ns(g, s, unit) - 1))


@inner
def _has_product(g: GraphView, s: StateView, unit: int) -> Any:
    """Whether one of a unit's ops is a product."""
    x = unit
    while x != -1:  # ends with the list
        if g.flags[x] & at.PRODUCT:
            return True
        x = s.next[x]
    return False


# --- by segments --------------------------------------------------------------------------------------


@inner
def segments_ns(g: GraphView, s: StateView, c: SegmentsView) -> Any:
    """Makespan of the state in its order; its sums are up to date."""
    _place_events(g, s, c)
    _sort_events(c)
    _add_cuts(g, c, 1)
    p = c.progress
    restart(p)
    work_ns: Any = np.int64(0)
    reached: Any = np.int64(0)
    for k in range(c.number[EVENTS]):
        event = c.by_time[k]
        slot, rank = _slot_of(c, event), event // KINDS
        work_ns = _run_until(g, s, c, work_ns, reached, slot)
        reached = slot
        times = at.TIME_COLUMNS * c.ranked[rank]
        if event % KINDS == ISSUED:
            work_ns += max(0, s.time_ns[times + at.PACK])
            if s.time_ns[times + at.ON_CHANNEL]:
                compute(p, work_ns, 0, ANY_COMPUTE, False)
                work_ns = 0
                issue(p, rank, s.time_ns[times + at.MAIN])
            else:
                work_ns += s.time_ns[times + at.MAIN]
        elif not is_over(p, rank):
            compute(p, work_ns, 0, ANY_COMPUTE, False)
            work_ns = 0
            wait(p, rank)
    end = s.total[at.SLOTS] + 1  # behind the last unit the entry root may need something cut out
    compute(p, _run_until(g, s, c, work_ns, reached, end), 0, ANY_COMPUTE, False)
    _add_cuts(g, c, -1)
    return p.number[NOW]


@inner
def _run_until(g: GraphView, s: StateView, c: SegmentsView, work_ns: int, start: int, end: int) -> Any:
    """Go through the slots from ``start`` on and before ``end``: the work that is left to do then, with ``work_ns`` of
    before. What holds a collective runs, and so does what comes before an op that runs collectives of its own."""
    p = c.progress
    while True:  # ends: start goes up
        loop = _next_loop(s, c, start, end)
        if work_ns == 0 and p.number[HELD] > 0:
            start = _behind_holding(g, s, c, start, loop)
        work_ns += _sum_ns(c, start, loop)
        if loop == end:
            return work_ns
        unit = c.unit[loop]
        compute(p, work_ns + g.head_ns[unit], 0, ANY_COMPUTE, False)
        drain(p)
        work_ns = c.time_ns[loop] - g.head_ns[unit]
        start = loop + 1


@inner
def _next_loop(s: StateView, c: SegmentsView, start: int, end: int) -> Any:
    """The first of these slots whose op runs collectives of its own; ``end`` where there is none."""
    found = end
    for i in range(c.loops):
        slot = s.place[c.loop[i]]
        if start <= slot < found:
            found = slot
    return found


@inner
def _slot_of(c: SegmentsView, event: int) -> Any:
    """The slot that an event comes before."""
    return c.key[event] >> (_PLACE_BITS + _KIND_BITS)


@inner
def _add_cuts(g: GraphView, c: SegmentsView, sign: int) -> None:
    """Let the sums have, or no longer have, what is cut out right before the unit of a slot. That depends on where all
    who read a gradient stand, so it is found anew for each candidate."""
    for i in range(c.number[CUTS]):
        change_ns = sign * g.slice_ns[c.cut[i]]
        c.time_ns[c.cut_at[i]] += change_ns
        c.block[c.cut_at[i] // BLOCK] += change_ns


@inner
def _behind_holding(g: GraphView, s: StateView, c: SegmentsView, start: int, end: int) -> Any:
    """Run the first kernel of these slots if it holds what is held: later ones do not matter to a transfer that has
    begun, and what cuts a gradient out holds nothing. The slot from which on the rest is to be run."""
    for slot in range(start, end):
        if c.time_ns[slot] > 0:
            if c.time_ns[slot] > compute_ns(g, s, c.unit[slot]):
                return start
            held_ns = _hold_ns(g, s, c.unit[slot])
            if held_ns == 0:
                return start
            is_product = _has_product(g, s, c.unit[slot])
            compute(c.progress, c.time_ns[slot], held_ns, ANY_COMPUTE, is_product)
            return slot + 1
    return start


@inner
def _sum_ns(c: SegmentsView, start: int, end: int) -> Any:
    """Compute time of the slots from ``start`` on and before ``end``."""
    total = np.int64(0)
    if end - start < 2 * BLOCK:
        for slot in range(start, end):
            total += c.time_ns[slot]
        return total
    first, last = (start + BLOCK - 1) // BLOCK, end // BLOCK
    for slot in range(start, first * BLOCK):
        total += c.time_ns[slot]
    for block in range(first, last):
        total += c.block[block]
    for slot in range(last * BLOCK, end):
        total += c.time_ns[slot]
    return total


@compiled
def run_order(step: Step, state: State, scratch: Scratch, segments: Segments) -> Any:
    """Cost in ns of a priced state in its own order, and number of entries in ``segments.started``."""
    g, s, _ = open_views(step, state, scratch)
    return order_ns(g, s, open_segments(segments))
