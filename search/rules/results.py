"""Which values leave their unit, kept up with every change of units.

Whether a value leaves depends on who owns it, who recomputes it, and the same of its readers. So what changes
hands settles which values must be looked at again: itself, and what it reads. Where two units become one that is
what the smaller of them computes and reads. All changes of units that a move makes go through here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from disco_hlo.compiled import Int, Row, compiled, inner
from disco_hlo.core.reasons import fresh_stamp
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import (
    Scratch,
    State,
    add_copies,
    computes,
    link,
    note_change,
    put,
    remove_copy,
    take_out,
)
from disco_hlo.search.arrays.digest import NOTHING, copy_share, owned_share, result_share
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.views import GraphView, ScratchView, StateView, open_views
from disco_hlo.search.rules.neighbours import gather_members, mark_computing, sort_runs


@inner
def join(g: GraphView, s: StateView, w: ScratchView, a: int, b: int) -> Any:
    """``board.link``: make one unit of two. Values may stay inside that left before, none leaves that did not."""
    _, count = gather_members(s, a if s.count[a] <= s.count[b] else b, w.touched)
    head = link(g, s, w, a, b)
    stamp = fresh_stamp(w)
    for i in range(count):
        x = w.touched[i]
        if w.mark[x] != stamp:
            w.mark[x] = stamp
            _look_again(g, s, w, x, 1)
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            source = g.edge[e]
            if w.mark[source] != stamp:
                w.mark[source] = stamp
                # What the whole neither owns nor recomputes it reads as its parts did.
                if s.leaves[source] and computes(s, head, source):
                    _look_again(g, s, w, source, 1)
    return head


@inner
def part(g: GraphView, s: StateView, w: ScratchView, node: int) -> Any:
    """``board.take_out``: make a unit of its own of a node, which reads all it reads from others."""
    rest = take_out(g, s, w, node)
    _look_again(g, s, w, node, 0)
    for e in range(g.sources_at[node], g.sources_at[node + 1]):
        _set_leaves(s, w, g.edge[e], 1)
    return rest


@inner
def recompute(g: GraphView, s: StateView, w: ScratchView, unit: int, nodes: Row, count: int) -> Any:
    """``board.add_copies``: let a unit recompute nodes, which are sorted here; False where there is no room."""
    sort_runs(nodes, w.queue, count)
    if not add_copies(s, w, unit, nodes, count):
        return False
    for i in range(count):
        x = nodes[i]
        _look_again(g, s, w, x, 1)
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            if s.leaves[g.edge[e]] == 0 and not computes(s, unit, g.edge[e]):
                _set_leaves(s, w, g.edge[e], 1)
    return True


@inner
def read_again(g: GraphView, s: StateView, w: ScratchView, unit: int, node: int) -> None:
    """``board.remove_copy``: let a unit read what it recomputed."""
    remove_copy(s, w, unit, node)
    _look_again(g, s, w, node, 0)
    for e in range(g.sources_at[node], g.sources_at[node + 1]):
        _look_again(g, s, w, g.edge[e], 1)


@inner
def _look_again(g: GraphView, s: StateView, w: ScratchView, x: int, before: int) -> None:
    """Whether a node leaves its unit now, where it did not (``before`` 0), or did (1)."""
    if s.leaves[x] == before:
        _set_leaves(s, w, x, np.int64(_is_read_outside(g, s, w, x)))


@inner
def _set_leaves(s: StateView, w: ScratchView, x: int, leaves: Int) -> None:
    if leaves == s.leaves[x]:
        return
    unit = s.owner[x]
    put(w, s.leaves, x, leaves)
    put(w, s.returned, unit, s.returned[unit] + (2 * leaves - 1) * result_share(x))
    note_change(w, x)


@inner
def _is_read_outside(g: GraphView, s: StateView, w: ScratchView, x: int) -> Any:
    """Whether a node's value leaves the unit that owns it."""
    if g.flags[x] & at.RETURNED:
        return True
    home, shared = s.owner[x], s.copiers[x] != -1
    if shared:
        for e in range(g.readers_at[x], g.readers_at[x + 1]):
            unit = s.owner[g.edge[e]]
            if unit != home and s.copies[unit] == -1:
                return True
    computing = mark_computing(s, w, x) if shared else 0
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        unit = s.owner[g.edge[e]]
        if unit != home and not (shared and w.inside[unit] == computing):
            return True
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        cell = s.copiers[g.edge[e]]
        while cell != -1:  # ends with the list
            unit = s.cell_unit[cell]
            if unit != home and not (shared and w.inside[unit] == computing):
                return True
            cell = s.next_of_node[cell]
    return False


@compiled
def count_results(step: Step, state: State, scratch: Scratch) -> None:
    """Fill in what every unit of a new state computes and returns."""
    g, s, w = open_views(step, state, scratch)
    for x in range(g.nodes):
        if s.owner[x] != -1:
            s.leaves[x] = _is_read_outside(g, s, w, x)
    for x in range(g.nodes):
        if s.owner[x] == x:
            count_unit(s, x)


@inner
def count_unit(s: StateView, unit: int) -> None:
    """Fill in what a unit computes and returns, its row ``leaves`` being right."""
    computed, returned = np.int64(NOTHING), np.int64(0)
    x = unit
    while x != -1:  # ends with the list
        computed += owned_share(x)
        if s.leaves[x]:
            returned += result_share(x)
        x = s.next[x]
    cell = s.copies[unit]
    while cell != -1:  # ends with the list
        computed += copy_share(s.cell_node[cell])
        cell = s.next_of_unit[cell]
    s.computed[unit], s.returned[unit] = computed, returned
