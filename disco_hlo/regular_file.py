"""Reading a file that may be anything: a device never ends, a pipe waits for a writer, a link leads elsewhere."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


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
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if info.st_size > most_bytes:
            raise OSError(
                errno.EFBIG, f"it has {info.st_size} bytes, more than the {most_bytes} allowed", str(path)
            )
        data = file.read(most_bytes + 1)  # one that is being written grows
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than the {most_bytes} bytes allowed", str(path))
    return data
