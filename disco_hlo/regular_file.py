"""Files, whole. One to be read may be anything: a device never ends, a pipe waits for a writer, a link leads away.

Nothing is made room for that is not there: Python's ``read(n)`` takes n bytes before it reads the first.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import zlib
from pathlib import Path

_PIECE_BYTES = 1 << 20
_GZIP = 31
"""``zlib``'s word for the gzip format."""


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
    while data:  # members follow each other, each with a head of its own
        unpacker = zlib.decompressobj(_GZIP)
        while not unpacker.eof:
            try:
                piece = unpacker.decompress(data, _PIECE_BYTES)
            except zlib.error as error:
                raise OSError(errno.EINVAL, f"it is a damaged gzip file: {error}") from error
            data = unpacker.unused_data or unpacker.unconsumed_tail
            if not piece and not data and not unpacker.eof:
                raise OSError(errno.EINVAL, "it is a damaged gzip file: its end is missing")
            found.append(piece)
            left -= len(piece)
            if left < 0:
                raise OSError(errno.EFBIG, f"it unzips to more than {most_bytes} bytes")
        data = unpacker.unused_data.lstrip(b"\0")
    return b"".join(found)
