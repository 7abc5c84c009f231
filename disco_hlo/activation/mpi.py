"""The channel over MPI broadcast (DisCo, section 5.1). The one file that imports mpi4py.

Only non-blocking calls are used, tested between sleeps, so that a waiting rank leaves its cores to
rank 0 and a dead peer ends in a timeout instead of a hang. The job's ranks get a communicator of
their own, ordered by JAX process index, so nothing of ours can meet the user's own messages.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from disco_hlo.activation.channel import (
    Deadline,
    Decider,
    Gone,
    KeyValueStore,
    key_part,
    name_ranks,
    nobody_gone,
    unpack,
)
from disco_hlo.errors import ActivationError, GoneError

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_BYTES = 16 << 20
"""Broadcasts are cut into pieces of this size: MPI counts are 32-bit, and each piece is a deadline check."""
_HEAD = struct.Struct("<4s8sQ")
_MAGIC = b"DSC1"
_STEP_BYTES = 8
_IDLE_PAUSE_S = 0.01
_FLOW_PAUSE_S = 0.0005
_MAX_TAG = 32767  # the least upper bound the MPI standard grants

EXIT_WAIT_S = 300.0
"""How long a process that ends waits for the others to end; jax.distributed's own shutdown waits as long."""
FORMER_EXIT_WAIT_S = 60.0
"""As long it waits for those of an earlier job that are not in its last one."""

log = logging.getLogger(__name__)

_EXIT_COMMS: list[tuple[frozenset[int], MPI.Intracomm]] = []
"""Of the jobs that this process was in, the last one at the end, with their ranks in MPI's world."""
# Requests that never completed: MPI may still write into their buffers, so these must outlive us.
_ABANDONED: list[object] = []


@dataclass(frozen=True, slots=True)
class Seat:
    """This process in MPI's world."""

    rank: int
    size: int
    library: str


def initialized_by_user() -> bool:
    """Whether this process runs MPI already, through mpi4py."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized()) and not module.Is_finalized()


def take_seat() -> Seat:
    """Import mpi4py, which initializes MPI unless that is done, and say where this process stands.

    Initializing blocks until every process of the MPI world does it, so the caller makes sure that
    they all will.

    Raises:
        ActivationError: MPI cannot be used here, with the reason.
    """
    try:
        MPI = _import_mpi()
    except (ImportError, RuntimeError, OSError) as error:
        raise ActivationError(
            f"mpi4py cannot be loaded: {(str(error).splitlines() or ['no reason given'])[0]}"
        ) from error
    if MPI.Is_finalized():
        raise ActivationError("MPI is finalized already in this process")
    if not MPI.Is_initialized():
        raise ActivationError("mpi4py is told not to initialize MPI (mpi4py.rc.initialize)")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED and not MPI.Is_thread_main():
        raise ActivationError("MPI was initialized for calls from the main thread, and this is another")
    library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
    return Seat(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), library)


def _import_mpi() -> Any:
    """mpi4py.MPI. Who initializes MPI has to finalize it: us, if nobody imported it before."""
    import mpi4py

    if "mpi4py.MPI" in sys.modules or mpi4py.rc.finalize is not None:
        from mpi4py import MPI

        return MPI
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.finalize = None
    if MPI.Is_initialized():
        atexit.register(_finalize, os.getpid())
    return MPI


def _finalize(process: int) -> None:
    """Finalize MPI at exit, once all ranks of the job are there: with one gone it can wait for ever.

    A process that ends by an exception leaves without; its launcher then ends the job, as it would
    have without MPI. So does a fork of ``process``, which is no rank.
    """
    if os.getpid() != process:
        return
    from mpi4py import MPI

    if MPI.Is_finalized() or getattr(sys, "last_value", None) is not None:
        return
    for number, (_, comm) in enumerate(reversed(_EXIT_COMMS)):
        wait_s = EXIT_WAIT_S if number == 0 else min(EXIT_WAIT_S, FORMER_EXIT_WAIT_S)
        if not _complete(comm.Ibarrier(), Deadline(wait_s), _IDLE_PAUSE_S):
            log.warning("a rank did not come to the end of the job within %g s: leaving MPI as it is", wait_s)
            return
    MPI.Finalize()


class MpiChannel:
    """A :class:`~disco_hlo.activation.channel.Channel` over MPI; decisions go through ``store``."""

    def __init__(
        self,
        world_ranks: Sequence[int],
        rank: int,
        job_id: str,
        store: KeyValueStore,
        *,
        library: str = "MPI",
        timeout_s: float = 30.0,
        gone: Gone = nobody_gone,
    ) -> None:
        """Build the job's communicator. Every rank of the job does this at the same time.

        Args:
            world_ranks: the rank in MPI's world of every rank of the job, by process index.
            rank: this process's index.

        Raises:
            ActivationError: the communicator did not come about within ``timeout_s``.
        """
        self.rank = rank
        self.size = len(world_ranks)
        self.gone = gone
        self.description = f"MPI ({library})"
        self._store = store
        self._root = f"disco/{key_part(job_id)}/mpi"
        self.decide = Decider(store, self._root, rank, self.size, gone).decide
        self._sequence = 0
        self._broken = ""
        self._world_ranks = frozenset(world_ranks)
        self._comm = _communicator(world_ranks, f"{job_id} exchange", timeout_s)
        # Another one for the end of the job: this one may be left in the middle of something.
        self._exit_comm = _communicator(world_ranks, f"{job_id} exit", timeout_s)

    def leave_together(self) -> None:
        """Finalize MPI when all ranks have come to their end. Call it on all of them, or on none.

        That takes the place of an earlier job's end, where its ranks are all in this job.
        """
        _EXIT_COMMS[:] = [earlier for earlier in _EXIT_COMMS if not earlier[0] <= self._world_ranks]
        _EXIT_COMMS.append((self._world_ranks, self._exit_comm))

    def broadcast(self, payload: bytes | None, *, tag: str, timeout_s: float) -> bytes:
        """See :class:`~disco_hlo.activation.channel.Channel`."""
        step = self._begin(tag)
        if self.rank == 0 and payload is None:
            raise ActivationError(f"{tag}: rank 0 must hand in the payload of a broadcast; got None")
        with self._breaking():
            return self._spread(payload, step, tag, Deadline(timeout_s, self.gone))

    def all_gather(self, item: bytes, *, tag: str, timeout_s: float) -> list[bytes]:
        """See :class:`~disco_hlo.activation.channel.Channel`."""
        step = self._begin(tag)
        deadline = Deadline(timeout_s, self.gone)
        with self._breaking():
            if self.rank == 0:
                items = self._collect(item, step, tag, deadline)
                self._spread(msgspec.msgpack.encode(items), step, tag, deadline)
                return items
            sent = self._comm.Isend(step + item, 0, self._message_tag())
            packed = self._spread(None, step, tag, deadline)
            if not _complete(sent, deadline, _FLOW_PAUSE_S):
                raise ActivationError(f"{tag}: rank 0 did not take the answer within {timeout_s:g} s")
            return unpack(packed, self.size)

    def _begin(self, tag: str) -> bytes:
        """Marks what is sent in this step, so that ranks out of step are noticed."""
        if self._broken:
            raise ActivationError(f"{tag}: an earlier exchange between the ranks failed: {self._broken}")
        self._sequence += 1
        return hashlib.sha256(f"{self._sequence} {tag}".encode()).digest()[:_STEP_BYTES]

    def _message_tag(self) -> int:
        return self._sequence % _MAX_TAG

    @contextlib.contextmanager
    def _breaking(self) -> Any:
        """Whatever interrupts an exchange, the others may be left in it: no other may follow."""
        from mpi4py import MPI

        try:
            yield
        except MPI.Exception as error:
            self._broken = f"MPI: {error.Get_error_string()}"
            raise ActivationError(self._broken) from error
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise

    def _collect(self, item: bytes, step: bytes, tag: str, deadline: Deadline) -> list[bytes]:
        """Rank 0's side of a gather: whatever arrives, from whomever, until all have answered."""
        from mpi4py import MPI

        arrived = {0: item}
        status = MPI.Status()
        pause_s = _Pause(_IDLE_PAUSE_S)
        while len(arrived) < self.size:
            message = self._comm.Improbe(MPI.ANY_SOURCE, self._message_tag(), status)
            if message is None:
                if deadline.passed():
                    raise self._note_missing(set(range(self.size)) - set(arrived), tag, deadline)
                pause_s.sleep()
                continue
            source, buffer = status.Get_source(), bytearray(status.Get_count(MPI.BYTE))
            if not _complete(message.Irecv(buffer), deadline, _FLOW_PAUSE_S, buffer):
                raise self._note_missing({source}, tag, deadline)
            if buffer[:_STEP_BYTES] != step:
                raise ActivationError(f"{tag}: rank {source} is at another step of the exchange")
            arrived[source] = bytes(buffer[_STEP_BYTES:])
        return [arrived[rank] for rank in range(self.size)]

    def _spread(self, payload: bytes | None, step: bytes, tag: str, deadline: Deadline) -> bytes:
        """Broadcast a head that says how long, then the payload in pieces."""
        head = (
            bytearray(_HEAD.pack(_MAGIC, step, len(payload)))
            if payload is not None
            else bytearray(_HEAD.size)
        )
        if not self._send_to_all(head, deadline, _IDLE_PAUSE_S):
            raise ActivationError(self._read_missing(tag, deadline))
        magic, its_step, length = _HEAD.unpack(head)
        if magic != _MAGIC or its_step != step:
            raise ActivationError(f"{tag}: rank 0 is at another step of the exchange")
        data = bytearray(payload) if payload is not None else bytearray(length)
        view = memoryview(data)
        for start in range(0, length, CHUNK_BYTES):
            if not self._send_to_all(view[start : start + CHUNK_BYTES], deadline, _FLOW_PAUSE_S):
                raise ActivationError(
                    f"{tag}: a broadcast of {length} bytes stopped at byte {start}; rank 0 or a peer is gone"
                )
        return bytes(data)

    def _send_to_all(self, buffer: bytearray | memoryview, deadline: Deadline, pause_s: float) -> bool:
        return _complete(self._comm.Ibcast(buffer, 0), deadline, pause_s, buffer)

    def _note_missing(self, missing: set[int], tag: str, deadline: Deadline) -> ActivationError:
        """Only rank 0 knows who has not answered; it leaves a note for the others."""
        text = f"{tag}: {name_ranks(missing)} of {self.size} {deadline.missed()}"
        self._store.put(self._note_key(), text.encode())
        return GoneError(text) if deadline.gone else ActivationError(text)

    def _read_missing(self, tag: str, deadline: Deadline) -> str:
        note = self._store.get(self._note_key(), 1.0) if self.rank != 0 else None
        if note is not None:
            return note.decode(errors="replace")
        return f"{tag}: rank 0 of {self.size} {deadline.missed()}"

    def _note_key(self) -> str:
        return f"{self._root}/missing/{self._sequence}"


class _Pause:
    """Sleeps that start short and grow: what is about to come is met at once, long waits cost nothing."""

    def __init__(self, longest_s: float) -> None:
        self._next_s = 20e-6
        self._longest_s = longest_s

    def sleep(self) -> None:
        time.sleep(self._next_s)
        self._next_s = min(self._next_s * 1.5, self._longest_s)


def _complete(request: MPI.Request, deadline: Deadline, pause_s: float, *keep: object) -> bool:
    """Test a request between sleeps; False at the deadline, with its buffers kept alive."""
    pause = _Pause(pause_s)
    try:
        while not request.Test():
            if deadline.passed():
                _ABANDONED.append((request, keep))
                return False
            pause.sleep()
    except BaseException:
        _ABANDONED.append((request, keep))
        raise
    return True


def _communicator(world_ranks: Sequence[int], name: str, timeout_s: float) -> MPI.Intracomm:
    """A communicator of these ranks of the world alone; nobody else takes part in making it.

    MPI has no non-blocking call for this, so where it allows threads a thread makes it: a peer that
    dies meanwhile costs a timeout.
    """
    from mpi4py import MPI

    made: list[MPI.Intracomm | BaseException] = []

    def make() -> None:
        try:
            group = MPI.COMM_WORLD.Get_group().Incl(list(world_ranks))
            tag = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % _MAX_TAG
            comm = MPI.COMM_WORLD.Create_group(group, tag)
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            made.append(comm)
        except MPI.Exception as error:
            made.append(error)

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        make()
    else:
        thread = threading.Thread(target=make, name="disco-mpi-group", daemon=True)
        thread.start()
        thread.join(timeout_s)
    if not made:
        raise ActivationError(f"MPI did not join {len(world_ranks)} ranks within {timeout_s:g} s")
    if isinstance(made[0], BaseException):
        raise ActivationError(f"MPI cannot join the ranks of this job: {made[0]}")
    return made[0]
