"""Move one gradient to the neighbouring bucket (not in the paper)."""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import Row, inner
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import draw
from disco_hlo.search.kernels import part
from disco_hlo.search.layout import GraphView, PoolView, ScratchView, StateView
from disco_hlo.search.moves.merge import merge, neighbouring_bucket
from disco_hlo.search.moves.move import Move
from disco_hlo.search.ordering import reseat
from disco_hlo.search.state import has_room


@inner
def hand_over(g: GraphView, s: StateView, w: ScratchView, gradient: int, bucket: int) -> Any:
    """Move one collective out of its bucket into another one, given by its head."""
    home = s.owner[gradient]
    if home == bucket or not g.flags[bucket] & g.flags[gradient] & at.COLLECTIVE:
        return False
    if s.count[home] == 1:
        return merge(g, s, w, home, bucket)
    place = s.place[home]
    part(g, s, w, gradient)
    return reseat(g, s, w, gradient, place) and has_room(g, w) and merge(g, s, w, gradient, bucket)


@inner
def random_gradient(g: GraphView, s: StateView, _w: ScratchView, generator: Row, pools: PoolView) -> Any:
    """A gradient, and a bucket next to its own."""
    x = pools.ranked[draw(generator, pools.ranks)]
    return x, neighbouring_bucket(g, s, generator, x, pools)


MOVE = Move("buckets", 1, random_gradient, hand_over, of_unit=False, with_unit=True)
