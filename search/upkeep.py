"""What moves share: keeping every node computed for somebody, and judging what a move changed.

Where every reader of an op recomputes it, its owner has nothing left to do it for. The op is then
handed over: one of those who recompute it owns it, so that nothing is executed in vain.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.search import layout as at
from disco_hlo.search.board import fresh_stamp, link, note_change, remove_copy, take_out
from disco_hlo.search.legality import LEGAL, unit_refusal
from disco_hlo.search.neighbours import gather_members, is_read_inside, is_read_outside

from disco_hlo.compiled import inner


@inner
def adopt_orphans(g: Any, s: Any, w: Any, unit: Any, sole: Any) -> Any:
    """Hand to ``unit`` the ops it duplicates that nobody needs their owner for.

    Returns its head and the first slot of a unit that it took in as a whole. Such a unit brings the
    duplicates it has, and with them what must run before and after these: it may have stood before
    anything the move was about, and where it stood behind the unit, the unit goes to its place.

    ``sole`` says that nothing had changed before this move since the state was priced: what then leaves
    its unit as it did (row ``leaves``) gives no reason to look at that unit again.
    """
    found, first = True, s.total[at.SLOTS]
    while found:
        found = False
        count = 0
        cell = s.copies[unit]
        while cell != -1:
            w.needed[count] = s.cell_node[cell]
            count += 1
            cell = s.next_of_unit[cell]
        # Readers before what they read: an op may be orphaned by the one adopted before it.
        for i in range(count - 1, -1, -1):
            x = w.needed[i]
            home = s.owner[x]
            if home == unit:
                continue
            if is_read_outside(g, s, w, x):
                if g.later_at[x] < g.later_at[x + 1]:
                    note_change(w, x)
                continue
            # Part of the unit may have read it from its owner, who is then rid of a result.
            if not sole or s.leaves[x] or g.later_at[x] < g.later_at[x + 1]:
                note_change(w, x)
            if is_read_inside(g, s, home, x):
                continue
            if s.count[home] > 1:
                drop_idle_copies(g, s, w, take_out(s, w, x), sole)
            else:
                first = min(first, s.place[x])
            unit = link(s, w, unit, x) if s.place[x] > s.place[unit] else link(s, w, x, unit)
            # With its op the unit may have taken over duplicates, which make more orphans.
            found = True
    return unit, first


@inner
def drop_idle_copies(g: Any, s: Any, w: Any, unit: Any, sole: Any) -> None:
    """Stop ``unit`` from recomputing what nothing in it reads any more; ``sole`` as in :func:`adopt_orphans`."""
    if s.copies[unit] == -1:
        return
    stamp = fresh_stamp(w)
    for i in range(gather_members(s, unit, w.members)[1]):
        w.judging[w.members[i]] = stamp
    found = True
    while found:
        found = False
        cell = s.copies[unit]
        while cell != -1:
            following, x = s.next_of_unit[cell], s.cell_node[cell]
            if not _is_read_by(g, w, x, stamp):
                w.judging[x] = 0
                remove_copy(s, w, unit, x)
                note_sources(g, s, w, x, sole)
                found = True
            cell = following


@inner
def _is_read_by(g: Any, w: Any, x: Any, stamp: Any) -> Any:
    """Whether one of those marked in row ``judging`` reads ``x``."""
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        if w.judging[g.edge[e]] == stamp:
            return True
    return False


@inner
def note_sources(g: Any, s: Any, w: Any, x: Any, sole: Any) -> None:
    """Note the groups whose values ``x`` reads where, with who computes ``x``, what they return has changed.

    Unless the move is the ``sole`` one since the state was priced it is not known what they returned.
    """
    for e in range(g.sources_at[x], g.sources_at[x + 1]):
        source = g.edge[e]
        unit = s.owner[source]
        if s.count[unit] == 1 and s.copies[unit] == -1:
            continue
        if not sole or is_read_outside(g, s, w, source) != (s.leaves[source] != 0):
            note_change(w, unit)


@inner
def all_stand(g: Any, s: Any, w: Any, changes: Any) -> Any:
    """Whether every unit noted as changed since entry ``changes`` is a legal kernel."""
    stamp = fresh_stamp(w)
    for i in range(changes, w.number[at.CHANGES]):
        unit = s.owner[w.changed[i]]
        if w.judged[unit] == stamp or not g.flags[unit] & at.FUSIBLE:
            continue
        w.judged[unit] = stamp
        if unit_refusal(g, s, w, unit) != LEGAL:
            return False
    return True
