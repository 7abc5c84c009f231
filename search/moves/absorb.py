"""Let every reader of a unit recompute it, so that it is executed no more (not in the paper).

Duplication pays at the last reader only; with several of them no single move shows the gain.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import Row, inner
from disco_hlo.search import layout as at
from disco_hlo.search.layout import GraphView, PoolView, ScratchView, StateView
from disco_hlo.search.moves.duplicate import duplicate
from disco_hlo.search.moves.move import Move, random_unit
from disco_hlo.search.ordering import successors
from disco_hlo.search.state import has_room

MOST_READERS = 32


@inner
def absorbers(g: GraphView, s: StateView, w: ScratchView, producer: int) -> Any:
    """Row ``readers``: the units that would recompute a unit; how many they are, 0 where it must stay for somebody."""
    if not g.flags[producer] & at.FUSIBLE:
        return 0
    x = producer
    while x != -1:  # ends with the list
        if g.flags[x] & at.RETURNED:
            return 0
        for e in range(g.readers_at[x], g.readers_at[x + 1]):
            if not g.flags[g.edge[e]] & at.FUSIBLE:
                return 0
        x = s.next[x]
    count = successors(g, s, w, producer, w.readers)
    if count > MOST_READERS:
        return 0
    for i in range(count):
        if not g.flags[w.readers[i]] & at.FUSIBLE:
            return 0
    return count


@inner
def absorb(g: GraphView, s: StateView, w: ScratchView, producer: int, _b: int) -> Any:
    """Duplicate the unit with head ``producer`` into all its readers."""
    count = absorbers(g, s, w, producer)
    if count == 0:
        return False
    for i in range(count):
        if not has_room(g, w) or not duplicate(g, s, w, s.owner[w.readers[i]], producer):
            return False
    return True


@inner
def random_producer(_g: GraphView, s: StateView, _w: ScratchView, generator: Row, pools: PoolView) -> Any:
    """A unit."""
    return random_unit(s, generator, pools.fusible, pools.fusibles), -1


MOVE = Move("kernels", 2, random_producer, absorb)
