"""Move a unit to another place in the order (not in the paper, which leaves the order to a queue)."""

from __future__ import annotations

from typing import Any

from disco_hlo.compiled import inner
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import has_room
from disco_hlo.search.rules.ordering import shift


@inner
def reorder(g: Any, s: Any, w: Any, unit: Any, slot: Any) -> Any:
    """Put a unit into a slot of the order; refused where what it is tied to stands between."""
    if not 0 <= slot < s.total[at.SLOTS] or slot == s.place[unit] or not has_room(g, w):
        return False
    return shift(g, s, w, unit, slot)
