"""Take an op out of a group: the way back from both kinds of fusion (not in the paper)."""

from __future__ import annotations

from typing import Any

from disco_hlo.search import layout as at
from disco_hlo.search.board import has_room, holds_copy, remove_copy, roll_back, take_out
from disco_hlo.search.ordering import reseat
from disco_hlo.search.upkeep import all_stand, drop_idle_copies, note_sources

from disco_hlo.compiled import inner


@inner
def unfuse(g: Any, s: Any, w: Any, unit: Any, node: Any) -> Any:
    """Make a unit of its own of an op that a group owns, or let the group read what it recomputes.

    Args:
        unit: head of a group.
        node: an op that the group computes.
    """
    if not g.flags[unit] & at.FUSIBLE or not has_room(g, w):
        return False
    mark, changes = w.number[at.LOGGED], w.number[at.CHANGES]
    if s.owner[node] == unit and s.count[unit] > 1:
        made = _take_out(g, s, w, unit, node, changes)
    elif holds_copy(s, unit, node):
        remove_copy(s, w, unit, node)
        note_sources(g, s, w, node)
        drop_idle_copies(g, s, w, unit)
        made = all_stand(g, s, w, changes) and reseat(g, s, w, unit, 0)
    else:
        return False
    if made:
        return True
    roll_back(w, mark)
    w.number[at.CHANGES] = changes
    return False


@inner
def _take_out(g: Any, s: Any, w: Any, unit: Any, node: Any, changes: Any) -> Any:
    place = s.place[unit]
    rest = take_out(s, w, node)
    note_sources(g, s, w, node)
    drop_idle_copies(g, s, w, rest)
    return all_stand(g, s, w, changes) and reseat(g, s, w, node, place) and reseat(g, s, w, rest, 0)
