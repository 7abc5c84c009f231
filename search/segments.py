"""What a state's order takes, in the time of its transfers rather than of its units.

Between two moments at which a bucket is issued or waited for, kernels run back to back on the compute
stream, and all that matters of them is their sum. The sums are kept by slot and by block of slots, in
working space of their own that is made anew when a climb begins (:func:`count_all`). After a move the log
that would undo it tells which slots and times were written (:func:`catch_up`): whatever writes through
``board.put`` is seen here, and since the sums are written through it too, ``roll_back`` restores them with
the rest. So is the digest of the order, which depends on which unit follows which, not on the slots.

The engine lets every kernel that runs beside a transfer end at a whole nanosecond, here a whole segment
does. Where transfers do not slow compute down both say the same; where they do, what is said here differs
by less than a nanosecond for each unit, mostly down. A climb compares such scores with each other alone;
what is noted as best and what is promised is what the engine says (``timeline``).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from disco_hlo.search import layout as at
from disco_hlo.search.board import put
from disco_hlo.search.step import Step
from disco_hlo.search.views import address_of, pointer_to
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.simulator.costs import BESIDE_COMPUTE, COMPUTE, NO_COMPUTE, PPM, MachineModel
from disco_hlo.simulator.engine import ENDS_AT, HEAD, IDLE, TAIL

BLOCK: Final = 64
"""Slots whose times are kept as one sum."""

# Segments.number.
ORDER_DIGEST: Final = 0
"""Hash of the order of the units."""
NOW: Final = 1
DONE: Final = 2
"""Work that every transfer under way did so far, as in the engine."""
BUSY: Final = 3
NEAREST: Final = 4
NUMBERS: Final = 5

# Events: number 3 * rank + kind, in the order in which they happen between two slots.
ISSUED: Final = 0
AWAITED: Final = 1
SLICED: Final = 2
_KINDS: Final = 3
_PLACE_BITS: Final = 24
_KIND_BITS: Final = 2
_NEVER: Final = 2**62
_OTHER, _END = np.uint64(0x5851F42D4C957F2D), np.uint64(0x9E3779B97F4A7C15)


class Segments(NamedTuple):
    """Working space of one search thread for orders of one step."""

    slot: NDArray[np.int64]
    """``[2, nodes + 1]``: the unit counted at each slot (-1: none), and what it adds to the compute stream."""
    block: NDArray[np.int64]
    """``[blocks]``: the sum of the latter."""
    number: NDArray[np.int64]
    event: NDArray[np.int64]
    """``[2, 3 * all-reduces]``: when each event happens; all of them, in the order of the last candidate."""
    ranked: NDArray[np.int64]
    """``[all-reduces]``: their nodes, by rank."""
    tie_at: NDArray[np.int64]
    """``[4 * all-reduces + 1]``: number i reads ``tie[tie_at[4 * i] : tie_at[4 * i + 1]]``; then come those
    that must run before it, its readers, and those that must run after it. Near each other they are fast
    to read, and candidates are scored by little else."""
    tie: NDArray[np.int64]
    lane: NDArray[np.int64]
    """``[channels, 3]``, as in the engine."""
    queued_ns: NDArray[np.int64]
    """``[channels, all-reduces]``: transfers in the order they were issued."""
    stands: NDArray[np.int64]
    """``[2, all-reduces]``: channel of each bucket, and where in its queue it stands."""
    speed_ppm: NDArray[np.int64]
    """``[3, channels + 1]``"""


class SegmentsView(NamedTuple):
    """Rows of :class:`Segments`."""

    unit: Any
    time_ns: Any
    block: Any
    number: Any
    key: Any
    by_time: Any
    ranked: Any
    buckets: Any
    """Number of all-reduces."""
    tie_at: Any
    tie: Any
    lane: Any
    queued_ns: Any
    channel: Any
    turn: Any
    speed_ppm: Any
    channels: Any


def new_segments(step: Step, ranked: NDArray[np.int64], machine: MachineModel) -> Segments:
    """Working space for orders of a step, whose all-reduces are ``ranked``."""
    speed_ppm, nodes = machine.speed_ppm(), int(step.node.shape[1]) - 1
    channels, events = speed_ppm.shape[1] - 1, _KINDS * ranked.size
    rows = (at.SOURCES_AT, at.EARLIER_AT, at.READERS_AT, at.LATER_AT)
    ties = [step.edge[slice(*step.node[row, x : x + 2])] for x in ranked.tolist() for row in rows]
    return Segments(
        np.full((2, nodes + 1), -1, np.int64),
        np.zeros(nodes // BLOCK + 1, np.int64),
        np.zeros(NUMBERS, np.int64),
        np.array([np.full(events, _NEVER), np.arange(events)], np.int64),
        ranked,
        np.cumsum([0, *map(len, ties)], dtype=np.int64),
        np.concatenate([*ties, np.zeros(0, np.int64)]),
        np.zeros((channels, 3), np.int64),
        np.zeros((channels, ranked.size), np.int64),
        np.zeros((2, ranked.size), np.int64),
        speed_ppm,
    )


@compiled
def open_segments(segments: Any) -> Any:
    """Pointers into the working space, valid while it lives."""
    slots, events, buckets = segments.slot.shape[1], segments.event.shape[1], segments.ranked.size
    return SegmentsView(
        pointer_to(segments.slot.ctypes.data),
        pointer_to(segments.slot.ctypes.data + 8 * slots),
        pointer_to(segments.block.ctypes.data),
        pointer_to(segments.number.ctypes.data),
        pointer_to(segments.event.ctypes.data),
        pointer_to(segments.event.ctypes.data + 8 * events),
        pointer_to(segments.ranked.ctypes.data),
        buckets,
        pointer_to(segments.tie_at.ctypes.data),
        pointer_to(segments.tie.ctypes.data),
        pointer_to(segments.lane.ctypes.data),
        pointer_to(segments.queued_ns.ctypes.data),
        pointer_to(segments.stands.ctypes.data),
        pointer_to(segments.stands.ctypes.data + 8 * buckets),
        pointer_to(segments.speed_ppm.ctypes.data),
        segments.speed_ppm.shape[1] - 1,
    )


# --- sums and digest ----------------------------------------------------------------------------------


@inner
def count_all(g: Any, s: Any, c: Any) -> None:
    """Sums and digest of a state, from nothing."""
    for block in range(g.nodes // BLOCK + 1):
        c.block[block] = 0
    digest: Any = np.uint64(0)
    before: Any = np.int64(-1)
    for slot in range(g.nodes):
        unit = s.order[slot] if slot < s.total[at.SLOTS] else -1
        c.unit[slot] = unit
        c.time_ns[slot] = _compute_ns(g, s, unit)
        c.block[slot // BLOCK] += c.time_ns[slot]
        if unit != -1:
            digest += _follows(g, before, unit)
            before = unit
    c.number[ORDER_DIGEST] = np.int64(digest + _follows(g, before, -1))


@inner
def catch_up(g: Any, s: Any, w: Any, c: Any, mark: Any) -> None:
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
def _change_of_digest(g: Any, s: Any, c: Any, slot: Any) -> Any:
    """What it does to the digest that a slot gets the unit that stands there now."""
    before, after, end = slot - 1, slot + 1, s.total[at.SLOTS]
    while before >= 0 and c.unit[before] == -1:
        before -= 1
    while after < end and c.unit[after] == -1:
        after += 1
    first = c.unit[before] if before >= 0 else -1
    last = c.unit[after] if after < end else -1
    return _through(g, first, s.order[slot], last) - _through(g, first, c.unit[slot], last)


@inner
def _count_anew(g: Any, s: Any, w: Any, c: Any, slot: Any) -> None:
    """Bring the sums up to date with what a slot's unit adds to them."""
    change_ns = _compute_ns(g, s, c.unit[slot]) - c.time_ns[slot]
    if change_ns != 0:
        put(w, c.block, slot // BLOCK, c.block[slot // BLOCK] + change_ns)
        put(w, c.time_ns, slot, c.time_ns[slot] + change_ns)


@inner
def _compute_ns(g: Any, s: Any, unit: Any) -> Any:
    """What a unit adds to the compute stream at its own place."""
    if unit == -1 or g.flags[unit] & at.ALL_REDUCE:
        return 0
    return s.time_ns[at.TIME_COLUMNS * unit + at.MAIN]


@inner
def _through(g: Any, first: Any, unit: Any, last: Any) -> Any:
    if unit == -1:
        return _follows(g, first, last)
    return _follows(g, first, unit) + _follows(g, unit, last)


@inner
def _follows(g: Any, a: Any, b: Any) -> Any:
    """Hash of ``b`` running next after ``a``; -1 stands for both ends."""
    mixed_a = np.uint64(g.mixed[a]) if a != -1 else _END
    mixed_b = np.uint64(g.mixed[b]) if b != -1 else _END
    return (mixed_a ^ _OTHER) * (mixed_b + _END)


# --- events -------------------------------------------------------------------------------------------


@inner
def _place_events(g: Any, s: Any, c: Any) -> None:
    """When every bucket is issued, waited for and sliced apart: ``timeline`` has the rules."""
    for i in range(c.buckets):
        bucket = c.ranked[i]
        if s.owner[bucket] != bucket:
            c.key[_KINDS * i + ISSUED] = c.key[_KINDS * i + AWAITED] = _NEVER
            continue
        issued, awaited = np.int64(-1), s.total[at.SLOTS]
        times = at.TIME_COLUMNS * bucket
        is_packed = s.time_ns[times + at.PACK] >= 0
        x = bucket
        while x != -1:
            rank = g.rank[x]
            issued = max(issued, _last_needed(g, s, c, bucket, rank))
            awaited = min(awaited, _first_waiting(s, c, bucket, rank))
            sliced = _NEVER
            if is_packed and g.flags[x] & at.UNPACKED:
                sliced = _key(_first_outside(g, s, x), SLICED, x)
            c.key[_KINDS * rank + SLICED] = sliced
            x = s.next[x]
        place = s.place[bucket]
        c.key[_KINDS * i + ISSUED] = _key(issued + 1, ISSUED, place)
        on_channel = s.time_ns[times + at.ON_CHANNEL]
        c.key[_KINDS * i + AWAITED] = _key(awaited, AWAITED, place) if on_channel else _NEVER


@inner
def _key(slot: Any, kind: Any, place: Any) -> Any:
    """Events sort by the slot they come before, kind, and place of the bucket."""
    return ((slot << _KIND_BITS | kind) << _PLACE_BITS) | place


@inner
def _last_needed(g: Any, s: Any, c: Any, bucket: Any, rank: Any) -> Any:
    """The last slot of what must have run before an all-reduce is issued."""
    last, earlier = np.int64(-1), c.tie_at[4 * rank + 1]
    for e in range(c.tie_at[4 * rank], c.tie_at[4 * rank + 2]):
        unit, cell = s.owner[c.tie[e]], s.copiers[c.tie[e]] if e >= earlier else -1
        while True:
            # Another transfer is waited for at this one's own slot, for it is one of its readers.
            if unit != bucket:
                last = max(last, s.place[bucket if g.flags[unit] & at.ALL_REDUCE else unit])
            if cell == -1:
                break
            unit = s.cell_unit[cell]
            cell = s.next_of_node[cell]
    return last


@inner
def _first_waiting(s: Any, c: Any, bucket: Any, rank: Any) -> Any:
    """The first slot of what must wait for an all-reduce."""
    first = s.total[at.SLOTS]
    for e in range(c.tie_at[4 * rank + 2], c.tie_at[4 * rank + 4]):
        unit, cell = s.owner[c.tie[e]], s.copiers[c.tie[e]]
        while True:
            if unit != bucket:
                first = min(first, s.place[unit])
            if cell == -1:
                break
            unit = s.cell_unit[cell]
            cell = s.next_of_node[cell]
    return first


@inner
def _first_outside(g: Any, s: Any, x: Any) -> Any:
    """The first slot of what cannot find an all-reduce inside its bucket."""
    first = s.total[at.SLOTS]
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        if not g.flags[g.edge[e]] & at.FUSIBLE:
            first = min(first, s.place[s.owner[g.edge[e]]])
    return first


@inner
def _sort_events(c: Any) -> None:
    """By insertion: the events of one candidate come nearly as those of the last one did."""
    for i in range(1, _KINDS * c.buckets):
        event = c.by_time[i]
        key, k = c.key[event], i
        while k > 0 and c.key[c.by_time[k - 1]] > key:
            c.by_time[k] = c.by_time[k - 1]
            k -= 1
        c.by_time[k] = event


# --- the engine's rules -------------------------------------------------------------------------------


@inner
def segments_ns(g: Any, s: Any, c: Any) -> Any:
    """Makespan of the state in its order; its sums are up to date."""
    _place_events(g, s, c)
    _sort_events(c)
    c.number[NOW] = c.number[DONE] = c.number[BUSY] = 0
    c.number[NEAREST] = IDLE
    for channel in range(c.channels):
        lane = 3 * channel
        c.lane[lane + HEAD] = c.lane[lane + TAIL] = 0
        c.lane[lane + ENDS_AT] = IDLE
    work_ns: Any = np.int64(0)
    reached: Any = np.int64(0)
    issued: Any = np.int64(0)
    for k in range(_KINDS * c.buckets):
        event = c.by_time[k]
        if c.key[event] == _NEVER:
            break
        slot, rank = c.key[event] >> (_PLACE_BITS + _KIND_BITS), event // _KINDS
        work_ns += _sum_ns(c, reached, slot)
        reached = slot
        times = at.TIME_COLUMNS * c.ranked[rank]
        if event % _KINDS == SLICED:
            work_ns += g.slice_ns[c.ranked[rank]]
        elif event % _KINDS == ISSUED:
            work_ns += max(0, s.time_ns[times + at.PACK])
            if s.time_ns[times + at.ON_CHANNEL]:
                _compute(c, work_ns)
                work_ns = 0
                _issue(c, rank, issued % c.channels, s.time_ns[times + at.MAIN])
                issued += 1
            else:
                work_ns += s.time_ns[times + at.MAIN]
        elif c.lane[3 * c.channel[rank] + HEAD] <= c.turn[rank]:
            _compute(c, work_ns)
            work_ns = 0
            _wait(c, rank)
    _compute(c, work_ns + _sum_ns(c, reached, s.total[at.SLOTS]))
    return c.number[NOW]


@inner
def _sum_ns(c: Any, start: Any, end: Any) -> Any:
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


@inner
def _compute(c: Any, work_ns: Any) -> None:
    """Let the compute stream work for so long, counted in time of running alone."""
    number, work, columns = c.number, work_ns * PPM, c.channels + 1
    while number[BUSY] > 0 and work > 0:
        speed = c.speed_ppm[COMPUTE * columns + number[BUSY]]
        transfer_speed = c.speed_ppm[BESIDE_COMPUTE * columns + number[BUSY]]
        elapsed = _quotient(work, speed)
        if number[DONE] + elapsed * transfer_speed < number[NEAREST]:
            number[NOW] += elapsed
            number[DONE] += elapsed * transfer_speed
            return
        elapsed = _quotient(number[NEAREST] - number[DONE], transfer_speed)
        number[NOW] += elapsed
        number[DONE] += elapsed * transfer_speed
        work -= elapsed * speed
        _retire(c)
    if work > 0:
        number[NOW] += _quotient(work, PPM)


@inner
def _quotient(work: Any, speed: Any) -> Any:
    """``work / speed`` rounded up. Processors divide floats several times faster; the rest makes it exact."""
    found = np.int64(work / speed)
    while found * speed < work:
        found += 1
    while (found - 1) * speed >= work:
        found -= 1
    return found


@inner
def _issue(c: Any, rank: Any, channel: Any, transfer_ns: Any) -> None:
    lane = 3 * channel
    own = c.lane[lane + TAIL]
    c.channel[rank], c.turn[rank] = channel, own
    c.queued_ns[channel * c.buckets + own] = transfer_ns
    c.lane[lane + TAIL] = own + 1
    if c.lane[lane + HEAD] == own:
        c.lane[lane + ENDS_AT] = c.number[DONE] + transfer_ns * PPM
        c.number[BUSY] += 1
        _retire(c)


@inner
def _wait(c: Any, rank: Any) -> None:
    number, head = c.number, 3 * c.channel[rank] + HEAD
    while c.lane[head] <= c.turn[rank]:
        speed = c.speed_ppm[NO_COMPUTE * (c.channels + 1) + number[BUSY]]
        elapsed = _quotient(number[NEAREST] - number[DONE], speed)
        number[NOW] += elapsed
        number[DONE] += elapsed * speed
        _retire(c)


@inner
def _retire(c: Any) -> None:
    """End transfers whose work is done and begin the next."""
    done, nearest = c.number[DONE], IDLE
    for channel in range(c.channels):
        lane = 3 * channel
        while c.lane[lane + ENDS_AT] <= done:
            c.lane[lane + HEAD] += 1
            if c.lane[lane + HEAD] == c.lane[lane + TAIL]:
                c.lane[lane + ENDS_AT] = IDLE
                c.number[BUSY] -= 1
            else:
                queued_ns = c.queued_ns[channel * c.buckets + c.lane[lane + HEAD]]
                c.lane[lane + ENDS_AT] = done + queued_ns * PPM
        nearest = min(nearest, c.lane[lane + ENDS_AT])
    c.number[NEAREST] = nearest
