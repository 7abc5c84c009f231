"""The channel of a job with one process: nothing to wait for."""

# ruff: noqa: ARG002 - the parameters are the protocol's
from __future__ import annotations

from disco_hlo.activation.channel import Rule, nobody_gone
from disco_hlo.errors import ActivationError


class LocalChannel:
    """A :class:`~disco_hlo.activation.channel.Channel` of size 1."""

    rank = 0
    size = 1
    gone = staticmethod(nobody_gone)
    description = "a single process"

    def broadcast(self, payload: bytes | None, *, tag: str, timeout_s: float) -> bytes:
        """The payload itself.

        Raises:
            ActivationError: there is none.
        """
        if payload is None:
            raise ActivationError(f"{tag}: rank 0 must hand in the payload of a broadcast; got None")
        return payload

    def all_gather(self, item: bytes, *, tag: str, timeout_s: float) -> list[bytes]:
        """The one item."""
        return [item]

    def decide(self, item: bytes, rule: Rule, *, tag: str, timeout_s: float) -> bytes:
        """What the rule makes of the one item."""
        return rule({0: item})
