"""Random proposals: which unit, which neighbour. (RandomApply of the paper's Algorithm 1.)"""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.search import layout as at
from disco_hlo.search.moves.absorb import absorb
from disco_hlo.search.moves.duplicate import duplicate
from disco_hlo.search.moves.fuse import fuse
from disco_hlo.search.moves.merge import merge, neighbouring_bucket
from disco_hlo.search.moves.reorder import reorder
from disco_hlo.search.moves.split import hand_over, split
from disco_hlo.search.moves.unfuse import unfuse
from disco_hlo.search.neighbours import predecessors
from disco_hlo.search.rng import draw

from disco_hlo.simulator.compiled import compiled

FUSE: Final = 0
DUPLICATE: Final = 1
MERGE: Final = 2
UNFUSE: Final = 3
ABSORB: Final = 4
SPLIT: Final = 5
HAND_OVER: Final = 6
REORDER: Final = 7

METHODS: Final = {"fuse": FUSE, "duplicate": DUPLICATE, "merge": MERGE}
"""The methods of Algorithm 1."""


@compiled
def make_move(g: Any, s: Any, w: Any, method: Any, a: Any, b: Any) -> Any:
    """Make one move; whether it was legal. What ``a`` and ``b`` are depends on the move."""
    if method == FUSE:
        return fuse(g, s, w, a, b)
    if method == DUPLICATE:
        return duplicate(g, s, w, a, b)
    if method == MERGE:
        return merge(g, s, w, a, b)
    if method == UNFUSE:
        return unfuse(g, s, w, a, b)
    if method == ABSORB:
        return absorb(g, s, w, a)
    if method == SPLIT:
        return split(g, s, w, a, b)
    if method == HAND_OVER:
        return hand_over(g, s, w, a, b)
    return reorder(g, s, w, a, b)


@compiled
def random_apply(
    g: Any, s: Any, w: Any, generator: Any, pools: Any, method: Any, times: Any, tries: Any, made: Any
) -> Any:
    """Apply one method at random places.

    Args:
        pools: (fusible nodes, all-reduces in production order), int64 arrays.
        times: how often.
        tries: how many proposals are drawn for one application before it is given up.
        made: ``[times, 3]`` int64, receives the moves (method, a, b).

    Returns:
        How many moves were made.
    """
    fusible, ranked = pools
    done = 0
    for _ in range(times):
        for _ in range(tries):
            if method == MERGE:
                a, b = _random_buckets(g, s, generator, ranked)
            else:
                a, b = _random_pair(g, s, w, generator, fusible)
            if b != -1 and make_move(g, s, w, method, a, b):
                made[done, 0], made[done, 1], made[done, 2] = method, a, b
                done += 1
                break
    return done


@compiled
def _random_pair(g: Any, s: Any, w: Any, generator: Any, fusible: Any) -> Any:
    """A unit, each equally likely, and one of its fusible predecessors, each equally likely."""
    if fusible.size == 0:
        return -1, -1
    unit = fusible[draw(generator, fusible.size)]
    while s.owner[unit] != unit:
        unit = fusible[draw(generator, fusible.size)]
    found = predecessors(g, s, w, unit, w.neighbours)
    chosen, seen = -1, 0
    for i in range(found):
        if g.flags[w.neighbours[i]] & at.FUSIBLE:
            seen += 1
            if draw(generator, seen) == 0:
                chosen = w.neighbours[i]
    return unit, chosen


@compiled
def _random_buckets(g: Any, s: Any, generator: Any, ranked: Any) -> Any:
    if ranked.size < 2:
        return -1, -1
    bucket = ranked[draw(generator, ranked.size)]
    while s.owner[bucket] != bucket:
        bucket = ranked[draw(generator, ranked.size)]
    x = bucket
    for _ in range(draw(generator, s.count[bucket])):
        x = s.next[x]
    direction = 2 * draw(generator, 2) - 1
    return bucket, neighbouring_bucket(g, s, x, direction, ranked)
