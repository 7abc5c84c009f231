"""What only tests call of the compiled search from Python."""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import compiled
from disco_hlo.search import layout as at
from disco_hlo.search.kernels import unit_refusal
from disco_hlo.search.layout import open_views
from disco_hlo.search.moves.table import make_move
from disco_hlo.search.segments import Segments, catch_up, open_segments, segments_ns
from disco_hlo.search.state import Scratch, State, roll_back
from disco_hlo.search.step import Step


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
