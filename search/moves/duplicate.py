"""Fuse a unit with a copy of a predecessor; the predecessor goes on serving its other readers.

The second method of the paper (section 4.5, figure 1 (iii)): duplicate op fusion. Of a predecessor
that is a group only what the reader needs is copied. What nobody but the reader needs is not
copied but handed over; where that is all of it, the move is non-duplicate fusion.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.search import layout as at
from disco_hlo.search.board import computes, fresh_stamp, has_room, roll_back
from disco_hlo.search.foresight import never_recomputed
from disco_hlo.search.neighbours import gather_members
from disco_hlo.search.ordering import settle
from disco_hlo.search.results import recompute
from disco_hlo.search.upkeep import adopt_orphans, all_stand, fell_at_sight

from disco_hlo.compiled import inner


@inner
def duplicate(g: Any, s: Any, w: Any, consumer: Any, producer: Any) -> Any:
    """Let ``consumer`` recompute what it reads of ``producer``; both are given by their heads."""
    if consumer == producer or not g.flags[consumer] & g.flags[producer] & at.FUSIBLE or not has_room(g, w):
        return False
    low = s.place[producer]
    if low > s.place[consumer]:
        return False
    count, members = needed(g, s, w, consumer, producer)
    if count == 0 or never_recomputed(g, s, w, consumer, members, count):
        fell_at_sight(w, consumer)
        return False
    mark, changes = w.number[at.LOGGED], w.number[at.CHANGES]
    if recompute(g, s, w, consumer, w.needed, count):
        unit, first = adopt_orphans(g, s, w, consumer)
        if all_stand(g, s, w, changes) and settle(g, s, w, unit, min(low, first), s.place[unit]):
            return True
    roll_back(w, mark)
    w.number[at.CHANGES] = changes
    return False


@inner
def needed(g: Any, s: Any, w: Any, consumer: Any, producer: Any) -> Any:
    """Row ``needed``: what the producer computes to serve this one reader. How much that is, and how much the
    reader computes."""
    owned, members = gather_members(s, consumer, w.members)
    stamp = fresh_stamp(w)
    for i in range(owned, members):
        w.inside[w.members[i]] = stamp  # the consumer has a copy of it
    count = 0
    for i in range(members):
        x = w.members[i]
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            source = g.edge[e]
            if s.owner[source] != producer or w.inside[source] == stamp:
                continue
            w.inside[source] = stamp
            w.needed[count] = source
            count += 1
    i = 0
    while i < count:
        x = w.needed[i]
        i += 1
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            source = g.edge[e]
            if w.inside[source] == stamp or not computes(s, producer, source):
                continue
            w.inside[source] = stamp
            if s.owner[source] != consumer:
                w.needed[count] = source
                count += 1
    return count, members
