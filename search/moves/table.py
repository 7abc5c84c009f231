"""Every move of the search, and what the search asks of a move by its number: to be drawn, made.

A new one is a file of its own, and a line here: all methods propose it. ``random_apply`` is RandomApply of the paper's
Algorithm 1; ``random_move`` serves the search around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Final

import numpy as np

from disco_hlo.compiled import Ints, Row, inner
from disco_hlo.search import layout as at
from disco_hlo.search.layout import GraphView, PoolView, ScratchView, StateView
from disco_hlo.search.moves.move import Compiled, Move
from disco_hlo.search.state import has_room, roll_back

NAMES: Final = (
    "fuse",
    "duplicate",
    "merge",
    "unfuse",
    "absorb",
    "split",
    "hand_over",
    "reorder",
    "sibling",
)
"""Each is a file of this folder, whose ``MOVE`` is the move."""
MOVES: Final[tuple[Move, ...]] = tuple(import_module(f"{__package__}.{name}").MOVE for name in NAMES)
"""To compiled code a move is its place here, its *number*."""
NUMBERS: Final[Mapping[str, int]] = {name: number for number, name in enumerate(NAMES)}

TRIES: Final = 16
"""Proposals that Algorithm 1 draws for one application of a move until a legal one is found."""


def weights(changes: str) -> dict[int, int]:
    """How often the joint search proposes each move that changes ``kernels``, ``buckets`` or ``order``."""
    return {number: move.weight for number, move in enumerate(MOVES) if move.changes == changes}


def in_algorithm_1() -> tuple[str, ...]:
    """The moves of the paper's Algorithm 1, and others that say so."""
    return tuple(name for name, number in NUMBERS.items() if MOVES[number].in_algorithm_1)


_OF_UNIT: Final = np.array([move.of_unit for move in MOVES])
_WITH_UNIT: Final = np.array([move.with_unit for move in MOVES])
_OF_BUCKETS: Final = np.array([move.changes == "buckets" for move in MOVES])
ONLY_ORDER: Final = np.array([move.changes == "order" for move in MOVES])


def _by_number(functions: Iterable[Compiled], arguments: str) -> Compiled:
    """A compiled function of a number and ``arguments`` that calls one of some. Numba cannot index constant functions,
    so the choice among them is written out."""
    named = {f"f{number}": function for number, function in enumerate(functions)}
    lines = (f"    if number == {name[1:]}: return {name}({arguments})" for name in named)
    text = "\n".join([f"def choose(number, {arguments}):", *lines, f"    return f0({arguments})"])
    scope: dict[str, Any] = {"__name__": __name__, **named}
    exec(text, scope)  # noqa: S102  a text of our own
    chosen: Compiled = inner(scope["choose"])
    return chosen


_propose = _by_number([move.propose for move in MOVES], "g, s, w, generator, pools")
_apply = _by_number([move.apply for move in MOVES], "g, s, w, a, b")


@inner
def random_move(
    number: int, g: GraphView, s: StateView, w: ScratchView, generator: Row, pools: PoolView
) -> Any:
    """Arguments for the move of a number; (-1, -1) where those drawn are refused at sight, or there is nothing to draw
    from: of buckets two gradients at least."""
    if pools.ranks < 2 if _OF_BUCKETS[number] else pools.fusibles == 0:
        return -1, -1
    return _propose(number, g, s, w, generator, pools)


@inner
def make_move(g: GraphView, s: StateView, w: ScratchView, number: int, a: int, b: int) -> Any:
    """Make one move; whether it was legal and there was room to log it, else nothing has changed. What ``a`` and ``b``
    are depends on the move."""
    if a < 0 or s.owner[a] == -1 or (_OF_UNIT[number] and s.owner[a] != a):
        return False
    if _WITH_UNIT[number] and (b < 0 or s.owner[b] != b):
        return False
    if not has_room(g, w):
        return False
    mark, changes = w.number[at.LOGGED], w.number[at.CHANGES]
    if _apply(number, g, s, w, a, b):
        return True
    roll_back(w, mark)
    w.number[at.CHANGES] = changes
    return False


@inner
def second_unit(s: StateView, number: int, b: int) -> Any:
    """The unit that a move is about besides that of its first argument, -1 where there is none."""
    return s.owner[b] if b >= 0 and _WITH_UNIT[number] else -1


@inner
def random_apply(
    g: GraphView,
    s: StateView,
    w: ScratchView,
    generator: Row,
    pools: PoolView,
    number: int,
    times: int,
    made: Ints,
) -> Any:
    """Apply one move at random places.

    Args:
        generator: a pointer to its word.
        pools: what to draw from, a ``layout.PoolView``.
        times: how often.
        made: ``[times, 3]`` int64, receives the moves (number, a, b).

    Returns:
        How many moves were made.
    """
    done = 0
    for _ in range(times):
        if not has_room(g, w):  # for no move any more
            break
        for _ in range(TRIES):
            a, b = random_move(number, g, s, w, generator, pools)
            if make_move(g, s, w, number, a, b):
                made[done, 0], made[done, 1], made[done, 2] = number, a, b
                done += 1
                break
    return done
