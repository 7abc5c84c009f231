"""Reading files that may be anything, and replacing files so that they are never half there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from disco_hlo.errors import PlanError
from disco_hlo.plan.locks import server_now_ns
from disco_hlo.regular_file import read_regular

_TEMPORARY = ".new-"
_TEMPORARY_AGE_S = 3600.0


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


def replace_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write all files beside their places, readable by this user alone, then rename them in the order given.

    Raises:
        PlanError: the disk is full or the folder read-only; unless it happens between two renames,
            nothing has changed.
    """
    written: list[tuple[Path, Path]] = []
    try:
        for name, data in files.items():
            temporary = folder / f"{_TEMPORARY}{os.getpid()}-{os.urandom(6).hex()}"
            written.append((temporary, folder / name))
            _write_synced(temporary, data)
        for temporary, place in written:
            os.replace(temporary, place)
        _sync_folder(folder)
    except OSError as error:
        total = sum(map(len, files.values()))
        raise PlanError(f"cannot save {total} bytes in {folder}: {error.strerror or error}") from error
    finally:
        for temporary, _ in written:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of savers that were killed long ago."""
    with contextlib.suppress(OSError):
        oldest_ns = server_now_ns(folder) - int(_TEMPORARY_AGE_S * 1e9)
        for leftover in folder.glob(".[a-z]*-*"):
            if leftover.lstat().st_mtime_ns < oldest_ns:
                leftover.unlink(missing_ok=True)


def _write_synced(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make the renames last; not every file system can, and then only the guarantee is lost."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
