"""Proposals that would be refused, recognised before they are made: remembered, or foreseen.

Where a plan leaves little to be fused most proposals make a kernel that may not stand, and are drawn again soon; making
a kernel, judging it and taking it back takes longer than all else.

**Remembered.** Every unit has a number in the state, a new one whenever it changes for good (:func:`renew`); undoing
the change brings back the number from before. A refusal is remembered under the proposal and the numbers of its units,
and holds wherever these meet again; so are moves for which there was nothing to be recomputed, or no room, and units
that must stay for somebody. Not remembered is what concerned further units, and what failed because units would wait
for each other: that depends on all the others. Where somebody else's change would make legal what was refused (a third
unit that no longer reads a value), the refusal holds until its units change: a move is missed, none is made that is
illegal.

**Foreseen.** What two units would be together, and what is left of one that an op leaves, can be told from the units as
they are: the kernel is looked up among the verdicts by its hash, or judged, before anything is written; making it then
finds the verdict. Where duplicates would change hands as well the move is let pass, to be made and judged as ever. Of
what a unit would be that recomputes more, only the number of ops is looked at, and whether it would recompute an op
that has to be returned (``core.legality_gpu``). Kernels of XLA's own stand whatever the rules say.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from disco_hlo.compiled import Int, Row, inner
from disco_hlo.core.legality import results_refusal
from disco_hlo.core.reasons import LEGAL, fresh_stamp
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import mix
from disco_hlo.search.kernels import UNJUDGED, judge, known_verdict
from disco_hlo.search.layout import GraphView, ScratchView, StateView
from disco_hlo.search.ordering import gather_members, is_read_inside, sort_runs
from disco_hlo.search.state import (
    COPY,
    MAXIMUM_MEMBERS,
    NOTHING,
    OWNED,
    REFUSALS,
    RESULT,
    computes,
    holds_copy,
    put,
    share,
    special_slot,
)

NO_KEY: Final = 0


@inner
def no_key(_g: GraphView, _s: StateView, _w: ScratchView, _salt: int, _a: int, _b: int) -> Any:
    """The ``cache_key`` of moves of which no refusal is remembered."""
    return np.int64(NO_KEY), 0


@inner
def key_of_pair(_g: GraphView, s: StateView, w: ScratchView, salt: int, a: int, b: int) -> Any:
    """The ``cache_key`` of a move of two units, given by their heads."""
    if b < 0:
        return np.int64(NO_KEY), 0
    w.readers[0] = b
    return with_unit(s, with_unit(s, with_number(np.int64(0), salt), a), b), 1


@inner
def with_number(key: Int, number: int) -> Any:
    """A key that holds a number, too."""
    return np.int64(mix(np.uint64(key) + np.uint64(number) + np.uint64(1)))


@inner
def with_unit(s: StateView, key: Int, unit: int) -> Any:
    """A key that holds a unit as it is now, too."""
    return with_number(with_number(key, unit), s.moment[unit])


@inner
def place_of(key: int) -> Any:
    """Where a key stands in ``Scratch.refused``."""
    return (key ^ (key >> 17)) & (REFUSALS - 1)


@inner
def was_refused(w: ScratchView, key: int) -> Any:
    """Whether a move is known to be refused here."""
    return key != NO_KEY and w.refused[place_of(key)] == key


@inner
def renew(s: StateView, w: ScratchView, changes: int) -> None:
    """Give new numbers to the units that a kept move has changed.

    Args:
        changes: how many entries of ``changed`` are the move's.
    """
    moment = fresh_stamp(w)
    for i in range(changes):
        unit = s.owner[w.changed[i]]
        if w.judged[unit] == moment:
            continue
        w.judged[unit] = moment
        put(w, s.moment, unit, moment)


@inner
def never_joined(g: GraphView, s: StateView, w: ScratchView, a: int, b: int) -> Any:
    """Whether two units would be a kernel that may not stand; ``b`` comes first in the order."""
    count, computed = _together(s, w, a, b)
    is_special = g.special_mask and special_slot(g, computed) >= 0
    if count > MAXIMUM_MEMBERS:
        return not is_special
    recomputes = s.copies[a] != -1 or s.copies[b] != -1
    results, returned = _results_together(g, s, w, a, b)
    verdict = known_verdict(w, computed + returned)
    if verdict == LEGAL or (recomputes and not _gather_both(g, s, w, a, b)):
        return False
    if verdict == UNJUDGED:
        if not is_special and results_refusal(g, w, results, False) != LEGAL:
            return True
        if not recomputes:
            _gather_both(g, s, w, a, b)
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
def never_without(g: GraphView, s: StateView, w: ScratchView, unit: int, node: int) -> Any:
    """Whether what is left of a unit may not stand without a node that it owns, or recomputes."""
    owned = s.owner[node] == unit
    computed, returned = s.computed[unit], s.returned[unit]
    computed -= share(node, OWNED) if owned else share(node, COPY)
    read = fresh_stamp(w)
    if owned:
        if s.leaves[node]:
            returned -= share(node, RESULT)
        for e in range(g.sources_at[node], g.sources_at[node + 1]):
            x = g.edge[e]
            w.mark[x] = read
            if s.owner[x] == unit and not s.leaves[x]:
                returned += share(x, RESULT)
    gone = fresh_stamp(w)
    others = _copies_gone(g, s, w, unit, node, gone)
    if not owned and others == 0 and _never_returned(g, s, w, unit, node):
        return True
    computed -= others
    verdict = known_verdict(w, computed + returned)
    if verdict == UNJUDGED:
        count = results = 0
        x = unit
        while x != -1:  # ends with the list
            if w.reached[x] != gone:
                w.members[count] = x
                count += 1
                if s.leaves[x] or w.mark[x] == read:
                    w.results[results] = x
                    results += 1
            x = s.next[x]
        cell = s.copies[unit]
        while cell != -1:  # ends with the list
            if w.reached[s.cell_node[cell]] != gone:
                w.members[count] = s.cell_node[cell]
                count += 1
            cell = s.next_of_unit[cell]
        if count == 1:
            return False
        verdict = judge(g, w, computed, returned, count, results)
    return verdict != LEGAL


@inner
def _never_returned(g: GraphView, s: StateView, w: ScratchView, unit: int, node: int) -> Any:
    """Whether the owner of a node may not stand where it returns the node as well, ``unit`` recomputing it no more."""
    home = s.owner[node]
    if s.leaves[node] or (s.count[home] == 1 and s.copies[home] == -1):
        return False
    returned = s.returned[home] + share(node, RESULT)
    lost = fresh_stamp(w)
    for e in range(g.sources_at[node], g.sources_at[node + 1]):
        x = g.edge[e]
        if s.owner[x] == home and s.leaves[x] and not _is_needed_elsewhere(g, s, x, home, unit, node):
            w.judging[x] = lost
            returned -= share(x, RESULT)
    verdict = known_verdict(w, s.computed[home] + returned)
    if verdict == UNJUDGED:
        owned, count = gather_members(s, home, w.members)
        results = 0
        for i in range(owned):
            x = w.members[i]
            if x == node or (s.leaves[x] and w.judging[x] != lost):
                w.results[results] = x
                results += 1
        verdict = judge(g, w, s.computed[home], returned, count, results)
    return verdict != LEGAL


@inner
def _is_needed_elsewhere(g: GraphView, s: StateView, x: int, home: int, other: int, by: int) -> Any:
    """Whether a node is returned, or read outside ``home`` by a unit that does not compute it. What the unit ``other``
    reads it for is left out of account: its node ``by`` alone, or, where that is -1, all of it."""
    if g.flags[x] & at.RETURNED:
        return True
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        reader, cell = s.owner[g.edge[e]], s.copiers[g.edge[e]]
        while True:  # ends with the list
            aside = reader == home or (reader == other and (by == -1 or by == g.edge[e]))
            if not aside and not computes(s, reader, x):
                return True
            if cell == -1:
                break
            reader = s.cell_unit[cell]
            cell = s.next_of_node[cell]
    return False


@inner
def _copies_gone(g: GraphView, s: StateView, w: ScratchView, unit: int, node: int, gone: int) -> Any:
    """Mark in row ``reached`` a node that leaves a unit, and what the unit recomputes for it alone; the hash of the
    latter (see ``kernels.drop_idle_copies``)."""
    w.reached[node] = gone
    hashed = np.int64(0)
    if s.copies[unit] == -1:
        return hashed
    w.queue[0], pending = node, 1
    while pending > 0:  # ends: a node is put there once, being marked before
        pending -= 1
        x = w.queue[pending]
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            source = g.edge[e]
            if w.reached[source] == gone or not holds_copy(s, unit, source):
                continue
            if not _is_still_read(g, s, w, unit, source, gone):
                w.reached[source] = gone
                hashed += share(source, COPY)
                w.queue[pending] = source
                pending += 1
    return hashed


@inner
def _is_still_read(g: GraphView, s: StateView, w: ScratchView, unit: int, x: int, gone: int) -> Any:
    """Whether a unit uses the value of a node without those that are ``gone`` from it."""
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        if w.reached[g.edge[e]] != gone and computes(s, unit, g.edge[e]):
            return True
    return False


@inner
def _together(s: StateView, w: ScratchView, a: int, b: int) -> Any:
    """Of two units as one: how many nodes it computes, and the hash of them."""
    stamp = fresh_stamp(w)
    computed, count = s.computed[a] + s.computed[b] - NOTHING, s.count[a] + s.count[b]
    for unit, other in ((a, b), (b, a)):
        cell = s.copies[unit]
        while cell != -1:  # ends with the list
            x = s.cell_node[cell]
            if s.owner[x] == other or w.inside[x] == stamp:
                computed -= share(x, COPY)
            else:
                w.inside[x] = stamp
                count += 1
            cell = s.next_of_unit[cell]
    return count, computed


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
            if _is_needed_elsewhere(g, s, x, a, b, -1):
                w.results[results] = x
                results += 1
            else:
                returned -= share(x, RESULT)
        x = s.next[x]
    sort_runs(w.results, w.queue, results)
    return results, returned


@inner
def _gather_both(g: GraphView, s: StateView, w: ScratchView, a: int, b: int) -> Any:
    """Row ``members``: what two units compute, each node once. False where they recompute what nobody else may need its
    owner for once they are one, so that it would be handed to them (``kernels.adopt_orphans``)."""
    owned_a, count = gather_members(s, a, w.members)
    owned_b, others = gather_members(s, b, w.touched)
    of_a = fresh_stamp(w)
    of_b = fresh_stamp(w)
    for i in range(count):
        w.mark[w.members[i]] = of_a
    for i in range(others):
        w.inside[w.touched[i]] = of_b
    for i in range(owned_a, count):
        if _may_be_orphaned(g, s, w.members[i], w.inside, of_b):
            return False
    for i in range(others):
        x = w.touched[i]
        if i >= owned_b and _may_be_orphaned(g, s, x, w.mark, of_a):
            return False
        if w.mark[x] != of_a:
            w.members[count] = x
            count += 1
    return True


@inner
def _may_be_orphaned(g: GraphView, s: StateView, x: int, computed: Row, stamp: int) -> Any:
    """Whether the owner of a node that a unit recomputes may be left without a reader of it, once the unit is one with
    another: what that one computes has ``stamp`` in row ``computed``."""
    if computed[x] == stamp:
        return False
    for e in range(g.readers_at[x], g.readers_at[x + 1]):
        if computed[g.edge[e]] == stamp:
            return True
    return not s.leaves[x] and not is_read_inside(g, s, s.owner[x], x)
