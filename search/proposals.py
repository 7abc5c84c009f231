"""Random proposals: which unit, which neighbour. (RandomApply of the paper's Algorithm 1.)"""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.search import layout as at
from disco_hlo.search.jit import compiled
from disco_hlo.search.moves.duplicate import duplicate
from disco_hlo.search.moves.fuse import fuse
from disco_hlo.search.moves.merge import merge, neighbouring_bucket
from disco_hlo.search.neighbours import predecessors
from disco_hlo.search.rng import draw

FUSE: Final = 0
DUPLICATE: Final = 1
MERGE: Final = 2

METHODS: Final = {"fuse": FUSE, "duplicate": DUPLICATE, "merge": MERGE}


@compiled
def make_move(step: Any, state: Any, scratch: Any, method: Any, a: Any, b: Any) -> Any:
    """Make one named move; whether it was legal. ``a`` and ``b`` are heads of units."""
    if method == FUSE:
        return fuse(step, state, scratch, a, b)
    if method == DUPLICATE:
        return duplicate(step, state, scratch, a, b)
    return merge(step, state, scratch, a, b)


@compiled
def random_apply(
    step: Any, state: Any, scratch: Any, generator: Any, pools: Any, method: Any, times: Any, tries: Any, made: Any
) -> Any:
    """Apply one method at random places.

    Args:
        pools: (fusible nodes, all-reduces in production order), int32 arrays.
        times: how often.
        tries: how many proposals are drawn for one application before it is given up.
        made: ``[times, 3]`` int32, receives the moves (method, a, b).

    Returns:
        How many moves were made.
    """
    fusible, ranked = pools
    done = 0
    for _ in range(times):
        for _ in range(tries):
            if method == MERGE:
                a, b = _random_buckets(step, state, generator, ranked)
            else:
                a, b = _random_pair(step, state, scratch, generator, fusible)
            if b != -1 and make_move(step, state, scratch, method, a, b):
                made[done, 0], made[done, 1], made[done, 2] = method, a, b
                done += 1
                break
    return done


@compiled
def _random_pair(step: Any, state: Any, scratch: Any, generator: Any, fusible: Any) -> Any:
    """A unit, each equally likely, and one of its fusible predecessors, each equally likely."""
    if fusible.shape[0] == 0:
        return -1, -1
    while True:
        unit = fusible[draw(generator, fusible.shape[0])]
        if state.word[at.OWNER, unit] == unit:
            break
    found = predecessors(step, state, scratch, unit, at.NEIGHBOURS)
    chosen, seen = -1, 0
    for i in range(found):
        other = scratch.row[at.NEIGHBOURS, i]
        if step.node[at.FLAGS, other] & at.FUSIBLE:
            seen += 1
            if draw(generator, seen) == 0:
                chosen = other
    return unit, chosen


@compiled
def _random_buckets(step: Any, state: Any, generator: Any, ranked: Any) -> Any:
    if ranked.shape[0] < 2:
        return -1, -1
    while True:
        bucket = ranked[draw(generator, ranked.shape[0])]
        if state.word[at.OWNER, bucket] == bucket:
            break
    member = draw(generator, state.word[at.COUNT, bucket])
    x = bucket
    for _ in range(member):
        x = state.word[at.NEXT, x]
    direction = 2 * draw(generator, 2) - 1
    return bucket, neighbouring_bucket(step, state, x, direction, ranked)
