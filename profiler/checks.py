"""Checks of values that come from a file: each failure names the file, the place and what was expected."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from disco_hlo.errors import ProfileError

_LARGEST = 1e200
"""What is multiplied with it, bytes or counts, stays finite."""


class Checker:
    """Returns each value as its type, or raises :class:`ProfileError`."""

    def __init__(self, source: str) -> None:
        self._source = source

    def fail(self, where: str, what: str) -> NoReturn:
        """Raise with the file, the place and what is wrong."""
        raise ProfileError(f"{self._source}: {where}: {what}; measure again or name another file")

    def record(self, value: Any, where: str) -> dict[str, Any]:
        """A JSON object."""
        if not isinstance(value, dict):
            self.fail(where, f"expected an object, got {value!r:.80}")
        return value

    def rows(self, value: Any, where: str) -> list[Any]:
        """A list of any length."""
        if not isinstance(value, list):
            self.fail(where, f"expected a list, got {value!r:.80}")
        return value

    def row(self, value: Any, length: int, where: str) -> list[Any]:
        """A list of exactly ``length`` values."""
        if not isinstance(value, list) or len(value) != length:
            self.fail(where, f"expected {length} values, got {value!r:.80}")
        return value

    def text(self, value: Any, where: str) -> str:
        """A text of at most 1000 characters."""
        if not isinstance(value, str) or len(value) > 1000:
            self.fail(where, f"expected a short text, got {value!r:.80}")
        return value

    def integer(self, value: Any, where: str, minimum: int) -> int:
        """An integer of at least ``minimum`` that fits 63 bits."""
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 1 << 62:
            self.fail(where, f"expected an integer of at least {minimum}, got {value!r:.80}")
        return value

    def number(self, value: Any, where: str, minimum: float = -math.inf, above: float = -math.inf) -> float:
        """A finite number, at least ``minimum`` and greater than ``above``."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not abs(value) <= _LARGEST or value < minimum or value <= above:
            bound = f"at least {minimum}" if minimum > -math.inf else f"above {above}"
            self.fail(where, f"expected a finite number {bound}, got {value!r:.80}")
        return float(value)
