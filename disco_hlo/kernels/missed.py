"""Why no kernel takes a collective."""

from __future__ import annotations


class MissedError(Exception):
    """No kernel takes a collective; its text says why."""


class NoMatmulError(MissedError):
    """What a collective sums or sends comes from no matmul."""


def require_met(met: bool, why: str) -> None:
    """Raise :class:`MissedError`, unless `met`."""
    if not met:
        raise MissedError(why)
