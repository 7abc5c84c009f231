"""Hashes of units and strategies: equal hash, equal kernel, equal cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from disco_hlo.search import layout as at
from disco_hlo.search.jit import compiled
from disco_hlo.search.neighbours import is_read_outside
from disco_hlo.search.rng import mix

_OWNED, _RESULT, _COPY, _UNIT = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
_SHIFT = np.uint64(3)


@compiled
def unit_digest(step: Any, state: Any, unit: Any) -> Any:
    """Hash of what a unit owns, duplicates and returns."""
    word = state.word
    total = np.uint64(0)
    x = unit
    while x != -1:
        role = _RESULT if is_read_outside(step, state, x) else _OWNED
        total += mix((np.uint64(x) << _SHIFT) | role)
        x = word[at.NEXT, x]
    cell = word[at.COPIES, unit]
    while cell != -1:
        total += mix((np.uint64(word[at.CELL_NODE, cell]) << _SHIFT) | _COPY)
        cell = word[at.NEXT_OF_UNIT, cell]
    return total


@compiled
def strategy_digest(state: Any) -> Any:
    """Hash of the strategy: of all units, wherever they stand in the order."""
    word = state.word
    total = np.uint64(0)
    for slot in range(word[at.TOTAL, at.SLOTS]):
        unit = word[at.ORDER, slot]
        if unit != -1:
            total += mix(state.digest[unit] ^ _UNIT)
    return total
