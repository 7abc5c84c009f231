"""Merge two neighbouring buckets into one.

The third method of the paper (section 4.5), which merges all-reduces. There neighbours are gradients of ops that are
next to each other in the graph; here they follow each other in the order of production.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import Row, inner
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import draw
from disco_hlo.search.kernels import join
from disco_hlo.search.layout import GraphView, PoolView, ScratchView, StateView
from disco_hlo.search.moves.move import Move, random_unit
from disco_hlo.search.ordering import settle, successors


@inner
def merge(g: GraphView, s: StateView, w: ScratchView, a: int, b: int) -> Any:
    """Make one bucket of two, given by their heads."""
    if a == b or not g.flags[a] & g.flags[b] & at.COLLECTIVE:
        return False
    if g.channel[a] != g.channel[b]:
        return False
    if s.place[a] > s.place[b]:
        a, b = b, a
    for i in range(successors(g, s, w, a, w.neighbours)):
        if w.neighbours[i] == b:
            return False
    low, high = s.place[a], s.place[b]
    return settle(g, s, w, join(g, s, w, a, b), low, high)


@inner
def random_neighbours(g: GraphView, s: StateView, _w: ScratchView, generator: Row, pools: PoolView) -> Any:
    """Two neighbouring buckets."""
    bucket = random_unit(s, generator, pools.ranked, pools.ranks)
    x = bucket
    for _ in range(draw(generator, s.count[bucket])):
        x = s.next[x]
    return bucket, neighbouring_bucket(g, s, generator, x, pools)


@inner
def neighbouring_bucket(g: GraphView, s: StateView, generator: Row, collective: int, pools: PoolView) -> Any:
    """The nearest other bucket in production order, earlier or later; -1 where there is none.

    Args:
        collective: a member of the bucket whose neighbour is asked for.
    """
    direction = 2 * draw(generator, 2) - 1
    rank = g.rank[collective] + direction
    while 0 <= rank < pools.ranks:  # ends: rank goes one way
        if s.owner[pools.ranked[rank]] != s.owner[collective]:
            return s.owner[pools.ranked[rank]]
        rank += direction
    return -1


MOVE = Move("buckets", 2, random_neighbours, merge, with_unit=True, in_algorithm_1=True)
