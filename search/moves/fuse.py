"""Fuse a unit with a predecessor; its other readers take the value from the group.

The first method of the paper (section 4.5, figure 1 (ii)): non-duplicate op fusion.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.search import layout as at
from disco_hlo.search.arrays import has_room, link, roll_back
from disco_hlo.search.jit import compiled
from disco_hlo.search.ordering import settle
from disco_hlo.search.upkeep import adopt_orphans, all_stand


@compiled
def fuse(step: Any, state: Any, scratch: Any, consumer: Any, producer: Any) -> Any:
    """Make one group of two units given by their heads, ``consumer`` reading ``producer``."""
    word, flags = state.word, step.node[at.FLAGS]
    if consumer == producer or not flags[consumer] & flags[producer] & at.FUSIBLE:
        return False
    low, high = word[at.PLACE, producer], word[at.PLACE, consumer]
    if low > high:
        return False
    if not has_room(scratch):
        return False
    mark, changes = scratch.number[at.LOGGED], scratch.number[at.CHANGES]
    unit = adopt_orphans(step, state, scratch, link(state, scratch, producer, consumer))
    if all_stand(step, state, scratch, changes) and settle(step, state, scratch, unit, low, high):
        return True
    roll_back(state, scratch, mark)
    scratch.number[at.CHANGES] = changes
    return False
