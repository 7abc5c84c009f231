"""Which units a unit waits for, and which wait for it, under the duplicates of the moment.

A unit reads a value from the unit that owns it, unless it recomputes the value itself; a pair
"a before b" binds every unit that computes a and every unit that computes b. This is the same rule
as ``plan.units``, asked for one unit at a time.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.search import layout as at
from disco_hlo.search.arrays import computes, fresh_stamp, holds_copy
from disco_hlo.search.jit import compiled


@compiled
def gather_members(state: Any, scratch: Any, unit: Any, row: Any) -> Any:
    """Write what ``unit`` owns, then what it duplicates, into a scratch row: (owned, all)."""
    word, out = state.word, scratch.row[row]
    count = 0
    x = unit
    while x != -1:
        out[count] = x
        count += 1
        x = word[at.NEXT, x]
    owned = count
    cell = word[at.COPIES, unit]
    while cell != -1:
        out[count] = word[at.CELL_NODE, cell]
        count += 1
        cell = word[at.NEXT_OF_UNIT, cell]
    return owned, count


@compiled
def predecessors(step: Any, state: Any, scratch: Any, unit: Any, row: Any) -> Any:
    """Write the units that ``unit`` waits for into a scratch row, each once; returns their number."""
    node, edge, word = step.node, step.edge, state.word
    out, mark = scratch.row[row], scratch.row[at.MARK]
    stamp = fresh_stamp(scratch)
    mark[unit] = stamp
    found = 0
    x, cell = unit, word[at.COPIES, unit]
    while x != -1:
        for e in range(node[at.SOURCES_AT, x], node[at.SOURCES_AT, x + 1]):
            source = edge[e]
            owner = word[at.OWNER, source]
            if mark[owner] != stamp and not holds_copy(state, unit, source):
                mark[owner] = stamp
                out[found] = owner
                found += 1
        for e in range(node[at.EARLIER_AT, x], node[at.EARLIER_AT, x + 1]):
            found = _add_computing(state, edge[e], mark, stamp, out, found)
        if word[at.NEXT, x] != -1 and word[at.OWNER, x] == unit:
            x = word[at.NEXT, x]
        elif cell != -1:
            x = word[at.CELL_NODE, cell]
            cell = word[at.NEXT_OF_UNIT, cell]
        else:
            x = -1
    return found


@compiled
def successors(step: Any, state: Any, scratch: Any, unit: Any, row: Any) -> Any:
    """Write the units that wait for ``unit`` into a scratch row, each once; returns their number."""
    node, edge, word = step.node, step.edge, state.word
    out, mark = scratch.row[row], scratch.row[at.MARK]
    stamp = fresh_stamp(scratch)
    mark[unit] = stamp
    found = 0
    x = unit
    while x != -1:
        for e in range(node[at.READERS_AT, x], node[at.READERS_AT, x + 1]):
            found = _add_reading(state, x, edge[e], mark, stamp, out, found)
        for e in range(node[at.LATER_AT, x], node[at.LATER_AT, x + 1]):
            found = _add_computing(state, edge[e], mark, stamp, out, found)
        x = word[at.NEXT, x]
    cell = word[at.COPIES, unit]
    while cell != -1:
        x = word[at.CELL_NODE, cell]
        for e in range(node[at.LATER_AT, x], node[at.LATER_AT, x + 1]):
            found = _add_computing(state, edge[e], mark, stamp, out, found)
        cell = word[at.NEXT_OF_UNIT, cell]
    return found


@compiled
def _add_computing(state: Any, x: Any, mark: Any, stamp: Any, out: Any, found: Any) -> Any:
    word = state.word
    owner = word[at.OWNER, x]
    if mark[owner] != stamp:
        mark[owner] = stamp
        out[found] = owner
        found += 1
    cell = word[at.COPIERS, x]
    while cell != -1:
        unit = word[at.CELL_UNIT, cell]
        if mark[unit] != stamp:
            mark[unit] = stamp
            out[found] = unit
            found += 1
        cell = word[at.NEXT_OF_NODE, cell]
    return found


@compiled
def _add_reading(state: Any, source: Any, reader: Any, mark: Any, stamp: Any, out: Any, found: Any) -> Any:
    """Units that compute ``reader`` and take ``source`` from its owner."""
    word = state.word
    owner = word[at.OWNER, reader]
    if mark[owner] != stamp and not holds_copy(state, owner, source):
        mark[owner] = stamp
        out[found] = owner
        found += 1
    cell = word[at.COPIERS, reader]
    while cell != -1:
        unit = word[at.CELL_UNIT, cell]
        if mark[unit] != stamp and not computes(state, unit, source):
            mark[unit] = stamp
            out[found] = unit
            found += 1
        cell = word[at.NEXT_OF_NODE, cell]
    return found


@compiled
def is_read_outside(step: Any, state: Any, x: Any) -> Any:
    """Whether a node's value leaves the unit that owns it."""
    node, edge, word = step.node, step.edge, state.word
    if node[at.FLAGS, x] & at.RETURNED:
        return True
    home = word[at.OWNER, x]
    for e in range(node[at.READERS_AT, x], node[at.READERS_AT, x + 1]):
        reader = edge[e]
        owner = word[at.OWNER, reader]
        if owner != home and not holds_copy(state, owner, x):
            return True
        cell = word[at.COPIERS, reader]
        while cell != -1:
            unit = word[at.CELL_UNIT, cell]
            if unit != home and not computes(state, unit, x):
                return True
            cell = word[at.NEXT_OF_NODE, cell]
    return False


@compiled
def is_read_inside(step: Any, state: Any, unit: Any, x: Any) -> Any:
    """Whether ``unit`` itself uses the value of a node that it computes."""
    node, edge = step.node, step.edge
    for e in range(node[at.READERS_AT, x], node[at.READERS_AT, x + 1]):
        if computes(state, unit, edge[e]):
            return True
    return False
