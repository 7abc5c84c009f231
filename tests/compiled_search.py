"""The search's code, compiled before a test whose search has less time than that takes on a fresh machine."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

from disco_hlo.optimize.rehearsal import rehearse


def compile_search(module: bytes, device_kind: str) -> None:
    """Rehearse a search of this step; one process at a time, as the others then find what it made."""
    with (Path(tempfile.gettempdir()) / "disco_tests_compile").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rehearse(module, device_kind)
