"""What Python calls of the compiled search: each opens the views and does one large piece of work."""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import compiled
from disco_hlo.pointers import Ints
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import Scratch, State, roll_back
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.table import Table
from disco_hlo.search.arrays.views import open_views
from disco_hlo.search.moves.proposals import make_move
from disco_hlo.search.rules.legality import unit_refusal
from disco_hlo.search.times.pricing import Unknown, price_changed
from disco_hlo.search.times.ready_queue import ready_queue
from disco_hlo.search.times.running_sums import Segments, catch_up, count_all, open_segments
from disco_hlo.search.times.segments import order_ns, segments_ns
from disco_hlo.simulator.contention import Progress, open_progress


@compiled
def make_one(step: Step, state: State, scratch: Scratch, method: int, a: int, b: int) -> Any:
    """Make one move between the units with heads ``a`` and ``b``; whether it was legal."""
    g, s, w = open_views(step, state, scratch)
    return make_move(g, s, w, method, a, b)


@compiled
def refusal_of(step: Step, state: State, scratch: Scratch, unit: int) -> Any:
    """Why the unit with this head may not stand as it is, 0 where it may (see ``legality``)."""
    g, s, w = open_views(step, state, scratch)
    return unit_refusal(g, s, w, unit)


@compiled
def look_up(step: Step, state: State, scratch: Scratch, prices: Table, unknown: Unknown) -> Any:
    """Fill in what the noted changes cost, as far as it is known; number of kernels listed as unknown."""
    g, s, w = open_views(step, state, scratch)
    return price_changed(g, s, w, prices, unknown, 0, True)


@compiled
def schedule(step: Step, state: State, scratch: Scratch, progress: Progress, started: Ints) -> Any:
    """Cost in ns of a priced state, and number of entries of its order in ``started``."""
    g, s, w = open_views(step, state, scratch)
    return ready_queue(g, s, w, open_progress(progress), started)


@compiled
def run_order(step: Step, state: State, scratch: Scratch, segments: Segments) -> Any:
    """Cost in ns of a priced state in its own order, and number of entries in ``segments.started``."""
    g, s, _ = open_views(step, state, scratch)
    return order_ns(g, s, open_segments(segments))


@compiled
def count_order(step: Step, state: State, scratch: Scratch, segments: Segments) -> Any:
    """What the order of a priced state takes by its segments, which are then ready to follow its changes."""
    g, s, _ = open_views(step, state, scratch)
    c = open_segments(segments)
    count_all(g, s, c)
    return segments_ns(g, s, c)


@compiled
def recount_order(step: Step, state: State, scratch: Scratch, segments: Segments, mark: int) -> Any:
    """The same after changes, which the log has from entry ``mark`` on."""
    g, s, w = open_views(step, state, scratch)
    c = open_segments(segments)
    catch_up(g, s, w, c, mark)
    return segments_ns(g, s, c)


@compiled
def undo(step: Step, state: State, scratch: Scratch, mark: int) -> None:
    """Undo all writes since the log had ``mark`` entries, and forget the noted changes."""
    _, _, w = open_views(step, state, scratch)
    roll_back(w, mark)
    w.number[at.CHANGES] = 0
