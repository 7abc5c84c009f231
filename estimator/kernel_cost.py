"""How much work a fused kernel does: the loop nests it emits, evaluated backwards from its results.

A value inside a kernel is computed once for every index it is needed at, not once per element: what
a transpose reads is computed again if something else reads it untransposed, and a reduction in the
middle is computed again for every element that uses it, unless the compiler can move it out of the
inner loops (XLA:CPU does: measured, a row sum divided into its row costs nothing extra, a column sum
costs n times as much).

A *context* is one set of indices that a value is needed at: the loops around the value and, for each of its
dimensions, the innermost loop it follows. Kernels of one step have few different contexts, so each is kept once, under
a number, and what an operand's is follows from the reader's by looking it up.

Compiled by numba, callable from Python and from compiled code: the search asks for tens of
thousands of kernels a second.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.estimator import kernel_tables as at
from disco_hlo.estimator.kernel_tables import KernelTables, Structure
from disco_hlo.hlo.cost_model import FlatKernels

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


@inner
def kernel_ns(
    tables: KernelTables,
    members: NDArray[np.int64],
    results: NDArray[np.int64],
    tiled: bool,
    scratch: Scratch,
) -> float:
    """Time of the kernel that computes ``members`` and writes ``results``, in ns; launch not included.

    ``members`` are ascending node ids, duplicates included; ``results`` those whose value leaves.
    Bitcasts between members may be left out. ``tiled`` kernels (Triton) keep whole tiles and compute
    every value once.
    """
    moved, work, strided = kernel_work(tables, members, results, tiled, scratch)
    work += strided * tables.constant[at.STRIDED_NS]
    return float(max(streaming_ns(tables.curve, tables.constant, moved), work))


@compiled
def kernels_ns(
    tables: KernelTables, kernels: FlatKernels, scratch: Scratch, times: NDArray[np.float64]
) -> None:
    """:func:`kernel_ns` of many kernels."""
    for i in range(times.size):
        inside = kernels.members[kernels.member_at[i] : kernels.member_at[i + 1]]
        returned = kernels.results[kernels.result_at[i] : kernels.result_at[i + 1]]
        times[i] = kernel_ns(tables, inside, returned, kernels.tiled[i], scratch)


@compiled
def kernel_work(
    tables: KernelTables,
    members: NDArray[np.int64],
    results: NDArray[np.int64],
    tiled: bool,
    scratch: Scratch,
) -> tuple[float, float, float]:
    """(bytes moved, ns of element evaluations, elements read across the memory's grain) of a kernel."""
    written = 0.0
    for result in results:
        whole = written_for(tables, members, results, result)
        written += tables.value[at.ELEMENTS, whole] * tables.value[at.ITEM_BYTES, whole]
    if tiled or members.size >= scratch.value.shape[0]:  # beyond the working space: count every value once
        read, work = _tiled(tables, members, scratch)
        return written + read, work, 0.0
    values, work = nested(tables, members, results, scratch)
    read, strided = _reads(tables, members.size, values, scratch)
    return written + read, work, strided


@inner
def written_for(
    tables: KernelTables, members: NDArray[np.int64], results: NDArray[np.int64], result: int
) -> int:
    """The node whose elements are written to return ``result``: of an update in place the update alone.

    XLA writes in place where all results are updates, of arrays that the kernel does not compute; where one is not,
    it writes every element of all.
    """
    for one in results:
        if tables.node[at.WRITTEN, one] == one:
            return int(result)
        updated = tables.edge[tables.node[at.OPERANDS_AT, one]]
        for member in members:
            if member == updated:
                return int(result)
    return int(tables.node[at.WRITTEN, result])


@compiled
def streaming_ns(curve: NDArray[np.float64], constant: NDArray[np.float64], moved_bytes: float) -> float:
    """Time to move so many bytes: the measured curve, beyond it at the rate of its last point."""
    points = curve.shape[1]
    if points == 0:
        return float(max(constant[at.KERNEL_NS], moved_bytes * constant[at.NS_PER_BYTE]))
    if moved_bytes >= curve[0, points - 1]:
        return float(curve[1, points - 1] * moved_bytes / curve[0, points - 1])
    if moved_bytes <= curve[0, 0]:
        return float(max(constant[at.KERNEL_NS], curve[1, 0] * moved_bytes / curve[0, 0]))
    low = 0
    while curve[0, low + 1] < moved_bytes:  # ends: the last point is no smaller
        low += 1
    share = (moved_bytes - curve[0, low]) / (curve[0, low + 1] - curve[0, low])
    return float(curve[1, low] + share * (curve[1, low + 1] - curve[1, low]))


@inner
def _tiled(tables: KernelTables, members: NDArray[np.int64], scratch: Scratch) -> tuple[float, float]:
    """(bytes read, ns of evaluations) where every value is computed and read once."""
    node, edge, value = tables.node, tables.edge, tables.value
    work = 0.0
    read = 0.0
    values = members.size
    enter(members, scratch)
    for member in members:
        work += value[at.ELEMENTS, member] * value[at.ELEMENT_NS, member]
        for slot in range(node[at.OPERANDS_AT, member], node[at.EXTENTS_AT, member], 2):
            before = values
            _, values = enter_read(edge[slot], values, scratch)
            if values > before:
                read += value[at.ELEMENTS, edge[slot]] * value[at.ITEM_BYTES, edge[slot]]
    return read, work


@inner
def nested(
    tables: KernelTables, members: NDArray[np.int64], results: NDArray[np.int64], scratch: Scratch
) -> tuple[int, float]:
    """Contexts of all values into ``scratch``; (number of values, ns of evaluations)."""
    node, edge, element_ns = tables.node, tables.edge, tables.value[at.ELEMENT_NS]
    value, evaluations, memo = scratch.value, scratch.evaluations, scratch.memo
    enter(members, scratch)
    for result in results:
        place = place_of(result, scratch)
        if place >= 0:
            whole = written_for(tables, members, results, result)
            add_context(place, context_of_result(tables, whole, scratch), scratch)
    values = members.size
    work = 0.0
    for local in range(members.size - 1, -1, -1):
        member = members[local]
        # Without loops of its own a reader matters by the index map alone, which many share.
        adds_loops = node[at.LOOPS_AT, member] < node[at.OPERANDS_AT, member + 1]
        for row in range(FIRST, FIRST + value[local, COUNT]):
            context = value[local, row]
            work += evaluations[context] * element_ns[member]
            unfollowed = 0.0
            for slot in range(node[at.OPERANDS_AT, member], node[at.EXTENTS_AT, member], 2):
                place, values = enter_read(edge[slot], values, scratch)
                if place < 0:
                    continue
                asked = (int(context + 1) << 32) + (slot if adds_loops else edge[slot + 1])
                remembered = memo_row(asked, memo.shape[0])
                found = memo[remembered, 1]
                if memo[remembered, 0] != asked:
                    found = context_of_operand(tables, member, slot, context, place, asked, scratch)
                if not add_context(place, found, scratch):
                    unfollowed += evaluations[found] * element_ns[edge[slot]]
            work += unfollowed
    return values, work


@inner
def _reads(tables: KernelTables, count: int, values: int, scratch: Scratch) -> tuple[float, float]:
    """(bytes read, elements read across the grain); an array's bytes count once however often it is read."""
    value = scratch.value
    read = 0.0
    strided = 0.0
    for local in range(count, min(values, value.shape[0])):
        operand = value[local, NODE]
        wanted = 0.0
        for row in range(FIRST, FIRST + value[local, COUNT]):
            evaluations = scratch.evaluations[value[local, row]]
            wanted += evaluations
            if scratch.strided[value[local, row]]:
                strided += evaluations
        read += min(tables.value[at.ELEMENTS, operand], wanted) * tables.value[at.ITEM_BYTES, operand]
    return read, strided


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
def context_of_result(tables: KernelTables, whole: int, scratch: Scratch) -> int:
    """Context of a value that leaves the kernel, for which the elements of ``whole`` are written."""
    start, end = tables.node[at.EXTENTS_AT, whole], tables.node[at.LOOPS_AT, whole]
    fresh = scratch.context[scratch.number[_KEPT]]
    fresh[:] = -1
    # The kernel's own loops: one for each dimension of what is written, major to minor.
    fresh[0] = end - start
    for dimension in range(end - start):
        fresh[1 + dimension] = np.int64(tables.edge[start + dimension]) << _SHIFT
        fresh[1 + scratch.loops + dimension] = dimension
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
