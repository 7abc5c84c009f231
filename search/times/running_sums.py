"""Compute time by slot, and a digest of the order, that follow every move.

They are kept in working space of their own that is made anew when a climb begins (:func:`count_all`). After a
move the log that would undo it tells which slots and times were written (:func:`catch_up`): whatever writes
through ``board.put`` is seen here, and since the sums are written through it too, ``roll_back`` restores them
with the rest. The digest depends on which unit follows which, not on the slots.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Row, address_of, inner, pointer_to
from disco_hlo.hlo.graph import stretches
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import put
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.views import GraphView, ScratchView, StateView
from disco_hlo.simulator.contention import Progress, ProgressView, new_progress, open_progress
from disco_hlo.simulator.costs import MachineModel

BLOCK: Final = 64
"""Slots whose times are kept as one sum."""

# Segments.number.
ORDER_DIGEST: Final = 0
"""Hash of the order of the units."""
CUTS: Final = 1
"""Gradients that are cut out of their buckets."""
EVENTS: Final = 2
"""Events that happen."""
NUMBERS: Final = 3

# Events: number 2 * rank + kind, in the order in which they happen between two slots.
ISSUED: Final = 0
AWAITED: Final = 1
KINDS: Final = 2
TIES: Final = 5
"""Lists of ``Segments.tie`` for each all-reduce."""
NEVER: Final = 2**62
"""The key of an event that does not happen."""

_OTHER, _END = np.uint64(0x5851F42D4C957F2D), np.uint64(0x9E3779B97F4A7C15)


class Segments(NamedTuple):
    """Working space of one search thread for orders of one step."""

    slot: NDArray[np.int64]
    """``[2, nodes + 1]``: the unit counted at each slot (-1: none), and what it adds to the compute stream."""
    block: NDArray[np.int64]
    """``[blocks]``: the sum of the latter."""
    number: NDArray[np.int64]
    event: NDArray[np.int64]
    """``[2, KINDS * all-reduces]``: when each event happens; all of them, in the order of the last candidate."""
    cut: NDArray[np.int64]
    """``[2, all-reduces]``: the slots before which gradients are cut out of their buckets, and these gradients."""
    ranked: NDArray[np.int64]
    """``[all-reduces]``: their nodes, by rank."""
    tie_at: NDArray[np.int64]
    """``[TIES * all-reduces + 1]``: number i reads ``tie[tie_at[TIES * i] : tie_at[TIES * i + 1]]``; then come those
    that must run before it, its readers, those that must run after it, and who does not find it inside a bucket
    (``UNCUT_AT``). Near each other they are fast to read, and candidates are scored by little else."""
    tie: NDArray[np.int64]
    loop: NDArray[np.int64]
    """Ops that run collectives of their own, ascending."""
    progress: Progress
    """Of collectives by rank."""
    started: NDArray[np.int64]
    """``[entries]``: what ran when an order was run last (``segments.order_ns``)."""
    ends_ns: NDArray[np.int64]
    """``[nodes]``: when the unit of each head ended then."""


class SegmentsView(NamedTuple):
    """Rows of :class:`Segments`."""

    unit: Row
    time_ns: Row
    block: Row
    number: Row
    key: Row
    by_time: Row
    cut_at: Row
    cut: Row
    ranked: Row
    buckets: int
    """Number of all-reduces."""
    tie_at: Row
    tie: Row
    loop: Row
    loops: int
    """Number of these."""
    progress: ProgressView
    started: Row
    ends_ns: Row


def new_segments(step: Step, ranked: NDArray[np.int64], machine: MachineModel) -> Segments:
    """Working space for orders of a step, whose all-reduces are ``ranked``."""
    nodes, events = int(step.node.shape[1]) - 1, KINDS * ranked.size
    rows = (at.SOURCES_AT, at.EARLIER_AT, at.READERS_AT, at.LATER_AT, at.UNCUT_AT)
    begin, end = (step.node[np.ix_(rows, beside)].T.ravel() for beside in (ranked, ranked + 1))
    return Segments(
        np.full((2, nodes + 1), -1, np.int64),
        np.zeros(nodes // BLOCK + 1, np.int64),
        np.zeros(NUMBERS, np.int64),
        np.array([np.full(events, NEVER), np.arange(events)], np.int64),
        np.zeros((2, ranked.size), np.int64),
        ranked,
        np.concatenate([[0], np.cumsum(end - begin)]),
        step.edge[stretches(begin, end - begin)],
        np.flatnonzero(step.node[at.FLAGS] & at.RUNS_COLLECTIVES),
        new_progress(ranked.size, machine.pace()),
        np.zeros(4 * nodes, np.int64),
        np.zeros(nodes, np.int64),
    )


@inner
def open_segments(segments: Segments) -> Any:
    """Pointers into the working space, valid while it lives."""
    slots, events, buckets = segments.slot.shape[1], segments.event.shape[1], segments.ranked.size
    return SegmentsView(
        pointer_to(segments.slot.ctypes.data),
        pointer_to(segments.slot.ctypes.data + 8 * slots),
        pointer_to(segments.block.ctypes.data),
        pointer_to(segments.number.ctypes.data),
        pointer_to(segments.event.ctypes.data),
        pointer_to(segments.event.ctypes.data + 8 * events),
        pointer_to(segments.cut.ctypes.data),
        pointer_to(segments.cut.ctypes.data + 8 * buckets),
        pointer_to(segments.ranked.ctypes.data),
        buckets,
        pointer_to(segments.tie_at.ctypes.data),
        pointer_to(segments.tie.ctypes.data),
        pointer_to(segments.loop.ctypes.data),
        segments.loop.size,
        open_progress(segments.progress),
        pointer_to(segments.started.ctypes.data),
        pointer_to(segments.ends_ns.ctypes.data),
    )


@inner
def count_all(g: GraphView, s: StateView, c: SegmentsView) -> None:
    """Sums and digest of a state, from nothing."""
    for block in range(g.nodes // BLOCK + 1):
        c.block[block] = 0
    digest: Any = np.uint64(0)
    before: Any = np.int64(-1)
    for slot in range(g.nodes + 1):
        unit = s.order[slot] if slot < s.total[at.SLOTS] else -1
        c.unit[slot] = unit
        c.time_ns[slot] = compute_ns(g, s, unit)
        c.block[slot // BLOCK] += c.time_ns[slot]
        if unit != -1:
            digest += _follows(g, before, unit)
            before = unit
    c.number[ORDER_DIGEST] = np.int64(digest + _follows(g, before, -1))


@inner
def catch_up(g: GraphView, s: StateView, w: ScratchView, c: SegmentsView, mark: int) -> None:
    """Bring sums and digest up to date with what was written since the log had ``mark`` entries."""
    order: Any = address_of(s.order)
    times: Any = address_of(s.time_ns)
    width = address_of(s.copies) - order  # the next row
    digest = np.uint64(c.number[ORDER_DIGEST])
    for entry in range(mark, w.number[at.LOGGED]):
        address = w.log[2 * entry]
        if order <= address < order + width:
            slot = (address - order) >> 3
            if c.unit[slot] != s.order[slot]:
                digest += _change_of_digest(g, s, c, slot)
                put(w, c.unit, slot, s.order[slot])
                _count_anew(g, s, w, c, slot)
        elif times <= address < times + at.TIME_COLUMNS * width:
            unit = (address - times) // (8 * at.TIME_COLUMNS)
            # Where it came to stand at a slot only now, that slot was written, too.
            if s.place[unit] != -1 and c.unit[s.place[unit]] == unit:
                _count_anew(g, s, w, c, s.place[unit])
    if np.int64(digest) != c.number[ORDER_DIGEST]:
        put(w, c.number, ORDER_DIGEST, np.int64(digest))


@inner
def _change_of_digest(g: GraphView, s: StateView, c: SegmentsView, slot: int) -> Any:
    """What it does to the digest that a slot gets the unit that stands there now."""
    before, after, end = slot - 1, slot + 1, s.total[at.SLOTS]
    while before >= 0 and c.unit[before] == -1:  # ends: it goes down
        before -= 1
    while after < end and c.unit[after] == -1:  # ends: it goes up
        after += 1
    first = c.unit[before] if before >= 0 else -1
    last = c.unit[after] if after < end else -1
    return _through(g, first, s.order[slot], last) - _through(g, first, c.unit[slot], last)


@inner
def _count_anew(g: GraphView, s: StateView, w: ScratchView, c: SegmentsView, slot: int) -> None:
    """Bring the sums up to date with what a slot's unit adds to them."""
    change_ns = compute_ns(g, s, c.unit[slot]) - c.time_ns[slot]
    if change_ns != 0:
        put(w, c.block, slot // BLOCK, c.block[slot // BLOCK] + change_ns)
        put(w, c.time_ns, slot, c.time_ns[slot] + change_ns)


@inner
def compute_ns(g: GraphView, s: StateView, unit: int) -> Any:
    """What a unit adds to the compute stream at its own place."""
    if unit == -1 or g.flags[unit] & at.ALL_REDUCE:
        return 0
    return s.time_ns[at.TIME_COLUMNS * unit + at.MAIN]


@inner
def _through(g: GraphView, first: int, unit: int, last: int) -> Any:
    if unit == -1:
        return _follows(g, first, last)
    return _follows(g, first, unit) + _follows(g, unit, last)


@inner
def _follows(g: GraphView, a: int, b: int) -> Any:
    """Hash of ``b`` running next after ``a``; -1 stands for both ends."""
    mixed_a = np.uint64(g.mixed[a]) if a != -1 else _END
    mixed_b = np.uint64(g.mixed[b]) if b != -1 else _END
    return (mixed_a ^ _OTHER) * (mixed_b + _END)
