"""How much work a fused kernel does: the loop nests it emits, evaluated backwards from its results.

A value inside a kernel is computed once for every index it is needed at, not once per element: what
a transpose reads is computed again if something else reads it untransposed, and a reduction in the
middle is computed again for every element that uses it, unless the compiler can move it out of the
inner loops (XLA:CPU does: measured, a row sum divided into its row costs nothing extra, a column sum
costs n times as much). A *context* is one such set of indices: the loops around the value and, for
each of its dimensions, the innermost loop it follows.

Compiled by numba, callable from Python and from compiled code: the search asks for tens of
thousands of kernels a second.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from disco_hlo.estimator import kernel_tables as at
from disco_hlo.estimator.kernel_tables import KernelTables, Structure
from numpy.typing import NDArray

from disco_hlo.compiled import compiled

MAXIMUM_CONTEXTS = 8
"""Contexts followed per value; XLA's code duplication guard allows no more. Beyond, work counts, but
not what it reads."""


_SHIFT = 31


class Scratch(NamedTuple):
    """Working space of :func:`kernel_ns`; contents mean nothing between calls."""

    context: NDArray[np.int64]
    """``[values * MAXIMUM_CONTEXTS, width]``: number of loops, the loops, the loop of each dimension.

    A loop is its extent, shifted, and the node that adds it plus 1 (0: the kernel's own loops): the
    loop of a reduction and the kernel's are two, however alike.
    """
    value: NDArray[np.int64]
    """``[2, values]``: contexts of each value, and the node it is (members first, then reads)."""
    fresh: NDArray[np.int64]
    """``[1, width]``: a context being made."""
    loops: int
    """Most loops a context can hold."""


def make_scratch(structure: Structure) -> Scratch:
    """Working space for any kernel of the graph."""
    nodes = structure.node.shape[1] - 1
    ranks = structure.node[at.LOOPS_AT, :nodes] - structure.node[at.EXTENTS_AT, :nodes]
    rank = max(int(ranks.max(initial=0)), 1)
    loops = 2 * rank + 8
    width = 1 + loops + rank
    values = min(nodes, 4096) + 1
    return Scratch(
        np.zeros((values * MAXIMUM_CONTEXTS, width), np.int64),
        np.zeros((2, values), np.int64),
        np.zeros((1, width), np.int64),
        loops,
    )


@compiled
def kernel_ns(
    tables: KernelTables,
    members: NDArray[np.int32],
    results: NDArray[np.int32],
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
    tables: KernelTables,
    member_at: NDArray[np.int64],
    members: NDArray[np.int32],
    result_at: NDArray[np.int64],
    results: NDArray[np.int32],
    scratch: Scratch,
    times: NDArray[np.float64],
) -> None:
    """:func:`kernel_ns` of many kernels: number i computes ``members[member_at[i] : member_at[i + 1]]``."""
    for i in range(times.size):
        inside = members[member_at[i] : member_at[i + 1]]
        returned = results[result_at[i] : result_at[i + 1]]
        times[i] = kernel_ns(tables, inside, returned, False, scratch)


@compiled
def kernel_work(
    tables: KernelTables,
    members: NDArray[np.int32],
    results: NDArray[np.int32],
    tiled: bool,
    scratch: Scratch,
) -> tuple[float, float, float]:
    """(bytes moved, ns of element evaluations, elements read across the memory's grain) of a kernel."""
    written = 0.0
    for result in results:
        written += tables.value[at.ELEMENTS, result] * tables.value[at.ITEM_BYTES, result]
    if tiled or members.size >= scratch.value.shape[1]:  # beyond the working space: count every value once
        read, work = _tiled(tables, members, scratch)
        return written + read, work, 0.0
    values, work = _nested(tables, members, results, scratch)
    read, strided = _reads(tables, members.size, values, scratch)
    return written + read, work, strided


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
    while curve[0, low + 1] < moved_bytes:
        low += 1
    share = (moved_bytes - curve[0, low]) / (curve[0, low + 1] - curve[0, low])
    return float(curve[1, low] + share * (curve[1, low + 1] - curve[1, low]))


@compiled
def _tiled(tables: KernelTables, members: NDArray[np.int32], scratch: Scratch) -> tuple[float, float]:
    """(bytes read, ns of evaluations) where every value is computed and read once."""
    node, edge, value = tables.node, tables.edge, tables.value
    work = 0.0
    read = 0.0
    values = members.size
    for member in members:
        work += value[at.ELEMENTS, member] * value[at.ELEMENT_NS, member]
        for slot in range(node[at.OPERANDS_AT, member], node[at.EXTENTS_AT, member], 2):
            before = values
            _, values = _local(members, values, edge[slot], scratch)
            if values > before:
                read += value[at.ELEMENTS, edge[slot]] * value[at.ITEM_BYTES, edge[slot]]
    return read, work


@compiled
def _nested(
    tables: KernelTables, members: NDArray[np.int32], results: NDArray[np.int32], scratch: Scratch
) -> tuple[int, float]:
    """Contexts of all values into ``scratch``; (number of values, ns of evaluations)."""
    hoists = tables.constant[at.HOISTS] > 0
    values = members.size
    for local in range(values):
        scratch.value[0, local] = 0
        scratch.value[1, local] = members[local]
    for result in results:
        place = _place(members, result)
        if place >= 0:
            _result_context(tables.node, tables.edge, result, scratch)
            _add_context(place, scratch)
    work = 0.0
    for local in range(members.size - 1, -1, -1):
        first = local * MAXIMUM_CONTEXTS
        for row in range(first, first + scratch.value[0, local]):
            evaluations = _evaluations(scratch.context, row, scratch.loops, hoists)
            work += evaluations * tables.value[at.ELEMENT_NS, members[local]]
            values, unfollowed = _operands(tables, members, values, local, row, scratch)
            work += unfollowed
    return values, work


@compiled
def _operands(
    tables: KernelTables, members: NDArray[np.int32], values: int, local: int, row: int, scratch: Scratch
) -> tuple[int, float]:
    """Contexts of what a member reads in one of its own; (number of values, ns of what found no room)."""
    node, edge = tables.node, tables.edge
    hoists = tables.constant[at.HOISTS] > 0
    member = members[local]
    unfollowed = 0.0
    for slot in range(node[at.OPERANDS_AT, member], node[at.EXTENTS_AT, member], 2):
        place, values = _local(members, values, edge[slot], scratch)
        if place < 0:
            continue
        _operand_context(node, edge, member, slot, row, hoists, scratch)
        if not _add_context(place, scratch):
            again = _evaluations(scratch.fresh, 0, scratch.loops, hoists)
            unfollowed += again * tables.value[at.ELEMENT_NS, edge[slot]]
    return values, unfollowed


@compiled
def _reads(tables: KernelTables, count: int, values: int, scratch: Scratch) -> tuple[float, float]:
    """(bytes read, elements read across the grain); an array's bytes count once however often it is read."""
    hoists = tables.constant[at.HOISTS] > 0
    read = 0.0
    strided = 0.0
    for local in range(count, min(values, scratch.value.shape[1])):
        operand = scratch.value[1, local]
        rank = tables.node[at.LOOPS_AT, operand] - tables.node[at.EXTENTS_AT, operand]
        wanted = 0.0
        first = local * MAXIMUM_CONTEXTS
        for row in range(first, first + scratch.value[0, local]):
            evaluations = _evaluations(scratch.context, row, scratch.loops, hoists)
            wanted += evaluations
            if _is_strided(scratch.context, row, scratch.loops, rank):
                strided += evaluations
        read += min(tables.value[at.ELEMENTS, operand], wanted) * tables.value[at.ITEM_BYTES, operand]
    return read, strided


@compiled
def _place(members: NDArray[np.int32], wanted: int) -> int:
    """Position in the ascending members, -1 if not there."""
    low, high = 0, members.size
    while low < high:
        middle = (low + high) // 2
        if members[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < members.size and members[low] == wanted else -1


@compiled
def _local(members: NDArray[np.int32], values: int, wanted: int, scratch: Scratch) -> tuple[int, int]:
    """(place of the node among the values, number of values); a new read gets the next place."""
    place = _place(members, wanted)
    if place >= 0:
        return place, values
    for local in range(members.size, min(values, scratch.value.shape[1])):
        if scratch.value[1, local] == wanted:
            return local, values
    if values >= scratch.value.shape[1]:
        return -1, values + 1
    scratch.value[0, values] = 0
    scratch.value[1, values] = wanted
    return values, values + 1


@compiled
def _result_context(node: NDArray[np.int32], edge: NDArray[np.int32], result: int, scratch: Scratch) -> None:
    """The kernel's own loops: one for each dimension of the result, major to minor."""
    start, end = node[at.EXTENTS_AT, result], node[at.LOOPS_AT, result]
    fresh = scratch.fresh
    for cell in range(fresh.shape[1]):
        fresh[0, cell] = -1
    fresh[0, 0] = end - start
    for dimension in range(end - start):
        fresh[0, 1 + dimension] = np.int64(edge[start + dimension]) << _SHIFT
        fresh[0, 1 + scratch.loops + dimension] = dimension


@compiled
def _innermost(context: NDArray[np.int64], row: int, loops: int) -> int:
    """The innermost loop that any dimension follows, -1 for none."""
    found = -1
    for cell in range(1 + loops, context.shape[1]):
        found = max(found, context[row, cell])
    return found


@compiled
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


@compiled
def _operand_context(
    node: NDArray[np.int32],
    edge: NDArray[np.int32],
    reader: int,
    slot: int,
    row: int,
    hoists: bool,
    scratch: Scratch,
) -> None:
    """Context of the operand at ``slot``, from the reader's in ``row``: into ``scratch.fresh``."""
    loops, fresh, context = scratch.loops, scratch.fresh, scratch.context
    deepest = _innermost(context, row, loops)
    outer = deepest + 1 if hoists else context[row, 0]
    for cell in range(fresh.shape[1]):
        fresh[0, cell] = context[row, cell] if 1 <= cell <= outer else -1
    around = outer
    for added in range(node[at.LOOPS_AT, reader], node[at.OPERANDS_AT, reader + 1]):
        if around < loops:
            around += 1
            fresh[0, around] = (np.int64(edge[added]) << _SHIFT) + reader + 1
        else:
            fresh[0, loops] += (np.int64(edge[added]) - 1) * (fresh[0, loops] >> _SHIFT << _SHIFT)
    fresh[0, 0] = around
    everywhere = around - 1 if around > outer else deepest
    operand, map_at = edge[slot], edge[slot + 1]
    rank = node[at.LOOPS_AT, operand] - node[at.EXTENTS_AT, operand]
    for dimension in range(rank):
        follows = edge[map_at + dimension]
        if follows >= 0:
            fresh[0, 1 + loops + dimension] = context[row, 1 + loops + follows]
        elif follows == at.ALL:
            fresh[0, 1 + loops + dimension] = everywhere
        elif follows <= at.ADDED:
            fresh[0, 1 + loops + dimension] = min(outer + at.ADDED - follows, around - 1)


@compiled
def _add_context(place: int, scratch: Scratch) -> bool:
    """Give the value the fresh context unless it has it; False where there is no room for another."""
    fresh, context = scratch.fresh, scratch.context
    first = place * MAXIMUM_CONTEXTS
    known = scratch.value[0, place]
    for row in range(first, first + known):
        if _equal(context, row, fresh):
            return True
    if known == MAXIMUM_CONTEXTS:
        return False
    for cell in range(fresh.shape[1]):
        context[first + known, cell] = fresh[0, cell]
    scratch.value[0, place] = known + 1
    return True


@compiled
def _equal(context: NDArray[np.int64], row: int, fresh: NDArray[np.int64]) -> bool:
    cell = 0
    while cell < fresh.shape[1] and context[row, cell] == fresh[0, cell]:
        cell += 1
    return bool(cell == fresh.shape[1])


@compiled
def _is_strided(context: NDArray[np.int64], row: int, loops: int, rank: int) -> bool:
    """Whether the innermost loop does not walk along the array's minor dimension."""
    minor = -1
    for dimension in range(rank - 1, -1, -1):
        minor = context[row, 1 + loops + dimension]
        if minor >= 0:
            break
    return 0 <= minor < _innermost(context, row, loops)
