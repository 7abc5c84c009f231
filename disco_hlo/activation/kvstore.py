"""What ranks tell each other through jax.distributed's key-value store: a channel without MPI, and signs of life.

The store lies in the process of rank 0 and every process of a jax.distributed job is connected to it already, so no
port is opened here. This file imports no jax: the client object is handed in.

**The channel.** Keys of one operation lie under ``disco/<job>/<sequence>-<tag>/`` and are used once. Rank 0 deletes
those of finished operations whenever an all-gather has shown that every rank has got past them; decisions stay, so that
a rank that comes late reads what the others read.

**Signs of life.** A timeout has to be long enough for a slow rank (a compile of minutes), so it tells nothing of a dead
one. jax ends a job that lost a process, but not one that may lose some (``jax_enable_recoverability``). So every rank
but 0 renews a note in the store while it is in a phase, and takes leave at its end. Rank 0 looks at the notes while it
waits: one that has not changed for :data:`SILENT_S` of looking is of a rank that is dead or stands still. Rank 0 writes
down which, and the others look for that. Rank 0 itself is not watched: the store goes with its process. Times are
counted in looks, so neither a clock that is moved nor a rank 0 that stood still makes anybody dead.

**Long waits.** A rank in a collective cannot tell a device that hangs from a rank that has yet to come. One that has
been in a run for long says so, and so does one that waits to hear how it went (:class:`LongWait`): where all have,
nobody is to come any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
import time
from typing import Final

import msgspec

from disco_hlo.activation.channel import (
    CoordinationStore,
    Deadline,
    Gone,
    Rule,
    key_part,
    name_ranks,
    nobody_gone,
    slice_s,
    unpack,
    wait,
)
from disco_hlo.errors import ActivationError, GoneError
from disco_hlo.printable import counted

CHUNK_BYTES = 2 << 20
"""gRPC messages are limited; larger values travel in pieces of this size."""
_INLINE_BYTES = 64 << 10
_HEAD = struct.Struct("<QI32s")
_PATIENCE = 0.8
"""Rank 0 stops collecting for a decision after this share of the timeout; the rest is for reading."""
_READ_S = 5.0


class KvChannel:
    """A :class:`~disco_hlo.activation.channel.Channel` over the key-value store."""

    description = "jax.distributed's key-value store"

    def __init__(
        self, rank: int, size: int, job_id: str, store: CoordinationStore, gone: Gone = nobody_gone
    ) -> None:
        self.rank = rank
        self.size = size
        self.gone = gone
        self._store = store
        self._root = f"disco/{key_part(job_id)}"
        self._sequence = 0
        self._rounds: dict[str, int] = {}
        """Decisions so far, by tag."""
        self._finished: list[str] = []
        self._broken = ""
        self._slice_s = slice_s(size)

    def broadcast(self, payload: bytes | None, *, tag: str, timeout_s: float) -> bytes:
        """See :class:`~disco_hlo.activation.channel.Channel`."""
        where = self._begin(tag)
        if self.rank == 0:
            if payload is None:
                raise ActivationError(f"{tag}: rank 0 must hand in the payload of a broadcast; got None")
            self._write(where, "all", payload)
            return payload
        return self._read_all(where, tag, Deadline(timeout_s, self.gone))

    def all_gather(self, item: bytes, *, tag: str, timeout_s: float) -> list[bytes]:
        """See :class:`~disco_hlo.activation.channel.Channel`."""
        where = self._begin(tag)
        deadline = Deadline(timeout_s, self.gone)
        self._write(where, f"from/{self.rank}", item)
        if self.rank != 0:
            return unpack(self._read_all(where, tag, deadline), self.size)
        items = [item]
        for rank in range(1, self.size):
            answer = self._read(where, f"from/{rank}", deadline)
            if answer is None:
                raise self._fail(self._who_is_missing(where, tag, deadline), deadline)
            items.append(answer)
        self._write(where, "all", msgspec.msgpack.encode(items))
        self._forget_before(where)
        return items

    def decide(self, item: bytes, rule: Rule, *, tag: str, timeout_s: float) -> bytes:
        """See :class:`~disco_hlo.activation.channel.Channel`; a tag's n-th call meets the others' n-th."""
        number = self._rounds.get(tag, 0)
        self._rounds[tag] = number + 1
        where = f"{self._root}/decided/{key_part(tag)}/{number}"
        self._store.put(f"{where}/from/{self.rank}", item)
        if self.rank == 0:
            items = self._collect(where, Deadline(timeout_s * _PATIENCE, self.gone))
        else:
            outcome = self._await_rank_0(where, timeout_s)
            if outcome is not None:
                return outcome
            # Whatever rank 0 said before it fell silent does not count: it did not decide.
            items = self._present(where, range(1, self.size))
        outcome = self._settled(f"{where}/outcome", rule(items), timeout_s)
        if self.rank == 0:
            self._store.delete(f"{where}/from")
        return outcome

    def wait(self, went: str | None = None, where: str = "") -> LongWait:
        """Of this rank, in what all ranks run before they next exchange anything, or ``where`` they say that they do;
        or in that exchange, where it says why the run failed here, or nothing."""
        directory = f"{self._root}/{where or f'{self._sequence}-waits'}"
        return LongWait(self.rank, self.size, directory, self._store, went)

    def long_in(self, directory: str) -> set[str]:
        """Places of this directory in which a rank has run for long (:meth:`wait`). Raises as the store."""
        words = self._store.values(f"{self._root}/{directory}")
        return {place.split("/")[0] for place, word in words.items() if word.startswith(_RUNS)}

    def _await_rank_0(self, where: str, timeout_s: float) -> bytes | None:
        deadline = Deadline(timeout_s, self.gone)
        outcome = wait(self._store, f"{where}/outcome", deadline, self._slice_s)
        if outcome is None and not deadline.gone and "0" in self._store.names(f"{where}/from"):
            # It came after us and collects with a timeout of its own.
            outcome = wait(self._store, f"{where}/outcome", Deadline(timeout_s, self.gone), self._slice_s)
        return outcome

    def _collect(self, where: str, deadline: Deadline) -> dict[int, bytes]:
        items: dict[int, bytes] = {}
        for rank in range(self.size):
            answer = wait(self._store, f"{where}/from/{rank}", deadline, self._slice_s)
            if answer is None:
                return self._present(where, range(self.size))
            items[rank] = answer
        return items

    def _present(self, where: str, ranks: range) -> dict[int, bytes]:
        names = set(self._store.names(f"{where}/from"))
        answers = {
            rank: self._store.get(f"{where}/from/{rank}", _READ_S) for rank in ranks if str(rank) in names
        }
        return {rank: answer for rank, answer in answers.items() if answer is not None}

    def _settled(self, key: str, vote: bytes, timeout_s: float) -> bytes:
        if self._store.put(key, vote):
            return vote
        outcome = wait(self._store, key, Deadline(max(_READ_S, timeout_s)), self._slice_s)
        if outcome is None:
            raise ActivationError(f"{key} was decided, but cannot be read back")
        return outcome

    def _begin(self, tag: str) -> str:
        if self._broken:
            raise ActivationError(f"{tag}: an earlier exchange between the ranks failed: {self._broken}")
        where = f"{self._root}/{self._sequence}-{key_part(tag)}"
        self._sequence += 1
        self._finished.append(where)
        return where

    def _fail(self, message: str, deadline: Deadline | None = None) -> ActivationError:
        self._broken = message
        return GoneError(message) if deadline is not None and deadline.gone else ActivationError(message)

    def _forget_before(self, where: str) -> None:
        """Every rank has answered in ``where``, so all have read what came before it."""
        for done in self._finished[:-1]:
            self._store.delete(done)
        self._finished = [where]

    def _write(self, where: str, name: str, data: bytes) -> None:
        """Pieces first, the head (length, number of pieces, digest) last: who sees the head sees all."""
        pieces = -(-len(data) // CHUNK_BYTES) if len(data) > _INLINE_BYTES else 0
        head = _HEAD.pack(len(data), pieces, hashlib.sha256(data).digest())
        for number in range(pieces):
            piece = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            self._store.put(f"{where}/pieces/{name}/{number}", piece)
        self._store.put(f"{where}/{name}", head if pieces else head + data)

    def _read(self, where: str, name: str, deadline: Deadline) -> bytes | None:
        """What :meth:`_write` wrote, or None at the deadline."""
        head = wait(self._store, f"{where}/{name}", deadline, self._slice_s)
        if head is None:
            return None
        if len(head) < _HEAD.size:
            raise self._fail(f"{where}/{name} arrived damaged: {counted(len(head), 'byte')}, no header")
        length, pieces, digest = _HEAD.unpack_from(head)
        data = head[_HEAD.size :]
        if pieces:
            keys = [f"{where}/pieces/{name}/{number}" for number in range(pieces)]
            found = [wait(self._store, key, deadline, self._slice_s) for key in keys]
            data = b"".join(piece for piece in found if piece is not None)
        if len(data) != length or hashlib.sha256(data).digest() != digest:
            raise self._fail(
                f"{where}/{name} arrived damaged: expected {counted(length, 'byte')}, got {len(data)}"
            )
        return data

    def _read_all(self, where: str, tag: str, deadline: Deadline) -> bytes:
        """Rank 0's answer to everybody."""
        data = self._read(where, "all", deadline)
        if data is None:
            raise self._fail(self._who_is_missing(where, tag, deadline), deadline)
        return data

    def _who_is_missing(self, where: str, tag: str, deadline: Deadline) -> str:
        answered = set(self._store.names(f"{where}/from"))
        silent = [rank for rank in range(self.size) if str(rank) not in answered]
        # In a broadcast nobody but rank 0 says anything.
        missing = silent if answered and silent else [0]
        return f"{tag}: {name_ranks(missing)} of {self.size} {deadline.missed()}"


_RUNS, _WAITS = b"\0runs ", b"waits"
"""The former with a number, which says that the rank still does."""
_TIMES_MORE = 2
"""A rank that runs must say so before that counts: one that stood still since its run ended has taken it back then."""
HANGS: Final = "it hangs"


class LongWait:
    """What one rank says of its wait to the others, from a thread besides; nothing before that asks for a verdict."""

    def __init__(
        self, rank: int, size: int, directory: str, store: CoordinationStore, went: str | None
    ) -> None:
        """Nothing is said yet.

        Args:
            directory: of the keys; the same on all ranks.
            went: as of :meth:`KvChannel.wait`.
        """
        self.rank = rank
        self._size = size
        self._directory = directory
        self._store = store
        self._runs = went is None
        self._says = (went or "").encode() or _WAITS
        self._saying = threading.Lock()
        self._said, self._ended = 0, False
        self._heard: dict[str, set[bytes]] = {}
        """What each rank that runs has said since all said something."""

    def verdict(self, longest_s: float) -> str:
        """Say that it has lasted for long, and wait for so long at most until it has on all ranks, and some still run,
        which rank 0 finds out: on which it failed, or :data:`HANGS`. Empty where that is not so."""
        with contextlib.suppress(ActivationError):  # whoever waits will notice
            with self._saying:
                if not self._ended and (self._runs or not self._said):
                    self._said += 1
                    word = _RUNS + b"%d" % self._said if self._runs else self._says
                    self._store.renew(f"{self._directory}/{self.rank}", word)
            if self.rank != 0:
                return (self._store.get(f"{self._directory}/all", longest_s) or b"").decode(errors="replace")
            said = self._store.values(self._directory)
            running = {rank: word for rank, word in said.items() if word.startswith(_RUNS)}
            if len(said) < self._size:
                self._heard.clear()
            else:
                for rank, word in running.items():
                    self._heard.setdefault(rank, set()).add(word)
            if self._heard and running and all(len(self._heard[rank]) > _TIMES_MORE for rank in running):
                failed = [(rank, why) for rank, why in said.items() if rank not in running and why != _WAITS]
                verdict = "; ".join(f"rank {rank}: {why.decode()}" for rank, why in failed) or HANGS
                self._store.renew(f"{self._directory}/all", verdict.encode())
                return verdict
        time.sleep(longest_s)
        return ""

    def end(self) -> None:
        """Take back what was said, and say nothing any more."""
        with self._saying:
            self._ended = True
            if self._said:
                with contextlib.suppress(ActivationError):
                    self._store.delete(f"{self._directory}/{self.rank}")


BEAT_S: Final = 5.0
"""Between two signs, and between two looks."""
SILENT_S: Final = 40.0
_AWAY: Final = b"away"


class Pulse:
    """The signs of life of one job's ranks. Call it to know whether any rank has fallen silent."""

    def __init__(
        self, rank: int, size: int, job_id: str, store: CoordinationStore, beat_s: float = BEAT_S
    ) -> None:
        self._rank = rank
        self._size = size
        self._store = store
        self._root = f"disco/{key_part(job_id)}/pulse"
        self._beat_s = beat_s
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._count = 0
        self._looked_s = 0.0
        self._seen: dict[str, tuple[bytes, int]] = {}
        """By rank, its last sign, and in how many looks on end it was the same."""
        self._silent = False

    def start(self) -> None:
        """Give signs from now on, which rank 0 does not need to."""
        if self._rank == 0 or self._size == 1 or self._thread is not None:
            return
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="disco-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take leave: from now on silence says nothing."""
        if self._thread is None:
            return
        self._done.set()
        self._thread.join()
        self._thread = None
        with contextlib.suppress(ActivationError):
            self._store.renew(f"{self._root}/of/{self._rank}", _AWAY)

    def __call__(self) -> bool:
        """Whether a rank is known to be silent. Once that is so it stays so: the ranks are in step no more."""
        since_s = time.monotonic() - self._looked_s
        if not self._silent and since_s >= self._beat_s:
            self._looked_s = time.monotonic()
            # Who has not looked for a while begins to count anew.
            self._silent = self._look(anew=since_s > 3 * self._beat_s)
        return self._silent

    def _beat(self) -> None:
        with contextlib.suppress(ActivationError):  # the job is over
            while True:
                self._count += 1
                self._store.renew(f"{self._root}/of/{self._rank}", b"%d" % self._count)
                if self._done.wait(self._beat_s):
                    return

    def _look(self, *, anew: bool) -> bool:
        try:
            if self._rank != 0:
                return bool(self._store.values(f"{self._root}/silent"))
            signs = self._store.values(f"{self._root}/of")
            before = {} if anew else self._seen
            same = {rank for rank, (sign, _) in before.items() if signs.get(rank) == sign}
            self._seen = {
                rank: (sign, before[rank][1] + 1 if rank in same else 0) for rank, sign in signs.items()
            }
            silent = [
                rank
                for rank, (sign, looks) in self._seen.items()
                if sign != _AWAY and looks * self._beat_s >= SILENT_S
            ]
            for rank in silent:
                self._store.renew(f"{self._root}/silent/{rank}", b"1")
        except ActivationError:  # whoever waits will notice
            return False
        return bool(silent)
