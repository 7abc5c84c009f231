"""What a state's order takes, in the time of its transfers rather than of its units.

Between two moments at which a bucket is issued or waited for, kernels run back to back on the compute
stream, and all that matters of them is their sum (``running_sums``).

The engine lets every kernel that runs beside a transfer end at a whole nanosecond, here a whole segment
does. Where transfers do not slow compute down both say the same; where they do, what is said here differs
by less than a nanosecond for each unit, mostly down, and by the wait of a transfer where that decides whether the
stream idles when it begins. And of kernels that hold transfers only the first of a segment does here, which runs by
itself as in the engine, not one that runs when a transfer's turn comes. All others go at one speed beside transfers,
products or not. A climb compares such scores with each other alone; what is noted as best and what is promised is what
the engine says (``timeline``).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from disco_hlo.compiled import inner
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import NOWHERE, cut_slot
from disco_hlo.search.times.running_sums import (
    AWAITED,
    BLOCK,
    BUSY,
    CUTS,
    DONE,
    EVENTS,
    HELD,
    ISSUED,
    KINDS,
    NEAREST,
    NEVER,
    NOW,
    TIES,
    compute_ns,
)  # fmt: skip
from disco_hlo.search.times.timeline import has_product, hold_ns
from disco_hlo.simulator.costs import BESIDE_COMPUTE, COMPUTE, NO_COMPUTE, PPM, PRODUCT
from disco_hlo.simulator.engine import ENDS_AT, HEAD, IDLE, NOT_YET, TAIL

_PLACE_BITS: Final = 24
_KIND_BITS: Final = 1


# --- events -------------------------------------------------------------------------------------------


@inner
def _place_events(g: Any, s: Any, c: Any) -> None:
    """When every bucket is issued and waited for, and what is cut out of it where: ``timeline`` has the rules."""
    events = cuts = 0
    for i in range(c.buckets):
        bucket = c.ranked[i]
        if s.owner[bucket] != bucket:
            c.key[KINDS * i + ISSUED] = c.key[KINDS * i + AWAITED] = NEVER
            continue
        issued, awaited = np.int64(-1), s.total[at.SLOTS]
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
                c.cut_at[cuts], c.cut_ns[cuts] = slot, g.slice_ns[x]
                cuts += 1
            x = s.next[x]
        place = s.place[bucket]
        c.key[KINDS * i + ISSUED] = _key(issued + 1, ISSUED, place)
        on_channel = s.time_ns[times + at.ON_CHANNEL]
        c.key[KINDS * i + AWAITED] = _key(awaited, AWAITED, place) if on_channel else NEVER
        events += 1 + on_channel
    c.number[EVENTS], c.number[CUTS] = events, cuts


@inner
def _key(slot: Any, kind: Any, place: Any) -> Any:
    """Events sort by the slot they come before, kind, and place of the bucket."""
    return ((slot << _KIND_BITS | kind) << _PLACE_BITS) | place


@inner
def _last_needed(g: Any, s: Any, c: Any, bucket: Any, rank: Any) -> Any:
    """The last slot of what must have run before an all-reduce is issued."""
    last, earlier = np.int64(-1), c.tie_at[TIES * rank + 1]
    for e in range(c.tie_at[TIES * rank], c.tie_at[TIES * rank + 2]):
        unit, cell = s.owner[c.tie[e]], s.copiers[c.tie[e]] if e >= earlier else -1
        while True:  # ends with the list
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
def _sort_events(c: Any) -> None:
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


# --- the engine's rules -------------------------------------------------------------------------------


@inner
def segments_ns(g: Any, s: Any, c: Any) -> Any:
    """Makespan of the state in its order; its sums are up to date."""
    _place_events(g, s, c)
    _sort_events(c)
    _add_cuts(c, 1)
    c.number[NOW] = c.number[DONE] = c.number[BUSY] = c.number[HELD] = 0
    c.number[NEAREST] = IDLE
    for channel in range(c.channels):
        lane = 3 * channel
        c.lane[lane + HEAD] = c.lane[lane + TAIL] = 0
        c.lane[lane + ENDS_AT] = IDLE
    work_ns: Any = np.int64(0)
    reached: Any = np.int64(0)
    issued: Any = np.int64(0)
    for k in range(c.number[EVENTS]):
        event = c.by_time[k]
        slot, rank = c.key[event] >> (_PLACE_BITS + _KIND_BITS), event // KINDS
        if work_ns == 0 and c.number[HELD] > 0:
            reached = _behind_holding(g, s, c, reached, slot)
        work_ns += _sum_ns(c, reached, slot)
        reached = slot
        times = at.TIME_COLUMNS * c.ranked[rank]
        if event % KINDS == ISSUED:
            work_ns += max(0, s.time_ns[times + at.PACK])
            if s.time_ns[times + at.ON_CHANNEL]:
                _compute(c, work_ns, 0, False)
                work_ns = 0
                _issue(c, rank, issued % c.channels, s.time_ns[times + at.MAIN])
                issued += 1
            else:
                work_ns += s.time_ns[times + at.MAIN]
        elif c.lane[3 * c.channel[rank] + HEAD] <= c.turn[rank]:
            _compute(c, work_ns, 0, False)
            work_ns = 0
            _wait(c, rank)
    end = s.total[at.SLOTS] + 1  # behind the last unit the entry root may need something cut out
    if work_ns == 0 and c.number[HELD] > 0:
        reached = _behind_holding(g, s, c, reached, end)
    _compute(c, work_ns + _sum_ns(c, reached, end), 0, False)
    _add_cuts(c, -1)
    return c.number[NOW]


@inner
def _add_cuts(c: Any, sign: Any) -> None:
    """Let the sums have, or no longer have, what is cut out right before the unit of a slot. That depends on where all
    who read a gradient stand, so it is found anew for each candidate."""
    for i in range(c.number[CUTS]):
        c.time_ns[c.cut_at[i]] += sign * c.cut_ns[i]
        c.block[c.cut_at[i] // BLOCK] += sign * c.cut_ns[i]


@inner
def _behind_holding(g: Any, s: Any, c: Any, start: Any, end: Any) -> Any:
    """Run the first kernel of these slots if it holds what is held: later ones do not matter to a transfer that has
    begun, and what cuts a gradient out holds nothing. The slot from which on the rest is to be run."""
    for slot in range(start, end):
        if c.time_ns[slot] > 0:
            if c.time_ns[slot] > compute_ns(g, s, c.unit[slot]):
                return start
            held_ns = hold_ns(g, s, c.unit[slot])
            if held_ns == 0:
                return start
            _compute(c, c.time_ns[slot], held_ns, has_product(g, s, c.unit[slot]))
            return slot + 1
    return start


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
def _compute(c: Any, work_ns: Any, held_ns: Any, is_product: Any) -> None:
    """Let the compute stream work for so long, counted in time of running alone; held transfers begin behind
    ``held_ns`` of that. A product that came first goes at full speed, and has more to do for what it holds."""
    number, work, columns = c.number, work_ns * PPM, c.channels + 1
    behind_hold = work - held_ns * PPM
    if number[HELD] > 0 and 0 < work <= behind_hold:
        _go_on(c, c.wait_ns)
    is_first = is_product and number[BUSY] == 0
    while number[BUSY] + number[HELD] > 0 and work > 0:  # ends as in the engine
        speed = c.speed_ppm[COMPUTE * columns + number[BUSY]]
        if is_first:
            speed = np.int64(PPM)
        transfer_speed = c.speed_ppm[BESIDE_COMPUTE * columns + number[BUSY]]
        elapsed = _quotient(work - behind_hold if number[HELD] > 0 else work, speed)
        if number[DONE] + elapsed * transfer_speed >= number[NEAREST]:
            elapsed = _quotient(number[NEAREST] - number[DONE], transfer_speed)
        elif number[HELD] == 0:
            number[NOW] += elapsed
            number[DONE] += elapsed * transfer_speed
            return
        number[NOW] += elapsed
        number[DONE] += elapsed * transfer_speed
        work -= elapsed * speed
        begun_ns: Any = NOT_YET
        if 0 < work <= behind_hold:
            begun_ns = c.wait_ns
            if is_first and number[HELD] > 0:
                lost = held_ns * (PPM - c.speed_ppm[PRODUCT * columns + 1]) // 2
                work += lost
                behind_hold += lost
        _go_on(c, begun_ns)
    if work > 0:
        number[NOW] += _quotient(work, PPM)


@inner
def _quotient(work: Any, speed: Any) -> Any:
    """``work / speed`` rounded up. Processors divide floats several times faster; the rest makes it exact."""
    found = np.int64(work / speed)
    while found * speed < work:  # ends: a float is off by one or two
        found += 1
    while (found - 1) * speed >= work:  # ends: likewise
        found -= 1
    return found


@inner
def _issue(c: Any, rank: Any, channel: Any, transfer_ns: Any) -> None:
    """Let a transfer queue up for its channel."""
    lane = 3 * channel
    own = c.lane[lane + TAIL]
    c.channel[rank], c.turn[rank] = channel, own
    c.queued_ns[channel * c.buckets + own] = transfer_ns
    c.lane[lane + TAIL] = own + 1
    if c.lane[lane + HEAD] == own:
        c.number[HELD] += 1


@inner
def _wait(c: Any, rank: Any) -> None:
    number, head = c.number, 3 * c.channel[rank] + HEAD
    while c.lane[head] <= c.turn[rank]:  # ends as in the engine
        if number[HELD] > 0:
            _go_on(c, 0)
        speed = c.speed_ppm[NO_COMPUTE * (c.channels + 1) + number[BUSY]]
        elapsed = _quotient(number[NEAREST] - number[DONE], speed)
        number[NOW] += elapsed
        number[DONE] += elapsed * speed
        _go_on(c, NOT_YET)


@inner
def _go_on(c: Any, begun_ns: Any) -> None:
    """End transfers whose work is done and begin the next, as the engine does."""
    number, done = c.number, c.number[DONE]
    number[BUSY] = number[HELD] = 0
    number[NEAREST] = IDLE
    for channel in range(c.channels):
        lane = 3 * channel
        if c.lane[lane + ENDS_AT] <= done:
            c.lane[lane + HEAD] += 1
            c.lane[lane + ENDS_AT] = IDLE
        if c.lane[lane + HEAD] == c.lane[lane + TAIL]:
            continue
        if c.lane[lane + ENDS_AT] == IDLE and begun_ns != NOT_YET:
            queued_ns = c.queued_ns[channel * c.buckets + c.lane[lane + HEAD]]
            c.lane[lane + ENDS_AT] = done + (queued_ns + begun_ns) * PPM
        if c.lane[lane + ENDS_AT] == IDLE:
            number[HELD] += 1
        else:
            number[BUSY] += 1
            number[NEAREST] = min(number[NEAREST], c.lane[lane + ENDS_AT])
