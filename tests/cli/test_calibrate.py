"""``disco calibrate``: one command from a training script to a profile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from disco_hlo.cli.training import _facts, _print_profile
from disco_hlo.profiler.profile import Contention, load
from tests.cli.conftest import Disco
from tests.report import plans

TRAIN = Path(__file__).with_name("train.py")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_SEARCH", "1")


def test_a_machine_is_measured_once_and_its_times_are_reused(disco: Disco, tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "profile.json", tmp_path / "b.json"
    outcome = disco("calibrate", "-o", first, "--json", "--", sys.executable, TRAIN)
    assert outcome.code == 0, outcome
    profile = load(first)
    assert profile.ops
    assert profile.all_reduce is not None
    assert outcome.json["ops"] == len(profile.ops)
    assert outcome.json["noise"] == profile.noise
    assert outcome.json["all_reduce"]["median_error"] == profile.all_reduce.median_error
    again = disco("calibrate", "-o", second, "--", sys.executable, TRAIN)
    assert load(second) == profile
    assert "its residuals" in again.out
    assert "noise of a step" in again.out


def test_the_wait_of_transfers_is_told_where_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    profile = plans.sockets_profile()
    _print_profile(profile)
    assert "wait of a collective" not in capsys.readouterr().out
    waiting = replace(profile, contention=Contention(1.05, 1.02, 32_500))
    _print_profile(waiting)
    assert "wait of a collective during kernels" in (out := capsys.readouterr().out)
    assert "32.5 µs" in out
    assert (_facts(profile)["transfer_wait_ns"], _facts(waiting)["transfer_wait_ns"]) == (0, 32_500)


def test_what_matmuls_and_others_lose_is_told_where_it_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_kind = replace(plans.sockets_profile(), contention=Contention(1.25, 1.5, products=4.0, others=1.0625))
    _print_profile(by_kind)
    assert "matmuls 4.000, others 1.062" in capsys.readouterr().out
    assert _facts(by_kind)["contention_by_kind"] == [4.0, 1.0625]
    assert _facts(plans.sockets_profile())["contention_by_kind"] is None


def test_what_holds_transfers_is_told_where_it_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    holding = replace(plans.sockets_profile(), holds={"dot": 0.75, "other dot": 0.85, "convolution": 0.0})
    _print_profile(holding)
    assert "2 of 3 kinds seen, 80 % of their time" in capsys.readouterr().out
    assert _facts(holding)["holds"] == holding.holds
    _print_profile(replace(holding, holds={"convolution": 0.0}))
    out = capsys.readouterr().out
    assert "0 of 1 kinds seen " in out
    assert "% of their time" not in out
    _print_profile(plans.sockets_profile())
    assert "delay collectives" not in capsys.readouterr().out


def test_a_command_that_cannot_be_measured_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    message = refused("calibrate", "-o", output, "--", sys.executable, "-c", "raise SystemExit(7)")
    assert "ended with exit code 7 and compiled no training step" in message
    message = refused(
        "calibrate", "-o", output, "--seconds", "1", "--", sys.executable, "-c", "import time; time.sleep(60)"
    )
    assert "nothing was measured within 1 s" in message
    assert "no such command" in refused("calibrate", "-o", output, "--", "no/such/command")
    assert "is a folder; name a file" in refused("calibrate", "-o", tmp_path, "--", sys.executable)
    assert not output.exists()
