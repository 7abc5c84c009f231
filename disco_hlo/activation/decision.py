"""One decision for all ranks, through a store that sets a key once.

Ranks that wait for one another can time out at different moments, and then each would draw its own
conclusion. Here a conclusion counts only once it is written, it can be written only once, and who
comes later reads it. MPI has nothing of the kind, so a job under MPI decides here as well.
"""

from __future__ import annotations

import hashlib
import re
from typing import Protocol

from disco_hlo.activation.channel import Deadline, Gone, Rule, nobody_gone
from disco_hlo.errors import ActivationError

_PATIENCE = 0.8  # rank 0 stops collecting after this share of the timeout; the rest is for reading
_READ_S = 5.0


class KeyValueStore(Protocol):
    """What the channel needs of a store shared by all ranks. Methods raise ActivationError where
    the store is out of reach."""

    def put(self, key: str, value: bytes) -> bool:
        """Set a key once; False where it has a value already (which stays)."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value, waited for (asleep) up to ``timeout_s``; None where it does not come."""

    def names(self, directory: str) -> list[str]:
        """Last path components of the keys right under ``directory``."""

    def delete(self, directory: str) -> None:
        """Remove a key and everything under it; no error where there is nothing."""


class Decider:
    """Decisions of the ranks of one job."""

    def __init__(
        self, store: KeyValueStore, root: str, rank: int, size: int, gone: Gone = nobody_gone
    ) -> None:
        self._store = store
        self._gone = gone
        self._root = root
        self._rank = rank
        self._size = size
        self._slice_s = slice_s(size)
        self._rounds: dict[str, int] = {}

    def decide(self, item: bytes, rule: Rule, tag: str, timeout_s: float) -> bytes:
        """See :class:`~disco_hlo.activation.channel.Channel`; a tag's n-th call meets the others' n-th."""
        number = self._rounds.get(tag, 0)
        self._rounds[tag] = number + 1
        where = f"{self._root}/decided/{key_part(tag)}/{number}"
        self._store.put(f"{where}/from/{self._rank}", item)
        if self._rank == 0:
            items = self._collect(where, Deadline(timeout_s * _PATIENCE, self._gone))
        else:
            outcome = self._await_rank_0(where, timeout_s)
            if outcome is not None:
                return outcome
            # Whatever rank 0 said before it fell silent does not count: it did not decide.
            items = self._present(where, range(1, self._size))
        outcome = self._settle(f"{where}/outcome", rule(items), timeout_s)
        if self._rank == 0:
            self._store.delete(f"{where}/from")
        return outcome

    def _await_rank_0(self, where: str, timeout_s: float) -> bytes | None:
        deadline = Deadline(timeout_s, self._gone)
        outcome = wait(self._store, f"{where}/outcome", deadline, self._slice_s)
        if outcome is None and not deadline.gone and "0" in self._store.names(f"{where}/from"):
            # It came after us and collects with a timeout of its own.
            outcome = wait(self._store, f"{where}/outcome", Deadline(timeout_s, self._gone), self._slice_s)
        return outcome

    def _collect(self, where: str, deadline: Deadline) -> dict[int, bytes]:
        items: dict[int, bytes] = {}
        for rank in range(self._size):
            answer = wait(self._store, f"{where}/from/{rank}", deadline, self._slice_s)
            if answer is None:
                return self._present(where, range(self._size))
            items[rank] = answer
        return items

    def _present(self, where: str, ranks: range) -> dict[int, bytes]:
        names = set(self._store.names(f"{where}/from"))
        answers = {
            rank: self._store.get(f"{where}/from/{rank}", _READ_S) for rank in ranks if str(rank) in names
        }
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def _settle(self, key: str, vote: bytes, timeout_s: float) -> bytes:
        if self._store.put(key, vote):
            return vote
        outcome = wait(self._store, key, Deadline(max(_READ_S, timeout_s)), self._slice_s)
        if outcome is None:
            raise ActivationError(f"{key} was decided, but cannot be read back")
        return outcome


def slice_s(size: int) -> float:
    """How long one question to the store lasts. Ctrl-C is noticed between two; with many ranks they
    are fewer, so that the process that keeps the store keeps its cores."""
    return min(2.0, max(0.25, size / 512))


def wait(store: KeyValueStore, key: str, deadline: Deadline, slice_s: float) -> bytes | None:
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
