"""Signs of life: nobody waits its whole timeout for a process that is gone.

A timeout has to be long enough for a slow rank (a compile of minutes), so it tells nothing of a dead one. jax ends a
job that lost a process, but not one that may lose some (``jax_enable_recoverability``). So every rank but 0 renews a
note in the job's key-value store while it is in a phase, and takes leave at its end. Rank 0 looks at the notes while it
waits: one that has not changed for :data:`SILENT_S` of looking is of a rank that is dead or stands still. Rank 0 writes
down which, and the others look for that. Rank 0 itself is not watched: the store lies in its process, and goes with it.

Times are counted in looks, so neither a clock that is moved nor a rank 0 that stood still makes anybody dead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final, Protocol

from disco_hlo.activation.decision import key_part
from disco_hlo.errors import ActivationError

BEAT_S: Final = 5.0
"""Between two signs, and between two looks."""
SILENT_S: Final = 40.0
_AWAY: Final = b"away"


class PulseStore(Protocol):
    """What is needed of a store that all ranks share. Methods raise ActivationError where it is out of reach."""

    def renew(self, key: str, value: bytes) -> None:
        """Set a key, whatever it was."""

    def values(self, directory: str) -> dict[str, bytes]:
        """By last path component, the values of the keys right under ``directory``."""


class Pulse:
    """The signs of life of one job's ranks. Call it to know whether any rank has fallen silent."""

    def __init__(self, rank: int, size: int, job_id: str, store: PulseStore, beat_s: float = BEAT_S) -> None:
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
            self._seen = {rank: (sign, _looks(before.get(rank), sign)) for rank, sign in signs.items()}
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


def _looks(before: tuple[bytes, int] | None, sign: bytes) -> int:
    return 0 if before is None or before[0] != sign else before[1] + 1
