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

**Foreseen.** What two units would be together that recompute nothing can be told from the units as they are: the kernel
is looked up among the verdicts by its hash, or judged, before anything is written; making it then finds the verdict. Of
what a unit would be that recomputes more, only the number of ops is looked at, and whether it would recompute an op
that has to be returned (``core.legality_gpu``). Kernels of XLA's own stand whatever the rules say.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from disco_hlo.compiled import Int, inner
from disco_hlo.core.legality import results_refusal
from disco_hlo.core.reasons import LEGAL, fresh_stamp
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import mix
from disco_hlo.search.kernels import UNJUDGED, judge, known_verdict
from disco_hlo.search.layout import GraphView, ScratchView, StateView
from disco_hlo.search.ordering import sort_runs
from disco_hlo.search.state import (
    COPY,
    MAXIMUM_MEMBERS,
    NOTHING,
    REFUSALS,
    RESULT,
    computes,
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
