"""The moves by name, as numbers."""

from __future__ import annotations

from disco_hlo.search.moves.table import NUMBERS

FUSE = NUMBERS["fuse"]
DUPLICATE = NUMBERS["duplicate"]
MERGE = NUMBERS["merge"]
UNFUSE = NUMBERS["unfuse"]
ABSORB = NUMBERS["absorb"]
SPLIT = NUMBERS["split"]
HAND_OVER = NUMBERS["hand_over"]
REORDER = NUMBERS["reorder"]
SIBLING = NUMBERS["sibling"]
