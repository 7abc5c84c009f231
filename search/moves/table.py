"""Every move of the search. A new one is a file of its own, and a line here: all methods propose it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from disco_hlo.search.moves.move import Move

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


def weights(changes: str) -> dict[int, int]:
    """How often the joint search proposes each move that changes ``kernels``, ``buckets`` or ``order``."""
    return {number: move.weight for number, move in enumerate(MOVES) if move.changes == changes}


def in_algorithm_1() -> tuple[str, ...]:
    """The moves of the paper's Algorithm 1, and others that say so."""
    return tuple(name for name, number in NUMBERS.items() if MOVES[number].in_algorithm_1)
