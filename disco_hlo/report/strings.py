"""Every text of a report once: names repeat a lot, and each passes here on its way into the page."""

from __future__ import annotations

from disco_hlo.report.printable import printable

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
