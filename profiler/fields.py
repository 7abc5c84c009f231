"""The kinds of numbers that measured records hold: whoever reads a record from a file has them checked."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

_MOST = 1 << 62
_LARGEST = 1e200
"""What is multiplied with it, bytes or counts, stays finite."""

Nanoseconds = Annotated[int, Meta(ge=0, lt=_MOST)]
Bytes = Annotated[int, Meta(ge=0, lt=_MOST)]
Positive = Annotated[int, Meta(ge=1, lt=_MOST)]
Factor = Annotated[float, Meta(ge=1, le=_LARGEST)]
"""A slow-down."""
Share = Annotated[float, Meta(ge=0, le=1)]
Spread = Annotated[float, Meta(ge=0, le=_LARGEST)]
"""Relative to what it is the spread, or the error, of."""
