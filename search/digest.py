"""Hashes of units and strategies: equal hash, equal kernel, equal cost."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from disco_hlo.search import layout as at
from disco_hlo.search.jit import compiled
from disco_hlo.search.neighbours import is_read_outside
from disco_hlo.search.rng import mix

_INSIDE: Final = 1
_RESULT: Final = 2
_COPY: Final = 3
_UNIT: Final = 4


@compiled
def unit_digest(g: Any, s: Any, unit: Any) -> Any:
    """Hash of what a unit owns, duplicates and returns."""
    total = np.uint64(0)
    x = unit
    while x != -1:
        role = _RESULT if is_read_outside(g, s, x) else _INSIDE
        total += mix(np.uint64(8 * x + role))
        x = s.next[x]
    cell = s.copies[unit]
    while cell != -1:
        total += mix(np.uint64(8 * s.cell_node[cell] + _COPY))
        cell = s.next_of_unit[cell]
    return np.int64(total)


@compiled
def strategy_digest(s: Any) -> Any:
    """Hash of the strategy: of all units, wherever they stand in the order."""
    total = np.uint64(0)
    for slot in range(s.total[at.SLOTS]):
        unit = s.order[slot]
        if unit != -1:
            total += mix(np.uint64(s.digest[unit] ^ _UNIT))
    return np.int64(total)
