"""The search's code, compiled before a test whose search has less time than that takes on a fresh machine."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

from disco_hlo.optimize.cold_start import compile_code
from tests.captured import CPU_MODULE


def compile_search() -> None:
    """One process at a time, as the others then find what it made."""
    with (Path(tempfile.gettempdir()) / "disco_tests_compile").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_code(CPU_MODULE.read_bytes(), "cpu")
