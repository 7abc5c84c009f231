"""How the ranks of one job talk (DisCo, sections 4.1 and 5.1: master and workers).

The activator needs three things from whatever joins the ranks: rank 0 sends bytes to all, all send bytes to all, and,
where some ranks may have given up on the others, one decision that every rank reads alike. MPI (``mpi.py``),
jax.distributed's key-value store (``kvstore.py``) and a job of one process (:class:`LocalChannel`) each provide them;
``choose.py`` picks.

All ranks make the same calls in the same order. A rank is the JAX process index, whatever its MPI rank. Waiting sleeps.
A call that fails leaves its channel broken: later calls fail at once, except ``decide``, which is how the ranks that
are left still come to one outcome.

Ranks that wait for one another can time out at different moments, and then each would draw its own conclusion. So a
conclusion counts only once it is written to a store that sets a key once (``KvChannel.decide``), and who comes later
reads it. MPI has nothing of the kind, so a job under MPI decides there as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

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
"""Whether a rank is known to be dead or to stand still (``kvstore.Pulse``), so that nobody waits any longer."""


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


def silence(timeout_s: float, gone: bool) -> str:
    """What ranks did that are missing, as the rest of a sentence."""
    if gone:
        return "did not answer: a rank is dead or stood still"
    return f"did not answer within {timeout_s:g} s"


def absence(channel: Channel, answers: Mapping[int, bytes], timeout_s: float) -> str:
    """Which ranks did not answer, and why nobody waits for them any longer; empty where all did."""
    missing = set(range(channel.size)) - set(answers)
    return f"{name_ranks(missing)} of {channel.size} {silence(timeout_s, channel.gone())}" if missing else ""


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


def unpack(data: bytes, count: int) -> list[bytes]:
    """The answers of so many ranks, from msgpack.

    Raises:
        ActivationError: ``data`` does not hold exactly ``count`` whole items.
    """
    try:
        items = msgspec.msgpack.decode(data, type=list[bytes])
    except msgspec.MsgspecError as error:
        raise ActivationError(f"the answers of {count} ranks arrived damaged: {error}") from error
    if len(items) != count:
        raise ActivationError(f"expected the answers of {count} ranks, got {len(items)}")
    return items


class CoordinationStore:
    """The key-value store of jax.distributed's jobs, shared by all ranks: jaxlib's ``DistributedRuntimeClient``
    (``jax._src.distributed.global_state.client``). Methods raise ActivationError where it is out of reach."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, key: str, value: bytes) -> bool:
        """Set a key once; False where it has a value already (which stays)."""
        with _reaching("ALREADY_EXISTS"):
            self._client.key_value_set_bytes(key, value)
            return True
        return False

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value, waited for (asleep) up to ``timeout_s``; None where it does not come."""
        with _reaching("DEADLINE_EXCEEDED", "NOT_FOUND"):
            found: bytes = self._client.blocking_key_value_get_bytes(key, max(1, int(timeout_s * 1000)))
            return found
        return None

    def names(self, directory: str) -> list[str]:
        """Of the keys under ``directory``, their paths from there."""
        return list(self.values(directory))

    def values(self, directory: str) -> dict[str, bytes]:
        """By their paths from ``directory``, the values of the keys under it."""
        with _reaching():
            found = self._client.key_value_dir_get_bytes(directory)
        return {key.removeprefix(f"{directory}/"): value for key, value in found}

    def renew(self, key: str, value: bytes) -> None:
        """Set a key, whatever it was."""
        with _reaching():
            self._client.key_value_set_bytes(key, value, True)  # may be there already

    def delete(self, directory: str) -> None:
        """Remove a key and everything under it; no error where there is nothing."""
        with _reaching():
            self._client.key_value_delete(directory)


@contextlib.contextmanager
def _reaching(*expected: str) -> Iterator[None]:
    """Around a call of the store; ends the body where it answers with one of the errors ``expected``."""
    try:
        yield
    except RuntimeError as error:
        if not any(one in str(error) for one in expected):
            first_line = (str(error).splitlines() or ["no message"])[0]
            raise ActivationError(
                f"jax.distributed's key-value store (in rank 0's process) does not answer: {first_line}"
            ) from error


def slice_s(size: int) -> float:
    """How long one question to the store lasts. Ctrl-C is noticed between two; with many ranks they
    are fewer, so that the process that keeps the store keeps its cores."""
    return min(2.0, max(0.25, size / 512))


def wait(store: CoordinationStore, key: str, deadline: Deadline, slice_s: float) -> bytes | None:
    """The value of ``key`` as soon as there is one; None at the deadline."""
    while True:
        left_s = deadline.left_s()
        value = store.get(key, min(slice_s, max(left_s, 0.001)))
        if value is not None or left_s <= 0.0:
            return value


def key_part(text: str) -> str:
    """``text`` as one component of a key; distinct texts stay distinct."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,80}", text):
        return text
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:40] + "-" + hashlib.sha256(text.encode()).hexdigest()[:16]


class LocalChannel:
    """A :class:`Channel` of size 1."""

    rank = 0
    size = 1
    gone = staticmethod(nobody_gone)
    description = "a single process"

    def broadcast(self, payload: bytes | None, *, tag: str, timeout_s: float) -> bytes:  # noqa: ARG002
        """The payload itself.

        Raises:
            ActivationError: there is none.
        """
        if payload is None:
            raise ActivationError(f"{tag}: rank 0 must hand in the payload of a broadcast; got None")
        return payload

    def all_gather(self, item: bytes, *, tag: str, timeout_s: float) -> list[bytes]:  # noqa: ARG002
        """The one item."""
        return [item]

    def decide(self, item: bytes, rule: Rule, *, tag: str, timeout_s: float) -> bytes:  # noqa: ARG002
        """What the rule makes of the one item."""
        return rule({0: item})
