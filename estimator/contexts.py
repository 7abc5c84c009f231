"""Values of a kernel and the contexts they are computed in: what ``kernel_cost`` counts with.

A value inside a kernel is computed once for every index it is needed at, not once per element. A *context*
is one such set of indices: the loops around the value and, for each of its dimensions, the innermost loop
it follows. Kernels of one step have few different contexts, so each is kept once, under a number, and what
an operand's is follows from the reader's by looking it up.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import inner
from disco_hlo.estimator import kernel_tables as at
from disco_hlo.estimator.kernel_tables import KernelTables, Structure

MAXIMUM_CONTEXTS: Final = 8
"""Contexts followed per value; XLA's code duplication guard allows no more. Beyond, work counts, but
not what it reads."""

_SHIFT = 31

# Columns of Scratch.value.
COUNT: Final = 0
"""How many contexts the value has,"""
NODE: Final = 1
"""the node it is,"""
FIRST: Final = 2
"""and its contexts, by number."""

# Scratch.number.
_BASE: Final = 0
"""What is subtracted from places; larger for every kernel."""
_KEPT: Final = 1
"""How many contexts are kept; the row behind them is for one being made."""

_MEMO_ROWS: Final = 1 << 15
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)


class Scratch(NamedTuple):
    """Working space for the kernels of one graph on one device.

    Contexts are kept from call to call; nothing depends on which.
    """

    context: NDArray[np.int64]
    """``[contexts, width]``: number of loops, the loops, the loop of each dimension.

    A loop is its extent, shifted, and the node that adds it plus 1 (0: the kernel's own loops): the
    loop of a reduction and the kernel's are two, however alike.
    """
    evaluations: NDArray[np.float64]
    """``[contexts]``: how often a value is computed in it."""
    strided: NDArray[np.bool_]
    """``[contexts]``: whether the innermost loop does not walk along the value's minor dimension."""
    numbers: NDArray[np.int32]
    """Hash table from what a context holds to its number plus 1."""
    memo: NDArray[np.int64]
    """``[.., 2]``: reader's context and index map as one number, and the operand's context. May forget."""
    value: NDArray[np.int32]
    """``[values, 2 + MAXIMUM_CONTEXTS]``, of the kernel at hand: members first, then reads."""
    place: NDArray[np.int64]
    """``[nodes]``: row of the node in ``value`` plus ``number[_BASE]``; less for what the kernel does not have."""
    number: NDArray[np.int64]
    """See ``_BASE`` and ``_KEPT``."""
    loops: int
    """Most loops a context can hold."""


def make_scratch(structure: Structure) -> Scratch:
    """Working space for any kernel of the graph."""
    nodes = structure.node.shape[1] - 1
    ranks = structure.node[at.LOOPS_AT, :nodes] - structure.node[at.EXTENTS_AT, :nodes]
    rank = max(int(ranks.max(initial=0)), 1)
    loops = 2 * rank + 8
    values = min(nodes, 4096) + 1
    contexts = 2 * values * MAXIMUM_CONTEXTS + 1
    memo_rows = min(1 << (8 * nodes).bit_length(), _MEMO_ROWS)
    return Scratch(
        np.empty((contexts, 1 + loops + rank), np.int64),  # written before they are read, and most never
        np.empty(contexts, np.float64),
        np.empty(contexts, np.bool_),
        np.zeros(1 << (2 * contexts).bit_length(), np.int32),
        np.zeros((memo_rows, 2), np.int64),
        np.zeros((values, FIRST + MAXIMUM_CONTEXTS), np.int32),
        np.zeros(nodes, np.int64),
        np.zeros(2, np.int64),
        loops,
    )


@inner
def enter(members: NDArray[np.int64], scratch: Scratch) -> None:
    """Begin a kernel: its members are the first values."""
    number, value, place = scratch.number, scratch.value, scratch.place
    number[_BASE] += np.int64(1) << 32
    most = value.shape[0] * MAXIMUM_CONTEXTS
    if number[_KEPT] + most >= scratch.evaluations.size:
        number[_KEPT] = 0
        scratch.numbers[:] = 0
        scratch.memo[:] = 0
    for local in range(members.size):
        place[members[local]] = number[_BASE] + local
    for local in range(min(members.size, value.shape[0])):
        value[local, COUNT] = 0
        value[local, NODE] = members[local]


@inner
def place_of(node: int, scratch: Scratch) -> int:
    """Place of the node among the values; negative if it is none of them."""
    return int(scratch.place[node] - scratch.number[_BASE])


@inner
def enter_read(node: int, values: int, scratch: Scratch) -> tuple[int, int]:
    """(place of the node among the values, number of values); a new read gets the next place."""
    place = place_of(node, scratch)
    if place >= 0:
        return place, values
    if values >= scratch.value.shape[0]:
        return -1, values + 1
    scratch.place[node] = scratch.number[_BASE] + values
    scratch.value[values, COUNT] = 0
    scratch.value[values, NODE] = node
    return values, values + 1


@inner
def memo_row(asked: int, rows: int) -> int:
    """Where ``memo`` of so many rows would have an answer."""
    return int((np.uint64(asked) * _ODD) >> np.uint64(32)) & (rows - 1)


@inner
def context_of_operand(
    tables: KernelTables, reader: int, slot: int, context: int, place: int, asked: int, scratch: Scratch
) -> int:
    """Context of the operand that ``reader`` reads at ``slot``, which has ``place``, from the reader's.

    It is kept, and remembered under ``asked``, unless the value has no room for it; then its number holds
    until the next is made. Apart from the loop that asks, which only looks up what is remembered: it would
    not be inlined there.
    """
    hoists = tables.constant[at.HOISTS] > 0
    _operand_context(tables.node, tables.edge, reader, slot, context, hoists, scratch)
    found = _number(hoists, scratch.value[place, COUNT] < MAXIMUM_CONTEXTS, scratch)
    if found < scratch.number[_KEPT]:
        row = memo_row(asked, scratch.memo.shape[0])
        scratch.memo[row, 0] = asked
        scratch.memo[row, 1] = found
    return found


@inner
def context_of_result(tables: KernelTables, result: int, scratch: Scratch) -> int:
    """Context of a value that leaves the kernel."""
    _result_context(tables.node, tables.edge, result, scratch)
    return _number(tables.constant[at.HOISTS] > 0, True, scratch)


@inner
def add_context(place: int, context: int, scratch: Scratch) -> bool:
    """Give the value the context unless it has it; False where there is no room for another."""
    value = scratch.value
    end = FIRST + value[place, COUNT]
    for row in range(FIRST, end):
        if value[place, row] == context:
            return True
    if end == FIRST + MAXIMUM_CONTEXTS:
        return False
    value[place, end] = context
    value[place, COUNT] += 1
    return True


@inner
def _number(hoists: bool, keep: bool, scratch: Scratch) -> int:
    """Number of the context being made; a new one is kept only if asked to, and else the next one's place."""
    context, numbers, loops = scratch.context, scratch.numbers, scratch.loops
    fresh = int(scratch.number[_KEPT])
    hashed = np.uint64(0)
    for cell in range(context.shape[1]):
        hashed = (hashed ^ np.uint64(context[fresh, cell])) * _ODD
        hashed ^= hashed >> np.uint64(32)
    slot = np.int64(hashed >> np.uint64(1)) & (numbers.size - 1)
    while numbers[slot]:  # ends: half of the table is empty
        if _equal(context, numbers[slot] - 1, fresh):
            return int(numbers[slot] - 1)
        slot = (slot + 1) & (numbers.size - 1)
    scratch.evaluations[fresh] = _evaluations(context, fresh, loops, hoists)
    scratch.strided[fresh] = _is_strided(context, fresh, loops)
    if keep:
        numbers[slot] = fresh + 1
        scratch.number[_KEPT] = fresh + 1
    return fresh


@inner
def _equal(context: NDArray[np.int64], one: int, other: int) -> bool:
    cell = 0
    while cell < context.shape[1] and context[one, cell] == context[other, cell]:  # ends: cell goes up
        cell += 1
    return bool(cell == context.shape[1])


@inner
def _result_context(node: NDArray[np.int32], edge: NDArray[np.int32], result: int, scratch: Scratch) -> None:
    """Make the kernel's own loops: one for each dimension of the result, major to minor."""
    start, end = node[at.EXTENTS_AT, result], node[at.LOOPS_AT, result]
    fresh = scratch.context[scratch.number[_KEPT]]
    fresh[:] = -1
    fresh[0] = end - start
    for dimension in range(end - start):
        fresh[1 + dimension] = np.int64(edge[start + dimension]) << _SHIFT
        fresh[1 + scratch.loops + dimension] = dimension


@inner
def _operand_context(
    node: NDArray[np.int32],
    edge: NDArray[np.int32],
    reader: int,
    slot: int,
    row: int,
    hoists: bool,
    scratch: Scratch,
) -> None:
    """Make the context of the operand at ``slot`` from the reader's in ``row``."""
    loops, context = scratch.loops, scratch.context
    fresh = context[scratch.number[_KEPT]]
    deepest = _innermost(context, row, loops)
    outer = deepest + 1 if hoists else context[row, 0]
    for cell in range(fresh.size):
        fresh[cell] = context[row, cell] if 1 <= cell <= outer else -1
    around = outer
    for added in range(node[at.LOOPS_AT, reader], node[at.OPERANDS_AT, reader + 1]):
        if around < loops:
            around += 1
            fresh[around] = (np.int64(edge[added]) << _SHIFT) + reader + 1
        else:
            fresh[loops] += (np.int64(edge[added]) - 1) * (fresh[loops] >> _SHIFT << _SHIFT)
    fresh[0] = around
    everywhere = around - 1 if around > outer else deepest
    operand, map_at = edge[slot], edge[slot + 1]
    rank = node[at.LOOPS_AT, operand] - node[at.EXTENTS_AT, operand]
    for dimension in range(rank):
        follows = edge[map_at + dimension]
        if follows >= 0:
            fresh[1 + loops + dimension] = context[row, 1 + loops + follows]
        elif follows == at.ALL:
            fresh[1 + loops + dimension] = everywhere
        elif follows <= at.ADDED:
            fresh[1 + loops + dimension] = min(outer + at.ADDED - follows, around - 1)


@inner
def _innermost(context: NDArray[np.int64], row: int, loops: int) -> int:
    """The innermost loop that any dimension follows, -1 for none."""
    found = -1
    for cell in range(1 + loops, context.shape[1]):
        found = max(found, context[row, cell])
    return found


@inner
def _evaluations(context: NDArray[np.int64], row: int, loops: int, hoists: bool) -> float:
    """How often the value is computed."""
    innermost = _innermost(context, row, loops)
    if innermost < 0:
        return 1.0
    around = innermost + 1 if hoists else context[row, 0]
    product = 1.0
    for loop in range(around):
        product *= context[row, 1 + loop] >> _SHIFT
    return product


@inner
def _is_strided(context: NDArray[np.int64], row: int, loops: int) -> bool:
    """Whether the innermost loop does not walk along the array's minor dimension."""
    minor = -1
    for cell in range(context.shape[1] - 1, loops, -1):
        minor = context[row, cell]
        if minor >= 0:
            break
    return 0 <= minor < _innermost(context, row, loops)
