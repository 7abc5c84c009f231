"""Kernels that may not stand, recognised before they are made.

Where a plan leaves little to be fused most proposals are refused, and making a kernel, judging it and taking it back
takes longer than all else. Some of what refuses it can be told from the units as they are: how many ops it would
compute, which of them it would certainly return, and on GPU whether a reduction would be left that no block of
threads does (``hlo.legality_gpu``). These conditions are necessary, not sufficient: what they let pass is made and
judged as ever, and a test makes what they refuse. Kernels of XLA's own stand whatever the rules say; one that would
be put together again is let pass.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.search import layout as at
from disco_hlo.search.board import MAXIMUM_MEMBERS, computes, fresh_stamp
from disco_hlo.search.digest import NOTHING, copy_share, owned_share, special_slot
from disco_hlo.search.legality import GPU_RULES

from disco_hlo.compiled import inner
from disco_hlo.hlo import gpu_facts as fact


@inner
def never_joined(g: Any, s: Any, w: Any, a: Any, b: Any) -> Any:
    """Whether two units would be a kernel that may not stand; ``b`` comes first in the order."""
    count, computed, blocks = _together(g, s, w, a, b)
    if g.special_mask and special_slot(g, computed) >= 0:
        return False
    if count > MAXIMUM_MEMBERS:
        return True
    if not g.limits[GPU_RULES]:
        return False
    results = 0
    x = a
    while x != -1:
        if s.leaves[x]:
            w.results[results] = x
            results += 1
        x = s.next[x]
    x = b
    while x != -1:
        if s.leaves[x]:
            if not _is_read_by_these_alone(g, s, a, b, x):
                w.results[results] = x
                results += 1
            elif g.flags[x] & at.BLOCK_ALONE:
                return True
        x = s.next[x]
    return _results_clash(g, w, results, blocks)


@inner
def never_recomputed(g: Any, s: Any, w: Any, unit: Any, members: Any, added: Any) -> Any:
    """Whether a unit that computes so many ``members`` may not recompute the ``added`` nodes in row ``needed``."""
    computed, hidden = s.computed[unit], False
    for i in range(added):
        computed += copy_share(w.needed[i])
        hidden = hidden or g.flags[w.needed[i]] & at.BLOCK_ALONE != 0
    if members + added <= MAXIMUM_MEMBERS and not hidden:
        return False
    return not g.special_mask or special_slot(g, computed) < 0


@inner
def never_without(g: Any, s: Any, w: Any, unit: Any, node: Any) -> Any:
    """Whether what is left of a unit without a node that it owns may not stand."""
    if g.special_mask and special_slot(g, s.computed[unit] - owned_share(node)) >= 0:
        return False
    stamp = fresh_stamp(w)
    for e in range(g.sources_at[node], g.sources_at[node + 1]):
        w.mark[g.edge[e]] = stamp
    count, blocks, drops = s.count[unit] - 1, False, False
    cell = s.copies[unit]
    while cell != -1:
        blocks = blocks or _may_be_block(g, s.cell_node[cell])
        drops = drops or w.mark[s.cell_node[cell]] == stamp  # perhaps for this node alone it is recomputed
        count += 1
        cell = s.next_of_unit[cell]
    if count > MAXIMUM_MEMBERS and not drops:
        return True
    if not g.limits[GPU_RULES]:
        return False
    results = 0
    x = unit
    while x != -1:
        if x != node:
            blocks = blocks or _may_be_block(g, x)
            if s.leaves[x] or w.mark[x] == stamp:
                w.results[results] = x
                results += 1
        x = s.next[x]
    return _results_clash(g, w, results, blocks)


@inner
def _together(g: Any, s: Any, w: Any, a: Any, b: Any) -> Any:
    """Of two units as one: how many nodes it computes, the hash of them, whether a block may do one of them."""
    stamp = fresh_stamp(w)
    computed, blocks = s.computed[a] + s.computed[b] - NOTHING, False
    count = s.count[a] + s.count[b]
    for unit, other in ((a, b), (b, a)):
        x = unit
        while x != -1:
            blocks = blocks or _may_be_block(g, x)
            x = s.next[x]
        cell = s.copies[unit]
        while cell != -1:
            x = s.cell_node[cell]
            blocks = blocks or _may_be_block(g, x)
            if s.owner[x] == other or w.inside[x] == stamp:
                computed -= copy_share(x)
            else:
                w.inside[x] = stamp
                count += 1
            cell = s.next_of_unit[cell]
    return count, computed, blocks


@inner
def _may_be_block(g: Any, x: Any) -> Any:
    """Whether a block of threads does this op together wherever it decides how a kernel is made."""
    return g.reduction[x] >= 0 or g.transpose[x] >= 0


@inner
def _is_read_by_these_alone(g: Any, s: Any, a: Any, b: Any, x: Any) -> Any:
    """Whether nobody reads a node but two units."""
    if g.flags[x] & at.RETURNED:
        return False
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        unit, cell = s.owner[g.edge[e]], s.copiers[g.edge[e]]
        while True:
            if unit != a and unit != b and not computes(s, unit, x):
                return False
            if cell == -1:
                break
            unit = s.cell_unit[cell]
            cell = s.next_of_node[cell]
    return True


@inner
def _results_clash(g: Any, w: Any, results: Any, blocks: Any) -> Any:
    """Whether no kernel returns all of row ``results``: not in one loop, nor beside the first reduction.

    Args:
        blocks: whether any member may be done by a block; where none is, one loop makes all results.
    """
    first = -1
    for i in range(results):
        x = w.results[i]
        if g.reduction[x] >= 0 and (first == -1 or x < first):
            first = x
    if first == -1 and blocks:
        return False  # what is behind the results decides
    for i in range(results):
        x = w.results[i]
        if first == -1:
            if g.loop[x] != g.loop[w.results[0]]:
                return True
        elif g.reduction[x] >= 0:
            if g.reduction[x] != g.reduction[first]:
                return True
        elif not g.gpu_flags[x] & fact.CHAIN and g.loop[x] != g.operand_loop[first]:
            return True  # a chain may begin with a reduction of its own
    return False
