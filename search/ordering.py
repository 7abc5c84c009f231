"""Keeping the units in a topological order while moves change them.

When two units become one, a path between them through a third would be a circle. It is searched
from both ends at once, among the units that stand between them only; whichever side is exhausted
first proves that there is none, and tells which units must step aside (dynamic topological
ordering after Pearce and Kelly, with the two-way search of Bender et al.).
"""

from __future__ import annotations

from typing import Any

from disco_hlo.search import layout as at
from disco_hlo.search.arrays import fresh_stamp, put
from disco_hlo.search.jit import compiled
from disco_hlo.search.neighbours import predecessors, successors


@compiled
def settle(step: Any, state: Any, scratch: Any, unit: Any, low: Any, high: Any) -> Any:
    """Find a place for a unit at slot ``high`` that a move has tied to units from slot ``low`` on.

    All it waits for must stand below ``high``, and all that wait for it above ``low``. Returns
    whether there is a place between them; where there is none (a circle) nothing is written.
    """
    word = state.word
    ahead, ahead_mark = scratch.row[at.QUEUE], scratch.row[at.REACHED]
    back, back_mark = scratch.row[at.QUEUE_BACK], scratch.row[at.REACHED_BACK]
    stamp = fresh_stamp(scratch)
    ahead[0] = back[0] = unit
    ahead_mark[unit] = back_mark[unit] = stamp
    ahead_count = back_count = 1
    next_ahead = next_back = 0
    while next_ahead < ahead_count and next_back < back_count:
        found = successors(step, state, scratch, ahead[next_ahead], at.NEIGHBOURS)
        is_first = next_ahead == 0
        next_ahead += 1
        for i in range(found):
            other = scratch.row[at.NEIGHBOURS, i]
            if other == unit:
                if not is_first:
                    return False
                continue
            if ahead_mark[other] != stamp and low <= word[at.PLACE, other] <= high:
                if back_mark[other] == stamp:
                    return False
                ahead_mark[other] = stamp
                ahead[ahead_count] = other
                ahead_count += 1
        if next_ahead == ahead_count:
            break
        found = predecessors(step, state, scratch, back[next_back], at.NEIGHBOURS)
        is_first = next_back == 0
        next_back += 1
        for i in range(found):
            other = scratch.row[at.NEIGHBOURS, i]
            if other == unit:
                if not is_first:
                    return False
                continue
            if back_mark[other] != stamp and low <= word[at.PLACE, other] <= high:
                if ahead_mark[other] == stamp:
                    return False
                back_mark[other] = stamp
                back[back_count] = other
                back_count += 1
    if next_ahead == ahead_count:
        _place_late(state, scratch, unit, low, high, stamp)
    else:
        _place_early(state, scratch, unit, low, high, stamp)
    return True


@compiled
def _place_late(state: Any, scratch: Any, unit: Any, low: Any, high: Any, stamp: Any) -> Any:
    """The unit and what waits for it go to the upper end; the rest stays or moves down."""
    word, reached = state.word, scratch.row[at.REACHED]
    units = _collect(state, scratch, unit, low, high)
    slot = high
    for i in range(units - 1, -1, -1):
        other = scratch.row[at.NEIGHBOURS, i]
        if reached[other] == stamp:
            _move(state, scratch, other, slot)
            slot -= 1
    _move(state, scratch, unit, slot)
    slot -= 1
    for i in range(units - 1, -1, -1):
        other = scratch.row[at.NEIGHBOURS, i]
        if reached[other] == stamp:
            continue
        slot = min(slot, word[at.PLACE, other])
        _move(state, scratch, other, slot)
        slot -= 1


@compiled
def _place_early(state: Any, scratch: Any, unit: Any, low: Any, high: Any, stamp: Any) -> Any:
    """What the unit waits for and the unit go to the lower end; the rest stays or moves up."""
    word, reached = state.word, scratch.row[at.REACHED_BACK]
    units = _collect(state, scratch, unit, low, high)
    slot = low
    for i in range(units):
        other = scratch.row[at.NEIGHBOURS, i]
        if reached[other] == stamp:
            _move(state, scratch, other, slot)
            slot += 1
    _move(state, scratch, unit, slot)
    slot += 1
    for i in range(units):
        other = scratch.row[at.NEIGHBOURS, i]
        if reached[other] == stamp:
            continue
        slot = max(slot, word[at.PLACE, other])
        _move(state, scratch, other, slot)
        slot += 1


@compiled
def _collect(state: Any, scratch: Any, unit: Any, low: Any, high: Any) -> Any:
    """The units between two slots, both included, without ``unit``, in order."""
    count = 0
    for slot in range(low, high + 1):
        other = state.word[at.ORDER, slot]
        if other != -1 and other != unit:
            scratch.row[at.NEIGHBOURS, count] = other
            count += 1
    return count


@compiled
def _move(state: Any, scratch: Any, unit: Any, slot: Any) -> Any:
    word = state.word
    old = word[at.PLACE, unit]
    if old == slot and word[at.ORDER, slot] == unit:
        return
    if old != -1 and word[at.ORDER, old] == unit:
        put(state, scratch, at.ORDER, old, -1)
    put(state, scratch, at.PLACE, unit, slot)
    put(state, scratch, at.ORDER, slot, unit)
