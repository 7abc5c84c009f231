"""Files in a directory that machines may share and processes may die in.

They are replaced whole, so that they are never half there, and some of them say who is at work. Such a file names its
owner: the machine, the process and when that process started. On the same machine the process table tells whether the
owner lives. Elsewhere the file's own time does: its owner renews it, and one not renewed for :data:`STALE_S` is taken
for dead. Times are the file server's, never this machine's clock. That clock may be set meanwhile, so before a lock is
taken over it is watched for :data:`WATCH_S`: who lives renews it. ``link`` makes a lock, because it is atomic on NFS
too; ``flock`` is not relied on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from disco_hlo.errors import PlanError
from disco_hlo.regular_file import read_regular, write_synced, write_whole

RENEW_S = 15.0
STALE_S = 120.0
WATCH_S = 2 * RENEW_S
_MAX_OWNER_BYTES = 4096
_POLL_S = 0.1
_TEMPORARY_AGE_S = 3600.0
# Whole files ------------------------------------------------------------------------------------


def read_bounded(path: Path, limit_bytes: int) -> bytes | None:
    """The content of a regular file, not through a link; None where there is none.

    Raises:
        PlanError: it is something else, unreadable, or larger than ``limit_bytes``.
    """
    try:
        return read_regular(path, limit_bytes, follow_links=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a name that no file has
        raise PlanError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def replace_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files as :func:`~disco_hlo.regular_file.write_whole`.

    Raises:
        PlanError: the disk is full or the folder read-only.
    """
    try:
        write_whole(folder, files)
    except OSError as error:
        total = sum(map(len, files.values()))
        raise PlanError(f"cannot save {total} bytes in {folder}: {error.strerror or error}") from error


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of savers that were killed long ago."""
    with contextlib.suppress(OSError):
        oldest_ns = server_now_ns(folder) - int(_TEMPORARY_AGE_S * 1e9)
        for leftover in folder.glob(".[a-z]*-*"):
            if leftover.lstat().st_mtime_ns < oldest_ns:
                leftover.unlink(missing_ok=True)


# Owners and locks -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnedFile:
    """A file with an owner in it."""

    path: Path

    def is_alive(self) -> bool:
        """Whether the owner is still at work. A file that is gone has none."""
        owner = _read_owner(self.path)
        if owner is None:
            return False
        if owner.get("machine") == _machine():
            return _process_lives(owner.get("pid"), owner.get("started"))
        age_s = self._age_s()
        # Where the server's time cannot be asked for, nobody is known to be dead.
        return os.path.lexists(self.path) if age_s is None else age_s < STALE_S

    def may_be_taken_over(self) -> bool:
        """Whether the owner is dead for certain; of another machine's that is seen after :data:`WATCH_S` only."""
        owner = _read_owner(self.path)
        if owner is None or owner.get("machine") == _machine():
            return not self.is_alive()
        age_s = self._age_s()
        # In the future lies what was not renewed since the server's clock was set back.
        if age_s is None or -RENEW_S < age_s < STALE_S:
            return False
        return not self._is_renewed()

    def _is_renewed(self) -> bool:
        """Whether its time changes while it is watched."""
        before_ns, end = self._modified_ns(), time.monotonic() + WATCH_S
        while time.monotonic() < end:
            time.sleep(_POLL_S)
            if self._modified_ns() != before_ns:
                return True
        return False

    def _age_s(self) -> float | None:
        """Since it was renewed, by the clock of its server; None where that cannot be asked for."""
        try:
            return (server_now_ns(self.path.parent) - self.path.lstat().st_mtime_ns) / 1e9
        except OSError:
            return None

    def _modified_ns(self) -> int:
        try:
            return self.path.lstat().st_mtime_ns
        except OSError:
            return 0

    def owner_text(self) -> str:
        """Host, process and time, for messages."""
        owner = _read_owner(self.path) or {}
        return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"


class RenewedFile:
    """An owned file of this process. Its time is renewed so that other machines see it lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._nonce = (_read_owner(path) or {}).get("nonce")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="disco-renew-file", daemon=True)
        self._thread.start()

    def is_ours(self) -> bool:
        """Whether it is still this owner's. It is not if this process stood still for so long that
        another took it for dead."""
        return self._nonce is not None and (_read_owner(self.path) or {}).get("nonce") == self._nonce

    def remove(self) -> None:
        """Stop renewing and remove it, unless it is somebody else's by now."""
        self._done.set()
        with contextlib.suppress(OSError):
            if self.is_ours():
                self.path.unlink()

    def _renew(self) -> None:
        while not self._done.wait(RENEW_S) and self.is_ours():
            with contextlib.suppress(OSError):
                os.utime(self.path)


class Lock:
    """One holder at a time; a dead holder's lock is taken over."""

    def __init__(self, path: Path, purpose: str) -> None:
        self.path = path
        self._purpose = purpose

    @contextlib.contextmanager
    def held(self, wait_s: float = 0.0) -> Iterator[None]:
        """Hold the lock; wait for it, asleep, up to ``wait_s``.

        Raises:
            PlanError: somebody else holds it (the message says who), or it cannot be written.
        """
        mine = self.acquire(wait_s)
        try:
            yield
        finally:
            mine.remove()

    def acquire(self, wait_s: float = 0.0) -> RenewedFile:
        """As :meth:`held`, released by ``remove()`` of what it returns."""
        end = time.monotonic() + wait_s
        while True:
            taken = self._try()
            if taken is not None:
                return taken
            if time.monotonic() >= end:
                owner = OwnedFile(self.path).owner_text()
                raise PlanError(
                    f"another {self._purpose} holds {self.path} ({owner}); wait for it or stop it"
                )
            time.sleep(_POLL_S)

    def _try(self) -> RenewedFile | None:
        claim = self.path.with_name(f".claim-{os.getpid()}-{os.urandom(6).hex()}")
        _write_owner(claim)
        try:
            if _link(claim, self.path):
                return RenewedFile(self.path)
            dead = _read(self.path)
            if OwnedFile(self.path).may_be_taken_over():
                self._break(claim, dead)
                return RenewedFile(self.path) if _link(claim, self.path) else None
            return None
        finally:
            claim.unlink(missing_ok=True)

    def _break(self, claim: Path, dead: bytes | None) -> None:
        """Remove a dead owner's lock, which holds these bytes. One at a time, or the second would remove the first
        one's new lock."""
        guard = self.path.with_name(f"{self.path.name}.breaking")
        if not _link(claim, guard):
            if not OwnedFile(guard).is_alive():
                guard.unlink(missing_ok=True)
            return
        try:
            # A lock that is gone was released, and the next one may be in its place at any moment.
            if dead is not None and _read(self.path) == dead:
                self.path.unlink(missing_ok=True)
        finally:
            guard.unlink(missing_ok=True)


def server_now_ns(folder: Path) -> int:
    """The time by the clock that stamps the files in ``folder``.

    Raises:
        OSError: nothing can be written there.
    """
    probe = folder / f".clock-{os.getpid()}-{os.urandom(6).hex()}"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


class Owner(TypedDict):
    """What a file says of the process that it belongs to."""

    host: str
    machine: str
    pid: int
    started: str
    nonce: str
    since: str


def this_process() -> Owner:
    """This process as the owner of one more file."""
    return Owner(
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=_started(os.getpid()),
        nonce=os.urandom(8).hex(),
        since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _write_owner(path: Path) -> None:
    try:
        write_synced(path, json.dumps(this_process()).encode())
    except OSError as error:
        with contextlib.suppress(OSError):  # a read-only file system refuses that as well
            path.unlink(missing_ok=True)
        raise PlanError(f"cannot write {path}: {error.strerror}") from error


def _read(path: Path) -> bytes | None:
    """The content of a small file; None where it is missing, empty where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(_MAX_OWNER_BYTES)
    except FileNotFoundError:
        return None
    except OSError:
        return b""


def _read_owner(path: Path) -> dict[str, object] | None:
    """What the file says of its owner; an unreadable owner is an empty one, a missing file None."""
    content = _read(path)
    if content is None:
        return None
    try:
        owner = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _link(source: Path, target: Path) -> bool:
    """Whether ``target`` is now another name of ``source``."""
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            return _copy_exclusively(source, target)
    # Over NFS the answer may be lost though the link was made: the link count tells.
    with contextlib.suppress(OSError):
        return os.stat(source).st_nlink == 2
    return False


def _copy_exclusively(source: Path, target: Path) -> bool:
    """For file systems without hard links: atomic wherever O_EXCL is."""
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return False
    with open(descriptor, "wb") as file:
        file.write(_read(source) or b"")
    return True


def _machine() -> str:
    """Where process numbers mean the same: one boot of one kernel, one process-id namespace."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot; tells it from a later one of the same number.
    ``dead`` for one that only waits to be reaped; empty where there is no telling."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return "dead" if fields[0] in "ZX" else fields[19]
    return ""


def _process_lives(pid: object, started: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    now = _started(pid)
    return now != "dead" and (not started or now in ("", started))
