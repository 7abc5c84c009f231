"""What moves share: keeping every node computed for somebody, and judging what a move changed.

Where every reader of an op recomputes it, its owner has nothing left to do it for. The op is then
handed over: one of those who recompute it owns it, so that nothing is executed in vain.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.search import layout as at
from disco_hlo.search.arrays import fresh_stamp, link, note_change, remove_copy, take_out
from disco_hlo.search.jit import compiled
from disco_hlo.search.legality import LEGAL, unit_refusal
from disco_hlo.search.neighbours import is_read_inside, is_read_outside


@compiled
def adopt_orphans(step: Any, state: Any, scratch: Any, unit: Any) -> Any:
    """Hand to ``unit`` the ops it duplicates that nobody needs their owner for; returns its head."""
    word, orphans = state.word, scratch.row[at.NEEDED]
    count = 0
    cell = word[at.COPIES, unit]
    while cell != -1:
        orphans[count] = word[at.CELL_NODE, cell]
        # Part of the unit may have read it from its owner, who is then rid of a result.
        note_change(scratch, orphans[count])
        count += 1
        cell = word[at.NEXT_OF_UNIT, cell]
    # Readers before what they read: an op may be orphaned by the one adopted before it.
    for i in range(count - 1, -1, -1):
        x = orphans[i]
        home = word[at.OWNER, x]
        if home == unit or is_read_outside(step, state, x) or is_read_inside(step, state, home, x):
            continue
        if word[at.COUNT, home] > 1:
            drop_idle_copies(step, state, scratch, take_out(state, scratch, x))
        unit = link(state, scratch, x, unit)
    return unit


@compiled
def drop_idle_copies(step: Any, state: Any, scratch: Any, unit: Any) -> Any:
    """Stop ``unit`` from recomputing what nothing in it reads any more."""
    word = state.word
    found = True
    while found:
        found = False
        cell = word[at.COPIES, unit]
        while cell != -1:
            following, x = word[at.NEXT_OF_UNIT, cell], word[at.CELL_NODE, cell]
            if not is_read_inside(step, state, unit, x):
                remove_copy(state, scratch, unit, x)
                found = True
            cell = following


@compiled
def all_stand(step: Any, state: Any, scratch: Any, changes: Any) -> Any:
    """Whether every unit noted as changed since entry ``changes`` is a legal kernel."""
    word, judged = state.word, scratch.row[at.JUDGED]
    stamp = fresh_stamp(scratch)
    for i in range(changes, scratch.number[at.CHANGES]):
        unit = word[at.OWNER, scratch.changed[i]]
        if judged[unit] == stamp:
            continue
        judged[unit] = stamp
        if unit_refusal(step, state, scratch, unit) != LEGAL:
            return False
    return True
