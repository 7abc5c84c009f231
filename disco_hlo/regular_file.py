"""Files, whole. One to be read may be anything: a device never ends, a pipe waits for a writer, a link leads away.

Nothing is made room for that is not there: Python's ``read(n)`` takes n bytes before it reads the first.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
import tempfile
import zlib
from pathlib import Path

_PIECE_BYTES = 1 << 20


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


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, which appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise


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
