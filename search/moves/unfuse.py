"""Take an op out of a group: the way back from both kinds of fusion (not in the paper)."""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import Row, inner
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import draw
from disco_hlo.search.kernels import all_stand, drop_idle_copies, may_own, part, read_again
from disco_hlo.search.layout import GraphView, PoolView, ScratchView, StateView
from disco_hlo.search.moves.move import Move
from disco_hlo.search.ordering import reseat
from disco_hlo.search.state import holds_copy


@inner
def unfuse(g: GraphView, s: StateView, w: ScratchView, unit: int, node: int) -> Any:
    """Make a unit of its own of an op that a group owns, or let the group read what it recomputes.

    Args:
        unit: head of a group.
        node: an op that the group computes.
    """
    if not g.flags[unit] & at.FUSIBLE:
        return False
    owned = s.owner[node] == unit and s.count[unit] > 1
    if (owned and stays(g, s, unit, node)) or (not owned and not holds_copy(s, unit, node)):
        return False
    changes, place = w.number[at.CHANGES], s.place[unit]
    if owned:
        drop_idle_copies(g, s, w, part(g, s, w, node), node)
    else:
        read_again(g, s, w, unit, node)
        drop_idle_copies(g, s, w, unit, node)
    # What is left of an owner is tied to nothing new but the op, which gets a place that suits both.
    moved, near = (node, place) if owned else (unit, 0)
    return all_stand(g, s, w, changes) and reseat(g, s, w, moved, near)


@inner
def stays(g: GraphView, s: StateView, unit: int, node: int) -> Any:
    """Whether an op that a group owns cannot leave it, seen from the op alone.

    Either it stands amid the group, which would then wait for the op and the op for it; or the group has
    more ops than a kernel may have, even without it.
    """
    if not may_own(g, s.count[unit] - 1):
        return True
    reads = False
    for e in range(g.sources_at[node], g.sources_at[node + 1]):
        reads = reads or s.owner[g.edge[e]] == unit
    if reads:
        for e in range(g.readers_at[node], g.readers_at[node + 1]):
            if s.owner[g.edge[e]] == unit:
                return True
    return False


@inner
def random_member(g: GraphView, s: StateView, _w: ScratchView, generator: Row, pools: PoolView) -> Any:
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


MOVE = Move("kernels", 2, random_member, unfuse)
