"""Marks on nodes that need not be taken off: whoever marks some takes a number that no mark holds yet."""

from __future__ import annotations

from typing import Any, Final

STAMP: Final = 0
"""Place in ``number`` of working space: the largest number that any mark holds."""


def fresh_stamp(w: Any) -> Any:
    """A number that no mark in working space ``w`` holds yet."""
    w.number[STAMP] += 1
    return w.number[STAMP]
