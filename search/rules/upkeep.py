"""What moves share: keeping every node computed for somebody, and judging what a move changed.

Where every reader of an op recomputes it, its owner has nothing left to do it for. The op is then
handed over: one of those who recompute it owns it, so that nothing is executed in vain.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import inner
from disco_hlo.core.reasons import LEGAL, fresh_stamp
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import holds_copy, note_change
from disco_hlo.search.arrays.views import GraphView, ScratchView, StateView
from disco_hlo.search.rules.legality import unit_refusal
from disco_hlo.search.rules.neighbours import is_read_inside
from disco_hlo.search.rules.results import join, part, read_again


@inner
def adopt_orphans(g: GraphView, s: StateView, w: ScratchView, unit: int) -> Any:
    """Hand to ``unit`` the ops it duplicates that nobody needs their owner for.

    Returns its head and the first slot of a unit that it took in as a whole. Such a unit brings the
    duplicates it has, and with them what must run before and after these: it may have stood before
    anything the move was about, and where it stood behind the unit, the unit goes to its place.
    """
    found, first = True, s.total[at.SLOTS]
    while found:  # ends: each pass hands over an op that the unit then recomputes no more
        found = False
        count = 0
        cell = s.copies[unit]
        while cell != -1:  # ends with the list
            w.needed[count] = s.cell_node[cell]
            count += 1
            cell = s.next_of_unit[cell]
        # Readers before what they read: an op may be orphaned by the one adopted before it.
        for i in range(count - 1, -1, -1):
            x = w.needed[i]
            home = s.owner[x]
            if home == unit:
                continue
            if g.flags[x] & at.ORDERED:
                note_change(w, x)  # what runs after it may wait for one unit more
            if s.leaves[x] or is_read_inside(g, s, home, x):
                continue
            if s.count[home] > 1:
                drop_idle_copies(g, s, w, part(g, s, w, x), x)
            else:
                first = min(first, s.place[x])
            unit = join(g, s, w, unit, x) if s.place[x] > s.place[unit] else join(g, s, w, x, unit)
            # With its op the unit may have taken over duplicates, which make more orphans.
            found = True
    return unit, first


@inner
def drop_idle_copies(g: GraphView, s: StateView, w: ScratchView, unit: int, gone: int) -> None:
    """Stop ``unit`` from recomputing what nothing in it reads any more, now that it computes ``gone`` no more."""
    if s.copies[unit] == -1:
        return
    w.queue[0], pending = gone, 1
    while pending > 0:  # ends: what is put there the unit recomputes no more
        pending -= 1
        x = w.queue[pending]
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            source = g.edge[e]
            if holds_copy(s, unit, source) and not is_read_inside(g, s, unit, source):
                read_again(g, s, w, unit, source)
                w.queue[pending] = source
                pending += 1


@inner
def all_stand(g: GraphView, s: StateView, w: ScratchView, changes: int) -> Any:
    """Whether every unit noted as changed since entry ``changes`` is a legal kernel.

    Where one is not, the move fails; ``at.FELL`` then says which units it was about.
    """
    w.number[at.FELL] = 0
    stamp = fresh_stamp(w)
    for i in range(changes, w.number[at.CHANGES]):
        unit = s.owner[w.changed[i]]
        # Not by whether its head may be fused: what is left of a kernel of XLA's may begin with an op that may not.
        if w.judged[unit] == stamp or g.flags[unit] & at.ALL_REDUCE:
            continue
        w.judged[unit] = stamp
        if unit_refusal(g, s, w, unit) != LEGAL:
            _keep_changed(s, w, changes)
            return False
    return True


@inner
def fell_at_sight(w: ScratchView, unit: int) -> None:
    """Say that a move fails for the kernel that ``unit`` would become, which was not made."""
    w.changed[w.number[at.CHANGES]] = unit
    w.number[at.FELL] = w.number[at.CHANGES] + 1


@inner
def _keep_changed(s: StateView, w: ScratchView, changes: int) -> None:
    """Leave only what is of units that have other ops or results than before among the entries since ``changes``."""
    fell = changes
    for i in range(changes, w.number[at.CHANGES]):
        unit = s.owner[w.changed[i]]
        if s.computed[unit] + s.returned[unit] != s.digest[unit]:
            w.changed[fell] = w.changed[i]
            fell += 1
    w.number[at.FELL] = fell
