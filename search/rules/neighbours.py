"""Which units a unit waits for, and which wait for it, under the duplicates of the moment.

A unit reads a value from the unit that owns it, unless it recomputes the value itself; a pair
"a before b" binds every unit that computes a and every unit that computes b. This is the same rule
as ``plan.units``, asked for one unit at a time.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import Row, inner
from disco_hlo.core.reasons import fresh_stamp
from disco_hlo.search.arrays.board import computes
from disco_hlo.search.arrays.layout import ORDERED
from disco_hlo.search.arrays.views import GraphView, ScratchView, StateView


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
        following = s.next[x] if s.owner[x] == unit else -1
        if following == -1 and cell != -1:
            following = s.cell_node[cell]
            cell = s.next_of_unit[cell]
        x = following
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
        following = s.next[x] if s.owner[x] == unit else -1
        if following == -1 and cell != -1:
            following = s.cell_node[cell]
            cell = s.next_of_unit[cell]
        x = following
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
