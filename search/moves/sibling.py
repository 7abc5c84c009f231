"""Fuse two units of which neither reads the other (not in the paper).

Mostly such as read the same array, for which one kernel reads it once; else any two, for which it is launched once.
"""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.compiled import Row, inner
from disco_hlo.core.rows import CLONED
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import draw
from disco_hlo.search.layout import GraphView, PoolView, ScratchView, StateView
from disco_hlo.search.moves.fuse import fuse
from disco_hlo.search.moves.move import Move

UNRELATED: Final = 4
"""One in so many proposals is of units that have nothing in common."""


@inner
def random_siblings(g: GraphView, s: StateView, _w: ScratchView, generator: Row, pools: PoolView) -> Any:
    """Two units, the one that stands later first."""
    a, b = _random_pair(g, s, generator, pools)
    return (a, b) if a != b and g.flags[a] & g.flags[b] & at.FUSIBLE else (-1, -1)


@inner
def _random_pair(g: GraphView, s: StateView, generator: Row, pools: PoolView) -> Any:
    x = pools.fusible[draw(generator, pools.fusibles)]
    if draw(generator, UNRELATED) == 0:
        a, b = s.owner[x], s.owner[pools.fusible[draw(generator, pools.fusibles)]]
        return (a, b) if s.place[a] > s.place[b] else (b, a)
    operands = g.operands_at[x + 1] - g.operands_at[x]
    if operands == 0:
        return -1, -1
    shared = g.edge[g.operands_at[x] + draw(generator, operands)]
    users = g.users_at[shared + 1] - g.users_at[shared]
    if g.flags[shared] & CLONED or users < 2:
        return -1, -1
    a, b = s.owner[x], s.owner[g.edge[g.users_at[shared] + draw(generator, users)]]
    if b == -1:
        return -1, -1
    return (a, b) if s.place[a] > s.place[b] else (b, a)


MOVE = Move("kernels", 2, random_siblings, fuse, with_unit=True)
