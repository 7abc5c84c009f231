"""What a move is to everybody who proposes moves: one record.

``table`` lists them; what the search asks of a move by its number is in ``proposals``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Compiled = Callable[..., Any]
"""A function under ``compiled.inner``."""


@dataclass(frozen=True)
class Move:
    """A kind of change of a state: what it is about, and who proposes it how often."""

    changes: str
    """``kernels``, ``buckets`` or ``order``: in which climbs of the joint search it is proposed."""
    weight: int
    """How often the joint search proposes it there, in proportion."""
    propose: Compiled
    """``(g, s, w, generator, pools)``: arguments for ``apply``; (-1, -1) where those drawn are refused at sight."""
    apply: Compiled
    """``(g, s, w, a, b)``: make the move; whether it was legal. ``a`` is a node of some unit."""
    of_unit: bool = True
    """Whether ``a`` is the head of a unit."""
    with_unit: bool = False
    """Whether ``b`` is the head of another unit."""
    cache_key: Compiled | None = None
    """``(g, s, w, salt, a, b)``: what a refusal is remembered under, and how many units besides that of ``a`` it is
    about, which it writes into row ``readers`` (``refusals``). None: no refusal is remembered."""
    slow_key: bool = False
    """Whether that takes so long that a move which has to wait for a cost waits before it is asked for."""
    first_weight: int = 0
    """Of ``weight`` in the very first climb. Few kernels of XLA are better for losing an op, and all that are tried
    need a cost."""
    in_algorithm_1: bool = False
    """Whether Algorithm 1 has it among its methods, unless ``SearchSettings.moves`` says otherwise."""
