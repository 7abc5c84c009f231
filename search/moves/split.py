"""Split a bucket in two (not in the paper)."""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import Row, inner
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import draw
from disco_hlo.search.kernels import join, part
from disco_hlo.search.layout import GraphView, PoolView, ScratchView, StateView
from disco_hlo.search.moves.move import Move
from disco_hlo.search.ordering import reseat


@inner
def split(g: GraphView, s: StateView, w: ScratchView, bucket: int, rank: int) -> Any:
    """Put the gradients of a bucket from production rank ``rank`` on into a bucket of their own."""
    if not g.flags[bucket] & at.COLLECTIVE:
        return False
    count = 0
    x = bucket
    while x != -1:  # ends with the list
        if g.rank[x] >= rank:
            w.readers[count] = x
            count += 1
        x = s.next[x]
    if count == 0 or count == s.count[bucket]:
        return False
    place = s.place[bucket]
    # From the last on, so that a head leaves at most once, and joined from the first on, each behind the others: the
    # other way round every gradient would be written anew for each, more than the log has room for.
    rest = bucket
    for i in range(count - 1, -1, -1):
        rest = part(g, s, w, w.readers[i])
    later = w.readers[0]
    for i in range(1, count):
        later = join(g, s, w, later, w.readers[i])
    return reseat(g, s, w, rest, 0) and reseat(g, s, w, later, place)


@inner
def random_cut(g: GraphView, s: StateView, _w: ScratchView, generator: Row, pools: PoolView) -> Any:
    """A bucket, and the production rank of one of its gradients."""
    x = pools.ranked[draw(generator, pools.ranks)]
    return s.owner[x], g.rank[x]


MOVE = Move("buckets", 1, random_cut, split)
