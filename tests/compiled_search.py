"""The search's code, compiled before a test whose search has less time than that takes on a fresh machine."""

from __future__ import annotations

import fcntl
import io
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from disco_hlo.optimize import rehearsal


def compile_search(module: bytes, device_kind: str) -> None:
    """Rehearse a search of this step; one process at a time, as the others then find what it made."""
    with (
        (Path(tempfile.gettempdir()) / "disco_tests_compile").open("w") as lock,
        pytest.MonkeyPatch.context() as patch,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(module)))
        patch.setattr("sys.argv", ["rehearsal", device_kind])
        rehearsal.main()
