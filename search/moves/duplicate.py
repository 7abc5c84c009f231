"""Fuse a unit with a copy of a predecessor; the predecessor goes on serving its other readers.

The second method of the paper (section 4.5, figure 1 (iii)): duplicate op fusion. Of a predecessor
that is a group only what the reader needs is copied. What nobody but the reader needs is not
copied but handed over; where that is all of it, the move is non-duplicate fusion.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import inner
from disco_hlo.core.reasons import fresh_stamp
from disco_hlo.search import layout as at
from disco_hlo.search.kernels import adopt_orphans, all_stand, recompute
from disco_hlo.search.layout import GraphView, ScratchView, StateView
from disco_hlo.search.moves.move import Move, random_reader
from disco_hlo.search.moves.refusals import never_recomputed
from disco_hlo.search.ordering import next_member, settle
from disco_hlo.search.state import computes


@inner
def duplicate(g: GraphView, s: StateView, w: ScratchView, consumer: int, producer: int) -> Any:
    """Let ``consumer`` recompute what it reads of ``producer``; both are given by their heads."""
    if consumer == producer or not g.flags[consumer] & g.flags[producer] & at.FUSIBLE:
        return False
    if s.total[at.FREE_CELL] == -1:  # as many duplicates as there may be
        return False
    low = s.place[producer]
    if low > s.place[consumer]:
        return False
    count, members = needed(g, s, w, consumer, producer)
    if count == 0 or never_recomputed(g, s, w, consumer, members, count):
        return False
    changes = w.number[at.CHANGES]
    if not recompute(g, s, w, consumer, w.needed, count):
        return False
    unit, first = adopt_orphans(g, s, w, consumer)
    return all_stand(g, s, w, changes) and settle(g, s, w, unit, min(low, first), s.place[unit])


@inner
def needed(g: GraphView, s: StateView, w: ScratchView, consumer: int, producer: int) -> Any:
    """Row ``needed``: what the producer computes to serve this one reader. How much that is, and how much the
    reader computes."""
    stamp = fresh_stamp(w)
    members = s.count[consumer]
    cell = s.copies[consumer]
    while cell != -1:  # ends with the list
        w.inside[s.cell_node[cell]] = stamp  # the consumer has a copy of it
        members += 1
        cell = s.next_of_unit[cell]
    # Whichever of the two is smaller tells what passes between them.
    if s.count[producer] < members:
        count = _read_by(g, s, w, consumer, producer, stamp)
    else:
        count = _read_of(g, s, w, consumer, producer, stamp)
    copied = fresh_stamp(w)
    cell = s.copies[producer]
    while cell != -1:  # ends with the list
        w.mark[s.cell_node[cell]] = copied
        cell = s.next_of_unit[cell]
    i = 0
    while i < count:  # ends: a node is put there once, being marked before
        x = w.needed[i]
        i += 1
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            source = g.edge[e]
            if w.inside[source] == stamp or (s.owner[source] != producer and w.mark[source] != copied):
                continue
            w.inside[source] = stamp
            if s.owner[source] != consumer:
                w.needed[count] = source
                count += 1
    return count, members


@inner
def _read_by(g: GraphView, s: StateView, w: ScratchView, consumer: int, producer: int, stamp: int) -> Any:
    """Begin row ``needed`` with what the consumer reads of the producer, looked for among what that owns."""
    count = 0
    x = producer
    while x != -1:  # ends with the list
        if s.leaves[x] and w.inside[x] != stamp:
            read, e = False, g.readers_at[x]
            while not read and e < g.readers_at[x + 1]:  # ends: e goes up
                read = computes(s, consumer, g.edge[e])
                e += 1
            if read:
                w.inside[x] = stamp
                w.needed[count] = x
                count += 1
        x = s.next[x]
    return count


@inner
def _read_of(g: GraphView, s: StateView, w: ScratchView, consumer: int, producer: int, stamp: int) -> Any:
    """The same, looked for among what the consumer computes reads."""
    count = 0
    x, cell = consumer, s.copies[consumer]
    while x != -1:  # ends with the list
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            source = g.edge[e]
            if s.owner[source] == producer and w.inside[source] != stamp:
                w.inside[source] = stamp
                w.needed[count] = source
                count += 1
        x, cell = next_member(s, consumer, x, cell)
    return count


MOVE = Move(
    "kernels", 3, random_reader, duplicate, with_unit=True, first_weight=1,
    in_algorithm_1=True,
)  # fmt: skip
