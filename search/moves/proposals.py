"""Which move next: the moves by number, and random choices among them.

``random_apply`` is RandomApply of the paper's Algorithm 1; ``random_move`` serves the search around it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from disco_hlo.compiled import inner
from disco_hlo.core.marks import fresh_stamp
from disco_hlo.core.rows import CLONED
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import PRODUCERS, has_room
from disco_hlo.search.arrays.rng import draw
from disco_hlo.search.moves.absorb import absorb
from disco_hlo.search.moves.duplicate import duplicate
from disco_hlo.search.moves.fuse import fuse
from disco_hlo.search.moves.merge import merge, neighbouring_bucket
from disco_hlo.search.moves.reorder import reorder
from disco_hlo.search.moves.split import hand_over, split
from disco_hlo.search.moves.unfuse import stays, unfuse
from disco_hlo.search.rules.neighbours import mark_copies, predecessors, successors

FUSE: Final = 0
DUPLICATE: Final = 1
MERGE: Final = 2
UNFUSE: Final = 3
ABSORB: Final = 4
SPLIT: Final = 5
HAND_OVER: Final = 6
REORDER: Final = 7
SIBLING: Final = 8
"""A fusion of two units that read the same value; made by :data:`FUSE`."""
KINDS: Final = 9
UNRELATED: Final = 4
"""One in so many of them is of units that have nothing in common."""
RIVALS: Final = 4
"""Of so many units the one that takes longest is moved to another place."""
MOST_DRAWS: Final = 1 << 12
"""Of slots, until there are so many units: in a step of few units most slots are empty."""
MOST_HEADS: Final = 1 << 14
"""Nodes that are drawn until one is the first of its unit, which has at most a few hundred."""
TRIES: Final = 32
"""Slots that are looked at for that place."""

METHODS: Final = {"fuse": FUSE, "duplicate": DUPLICATE, "merge": MERGE}
"""The methods of Algorithm 1."""


@inner
def make_move(g: Any, s: Any, w: Any, method: Any, a: Any, b: Any) -> Any:
    """Make one move; whether it was legal. What ``a`` and ``b`` are depends on the move."""
    if a < 0 or s.owner[a] == -1:
        return False
    if method == HAND_OVER:
        return b >= 0 and s.owner[b] == b and hand_over(g, s, w, a, b)
    if s.owner[a] != a:
        return False
    if method == UNFUSE:
        return unfuse(g, s, w, a, b)
    if method == ABSORB:
        return absorb(g, s, w, a)
    if method == SPLIT:
        return split(g, s, w, a, b)
    if method == REORDER:
        return reorder(g, s, w, a, b)
    if b < 0 or s.owner[b] != b:
        return False
    if method == DUPLICATE:
        return duplicate(g, s, w, a, b)
    if method == MERGE:
        return merge(g, s, w, a, b)
    return fuse(g, s, w, a, b)


@inner
def second_unit(s: Any, kind: Any, b: Any) -> Any:
    """The unit that a move is about besides that of its first argument, -1 where there is none."""
    if b < 0 or kind == UNFUSE or kind == ABSORB or kind == SPLIT or kind == REORDER:
        return -1
    return s.owner[b]


@inner
def random_apply(
    g: Any, s: Any, w: Any, generator: Any, pools: Any, method: Any, times: Any, tries: Any, made: Any
) -> Any:
    """Apply one method at random places.

    Args:
        generator: a pointer to its word.
        pools: what to draw from, a ``views.PoolView``.
        times: how often.
        tries: how many proposals are drawn for one application before it is given up.
        made: ``[times, 3]`` int64, receives the moves (method, a, b).

    Returns:
        How many moves were made.
    """
    done = 0
    for _ in range(times):
        if not has_room(g, w):  # for no move any more
            break
        for _ in range(tries):
            a, b = random_move(g, s, w, generator, pools, method)
            if make_move(g, s, w, method, a, b):
                made[done, 0], made[done, 1], made[done, 2] = method, a, b
                done += 1
                break
    return done


@inner
def random_move(g: Any, s: Any, w: Any, generator: Any, pools: Any, method: Any) -> Any:
    """Arguments for a move of this kind; (-1, -1) where those drawn are refused at sight."""
    if method == MERGE or method == SPLIT or method == HAND_OVER:
        if pools.ranks < 2:
            return -1, -1
        return _random_buckets(g, s, generator, pools, method)
    if pools.fusibles == 0:
        return -1, -1
    if method == FUSE or method == DUPLICATE:
        unit = _random_unit(s, generator, pools.fusible, pools.fusibles)
        producer = _random_producer(g, s, w, generator, unit)
        return (unit, producer) if producer != -1 else (-1, -1)
    if method == SIBLING:
        a, b = _random_siblings(g, s, generator, pools)
        return (a, b) if a != b and g.flags[a] & g.flags[b] & at.FUSIBLE else (-1, -1)
    if method == UNFUSE:
        return _random_member(g, s, generator, pools)
    if method == ABSORB:
        return _random_unit(s, generator, pools.fusible, pools.fusibles), -1
    unit = _random_long_unit(g, s, generator)
    slot = _random_slot(g, s, w, generator, unit) if unit != -1 else -1
    return (unit, slot) if slot != -1 else (-1, -1)


@inner
def _random_unit(s: Any, generator: Any, pool: Any, size: Any) -> Any:
    """A unit that owns a node of the pool, each equally likely."""
    unit = pool[draw(generator, size)]
    for _ in range(MOST_HEADS):
        if s.owner[unit] == unit:
            return unit
        unit = pool[draw(generator, size)]
    return s.owner[unit]  # no unit need begin with a node of the pool


@inner
def _random_producer(g: Any, s: Any, w: Any, generator: Any, unit: Any) -> Any:
    """One of the fusible units that a unit waits for, -1 where there is none.

    They are listed when a unit is drawn for the first time, each by one of its nodes that the unit waits for, and the
    list holds as long as the unit computes the same, whatever becomes of those it names. One of them that was cut in
    two since is then drawn as the part that the named node is in.
    """
    if w.producers_of[unit] != s.computed[unit] or w.number[at.LISTED] - w.producers_at[unit] > PRODUCERS:
        _list_producers(g, s, w, unit)
    count = w.producer_count[unit]
    if count == 0:
        return -1
    producer = s.owner[w.producer[(w.producers_at[unit] + draw(generator, count)) & (PRODUCERS - 1)]]
    return producer if g.flags[producer] & at.FUSIBLE else -1


@inner
def _list_producers(g: Any, s: Any, w: Any, unit: Any) -> None:
    """Write down a node of each fusible unit that a unit waits for."""
    copied = mark_copies(s, w, unit)
    stamp = fresh_stamp(w)
    w.mark[unit] = stamp
    first = w.number[at.LISTED]
    last = first
    x, cell = unit, s.copies[unit]
    while x != -1:  # ends with the list
        for e in range(g.sources_at[x], g.sources_at[x + 1]):
            last = _list_producer(g, s, w, g.edge[e], copied, stamp, last)
        for e in range(g.earlier_at[x], g.earlier_at[x + 1]):
            last = _list_producer(g, s, w, g.edge[e], copied, stamp, last)
        following = s.next[x] if s.owner[x] == unit else -1
        if following == -1 and cell != -1:
            following = s.cell_node[cell]
            cell = s.next_of_unit[cell]
        x = following
    w.producers_of[unit], w.producers_at[unit], w.producer_count[unit] = s.computed[unit], first, last - first
    w.number[at.LISTED] = last


@inner
def _list_producer(g: Any, s: Any, w: Any, node: Any, copied: Any, stamp: Any, last: Any) -> Any:
    owner = s.owner[node]
    if w.mark[owner] == stamp or w.inside[node] == copied or not g.flags[owner] & at.FUSIBLE:
        return last
    w.mark[owner] = stamp
    w.producer[last & (PRODUCERS - 1)] = node
    return last + 1


@inner
def _random_siblings(g: Any, s: Any, generator: Any, pools: Any) -> Any:
    """Two units, the one that stands later first: mostly such as read the same array, for which one kernel
    reads it once; else any two, for which it is launched once."""
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


@inner
def _random_member(g: Any, s: Any, generator: Any, pools: Any) -> Any:
    """A group, and an op that it duplicates, or that it owns and may be rid of."""
    x = pools.fusible[draw(generator, pools.fusibles)]
    unit = s.owner[x]
    copies = 0
    cell = s.copies[unit]
    while cell != -1:  # ends with the list
        copies += 1
        cell = s.next_of_unit[cell]
    if s.count[unit] == 1 and copies == 0:
        return -1, -1
    chosen = draw(generator, s.count[unit] + copies)
    if chosen >= copies:
        return (-1, -1) if stays(g, s, unit, x) else (unit, x)
    cell = s.copies[unit]
    for _ in range(chosen):
        cell = s.next_of_unit[cell]
    return unit, s.cell_node[cell]


@inner
def _random_long_unit(g: Any, s: Any, generator: Any) -> Any:
    """The one that takes longest of ``RIVALS`` units other than buckets, each of these equally likely; -1 where none
    was met.

    What runs beside a transfer, and when a gradient appears, is decided by where the long ones stand.
    """
    chosen, longest_ns, rivals = np.int64(-1), np.int64(0), 0
    for _ in range(MOST_DRAWS):
        unit = s.order[draw(generator, s.total[at.SLOTS])]
        if unit == -1 or g.flags[unit] & at.ALL_REDUCE:
            continue
        time_ns = s.time_ns[at.TIME_COLUMNS * unit + at.MAIN]
        if chosen == -1 or time_ns > longest_ns:
            chosen, longest_ns = unit, time_ns
        rivals += 1
        if rivals == RIVALS:
            break
    return chosen


@inner
def _random_slot(g: Any, s: Any, w: Any, generator: Any, unit: Any) -> Any:
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


@inner
def _random_buckets(g: Any, s: Any, generator: Any, pools: Any, method: Any) -> Any:
    """Arguments for a move of buckets."""
    if method == MERGE:
        bucket = _random_unit(s, generator, pools.ranked, pools.ranks)
        x = bucket
        for _ in range(draw(generator, s.count[bucket])):
            x = s.next[x]
        return bucket, neighbouring_bucket(g, s, x, 2 * draw(generator, 2) - 1, pools)
    x = pools.ranked[draw(generator, pools.ranks)]
    if method == SPLIT:
        return s.owner[x], g.rank[x]
    return x, neighbouring_bucket(g, s, x, 2 * draw(generator, 2) - 1, pools)
