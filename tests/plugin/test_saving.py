"""What an interrupted search leaves: nothing that is known to be wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.activation.local import LocalChannel
from disco_hlo.plan.plan import DEFAULT, SEARCHED, Strategy
from disco_hlo.plan.store import PlanStore
from disco_hlo.plugin.measuring.candidates import Trial
from disco_hlo.plugin.phases import saving
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings


@pytest.mark.parametrize("error", ["", "output 0 differs from XLA's default at [0]"])
def test_a_plan_that_was_found_wrong_before_ctrl_c_is_not_saved(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[str] = []
    monkeypatch.setattr(saving, "_write", lambda _outcome, trial: written.append(trial.name))
    session = Session(None, Settings(search=True, directory=tmp_path), None, LocalChannel())  # type: ignore[arg-type]
    slot = PlanStore(tmp_path).slot("0" * 64, "cpu", "cpu", 2, 1)
    found: Any = SimpleNamespace(prediction=SimpleNamespace(plan_ns=1, default_ns=2))
    trials = [Trial(DEFAULT, None, 2), Trial(SEARCHED, Strategy(), 1, times_ns=[1, 1], error=error)]
    step: Any = None
    profile: Any = None
    with caplog.at_level(logging.INFO, "disco_hlo"):
        saving.save_interrupted(saving.Outcome(session, step, slot, found, profile, trials, 0.0, 0.0))
    assert written == ([] if error else [SEARCHED])
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"interrupted: the best plan so far is {'of no use' if error else 'in '}")
    assert "wins" not in line, "it was only timed"
