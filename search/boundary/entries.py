"""What Python calls of the compiled search: each opens the views and does one large piece of work."""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import Ints, compiled
from disco_hlo.search.arrays.board import Scratch, State
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.table import Table
from disco_hlo.search.arrays.views import open_views
from disco_hlo.search.times.pricing import Unknown, price_changed
from disco_hlo.search.times.ready_queue import ready_queue
from disco_hlo.search.times.running_sums import Segments, count_all, open_segments
from disco_hlo.search.times.segments import order_ns, segments_ns
from disco_hlo.simulator.contention import Progress, open_progress


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
