"""How much work a fused kernel does: the loop nests it emits, evaluated backwards from its results.

A value inside a kernel is computed once for every index it is needed at, not once per element: what
a transpose reads is computed again if something else reads it untransposed, and a reduction in the
middle is computed again for every element that uses it, unless the compiler can move it out of the
inner loops (XLA:CPU does: measured, a row sum divided into its row costs nothing extra, a column sum
costs n times as much). ``contexts`` keeps the sets of indices that each value is needed at.

Compiled by numba, callable from Python and from compiled code: the search asks for tens of
thousands of kernels a second.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.estimator import kernel_tables as at
from disco_hlo.estimator.contexts import (
    COUNT,
    FIRST,
    NODE,
    Scratch,
    add_context,
    context_of_operand,
    context_of_result,
    enter,
    enter_read,
    memo_row,
    place_of,
)
from disco_hlo.estimator.kernel_tables import KernelTables
from disco_hlo.hlo.cost_model import FlatKernels


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
        written += tables.value[at.ELEMENTS, result] * tables.value[at.ITEM_BYTES, result]
    if tiled or members.size >= scratch.value.shape[0]:  # beyond the working space: count every value once
        read, work = _tiled(tables, members, scratch)
        return written + read, work, 0.0
    values, work = nested(tables, members, results, scratch)
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
            add_context(place, context_of_result(tables, result, scratch), scratch)
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
