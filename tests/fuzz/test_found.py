"""What the fuzzer found, run again: every file in ``found/`` is a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.findings import FOUND, load, outcomes, panel
from tests.fuzz.processes import Worker
from tests.fuzz.tally import FINDINGS

FILES = sorted(FOUND.glob("*.json"))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """XLA may abort; then it takes this process with it, not the test's."""
    with Worker("cpu", devices=4) as one:
        yield one


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_what_was_found_is_right_now(path: Path, worker: Worker) -> None:
    finding = load(path)
    found, skipped = outcomes(worker, finding.program, panel(finding.strategy))
    assert not skipped
    assert found
    wrong = [(str(one), kind, detail) for one, kind, detail in found if kind in FINDINGS]
    assert not wrong
