"""Files, whole. One to be read may be anything: a device never ends, a pipe waits for a writer, a link leads away.

Nothing is made room for that is not there: Python's ``read(n)`` takes n bytes before it reads the first.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path

_PIECE_BYTES = 1 << 20
DRAFT = ".new-"
"""What the names of files begin with that are being written."""


def read_regular(path: Path, most_bytes: int, *, follow_links: bool = True) -> bytes:
    """The content of a regular file.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is something else, unreadable, or larger than ``most_bytes``; ``strerror`` says which.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise OSError(error.errno, "it is a link, which is not followed here", str(path)) from error
        raise
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if info.st_size > most_bytes:
            raise OSError(
                errno.EFBIG, f"it has {info.st_size} bytes, more than the {most_bytes} allowed", str(path)
            )
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(info.st_size + 1)  # one that is being written grows
    finally:
        os.close(descriptor)
    if len(data) > info.st_size:
        raise OSError(errno.EBUSY, "it is being written", str(path))
    return data


def write_whole(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files beside their places, readable by this user alone, then rename them in the order given: each appears
    whole or not at all.

    Raises:
        OSError: they cannot be written; unless it happens between two renames, nothing has changed.
    """
    written: list[tuple[Path, Path]] = []
    try:
        for name, data in files.items():
            draft = folder / f"{DRAFT}{os.getpid()}-{os.urandom(6).hex()}"
            written.append((draft, folder / name))
            write_synced(draft, data)
        for draft, place in written:
            os.replace(draft, place)
        _sync_folder(folder)
    finally:
        for draft, _ in written:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file, which is on the disk then. Raises OSError: there is one, or it cannot be written."""
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


def unzipped(data: bytes, most_bytes: int) -> bytes:
    """What was packed by gzip.

    Raises:
        OSError: it is damaged, or would be larger than ``most_bytes``; ``strerror`` says which.
    """
    found: list[bytes] = []
    left = most_bytes
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while piece := file.read(_PIECE_BYTES):
                found.append(piece)
                left -= len(piece)
                if left < 0:
                    raise OSError(errno.EFBIG, f"it unzips to more than {most_bytes} bytes")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(errno.EINVAL, f"it is a damaged gzip file: {error}") from error
    return b"".join(found)
