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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from disco_hlo.activation.channel import CoordinationStore, Deadline, Gone, nobody_gone
from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.errors import ActivationError
from disco_hlo.printable import counted

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_BYTES = 16 << 20
"""Broadcasts are cut into pieces of this size: MPI counts are 32-bit, and each piece is a deadline check."""
_HEAD = struct.Struct("<4s8sQ")
_MAGIC = b"DSC1"
_STEP_BYTES = 8
_FIRST_PAUSE_S = 20e-6
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


class MpiChannel(KvChannel):
    """A :class:`~disco_hlo.activation.channel.Channel` whose broadcasts, which may be large, go over MPI; answers and
    decisions go through ``store``."""

    def __init__(
        self,
        world_ranks: Sequence[int],
        rank: int,
        job_id: str,
        store: CoordinationStore,
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
        super().__init__(rank, len(world_ranks), f"{job_id} mpi", store, gone)
        self.description = f"MPI ({library})"
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
        # Marks what is sent in this step, so that ranks out of step are noticed.
        step = hashlib.sha256(self._begin(tag).encode()).digest()[:_STEP_BYTES]
        if self.rank == 0 and payload is None:
            raise ActivationError(f"{tag}: rank 0 must hand in the payload of a broadcast; got None")
        with self._breaking():
            return self._spread(payload, step, tag, Deadline(timeout_s, self.gone))

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
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

    def _spread(self, payload: bytes | None, step: bytes, tag: str, deadline: Deadline) -> bytes:
        """Broadcast a head that says how long, then the payload in pieces."""
        head = (
            bytearray(_HEAD.pack(_MAGIC, step, len(payload)))
            if payload is not None
            else bytearray(_HEAD.size)
        )
        if not self._send_to_all(head, deadline, _IDLE_PAUSE_S):
            raise ActivationError(f"{tag}: rank 0 of {self.size} {deadline.missed()}")
        magic, its_step, length = _HEAD.unpack(head)
        if magic != _MAGIC or its_step != step:
            raise ActivationError(f"{tag}: rank 0 is at another step of the exchange")
        data = bytearray(payload) if payload is not None else bytearray(length)
        view = memoryview(data)
        for start in range(0, length, CHUNK_BYTES):
            if not self._send_to_all(view[start : start + CHUNK_BYTES], deadline, _FLOW_PAUSE_S):
                raise ActivationError(
                    f"{tag}: a broadcast of {counted(length, 'byte')} stopped at byte {start}; rank 0 or a peer is gone"
                )
        return bytes(data)

    def _send_to_all(self, buffer: bytearray | memoryview, deadline: Deadline, pause_s: float) -> bool:
        return _complete(self._comm.Ibcast(buffer, 0), deadline, pause_s, buffer)


def _complete(request: MPI.Request, deadline: Deadline, pause_s: float, *keep: object) -> bool:
    """Test a request between sleeps, of up to ``pause_s``; False at the deadline, with its buffers kept alive."""
    next_s = _FIRST_PAUSE_S  # what is about to come is met at once, long waits cost nothing
    try:
        while not request.Test():
            if not deadline.left_s():
                _ABANDONED.append((request, keep))
                return False
            time.sleep(next_s)
            next_s = min(next_s * 1.5, pause_s)
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
