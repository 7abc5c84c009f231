"""Fuse a unit with a predecessor; its other readers take the value from the group.

The first method of the paper (section 4.5, figure 1 (ii)): non-duplicate op fusion.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import inner
from disco_hlo.search import layout as at
from disco_hlo.search.kernels import adopt_orphans, all_stand, join, most_owned
from disco_hlo.search.layout import GraphView, ScratchView, StateView
from disco_hlo.search.moves.move import Move, random_reader
from disco_hlo.search.moves.refusals import never_joined
from disco_hlo.search.ordering import settle


@inner
def fuse(g: GraphView, s: StateView, w: ScratchView, consumer: int, producer: int) -> Any:
    """Make one group of two units given by their heads, ``consumer`` reading ``producer``."""
    if consumer == producer or not g.flags[consumer] & g.flags[producer] & at.FUSIBLE:
        return False
    low = s.place[producer]
    if low > s.place[consumer] or s.count[consumer] + s.count[producer] > most_owned(g):
        return False
    if never_joined(g, s, w, consumer, producer):
        return False
    changes = w.number[at.CHANGES]
    unit, first = adopt_orphans(g, s, w, join(g, s, w, producer, consumer))
    return all_stand(g, s, w, changes) and settle(g, s, w, unit, min(low, first), s.place[unit])


MOVE = Move(
    "kernels", 4, random_reader, fuse, with_unit=True, first_weight=1, in_algorithm_1=True
)  # fmt: skip
