"""Fuse a unit with a copy of a predecessor; the predecessor goes on serving its other readers.

The second method of the paper (section 4.5, figure 1 (iii)): duplicate op fusion. Of a predecessor
that is a group only what the reader needs is copied. What nobody but the reader needs is not
copied but handed over; where that is all of it, the move is non-duplicate fusion.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.search import layout as at
from disco_hlo.search.arrays import add_copy, computes, fresh_stamp, has_room, roll_back
from disco_hlo.search.jit import compiled
from disco_hlo.search.neighbours import gather_members
from disco_hlo.search.ordering import settle
from disco_hlo.search.upkeep import adopt_orphans, all_stand


@compiled
def duplicate(step: Any, state: Any, scratch: Any, consumer: Any, producer: Any) -> Any:
    """Let ``consumer`` recompute what it reads of ``producer``; both are given by their heads."""
    word, flags = state.word, step.node[at.FLAGS]
    if consumer == producer or not flags[consumer] & flags[producer] & at.FUSIBLE:
        return False
    low, high = word[at.PLACE, producer], word[at.PLACE, consumer]
    if low > high:
        return False
    count = _needed(step, state, scratch, consumer, producer)
    if not has_room(scratch):
        return False
    mark, changes = scratch.number[at.LOGGED], scratch.number[at.CHANGES]
    if count and _copy(step, state, scratch, consumer, count):
        unit = adopt_orphans(step, state, scratch, consumer)
        if all_stand(step, state, scratch, changes) and settle(step, state, scratch, unit, low, high):
            return True
    roll_back(state, scratch, mark)
    scratch.number[at.CHANGES] = changes
    return False


@compiled
def _needed(step: Any, state: Any, scratch: Any, consumer: Any, producer: Any) -> Any:
    """Row NEEDED: what the producer computes to serve this one reader."""
    node, edge, word = step.node, step.edge, state.word
    needed, mark = scratch.row[at.NEEDED], scratch.row[at.INSIDE]
    stamp = fresh_stamp(scratch)
    _, members = gather_members(state, scratch, consumer, at.MEMBERS)
    count = 0
    for i in range(members):
        x = scratch.row[at.MEMBERS, i]
        for e in range(node[at.SOURCES_AT, x], node[at.SOURCES_AT, x + 1]):
            source = edge[e]
            taken = word[at.OWNER, source] == producer and not computes(state, consumer, source)
            if taken and mark[source] != stamp:
                mark[source] = stamp
                needed[count] = source
                count += 1
    i = 0
    while i < count:
        x = needed[i]
        i += 1
        for e in range(node[at.SOURCES_AT, x], node[at.SOURCES_AT, x + 1]):
            source = edge[e]
            if mark[source] == stamp or not computes(state, producer, source):
                continue
            mark[source] = stamp
            if not computes(state, consumer, source):
                needed[count] = source
                count += 1
    return count


@compiled
def _copy(step: Any, state: Any, scratch: Any, consumer: Any, count: Any) -> Any:
    for i in range(count):
        if not add_copy(state, scratch, consumer, scratch.row[at.NEEDED, i]):
            return False
    return True
