"""Proposals that would be refused, recognised before they are made.

Where a plan leaves little to be fused most proposals make a kernel that may not stand; making a kernel, judging it and
taking it back takes longer than all else. What two units would be together that recompute nothing can be told from the
units as they are: the kernel is looked up among the verdicts by its hash, or judged, before anything is written; making
it then finds the verdict. Of what a unit would be that recomputes more, only the number of ops is looked at, and
whether it would recompute an op that has to be returned (``core.legality_gpu``). Kernels of XLA's own stand whatever
the rules say.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import inner
from disco_hlo.core.legality import results_refusal
from disco_hlo.core.reasons import LEGAL
from disco_hlo.search import layout as at
from disco_hlo.search.kernels import UNJUDGED, judge, known_verdict
from disco_hlo.search.layout import GraphView, ScratchView, StateView
from disco_hlo.search.ordering import sort_runs
from disco_hlo.search.state import COPY, MAXIMUM_MEMBERS, NOTHING, RESULT, computes, share, special_slot


@inner
def never_joined(g: GraphView, s: StateView, w: ScratchView, a: int, b: int) -> Any:
    """Whether two units would be a kernel that may not stand; ``b`` comes first in the order."""
    if s.copies[a] != -1 or s.copies[b] != -1:
        return False
    count, computed = s.count[a] + s.count[b], s.computed[a] + s.computed[b] - NOTHING
    is_special = g.special_mask and special_slot(g, computed) >= 0
    if count > MAXIMUM_MEMBERS:
        return not is_special
    results, returned = _results_together(g, s, w, a, b)
    verdict = known_verdict(w, computed + returned)
    if verdict == UNJUDGED:
        if not is_special and results_refusal(g, w, results, False) != LEGAL:
            return True
        place = 0
        for unit in (a, b):
            x = unit
            while x != -1:  # ends with the list
                w.members[place] = x
                place += 1
                x = s.next[x]
        verdict = judge(g, w, computed, returned, count, results)
    return verdict != LEGAL


@inner
def never_recomputed(g: GraphView, s: StateView, w: ScratchView, unit: int, members: int, added: int) -> Any:
    """Whether a unit that computes so many ``members`` may not recompute the ``added`` nodes in row ``needed``."""
    computed, hidden = s.computed[unit], False
    for i in range(added):
        computed += share(w.needed[i], COPY)
        hidden = hidden or g.flags[w.needed[i]] & at.MUST_BE_RETURNED != 0
    if members + added <= MAXIMUM_MEMBERS and not hidden:
        return False
    return not g.special_mask or special_slot(g, computed) < 0


@inner
def _is_needed_elsewhere(g: GraphView, s: StateView, x: int, home: int, other: int) -> Any:
    """Whether a node is returned, or read outside of two units by one that does not compute it."""
    if g.flags[x] & at.RETURNED:
        return True
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        reader, cell = s.owner[g.edge[e]], s.copiers[g.edge[e]]
        while True:  # ends with the list
            if reader not in (home, other) and not computes(s, reader, x):
                return True
            if cell == -1:
                break
            reader = s.cell_unit[cell]
            cell = s.next_of_node[cell]
    return False


@inner
def _results_together(g: GraphView, s: StateView, w: ScratchView, a: int, b: int) -> Any:
    """Row ``results``: what two units would return as one, ascending. How many these are, and the hash of them."""
    results, returned = 0, s.returned[a] + s.returned[b]
    x = a
    while x != -1:  # ends with the list
        if s.leaves[x]:
            w.results[results] = x
            results += 1
        x = s.next[x]
    x = b
    while x != -1:  # ends with the list
        if s.leaves[x]:
            if _is_needed_elsewhere(g, s, x, a, b):
                w.results[results] = x
                results += 1
            else:
                returned -= share(x, RESULT)
        x = s.next[x]
    sort_runs(w.results, w.queue, results)
    return results, returned
