"""The rules of ``hlo.legality`` for groups under change, in compiled code.

The rules themselves, their reasons and their sources are there; a property test holds the two
equal. Here a group is what a unit owns and duplicates together with the bitcasts that belong to it.
"""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.compiled import inner
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import MAXIMUM_MEMBERS, VERDICTS, fresh_stamp
from disco_hlo.search.arrays.digest import special_slot
from disco_hlo.search.rules.legality_gpu import is_gpu_kernel
from disco_hlo.search.rules.neighbours import gather_members, sort_runs

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
GPU_RULE: Final = 11
OTHER_RESULTS: Final = 12
TOO_MANY_EVALUATIONS: Final = 13
UNJUDGED: Final = -1

# Places in Step.limits.
OPERANDS_LIMIT: Final = 0
EMISSIONS_LIMIT: Final = 1
REDUCTIONS_LIMIT: Final = 2
GPU_RULES: Final = 3
"""1 where XLA:GPU's rules hold, 0 where XLA:CPU's do."""
REPETITION_LIMIT: Final = 4
FEW_READS_LIMIT: Final = 5
MOST_WORK_LIMIT: Final = 6
LARGE_KERNELS: Final = 7
"""How many kernels in ``Step.special`` own more than ``MAXIMUM_MEMBERS``; how many each owns, ascending, follows."""


@inner
def most_owned(g: Any) -> Any:
    """Most ops that any kernel may own, those included that stand as they are whatever the rules say."""
    count = g.limits[LARGE_KERNELS]
    return g.limits[LARGE_KERNELS + count] if count else MAXIMUM_MEMBERS


@inner
def may_own(g: Any, owned: Any) -> Any:
    """Whether a kernel may own so many ops, as far as their number goes."""
    if owned <= MAXIMUM_MEMBERS:
        return True
    for i in range(g.limits[LARGE_KERNELS]):
        if g.limits[LARGE_KERNELS + 1 + i] == owned:
            return True
    return False


@inner
def unit_refusal(g: Any, s: Any, w: Any, unit: Any) -> Any:
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
def known_verdict(w: Any, digest: Any) -> Any:
    """What was found of the kernel that computes and returns what hashes to this; ``UNJUDGED``: nothing."""
    place = _place(digest)
    return w.verdict[place + 1] if w.verdict[place] == digest else UNJUDGED


@inner
def judge(g: Any, w: Any, computed: Any, returned: Any, count: Any, results: Any) -> Any:
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
def _place(digest: Any) -> Any:
    return 2 * ((digest ^ (digest >> 17)) & (VERDICTS - 1))


@inner
def _gather_results(s: Any, w: Any, owned: Any) -> Any:
    """Row ``results``: those of the first members, which a unit owns, that leave it. Returns how many they are."""
    results = 0
    for i in range(owned):
        if s.leaves[w.members[i]]:
            w.results[results] = w.members[i]
            results += 1
    return results


@inner
def _refusal(g: Any, w: Any, computed: Any, returned: Any, count: Any, results: Any) -> Any:
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
            return NOT_FUSIBLE
    if results == 0:
        return NO_RESULT
    by_gpu = g.limits[GPU_RULES] != 0
    if results > 1 and not by_gpu and not _results_agree(g, w, results):
        return RESULT_SHAPES
    count, stamp = add_bitcasts(g, w, count)
    if by_gpu and not is_gpu_kernel(g, w, count, results, stamp):
        return GPU_RULE
    refusal = _size_refusal(g, w, count, stamp, results)
    if refusal != LEGAL:
        return refusal
    _mark_results(w, count, results)
    if not _all_are_used(g, w, count, stamp):
        return DEAD_MEMBER
    refusal = _emission_refusal(g, w, count, stamp)
    if refusal != LEGAL:
        return refusal
    _mark_results(w, count, results)
    if _evaluates_too_much(g, w, count, stamp):
        return TOO_MANY_EVALUATIONS
    if by_gpu:
        return LEGAL
    return _inplace_refusal(g, w, count)


@inner
def _mark_results(w: Any, count: Any, results: Any) -> None:
    """Row ``value`` of each member: 1 where it stands in row ``results``, else 0."""
    for i in range(count):
        w.value[w.members[i]] = 0
    for i in range(results):
        w.value[w.results[i]] = 1


@inner
def _all_are_used(g: Any, w: Any, count: Any, stamp: Any) -> Any:
    """Whether every member but bitcasts leaves (row ``value``) or is read by another one."""
    for i in range(count):
        x = w.members[i]
        used, e = w.value[x] != 0 or g.flags[x] & at.BITCAST != 0, g.readers_at[x]
        while not used and e < g.readers_at[x + 1]:  # ends: e goes up
            used = w.inside[g.edge[e]] == stamp
            e += 1
        if not used:
            return False
    return True


@inner
def _results_agree(g: Any, w: Any, results: Any) -> Any:
    for i in range(results):
        x = w.results[i]
        if g.shape[x] != g.shape[w.results[0]] or g.flags[x] & at.SINGLE_RESULT:
            return False
    return True


@inner
def add_bitcasts(g: Any, w: Any, count: Any) -> Any:
    """Add bitcasts to the members, sort and mark them ``inside``: (count, stamp).

    A group takes along the bitcasts between its members, and those through which it reads an
    all-reduce: a kernel that sees the gradient itself can cut it out of its bucket.
    """
    stamp = fresh_stamp(w)
    for i in range(count):
        w.inside[w.members[i]] = stamp
    total = count
    for i in range(count):
        x = w.members[i]
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            operand = g.edge[e]
            if g.flags[operand] & at.BITCAST and w.inside[operand] != stamp:
                total = _add_chain(g, w, stamp, operand, total)
    sort_runs(w.members, w.queue, total)
    return total, stamp


@inner
def _add_chain(g: Any, w: Any, stamp: Any, bitcast: Any, total: Any) -> Any:
    start = bitcast
    while g.flags[start] & at.BITCAST and w.inside[start] != stamp:  # ends: operands come before
        start = g.edge[g.operands_at[start]]
    if w.inside[start] != stamp and not g.flags[start] & at.ALL_REDUCE:
        return total
    x = bitcast
    while x != start:  # ends: start lies behind these bitcasts
        w.inside[x] = stamp
        w.members[total] = x
        total += 1
        x = g.edge[g.operands_at[x]]
    return total


@inner
def _size_refusal(g: Any, w: Any, count: Any, stamp: Any, results: Any) -> Any:
    seen = fresh_stamp(w)
    reads = reductions = 0
    for i in range(count):
        x = w.members[i]
        if g.flags[x] & at.REDUCE:
            reductions += 1
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            operand = g.edge[e]
            if w.inside[operand] == stamp or w.mark[operand] == seen or g.flags[operand] & at.CLONED:
                continue
            w.mark[operand] = seen
            reads += 1
    if reads + results > g.limits[OPERANDS_LIMIT]:
        return TOO_MANY_OPERANDS
    if reductions > g.limits[REDUCTIONS_LIMIT]:
        return TOO_MANY_REDUCTIONS
    return LEGAL


@inner
def _emission_refusal(g: Any, w: Any, count: Any, stamp: Any) -> Any:
    """Row ``value`` comes to hold how often the readers so far want each member written; the results are in it."""
    for i in range(count - 1, -1, -1):
        x = w.members[i]
        written = max(1, w.value[x])
        if written > g.limits[EMISSIONS_LIMIT]:
            return TOO_MANY_EMISSIONS
        elementwise = g.flags[x] & at.ELEMENTWISE
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            operand = g.edge[e]
            if w.inside[operand] != stamp:
                continue
            if elementwise:
                w.value[operand] = max(w.value[operand], written)
            else:
                # Reading an operand twice adds twice: once for each time it is listed.
                w.value[operand] += written
    return LEGAL


@inner
def _evaluates_too_much(g: Any, w: Any, count: Any, stamp: Any) -> Any:
    """Whether the kernel does too much of the same again and again; row ``value`` tells its results."""
    alone = 0
    for i in range(count):
        x = w.members[i]
        alone = min(g.limits[MOST_WORK_LIMIT], alone + g.element_count[x] * max(1, g.reads_per_element[x]))
        w.evaluated[x] = g.element_count[x] if w.value[x] else 0
    most, total = max(g.limits[FEW_READS_LIMIT], g.limits[REPETITION_LIMIT] * alone), 0
    for i in range(count - 1, -1, -1):
        x = w.members[i]
        own, reads, elementwise = w.evaluated[x], g.reads_per_element[x], g.flags[x] & at.ELEMENTWISE
        if own > most // max(1, reads):
            return True
        total += own * max(1, reads)
        if total > most:
            return True
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            operand = g.edge[e]
            if w.inside[operand] != stamp:
                continue
            share = max(1, g.element_count[x] // max(1, g.element_count[operand]))
            added = own * reads if reads else own // share
            before = w.evaluated[operand]
            w.evaluated[operand] = max(before, added) if elementwise else before + added
    return False


@inner
def _inplace_refusal(g: Any, w: Any, count: Any) -> Any:
    for i in range(count):
        writer = w.members[i]
        for e in range(g.buffers_at[writer], g.buffers_at[writer + 1]):
            if not _reads_only_its_element(g, w, count, g.edge[e], writer):
                return SHARED_BUFFER
    return LEGAL


@inner
def _reads_only_its_element(g: Any, w: Any, count: Any, name: Any, writer: Any) -> Any:
    touched = fresh_stamp(w)
    w.mark[name] = touched
    for i in range(count):
        x = w.members[i]
        reads = False
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            # A bitcast of the value is another name of it, which is looked at for itself.
            is_name = g.flags[x] & at.BITCAST and g.edge[e] == name
            reads = reads or (w.mark[g.edge[e]] == touched and not is_name)
        if not reads:
            continue
        w.mark[x] = touched
        if not g.flags[x] & at.ELEMENTWISE or g.geometry[x] != g.geometry[writer]:
            return False
    return True
