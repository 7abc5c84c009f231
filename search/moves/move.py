"""What moves share: the record of a move for everybody who proposes moves; draws of a unit and of one it waits for.

``table`` lists the moves, and has what the search asks of one by its number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from disco_hlo.compiled import Row, inner
from disco_hlo.core.reasons import fresh_stamp
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import draw
from disco_hlo.search.layout import GraphView, PoolView, ScratchView, StateView
from disco_hlo.search.ordering import mark_copies, next_member
from disco_hlo.search.state import PRODUCERS

Compiled = Callable[..., Any]
"""A function under ``compiled.inner``."""
MOST_HEADS: Final = 1 << 14
"""Nodes that are drawn until one is the first of its unit, which has at most a few hundred."""


@dataclass(frozen=True)
class Move:
    """A kind of change of a state: what it is about, and who proposes it how often."""

    changes: str
    """``kernels``, ``buckets`` or ``order``: in which climbs of the joint search it is proposed."""
    weight: int
    """How often the joint search proposes it there, in proportion."""
    propose: Compiled
    """``(g, s, w, generator, pools)``: arguments for ``apply``; (-1, -1) where those drawn are refused at sight.
    There is something to draw from (``table.random_move``)."""
    apply: Compiled
    """``(g, s, w, a, b)``: make the move; whether it was legal. What it has done by then is taken back where it was not
    (``table.make_move``). ``a`` is a node of some unit."""
    of_unit: bool = True
    """Whether ``a`` is the head of a unit."""
    with_unit: bool = False
    """Whether ``b`` is the head of another unit."""
    first_weight: int = 0
    """Of ``weight`` in the very first climb. Few kernels of XLA are better for losing an op, and all that are tried
    need a cost."""
    in_algorithm_1: bool = False
    """Whether Algorithm 1 has it among its methods, unless ``SearchSettings.moves`` says otherwise."""


@inner
def random_unit(s: StateView, generator: Row, pool: Row, size: int) -> Any:
    """A unit that owns a node of the pool, each equally likely."""
    unit = pool[draw(generator, size)]
    for _ in range(MOST_HEADS):
        if s.owner[unit] == unit:
            return unit
        unit = pool[draw(generator, size)]
    return s.owner[unit]  # no unit need begin with a node of the pool


@inner
def random_reader(g: GraphView, s: StateView, w: ScratchView, generator: Row, pools: PoolView) -> Any:
    """A unit, and a fusible one that it waits for; (-1, -1) where there is none."""
    unit = random_unit(s, generator, pools.fusible, pools.fusibles)
    producer = _random_producer(g, s, w, generator, unit)
    return (unit, producer) if producer != -1 else (-1, -1)


@inner
def _random_producer(g: GraphView, s: StateView, w: ScratchView, generator: Row, unit: int) -> Any:
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
def _list_producers(g: GraphView, s: StateView, w: ScratchView, unit: int) -> None:
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
        x, cell = next_member(s, unit, x, cell)
    w.producers_of[unit], w.producers_at[unit], w.producer_count[unit] = s.computed[unit], first, last - first
    w.number[at.LISTED] = last


@inner
def _list_producer(
    g: GraphView, s: StateView, w: ScratchView, node: int, copied: int, stamp: int, last: int
) -> Any:
    owner = s.owner[node]
    if w.mark[owner] == stamp or w.inside[node] == copied or not g.flags[owner] & at.FUSIBLE:
        return last
    w.mark[owner] = stamp
    w.producer[last & (PRODUCERS - 1)] = node
    return last + 1
