"""How the ranks of one job talk (DisCo, sections 4.1 and 5.1: master and workers).

The activator needs four things from whatever joins the ranks: rank 0 sends bytes to all, all send
bytes to all, all wait for all, and, where some ranks may have given up on the others, one decision
that every rank reads alike. MPI, jax.distributed's key-value store and a job of one process each
provide them (``mpi.py``, ``kvstore.py``, ``local.py``); ``choose.py`` picks.

All ranks make the same calls in the same order. A rank is the JAX process index, whatever its MPI
rank. Waiting sleeps. A call that fails leaves its channel broken: later calls fail at once, except
``decide``, which is how the ranks that are left still come to one outcome.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from disco_hlo.errors import ActivationError


class Channel(Protocol):
    """One job's ranks, joined. ``tag`` names a step for keys and messages and must be equal on all."""

    @property
    def rank(self) -> int:
        """JAX process index of this process."""

    @property
    def size(self) -> int:
        """Number of processes of the job."""

    @property
    def description(self) -> str:
        """What carries the bytes, for the log."""

    @property
    def gone(self) -> Gone:
        """Tells where no rank needs to be waited for any more."""

    def broadcast(self, payload: bytes | None, *, tag: str, timeout_s: float) -> bytes:
        """Rank 0 hands in the payload, the others None; all return it.

        Raises:
            ActivationError: it did not arrive within ``timeout_s``, or arrived damaged.
        """

    def all_gather(self, item: bytes, *, tag: str, timeout_s: float) -> list[bytes]:
        """Every rank's item, by rank.

        Raises:
            ActivationError: some ranks did not answer within ``timeout_s``; it names them.
        """

    def decide(self, item: bytes, rule: Rule, *, tag: str, timeout_s: float) -> bytes:
        """Every rank hands in an item and ``rule`` makes one outcome of them; all ranks return that one.

        Rank 0 applies the rule, to the items of all ranks or of those that came in time. Where rank 0
        does not, another rank does, without rank 0's item. A rank that comes late, when the outcome
        stands, gets the same. Works on a broken channel. Ends within ``timeout_s``, or twice that where
        rank 0 came and then fell silent.

        Raises:
            ActivationError: the place where decisions are written is gone.
        """


Rule = Callable[[Mapping[int, bytes]], bytes]
"""From the items of some ranks, by rank, to an outcome; the same on all ranks."""


Gone = Callable[[], bool]
"""Whether a rank is known to be dead or to stand still (``pulse.py``), so that nobody waits any longer."""


def nobody_gone() -> bool:
    """Where no rank gives signs of life."""
    return False


class Deadline:
    """A point in time to give up at, or before it once a rank is gone."""

    def __init__(self, timeout_s: float, gone: Gone = nobody_gone) -> None:
        self.timeout_s = timeout_s
        self.gone = False
        """Whether it was given up before, since a rank is gone."""
        self._gone = gone
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, never negative."""
        self.gone = self.gone or self._gone()
        return 0.0 if self.gone else max(0.0, self._end - time.monotonic())

    def missed(self) -> str:
        """What is to be said of whom nobody waits for any longer."""
        return silence(self.timeout_s, self.gone)

    def passed(self) -> bool:
        """Whether it is time to give up."""
        return self.left_s() <= 0.0


def silence(timeout_s: float, gone: bool) -> str:
    """What ranks did that are missing, as the rest of a sentence."""
    if gone:
        return "did not answer: a rank is dead or stood still"
    return f"did not answer within {timeout_s:g} s"


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 1-3, 7``."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"


def pack(items: Sequence[bytes]) -> bytes:
    """Several byte strings as one: a count, the lengths, the bytes."""
    lengths = struct.pack(f"<I{len(items)}Q", len(items), *map(len, items))
    return lengths + b"".join(items)


def unpack(data: bytes, count: int) -> list[bytes]:
    """The inverse of :func:`pack`.

    Raises:
        ActivationError: ``data`` does not hold exactly ``count`` whole items.
    """
    head_bytes = 4 + 8 * count
    if len(data) < head_bytes or struct.unpack_from("<I", data)[0] != count:
        raise ActivationError(
            f"expected the answers of {count} ranks, got {len(data)} bytes of something else"
        )
    lengths = struct.unpack_from(f"<{count}Q", data, 4)
    if head_bytes + sum(lengths) != len(data):
        raise ActivationError(f"the answers of {count} ranks arrived incomplete ({len(data)} bytes)")
    items, at = [], head_bytes
    for length in lengths:
        items.append(data[at : at + length])
        at += length
    return items
