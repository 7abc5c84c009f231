"""A plan of 50,000 instructions is shown and reported like any other."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.report import bundle
from tests.cli.conftest import Disco
from tests.report import plans
from tests.report.large import repeated_step


@pytest.mark.slow
def test_a_plan_of_50_000_instructions_is_inspected_and_reported(
    disco: Disco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Most of each command is bringing the step into its canonical form: once is enough to see that it can be done.
    monkeypatch.setattr(bundle, "canonicalize", functools.cache(canonicalize))
    data = repeated_step(9)
    source = bundle.canonicalize(data)
    assert len(source.graph) > 50_000
    folder = plans.save_plan(tmp_path / "plan", source, data, plans.early_all_reduces(source))
    outcome = disco("inspect", folder)
    assert outcome.code == 0
    assert "5986 op groups" in outcome.out
    page = tmp_path / "plan.html"
    assert disco("report", folder, "-o", page).code == 0
    assert page.stat().st_size < 10_000_000
