"""Why no kernel takes a collective: a word for the reason, and what it is about."""

from __future__ import annotations


class MissedError(Exception):
    """No kernel takes a collective: a word for the reason, and what it is about."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(reason, why)
        self.reason, self.why = reason, why


def require_met(met: bool, reason: str, why: str) -> None:
    """Raise :class:`MissedError`, unless `met`."""
    if not met:
        raise MissedError(reason, why)
