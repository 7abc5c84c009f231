"""Take an op out of a group: the way back from both kinds of fusion (not in the paper)."""

from __future__ import annotations

from typing import Any

import numpy as np

from disco_hlo.compiled import Row, inner
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import draw
from disco_hlo.search.kernels import all_stand, drop_idle_copies, fell_at_sight, may_own, part, read_again
from disco_hlo.search.layout import GraphView, PoolView, ScratchView, StateView
from disco_hlo.search.moves.move import Move
from disco_hlo.search.moves.refusals import never_without, with_number, with_unit
from disco_hlo.search.ordering import reseat
from disco_hlo.search.state import has_room, holds_copy, roll_back


@inner
def unfuse(g: GraphView, s: StateView, w: ScratchView, unit: int, node: int) -> Any:
    """Make a unit of its own of an op that a group owns, or let the group read what it recomputes.

    Args:
        unit: head of a group.
        node: an op that the group computes.
    """
    if not g.flags[unit] & at.FUSIBLE or not has_room(g, w):
        return False
    mark, changes = w.number[at.LOGGED], w.number[at.CHANGES]
    if s.owner[node] == unit and s.count[unit] > 1:
        if stays(g, s, unit, node):
            return False
        if never_without(g, s, w, unit, node):
            fell_at_sight(w, unit)
            return False
        made = _take_out(g, s, w, unit, node, changes)
    elif holds_copy(s, unit, node):
        if never_without(g, s, w, unit, node):
            fell_at_sight(w, unit)
            return False
        read_again(g, s, w, unit, node)
        drop_idle_copies(g, s, w, unit, node)
        made = all_stand(g, s, w, changes) and reseat(g, s, w, unit, 0)
    else:
        return False
    if made:
        return True
    roll_back(w, mark)
    w.number[at.CHANGES] = changes
    return False


@inner
def stays(g: GraphView, s: StateView, unit: int, node: int) -> Any:
    """Whether an op that a group owns cannot leave it, seen from the op alone.

    Either it stands amid the group, which would then wait for the op and the op for it; or the group has
    more ops than a kernel may have, even without it.
    """
    if not may_own(g, s.count[unit] - 1):
        return True
    reads = False
    for e in range(g.sources_at[node], g.sources_at[node + 1]):
        reads = reads or s.owner[g.edge[e]] == unit
    if reads:
        for e in range(g.readers_at[node], g.readers_at[node + 1]):
            if s.owner[g.edge[e]] == unit:
                return True
    return False


@inner
def _take_out(g: GraphView, s: StateView, w: ScratchView, unit: int, node: int, changes: int) -> Any:
    place = s.place[unit]
    drop_idle_copies(g, s, w, part(g, s, w, node), node)
    # The rest is tied to nothing new but the op, which gets a place that suits both.
    return all_stand(g, s, w, changes) and reseat(g, s, w, node, place)


@inner
def random_member(g: GraphView, s: StateView, _w: ScratchView, generator: Row, pools: PoolView) -> Any:
    """A group, and an op that it duplicates, or that it owns and may be rid of."""
    if pools.fusibles == 0:
        return -1, -1
    x = pools.fusible[draw(generator, pools.fusibles)]
    unit = s.owner[x]
    copies = 0
    cell = s.copies[unit]
    while cell != -1:  # ends with the list
        copies += 1
        cell = s.next_of_unit[cell]
    if s.count[unit] == 1 and copies == 0:
        return -1, -1
    chosen = draw(generator, s.count[unit] + copies)
    if chosen >= copies:
        return (-1, -1) if stays(g, s, unit, x) else (unit, x)
    cell = s.copies[unit]
    for _ in range(chosen):
        cell = s.next_of_unit[cell]
    return unit, s.cell_node[cell]


@inner
def _key(_g: GraphView, s: StateView, w: ScratchView, salt: int, unit: int, node: int) -> Any:
    w.readers[0] = s.owner[node]
    return with_unit(s, with_unit(s, with_number(np.int64(node), salt), unit), s.owner[node]), 1


MOVE = Move("kernels", 2, random_member, unfuse, cache_key=_key)
