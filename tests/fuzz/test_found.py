"""What the fuzzer found, run again: every file in ``found/`` is a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.findings import FOUND, load, outcomes, panel
from tests.fuzz.strategies import SEARCHED, Wanted
from tests.fuzz.tally import FINDINGS
from tests.fuzz.worker import Worker

FILES = sorted(FOUND.glob("*.json"))
ONCE = (pytest.mark.product_only,)
"""The search is compiled on one leg alone."""
NEIGHBOURS = sys.version_info >= (3, 12)
"""Whether some neighbours are tried as well: for our rules one leg is enough, and the other has less time."""
_A_LONG_TIME_S = 900.0
"""A busy machine takes minutes to compile the search; what never ends is ended all the same."""


def _parameters() -> Iterator[Any]:
    for path in FILES:
        searched = load(path).strategy.kind in SEARCHED
        yield pytest.param(path, id=path.stem, marks=ONCE if searched else ())


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """XLA may abort; then it takes this process with it, not the test's."""
    with Worker("cpu", devices=4, pair_limit_s=_A_LONG_TIME_S) as one:
        yield one


@pytest.mark.parametrize("path", [*_parameters()])
def test_what_was_found_is_right_now(path: Path, worker: Worker) -> None:
    finding = load(path)
    strategies = panel(finding.strategy)[:4] if NEIGHBOURS else [Wanted("default"), finding.strategy]
    found, skipped = outcomes(worker, finding.program, strategies)
    assert not skipped
    assert found
    wrong = [(str(one), kind, detail) for one, kind, detail in found if kind in FINDINGS]
    assert not wrong
