"""Merge two neighbouring all-reduce buckets into one.

The third method of the paper (section 4.5): all-reduce fusion.
"""

from __future__ import annotations

from typing import Any

from disco_hlo.search import layout as at
from disco_hlo.search.arrays import has_room, link, roll_back
from disco_hlo.search.jit import compiled
from disco_hlo.search.neighbours import successors
from disco_hlo.search.ordering import settle


@compiled
def merge(step: Any, state: Any, scratch: Any, a: Any, b: Any) -> Any:
    """Make one bucket of two, given by their heads."""
    word, node = state.word, step.node
    if a == b or not node[at.FLAGS, a] & node[at.FLAGS, b] & at.ALL_REDUCE:
        return False
    if node[at.CHANNEL, a] != node[at.CHANNEL, b]:
        return False
    if word[at.PLACE, a] > word[at.PLACE, b]:
        a, b = b, a
    for i in range(successors(step, state, scratch, a, at.NEIGHBOURS)):
        if scratch.row[at.NEIGHBOURS, i] == b:
            return False
    low, high = word[at.PLACE, a], word[at.PLACE, b]
    if not has_room(scratch):
        return False
    mark, changes = scratch.number[at.LOGGED], scratch.number[at.CHANGES]
    unit = link(state, scratch, a, b)
    if settle(step, state, scratch, unit, low, high):
        return True
    roll_back(state, scratch, mark)
    scratch.number[at.CHANGES] = changes
    return False


@compiled
def neighbouring_bucket(step: Any, state: Any, all_reduce: Any, direction: Any, ranked: Any) -> Any:
    """The nearest other bucket in production order, -1 where there is none.

    Args:
        all_reduce: a member of the bucket whose neighbour is asked for.
        direction: 1 for the gradients produced later, -1 for those produced earlier.
        ranked: ``[all-reduces]``, node ids in production order.
    """
    owner = state.word[at.OWNER]
    rank = step.node[at.RANK, all_reduce] + direction
    while 0 <= rank < ranked.shape[0]:
        if owner[ranked[rank]] != owner[all_reduce]:
            return owner[ranked[rank]]
        rank += direction
    return -1
