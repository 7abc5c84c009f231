"""Whether the rules of ``core.legality`` let a unit stand as it is, and what is remembered of that.

To the rules a kernel is what a unit owns and duplicates, with the bitcasts through which that reads. Kernels of XLA's
own stand whatever the rules say.
"""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.compiled import inner
from disco_hlo.core.legality import kernel_refusal, results_refusal
from disco_hlo.core.reasons import LEGAL, fresh_stamp
from disco_hlo.core.rows import BITCAST, LIMITS
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import MAXIMUM_MEMBERS, VERDICTS
from disco_hlo.search.arrays.digest import special_slot
from disco_hlo.search.arrays.views import GraphView, ScratchView, StateView
from disco_hlo.search.rules.neighbours import gather_members, sort_runs

# Verdicts of the search's own, beside ``LEGAL`` and the other reasons of ``core.reasons``.
UNJUDGED: Final = -1
TOO_MANY_MEMBERS: Final = -2
STAYS_ALONE: Final = -3
"""A member is none of the ops that the search fuses."""
OTHER_RESULTS: Final = -4

LARGE_KERNELS: Final = LIMITS
"""Place in ``Step.limits``: how many kernels in ``Step.special`` own more than ``MAXIMUM_MEMBERS``; how many each owns,
ascending, follows."""


@inner
def most_owned(g: GraphView) -> Any:
    """Most ops that any kernel may own, those included that stand as they are whatever the rules say."""
    count = g.limits[LARGE_KERNELS]
    return g.limits[LARGE_KERNELS + count] if count else MAXIMUM_MEMBERS


@inner
def may_own(g: GraphView, owned: int) -> Any:
    """Whether a kernel may own so many ops, as far as their number goes."""
    if owned <= MAXIMUM_MEMBERS:
        return True
    for i in range(g.limits[LARGE_KERNELS]):
        if g.limits[LARGE_KERNELS + 1 + i] == owned:
            return True
    return False


@inner
def unit_refusal(g: GraphView, s: StateView, w: ScratchView, unit: int) -> Any:
    """Why a unit may not stand as it is, ``LEGAL`` where it may. Single nodes always may.

    A search proposes the same kernels again and again, so verdicts are remembered.
    """
    if s.count[unit] == 1 and s.copies[unit] == -1:
        return LEGAL
    computed, returned = s.computed[unit], s.returned[unit]
    verdict = known_verdict(w, computed + returned)
    if verdict != UNJUDGED:
        return verdict
    owned, count = gather_members(s, unit, w.members)
    results = _gather_results(s, w, owned)
    return judge(g, w, computed, returned, count, results)


@inner
def known_verdict(w: ScratchView, digest: int) -> Any:
    """What was found of the kernel that computes and returns what hashes to this; ``UNJUDGED``: nothing."""
    place = _place(digest)
    return w.verdict[place + 1] if w.verdict[place] == digest else UNJUDGED


@inner
def judge(g: GraphView, w: ScratchView, computed: int, returned: int, count: int, results: int) -> Any:
    """Why a kernel may not stand, ``LEGAL`` where it may; remembered.

    Args:
        computed: hash of what it computes; ``returned``: of what it returns.
        count: how many members stand in row ``members``.
        results: how many of them, ascending, stand in row ``results``.
    """
    place = _place(computed + returned)
    w.verdict[place] = computed + returned
    w.verdict[place + 1] = _refusal(g, w, computed, returned, count, results)
    return w.verdict[place + 1]


@inner
def _place(digest: int) -> Any:
    return 2 * ((digest ^ (digest >> 17)) & (VERDICTS - 1))


@inner
def _gather_results(s: StateView, w: ScratchView, owned: int) -> Any:
    """Row ``results``: those of the first members, which a unit owns, that leave it. Returns how many they are."""
    results = 0
    for i in range(owned):
        if s.leaves[w.members[i]]:
            w.results[results] = w.members[i]
            results += 1
    return results


@inner
def _refusal(g: GraphView, w: ScratchView, computed: int, returned: int, count: int, results: int) -> Any:
    """The verdict on the kernel whose members stand in row ``members``, its results in row ``results``.

    What most kernels fail by comes first.
    """
    if g.special_mask:
        slot = special_slot(g, computed)
        if slot >= 0:
            if g.special[3 * slot + 1] == returned:
                return LEGAL
            if g.special[3 * slot + 2]:
                return OTHER_RESULTS
    if count > MAXIMUM_MEMBERS:
        return TOO_MANY_MEMBERS
    for i in range(count):
        if not g.flags[w.members[i]] & at.FUSIBLE:
            return STAYS_ALONE
    reason = results_refusal(g, w, results, False)
    if reason != LEGAL:
        return reason
    count, stamp = add_bitcasts(g, w, count)
    return kernel_refusal(g, w, count, results, stamp, False)


@inner
def add_bitcasts(g: GraphView, w: ScratchView, count: int) -> Any:
    """Add the bitcasts through which members read (``flat_graph``), sort and mark all ``inside``: (count, stamp)."""
    stamp = fresh_stamp(w)
    for i in range(count):
        w.inside[w.members[i]] = stamp
    total, read = count, 0
    while read < total:  # ends: a bitcast is added once
        x = w.members[read]
        read += 1
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            operand = g.edge[e]
            if g.flags[operand] & BITCAST and w.inside[operand] != stamp:
                w.inside[operand] = stamp
                w.members[total] = operand
                total += 1
    sort_runs(w.members, w.queue, total)
    return total, stamp
