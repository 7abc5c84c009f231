"""The rules of ``hlo.legality`` for groups under change, in compiled code.

The rules themselves, their reasons and their sources are there; a property test holds the two
equal. Here a group is what a unit owns and duplicates together with the bitcasts between them.
"""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.search import layout as at
from disco_hlo.search.arrays import MAXIMUM_MEMBERS, fresh_stamp
from disco_hlo.search.jit import compiled
from disco_hlo.search.neighbours import gather_members, is_read_inside, is_read_outside

LEGAL: Final = 0
NOT_FUSIBLE: Final = 1
NO_RESULT: Final = 2
RESULT_SHAPES: Final = 3
SEVERAL_RESULTS: Final = 4
TOO_MANY_OPERANDS: Final = 5
TOO_MANY_REDUCTIONS: Final = 6
TOO_MANY_EMISSIONS: Final = 7
SHARED_BUFFER: Final = 8
DEAD_MEMBER: Final = 9
TOO_MANY_MEMBERS: Final = 10

_MAXIMUM_OPERANDS: Final = 0
_MAXIMUM_EMISSIONS: Final = 1
_MAXIMUM_REDUCTIONS: Final = 2


@compiled
def unit_refusal(step: Any, state: Any, scratch: Any, unit: Any) -> Any:
    """Why a unit may not stand as it is, ``LEGAL`` where it may. Single nodes always may."""
    if state.word[at.COUNT, unit] == 1 and state.word[at.COPIES, unit] == -1:
        return LEGAL
    owned, count = gather_members(state, scratch, unit, at.MEMBERS)
    members = scratch.row[at.MEMBERS]
    if count > MAXIMUM_MEMBERS:
        return TOO_MANY_MEMBERS
    for i in range(count):
        if not step.node[at.FLAGS, members[i]] & at.FUSIBLE:
            return NOT_FUSIBLE
    count, stamp = add_bitcasts(step, scratch, count)
    results = _mark_results(step, state, scratch, unit, owned, count)
    return _group_refusal(step, scratch, count, stamp, results)


@compiled
def add_bitcasts(step: Any, scratch: Any, count: Any) -> Any:
    """Add bitcasts to the members, sort and mark them ``INSIDE``: (count, stamp).

    A group takes along the bitcasts between its members, and those through which it reads an
    all-reduce: a kernel that sees the gradient itself can cut it out of its bucket.
    """
    node, edge = step.node, step.edge
    members, inside = scratch.row[at.MEMBERS], scratch.row[at.INSIDE]
    stamp = fresh_stamp(scratch)
    for i in range(count):
        inside[members[i]] = stamp
    total = count
    for i in range(count):
        x = members[i]
        for e in range(node[at.OPERANDS_AT, x], node[at.OPERANDS_AT, x + 1]):
            if node[at.FLAGS, edge[e]] & at.BITCAST and inside[edge[e]] != stamp:
                total = _add_chain(step, members, inside, stamp, edge[e], total)
    _sort(members, total)
    return total, stamp


@compiled
def _add_chain(step: Any, members: Any, inside: Any, stamp: Any, bitcast: Any, total: Any) -> Any:
    node, edge = step.node, step.edge
    start = bitcast
    while node[at.FLAGS, start] & at.BITCAST and inside[start] != stamp:
        start = edge[node[at.OPERANDS_AT, start]]
    if inside[start] != stamp and not node[at.FLAGS, start] & at.ALL_REDUCE:
        return total
    x = bitcast
    while x != start:
        inside[x] = stamp
        members[total] = x
        total += 1
        x = edge[node[at.OPERANDS_AT, x]]
    return total


@compiled
def _sort(values: Any, count: Any) -> Any:
    """Insertion sort: the owned come sorted, so do the duplicates, and bitcasts are few."""
    for i in range(1, count):
        value, j = values[i], i - 1
        while j >= 0 and values[j] > value:
            values[j + 1] = values[j]
            j -= 1
        values[j + 1] = value


@compiled
def _mark_results(step: Any, state: Any, scratch: Any, unit: Any, owned: Any, count: Any) -> Any:
    """Row VALUE of every member: 1 where it leaves the unit, else 0. Returns how many do, -1 where
    a member is computed for nobody."""
    members, value = scratch.row[at.MEMBERS], scratch.row[at.VALUE]
    results = 0
    dead = False
    for i in range(count):
        x = members[i]
        value[x] = 0
        if not step.node[at.FLAGS, x] & at.FUSIBLE:
            continue
        if state.word[at.OWNER, x] == unit and is_read_outside(step, state, x):
            value[x] = 1
            results += 1
        elif not is_read_inside(step, state, unit, x):
            dead = True
    return -1 if dead else results


@compiled
def _group_refusal(step: Any, scratch: Any, count: Any, stamp: Any, results: Any) -> Any:
    if results < 0:
        return DEAD_MEMBER
    if results == 0:
        return NO_RESULT
    return (
        _result_refusal(step, scratch, count, results)
        or _size_refusal(step, scratch, count, stamp, results)
        or _emission_refusal(step, scratch, count, stamp)
        or _inplace_refusal(step, scratch, count, stamp)
    )


@compiled
def _result_refusal(step: Any, scratch: Any, count: Any, results: Any) -> Any:
    if results == 1:
        return LEGAL
    node, members, value = step.node, scratch.row[at.MEMBERS], scratch.row[at.VALUE]
    shape = -1
    for i in range(count):
        x = members[i]
        if not value[x]:
            continue
        if shape == -1:
            shape = node[at.SHAPE, x]
        if node[at.SHAPE, x] != shape:
            return RESULT_SHAPES
        if node[at.FLAGS, x] & at.SINGLE_RESULT:
            return SEVERAL_RESULTS
    return LEGAL


@compiled
def _size_refusal(step: Any, scratch: Any, count: Any, stamp: Any, results: Any) -> Any:
    node, edge = step.node, step.edge
    members, inside, mark = scratch.row[at.MEMBERS], scratch.row[at.INSIDE], scratch.row[at.MARK]
    seen = fresh_stamp(scratch)
    reads = reductions = 0
    for i in range(count):
        x = members[i]
        if node[at.FLAGS, x] & at.REDUCE:
            reductions += 1
        for e in range(node[at.OPERANDS_AT, x], node[at.OPERANDS_AT, x + 1]):
            operand = edge[e]
            if inside[operand] == stamp or mark[operand] == seen or node[at.FLAGS, operand] & at.CLONED:
                continue
            mark[operand] = seen
            reads += 1
    if reads + results > step.limits[_MAXIMUM_OPERANDS]:
        return TOO_MANY_OPERANDS
    if reductions > step.limits[_MAXIMUM_REDUCTIONS]:
        return TOO_MANY_REDUCTIONS
    return LEGAL


@compiled
def _emission_refusal(step: Any, scratch: Any, count: Any, stamp: Any) -> Any:
    """Row VALUE holds how often each member's readers so far want it written."""
    node, edge = step.node, step.edge
    members, inside, value = scratch.row[at.MEMBERS], scratch.row[at.INSIDE], scratch.row[at.VALUE]
    for i in range(count - 1, -1, -1):
        x = members[i]
        written = max(1, value[x])
        if written > step.limits[_MAXIMUM_EMISSIONS]:
            return TOO_MANY_EMISSIONS
        elementwise = node[at.FLAGS, x] & at.ELEMENTWISE
        first, last = node[at.OPERANDS_AT, x], node[at.OPERANDS_AT, x + 1]
        for e in range(first, last):
            operand = edge[e]
            if inside[operand] != stamp:
                continue
            if elementwise:
                value[operand] = max(value[operand], written)
            else:
                # Reading an operand twice adds twice: once for each time it is listed.
                value[operand] += written
    return LEGAL


@compiled
def _inplace_refusal(step: Any, scratch: Any, count: Any, stamp: Any) -> Any:
    node, edge, members = step.node, step.edge, scratch.row[at.MEMBERS]
    for i in range(count):
        writer = members[i]
        for e in range(node[at.BUFFERS_AT, writer], node[at.BUFFERS_AT, writer + 1]):
            if not _reads_only_its_element(step, scratch, count, edge[e]):
                return SHARED_BUFFER
    return LEGAL


@compiled
def _reads_only_its_element(step: Any, scratch: Any, count: Any, buffer: Any) -> Any:
    node, edge = step.node, step.edge
    members, mark = scratch.row[at.MEMBERS], scratch.row[at.MARK]
    touched = fresh_stamp(scratch)
    mark[buffer] = touched
    for i in range(count):
        x = members[i]
        reads = False
        for e in range(node[at.OPERANDS_AT, x], node[at.OPERANDS_AT, x + 1]):
            if mark[edge[e]] == touched:
                reads = True
        if not reads:
            continue
        mark[x] = touched
        if not node[at.FLAGS, x] & at.ELEMENTWISE or node[at.GEOMETRY, x] != node[at.GEOMETRY, buffer]:
            return False
    return True
