"""Move a unit to another place in the order (not in the paper, which leaves the order to a queue)."""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.compiled import Row, inner
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import draw
from disco_hlo.search.layout import GraphView, PoolView, ScratchView, StateView
from disco_hlo.search.moves.move import Move
from disco_hlo.search.ordering import predecessors, shift, successors

RIVALS: Final = 4
"""Of so many units the one that takes longest is moved to another place."""
MOST_DRAWS: Final = 1 << 12
"""Of slots, until there are so many units: in a step of few units most slots are empty."""
TRIES: Final = 32
"""Slots that are looked at for that place."""


@inner
def reorder(g: GraphView, s: StateView, w: ScratchView, unit: int, slot: int) -> Any:
    """Put a unit into a slot of the order; refused where what it is tied to stands between."""
    if not 0 <= slot < s.total[at.SLOTS] or slot == s.place[unit]:
        return False
    return shift(g, s, w, unit, slot)


@inner
def random_place(g: GraphView, s: StateView, w: ScratchView, generator: Row, _pools: PoolView) -> Any:
    """A unit, and the slot of another one whose place it may take."""
    unit = _random_long_unit(g, s, generator)
    slot = _random_slot(g, s, w, generator, unit) if unit != -1 else -1
    return (unit, slot) if slot != -1 else (-1, -1)


@inner
def _random_long_unit(g: GraphView, s: StateView, generator: Row) -> Any:
    """The one that takes longest of ``RIVALS`` units other than buckets, each of these equally likely; -1 where none
    was met.

    What runs beside a transfer, and when a gradient appears, is decided by where the long ones stand.
    """
    chosen, longest_ns, rivals = -1, 0, 0
    for _ in range(MOST_DRAWS):
        unit = s.order[draw(generator, s.total[at.SLOTS])]
        if unit == -1 or g.flags[unit] & at.COLLECTIVE:
            continue
        time_ns = s.time_ns[at.TIME_COLUMNS * unit + at.MAIN]
        if chosen == -1 or time_ns > longest_ns:
            chosen, longest_ns = unit, time_ns
        rivals += 1
        if rivals == RIVALS:
            break
    return chosen


@inner
def _random_slot(g: GraphView, s: StateView, w: ScratchView, generator: Row, unit: int) -> Any:
    """The slot of another unit whose place a unit may take, each equally likely; -1 where none was met.

    Most slots are empty, and those of a kernel of hundreds of ops lie together: drawn by slot, a unit that could pass
    many others would nearly always come to stand beside the largest kernels.
    """
    low, high = -1, s.total[at.SLOTS]
    for i in range(predecessors(g, s, w, unit, w.neighbours)):
        low = max(low, s.place[w.neighbours[i]])
    for i in range(successors(g, s, w, unit, w.neighbours)):
        high = min(high, s.place[w.neighbours[i]])
    for _ in range(TRIES):
        slot = low + 1 + draw(generator, high - low - 1)
        if s.order[slot] != -1 and s.order[slot] != unit:
            return slot
    return -1


MOVE = Move("order", 2, random_place, reorder)
