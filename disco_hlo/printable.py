"""What is printed for people: times and sizes in the unit that suits, names from modules and plans made safe.

Names may hold anything, terminal commands included, and repeat a lot: a report has every text once (:class:`Strings`).
"""

from __future__ import annotations

from collections.abc import Sequence

_FULL_CHARACTERS = 160


def printable(text: str, limit: int = _FULL_CHARACTERS) -> str:
    """``text`` on one line: what a terminal would obey is written as an escape, what is too long is cut.

    Control characters, terminal escapes, direction marks and lone surrogates all become ``\\x1b``-like
    escapes. The length of what was cut is told.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return shown if len(text) <= limit else f"{shown}… ({len(text)} characters)"


def listed(texts: Sequence[str], most: int) -> str:
    """The first of them, side by side, and whether there are more."""
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


def counted(number: float, what: str) -> str:
    """So many of something, in the singular or the plural: ``1 op``, ``2 processes``."""
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number:.15g} {what}{ending}"


def size_text(size_bytes: int) -> str:
    """A number of bytes for people: ``1.5 MiB``."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def time_text(time_ns: float) -> str:
    """A time for people: ``1.234 ms``."""
    for unit, ns in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(time_ns) >= ns:
            return f"{time_ns / ns:.4g} {unit}"
    return f"{time_ns:.0f} ns"


LONGEST = 500
"""Characters of a name that a page shows; of longer ones it tells the length."""


class Strings:
    """A table of texts; equal texts share an index."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._shown: list[str] = []

    def __call__(self, text: str) -> int:
        """Index of ``text`` as a page may show it."""
        found = self._index.get(text)
        if found is None:
            found = self._index[text] = len(self._shown)
            self._shown.append(printable(text, LONGEST))
        return found

    def as_list(self) -> list[str]:
        """The texts by index."""
        return self._shown
