"""The search's code, compiled before a test whose search has less time than that takes on a fresh machine."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

from disco_hlo.optimize.ablations import candidates
from disco_hlo.optimize.pipeline import Budget, optimize
from disco_hlo.optimize.rehearsal import rehearse
from disco_hlo.search.api import SearchSettings


def compile_search(module: bytes, device_kind: str) -> None:
    """Rehearse a search of this step; one process at a time, as the others then find what it made."""
    with (Path(tempfile.gettempdir()) / "disco_tests_compile").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = optimize(rehearse(module, device_kind), SearchSettings(seconds=2.0), Budget.of(2.0, 600.0))
        candidates(found, 5)
        found.case.prediction(found.best)
