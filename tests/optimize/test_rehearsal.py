"""The search's code is compiled while a GPU's step is profiled, and nobody notices if that fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.optimize import rehearsal
from tests.captured import stored


def rehearsed(*, wanted: bool = True) -> Any:
    return rehearsal.rehearsed(b"a module", "NVIDIA H200", wanted=wanted)


def command(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the rehearsal be this program, on a machine that never searched."""
    monkeypatch.setattr(rehearsal, "_COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(rehearsal, "is_cached", lambda module: False)
    monkeypatch.setattr(rehearsal, "compile_ahead", lambda backend: None)


def test_a_rehearsal_predicts_the_step_as_one_of_gpus() -> None:
    case = rehearsal.rehearse(stored("h200_models/rnnlm"), "NVIDIA H200")
    platform = case.costs.profile.platform
    assert (platform.backend, platform.device_kind) == ("gpu", "NVIDIA H200")
    assert case.default.makespan_ns > 0


def test_the_search_waits_for_its_rehearsal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command(
        monkeypatch,
        "import os, sys, time; from pathlib import Path\n"
        "time.sleep(0.3)\n"
        f"given = [sys.stdin.read(), sys.argv[1], str(os.environ.get('ENABLE_SEARCH'))]\n"
        f"Path({str(tmp_path / 'done')!r}).write_text(' | '.join(given))",
    )
    monkeypatch.setenv("ENABLE_SEARCH", "1")
    with rehearsed() as wait:
        wait(lambda: False)
        assert (tmp_path / "done").read_text() == "a module | NVIDIA H200 | None"


@pytest.mark.parametrize("ended_by", ["interruption", "end of the block"])
def test_a_rehearsal_lasts_no_longer_than_it_is_wanted(
    ended_by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    beat = tmp_path / "beat"
    command(
        monkeypatch,
        "import time; from pathlib import Path\n"
        f"while True: Path({str(beat)!r}).write_text(str(time.time())); time.sleep(0.02)",
    )
    with rehearsed() as wait:
        while not beat.exists():
            time.sleep(0.02)
        if ended_by == "interruption":
            wait(lambda: True)
    last = beat.read_text()
    time.sleep(0.3)
    assert beat.read_text() == last


@pytest.mark.parametrize(("wanted", "cached"), [(False, False), (True, True)])
def test_where_it_would_not_help_nothing_is_rehearsed(
    wanted: bool, cached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command(monkeypatch, f"from pathlib import Path; Path({str(tmp_path / 'ran')!r}).touch()")
    monkeypatch.setattr(rehearsal, "is_cached", lambda module: cached)
    with rehearsed(wanted=wanted) as wait:
        wait(lambda: False)
    assert not (tmp_path / "ran").exists()


def test_a_rehearsal_that_fails_is_nobodys_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, "raise SystemExit(1)")
    with rehearsed() as wait:
        wait(lambda: False)
    monkeypatch.setattr(rehearsal, "_COMMAND", ("/no/such/interpreter",))
    with rehearsed() as wait:
        wait(lambda: False)
