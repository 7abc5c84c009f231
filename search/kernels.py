"""What moves change kernels through: which values leave a unit, whether it may stand, and who owns what is computed.

**Results.** Whether a value leaves depends on who owns it, who recomputes it, and the same of its readers. So what
changes hands settles which values must be looked at again: itself, and what it reads. Where two units become one that
is what the smaller of them computes and reads. All changes of units that a move makes go through here.

**Legality.** To the rules of ``core.legality`` a kernel is what a unit owns and duplicates, with the bitcasts through
which that reads. Kernels of XLA's own stand whatever the rules say. Verdicts are remembered.

**Orphans.** Where every reader of an op recomputes it, its owner has nothing left to do it for. The op is then
handed over: one of those who recompute it owns it, so that nothing is executed in vain.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from disco_hlo.compiled import Int, Row, compiled, inner
from disco_hlo.core.legality import kernel_refusal, results_refusal
from disco_hlo.core.reasons import LEGAL, fresh_stamp
from disco_hlo.core.rows import BITCAST, LIMITS
from disco_hlo.search import layout as at
from disco_hlo.search.layout import GraphView, ScratchView, StateView, open_views
from disco_hlo.search.ordering import gather_members, is_read_inside, mark_computing, sort_runs
from disco_hlo.search.state import (
    COPY,
    MAXIMUM_MEMBERS,
    NOTHING,
    OWNED,
    RESULT,
    VERDICTS,
    Scratch,
    State,
    add_copies,
    computes,
    holds_copy,
    link,
    note_change,
    put,
    remove_copy,
    share,
    special_slot,
    take_out,
)
from disco_hlo.search.step import Step

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
def join(g: GraphView, s: StateView, w: ScratchView, a: int, b: int) -> Any:
    """``state.link``: make one unit of two. Values may stay inside that left before, none leaves that did not."""
    _, count = gather_members(s, a if s.count[a] <= s.count[b] else b, w.touched)
    head = link(g, s, w, a, b)
    stamp = fresh_stamp(w)
    for i in range(count):
        x = w.touched[i]
        if w.mark[x] != stamp:
            w.mark[x] = stamp
            _look_again(g, s, w, x, 1)
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            source = g.edge[e]
            if w.mark[source] != stamp:
                w.mark[source] = stamp
                # What the whole neither owns nor recomputes it reads as its parts did.
                if s.leaves[source] and computes(s, head, source):
                    _look_again(g, s, w, source, 1)
    return head


@inner
def part(g: GraphView, s: StateView, w: ScratchView, node: int) -> Any:
    """``state.take_out``: make a unit of its own of a node, which reads all it reads from others."""
    rest = take_out(g, s, w, node)
    _look_again(g, s, w, node, 0)
    for e in range(g.sources_at[node], g.sources_at[node + 1]):
        _set_leaves(s, w, g.edge[e], 1)
    return rest


@inner
def recompute(g: GraphView, s: StateView, w: ScratchView, unit: int, nodes: Row, count: int) -> Any:
    """``state.add_copies``: let a unit recompute nodes, which are sorted here; False where there is no room."""
    sort_runs(nodes, w.queue, count)
    if not add_copies(s, w, unit, nodes, count):
        return False
    for i in range(count):
        x = nodes[i]
        _look_again(g, s, w, x, 1)
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            if s.leaves[g.edge[e]] == 0 and not computes(s, unit, g.edge[e]):
                _set_leaves(s, w, g.edge[e], 1)
    return True


@inner
def read_again(g: GraphView, s: StateView, w: ScratchView, unit: int, node: int) -> None:
    """``state.remove_copy``: let a unit read what it recomputed."""
    remove_copy(s, w, unit, node)
    _look_again(g, s, w, node, 0)
    for e in range(g.sources_at[node], g.sources_at[node + 1]):
        _look_again(g, s, w, g.edge[e], 1)


@inner
def _look_again(g: GraphView, s: StateView, w: ScratchView, x: int, before: int) -> None:
    """Whether a node leaves its unit now, where it did not (``before`` 0), or did (1)."""
    if s.leaves[x] == before:
        _set_leaves(s, w, x, np.int64(_is_read_outside(g, s, w, x)))


@inner
def _set_leaves(s: StateView, w: ScratchView, x: int, leaves: Int) -> None:
    if leaves == s.leaves[x]:
        return
    unit = s.owner[x]
    put(w, s.leaves, x, leaves)
    put(w, s.returned, unit, s.returned[unit] + (2 * leaves - 1) * share(x, RESULT))
    note_change(w, x)


@inner
def _is_read_outside(g: GraphView, s: StateView, w: ScratchView, x: int) -> Any:
    """Whether a node's value leaves the unit that owns it."""
    if g.flags[x] & at.RETURNED:
        return True
    home, shared = s.owner[x], s.copiers[x] != -1
    if shared:
        for e in range(g.readers_at[x], g.readers_at[x + 1]):
            unit = s.owner[g.edge[e]]
            if unit != home and s.copies[unit] == -1:
                return True
    computing = mark_computing(s, w, x) if shared else 0
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        unit = s.owner[g.edge[e]]
        if unit != home and not (shared and w.inside[unit] == computing):
            return True
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        cell = s.copiers[g.edge[e]]
        while cell != -1:  # ends with the list
            unit = s.cell_unit[cell]
            if unit != home and not (shared and w.inside[unit] == computing):
                return True
            cell = s.next_of_node[cell]
    return False


@compiled
def count_results(step: Step, state: State, scratch: Scratch) -> None:
    """Fill in what every unit of a new state computes and returns."""
    g, s, w = open_views(step, state, scratch)
    for x in range(g.nodes):
        if s.owner[x] != -1:
            s.leaves[x] = _is_read_outside(g, s, w, x)
    for x in range(g.nodes):
        if s.owner[x] == x:
            count_unit(s, x)


@inner
def count_unit(s: StateView, unit: int) -> None:
    """Fill in what a unit computes and returns, its row ``leaves`` being right."""
    computed, returned = np.int64(NOTHING), np.int64(0)
    x = unit
    while x != -1:  # ends with the list
        computed += share(x, OWNED)
        if s.leaves[x]:
            returned += share(x, RESULT)
        x = s.next[x]
    cell = s.copies[unit]
    while cell != -1:  # ends with the list
        computed += share(s.cell_node[cell], COPY)
        cell = s.next_of_unit[cell]
    s.computed[unit], s.returned[unit] = computed, returned


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
    results = 0
    for i in range(owned):
        if s.leaves[w.members[i]]:
            w.results[results] = w.members[i]
            results += 1
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
    """Add the bitcasts through which members read, sort and mark all ``inside``: (count, stamp)."""
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


@inner
def adopt_orphans(g: GraphView, s: StateView, w: ScratchView, unit: int) -> Any:
    """Hand to ``unit`` the ops it duplicates that nobody needs their owner for.

    Returns its head and the first slot of a unit that it took in as a whole. Such a unit brings the
    duplicates it has, and with them what must run before and after these: it may have stood before
    anything the move was about, and where it stood behind the unit, the unit goes to its place.
    """
    found, first = True, s.total[at.SLOTS]
    while found:  # ends: each pass hands over an op that the unit then recomputes no more
        found = False
        count = 0
        cell = s.copies[unit]
        while cell != -1:  # ends with the list
            w.needed[count] = s.cell_node[cell]
            count += 1
            cell = s.next_of_unit[cell]
        # Readers before what they read: an op may be orphaned by the one adopted before it.
        for i in range(count - 1, -1, -1):
            x = w.needed[i]
            home = s.owner[x]
            if home == unit:
                continue
            if g.flags[x] & at.ORDERED:
                note_change(w, x)  # what runs after it may wait for one unit more
            if s.leaves[x] or is_read_inside(g, s, home, x):
                continue
            if s.count[home] > 1:
                drop_idle_copies(g, s, w, part(g, s, w, x), x)
            else:
                first = min(first, s.place[x])
            unit = join(g, s, w, unit, x) if s.place[x] > s.place[unit] else join(g, s, w, x, unit)
            # With its op the unit may have taken over duplicates, which make more orphans.
            found = True
    return unit, first


@inner
def drop_idle_copies(g: GraphView, s: StateView, w: ScratchView, unit: int, gone: int) -> None:
    """Stop ``unit`` from recomputing what nothing in it reads any more, now that it computes ``gone`` no more."""
    if s.copies[unit] == -1:
        return
    w.queue[0], pending = gone, 1
    while pending > 0:  # ends: what is put there the unit recomputes no more
        pending -= 1
        x = w.queue[pending]
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            source = g.edge[e]
            if holds_copy(s, unit, source) and not is_read_inside(g, s, unit, source):
                read_again(g, s, w, unit, source)
                w.queue[pending] = source
                pending += 1


@inner
def all_stand(g: GraphView, s: StateView, w: ScratchView, changes: int) -> Any:
    """Whether every unit noted as changed since entry ``changes`` is a legal kernel."""
    stamp = fresh_stamp(w)
    for i in range(changes, w.number[at.CHANGES]):
        unit = s.owner[w.changed[i]]
        # Not by whether its head may be fused: what is left of a kernel of XLA's may begin with an op that may not.
        if w.judged[unit] == stamp or g.flags[unit] & at.COLLECTIVE:
            continue
        w.judged[unit] = stamp
        if unit_refusal(g, s, w, unit) != LEGAL:
            return False
    return True
