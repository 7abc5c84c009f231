"""Which units wait for which, and how units keep a topological order while moves change them.

A unit reads a value from the unit that owns it, unless it recomputes the value itself; a pair
"a before b" binds every unit that computes a and every unit that computes b. This is the same rule
as ``plan.units``, asked for one unit at a time.

A move that ties a unit to others may close a circle. The path back is searched from both ends at
once, among the units that stand between them only; whichever side is exhausted first proves that
there is none, and tells which units must step aside (dynamic topological ordering after Pearce and
Kelly, with the two-way search of Bender, Fineman, Gilbert and Tarjan).
"""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import Row, inner
from disco_hlo.core.reasons import fresh_stamp
from disco_hlo.search import layout as at
from disco_hlo.search.layout import ORDERED, GraphView, ScratchView, StateView
from disco_hlo.search.state import computes, put


@inner
def gather_members(s: StateView, unit: int, out: Row) -> Any:
    """Write what ``unit`` owns, then what it duplicates; returns the numbers (owned, all)."""
    count = 0
    x = unit
    while x != -1:  # ends with the list
        out[count] = x
        count += 1
        x = s.next[x]
    owned = count
    cell = s.copies[unit]
    while cell != -1:  # ends with the list
        out[count] = s.cell_node[cell]
        count += 1
        cell = s.next_of_unit[cell]
    return owned, count


@inner
def next_member(s: StateView, unit: int, x: int, cell: int) -> Any:
    """What comes after ``x`` among what ``unit`` owns, then duplicates (-1: nothing), and the cell after that. Begin
    with ``unit`` and ``copies[unit]``."""
    following = s.next[x] if s.owner[x] == unit else -1
    if following == -1 and cell != -1:
        return s.cell_node[cell], s.next_of_unit[cell]
    return following, cell


@inner
def mark_copies(s: StateView, w: ScratchView, unit: int) -> Any:
    """Mark in row ``inside`` what a unit recomputes; returns the stamp."""
    stamp = fresh_stamp(w)
    cell = s.copies[unit]
    while cell != -1:  # ends with the list
        w.inside[s.cell_node[cell]] = stamp
        cell = s.next_of_unit[cell]
    return stamp


@inner
def mark_computing(s: StateView, w: ScratchView, x: int) -> Any:
    """Mark in row ``inside`` the units that compute a node; returns the stamp."""
    stamp = fresh_stamp(w)
    w.inside[s.owner[x]] = stamp
    cell = s.copiers[x]
    while cell != -1:  # ends with the list
        w.inside[s.cell_unit[cell]] = stamp
        cell = s.next_of_node[cell]
    return stamp


@inner
def predecessors(g: GraphView, s: StateView, w: ScratchView, unit: int, out: Row) -> Any:
    """Write the units that ``unit`` waits for, each once; returns their number."""
    copied = mark_copies(s, w, unit)
    stamp = fresh_stamp(w)
    w.mark[unit] = stamp
    found = 0
    x, cell = unit, s.copies[unit]
    while x != -1:  # ends with the list
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            source = g.edge[e]
            owner = s.owner[source]
            if w.mark[owner] != stamp and w.inside[source] != copied:
                w.mark[owner] = stamp
                out[found] = owner
                found += 1
        for e in range(g.earlier_at[x], g.earlier_at[x + 1]):
            found = _add_computing(s, w, g.edge[e], stamp, out, found)
        x, cell = next_member(s, unit, x, cell)
    return found


@inner
def successors(g: GraphView, s: StateView, w: ScratchView, unit: int, out: Row) -> Any:
    """Write the units that wait for ``unit``, each once; returns their number."""
    stamp = fresh_stamp(w)
    w.mark[unit] = stamp
    found = 0
    x = unit
    while x != -1:  # ends with the list
        if s.leaves[x]:
            computing = mark_computing(s, w, x)
            for e in range(g.readers_at[x], g.readers_at[x + 1]):
                found = _add_reading(s, w, g.edge[e], computing, stamp, out, found)
        if g.flags[x] & ORDERED:
            for e in range(g.later_at[x], g.later_at[x + 1]):
                found = _add_computing(s, w, g.edge[e], stamp, out, found)
        x = s.next[x]
    cell = s.copies[unit]
    while cell != -1:  # ends with the list
        x = s.cell_node[cell]
        for e in range(g.later_at[x], g.later_at[x + 1]):
            found = _add_computing(s, w, g.edge[e], stamp, out, found)
        cell = s.next_of_unit[cell]
    return found


@inner
def _add_computing(s: StateView, w: ScratchView, x: int, stamp: int, out: Row, found: int) -> Any:
    unit, cell = s.owner[x], s.copiers[x]
    while True:  # ends with the list
        if w.mark[unit] != stamp:
            w.mark[unit] = stamp
            out[found] = unit
            found += 1
        if cell == -1:
            return found
        unit = s.cell_unit[cell]
        cell = s.next_of_node[cell]


@inner
def _add_reading(
    s: StateView, w: ScratchView, reader: int, computing: int, stamp: int, out: Row, found: int
) -> Any:
    """Units that compute ``reader``, but not what it reads: those of the stamp ``computing`` do."""
    unit, cell = s.owner[reader], s.copiers[reader]
    while True:  # ends with the list
        if w.mark[unit] != stamp and w.inside[unit] != computing:
            w.mark[unit] = stamp
            out[found] = unit
            found += 1
        if cell == -1:
            return found
        unit = s.cell_unit[cell]
        cell = s.next_of_node[cell]


@inner
def is_read_inside(g: GraphView, s: StateView, unit: int, x: int) -> Any:
    """Whether ``unit`` itself uses the value of a node that it computes."""
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        if computes(s, unit, g.edge[e]):
            return True
    return False


@inner
def count_waits(g: GraphView, s: StateView, w: ScratchView, unit: int) -> Any:
    """Number of reads and orderings that a unit waits for; several may concern one unit."""
    copied = mark_copies(s, w, unit)
    count = 0
    x, cell = unit, s.copies[unit]
    while x != -1:  # ends with the list
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            count += s.owner[g.edge[e]] != unit and w.inside[g.edge[e]] != copied
        for e in range(g.earlier_at[x], g.earlier_at[x + 1]):
            count += _computing_besides(s, unit, g.edge[e])
        x, cell = next_member(s, unit, x, cell)
    return count


@inner
def _computing_besides(s: StateView, unit: int, x: int) -> Any:
    count = 1 if s.owner[x] != unit else 0
    cell = s.copiers[x]
    while cell != -1:  # ends with the list
        count += s.cell_unit[cell] != unit
        cell = s.next_of_node[cell]
    return count


@inner
def sort_runs(values: Row, spare: Row, count: int) -> None:
    """Merge sort of what is there in ascending runs, mostly few and long."""
    if count < 2:
        return
    while True:  # ends: each pass halves the number of runs, and one run is sorted
        left = 0
        while left < count:  # ends: a run has one value at least
            middle = _run_end(values, left, count)
            if left == 0 and middle == count:
                return
            end = _run_end(values, middle, count)
            i, j = left, middle
            for k in range(left, end):
                if j == end or (i < middle and values[i] <= values[j]):
                    spare[k] = values[i]
                    i += 1
                else:
                    spare[k] = values[j]
                    j += 1
            left = end
        for k in range(count):
            values[k] = spare[k]


@inner
def _run_end(values: Row, start: int, count: int) -> Any:
    """Where the ascending run that begins at ``start`` ends."""
    end = start + 1
    while end < count and values[end - 1] <= values[end]:  # ends: end goes up
        end += 1
    return min(end, count)


@inner
def settle(g: GraphView, s: StateView, w: ScratchView, unit: int, low: int, high: int) -> Any:
    """Find a place for a unit at slot ``high`` that a move has tied to units from slot ``low`` on.

    All it waits for must stand below ``high``, and all that wait for it above ``low``. Returns
    whether there is a place between them; where there is none (a circle) nothing is written.
    """
    stamp = fresh_stamp(w)
    w.queue[0] = w.queue_back[0] = unit
    w.reached[unit] = w.reached_back[unit] = stamp
    ahead = back = 1
    next_ahead = next_back = 0
    while next_ahead < ahead and next_back < back:  # ends: a unit is put into either queue once
        found = successors(g, s, w, w.queue[next_ahead], w.neighbours)
        ahead = _reach(s, w, unit, found, low, high, stamp, w.reached, w.reached_back, w.queue, ahead)
        next_ahead += 1
        if ahead < 0:
            return False
        if next_ahead == ahead:
            break
        found = predecessors(g, s, w, w.queue_back[next_back], w.neighbours)
        back = _reach(s, w, unit, found, low, high, stamp, w.reached_back, w.reached, w.queue_back, back)
        next_back += 1
        if back < 0:
            return False
    if next_ahead == ahead:
        _place_late(s, w, unit, low, high, stamp)
    else:
        _place_early(s, w, unit, low, high, stamp)
    return True


@inner
def _reach(
    s: StateView,
    w: ScratchView,
    unit: int,
    found: int,
    low: int,
    high: int,
    stamp: int,
    mine: Row,
    theirs: Row,
    queue: Row,
    count: int,
) -> Any:
    """Queue those neighbours that are new and stand between; -1 where the other side was there."""
    for i in range(found):
        other = w.neighbours[i]
        if other == unit:
            return -1
        if mine[other] == stamp or not low <= s.place[other] <= high:
            continue
        if theirs[other] == stamp:
            return -1
        mine[other] = stamp
        queue[count] = other
        count += 1
    return count


@inner
def _place_late(s: StateView, w: ScratchView, unit: int, low: int, high: int, stamp: int) -> None:
    """The unit and what waits for it go to the upper end; the rest stays or moves down."""
    units = _collect(s, w, unit, low, high)
    slot = high
    for i in range(units - 1, -1, -1):
        other = w.neighbours[i]
        if w.reached[other] == stamp:
            _move(s, w, other, slot)
            slot -= 1
    _move(s, w, unit, slot)
    slot -= 1
    for i in range(units - 1, -1, -1):
        other = w.neighbours[i]
        if w.reached[other] != stamp:
            slot = min(slot, s.place[other])
            _move(s, w, other, slot)
            slot -= 1


@inner
def _place_early(s: StateView, w: ScratchView, unit: int, low: int, high: int, stamp: int) -> None:
    """What the unit waits for and the unit go to the lower end; the rest stays or moves up."""
    units = _collect(s, w, unit, low, high)
    slot = low
    for i in range(units):
        other = w.neighbours[i]
        if w.reached_back[other] == stamp:
            _move(s, w, other, slot)
            slot += 1
    _move(s, w, unit, slot)
    slot += 1
    for i in range(units):
        other = w.neighbours[i]
        if w.reached_back[other] != stamp:
            slot = max(slot, s.place[other])
            _move(s, w, other, slot)
            slot += 1


@inner
def _collect(s: StateView, w: ScratchView, unit: int, low: int, high: int) -> Any:
    """The units between two slots, both included, without ``unit``, in order."""
    count = 0
    for slot in range(low, high + 1):
        other = s.order[slot]
        if other != -1 and other != unit:
            w.neighbours[count] = other
            count += 1
    return count


@inner
def _move(s: StateView, w: ScratchView, unit: int, slot: int) -> None:
    old = s.place[unit]
    if old == slot and s.order[slot] == unit:
        return
    if old != -1 and s.order[old] == unit:
        put(w, s.order, old, -1)
    put(w, s.place, unit, slot)
    put(w, s.order, slot, unit)


@inner
def reseat(g: GraphView, s: StateView, w: ScratchView, unit: int, near: int) -> Any:
    """Find a place for a unit whose ties have changed at will, or which has none yet.

    ``near`` is the slot to begin with where the unit has no place. Returns whether there is one; a
    circle may leave the order changed, but still topological for all other units.
    """
    last, first = near - 1, s.total[at.SLOTS]
    for i in range(predecessors(g, s, w, unit, w.neighbours)):
        last = max(last, s.place[w.neighbours[i]])
    for i in range(successors(g, s, w, unit, w.neighbours)):
        first = min(first, s.place[w.neighbours[i]])
    old = s.place[unit]
    if old != -1 and last < old < first:
        return True
    if old != -1:
        put(w, s.order, old, -1)
        put(w, s.place, unit, -1)
    else:
        put(w, s.total, at.UNITS, s.total[at.UNITS] + 1)
    slot = _open_slot(s, w, last)
    _move(s, w, unit, slot)
    first = s.total[at.SLOTS]
    for i in range(successors(g, s, w, unit, w.neighbours)):
        first = min(first, s.place[w.neighbours[i]])
    return first > slot or settle(g, s, w, unit, first, slot)


@inner
def _open_slot(s: StateView, w: ScratchView, after: int) -> Any:
    """Make room right after a slot (-1: at the front) by shifting units to the nearest hole.

    There always is one: ORDER has a slot for every node.
    """
    up, down, end = after + 1, after, s.total[at.SLOTS]
    while True:  # ends: each pass goes one slot further both ways, and returns beyond both ends
        if up < end and s.order[up] == -1:
            for slot in range(up, after + 1, -1):
                _move(s, w, s.order[slot - 1], slot)
            return after + 1
        if down >= 0 and s.order[down] == -1:
            for slot in range(down, after):
                _move(s, w, s.order[slot + 1], slot)
            return after
        up, down = up + 1, down - 1
        if up >= end and down < 0:
            return -1


@inner
def shift(g: GraphView, s: StateView, w: ScratchView, unit: int, slot: int) -> Any:
    """Move a unit to another slot, those between one aside; False where what it is tied to stands between."""
    old = s.place[unit]
    for i in range(predecessors(g, s, w, unit, w.neighbours)):
        if s.place[w.neighbours[i]] >= slot:
            return False
    for i in range(successors(g, s, w, unit, w.neighbours)):
        if s.place[w.neighbours[i]] <= slot:
            return False
    put(w, s.order, old, -1)
    direction = 1 if slot > old else -1
    hole = old
    for k in range(old + direction, slot + direction, direction):
        if s.order[k] != -1:
            _move(s, w, s.order[k], hole)
            hole = k
    put(w, s.place, unit, -1)
    _move(s, w, unit, slot)
    return True
