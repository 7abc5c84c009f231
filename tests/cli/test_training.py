"""The command that ``capture`` and ``calibrate`` start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_hlo.cli import training


@pytest.mark.parametrize("quiet", [False, True])
def test_what_a_command_prints_does_not_get_into_our_json(
    quiet: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = training._start([sys.executable, "-c", "print('loss 0.1')"], tmp_path, quiet=quiet)
    assert process.wait(60) == 0
    out, err = capfd.readouterr()
    assert ("loss 0.1" in out, "loss 0.1" in err) == (not quiet, quiet)


def test_a_command_is_started_though_stdout_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert training._start([sys.executable, "-c", ""], tmp_path, quiet=False).wait(60) == 0


@pytest.mark.parametrize("command", ["capture", "calibrate"])
def test_a_file_that_is_no_program_is_refused(
    command: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    script = tmp_path / "train"
    script.write_text("import jax\n")
    script.chmod(0o755)
    message = refused(command, "-o", tmp_path / "out", "--", script)
    assert f"{script} cannot be started: Exec format error" in message
    script.chmod(0o644)
    message = refused(command, "-o", tmp_path / "out", "--", script)
    assert f"{script}: not an executable program; expected: disco {command} -o" in message


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    started = tmp_path / "started"
    touch = [sys.executable, "-c", f"open({str(started)!r}, 'w')"]
    message = refused("calibrate", "-o", tmp_path / "file" / "profile.json", "--", *touch)
    assert "is not a folder" in message
    assert not started.exists()
