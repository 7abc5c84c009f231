from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from disco_hlo.cli import doctor
from disco_hlo.cli.doctor import Check

PROBE = {
    "platform": "gpu",
    "device_kind": "NVIDIA H200",
    "device_count": 2,
    "jax_version": "0.12.0",
    "jaxlib_version": "0.12.0",
    "keeps_donation": True,
}


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(doctor.doctor)
    return app


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stands in for the two checks that start a process; each has a test of its own."""
    monkeypatch.setattr(doctor, "_run_probe", lambda: dict(PROBE))
    monkeypatch.setattr(doctor, "_check_mpi4py", lambda: Check("mpi4py", True, "Open MPI"))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/mpiexec")
    monkeypatch.setenv("DISCO_DIR", str(tmp_path / "not" / "there"))


def test_where_everything_is_there_the_exit_code_is_0(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--json"])
    assert result.exit_code == 0
    checks = json.loads(result.stdout)
    assert [check["name"] for check in checks] == [
        "python", "plugin", "settings", "directory", "hook", "devices", "mpiexec", "mpi4py",
    ]  # fmt: skip
    assert all(check["ok"] for check in checks)
    details = {check["name"]: check["detail"] for check in checks}
    assert details["devices"] == "2 x NVIDIA H200 (gpu)"
    assert details["hook"] == "jax 0.12.0, jaxlib 0.12.0: XLA ran a rewritten module; donation is kept"
    assert details["settings"] == "DISCO_DIR"
    assert not (tmp_path / "not").exists()


def test_where_something_is_missing_the_exit_code_is_1_and_the_reason_is_shown(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.sys, "executable", "/no/such/python")
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "mpiexec missing not found" in lines
    assert "pip install 'disco-hlo[mpi]', or put mpiexec on PATH" in lines


def checks() -> dict[str, Check]:
    return {check.name: check for check in doctor.diagnose()}


def test_a_hook_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_run_probe", lambda: {"error": "XLA ran something else"})
    advice = "use jax 0.10.2 to 0.12 with its own jaxlib"
    assert checks()["hook"] == Check("hook", False, "XLA ran something else", advice)
    assert not checks()["devices"].ok


def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCO_PATIENCE", "none")
    found = checks()["settings"]
    assert (found.ok, checks()["directory"].ok) == (False, False)
    assert found.detail == "DISCO_PATIENCE is 'none'; expected a whole number, 1 or more"


def test_a_directory_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCO_DIR", "/proc/disco")
    assert not checks()["directory"].ok
    assert checks()["directory"].detail.startswith("/proc/disco: ")


def test_a_directory_that_cannot_even_be_looked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCO_DIR", "/tmp/" + "a" * 300)
    directory = checks()["directory"]
    if sys.version_info < (3, 14):  # later ones take it for a folder that is yet to be made
        assert not directory.ok
    assert directory.detail.startswith("/tmp/aaa")


def test_python_code_that_fails_says_why() -> None:
    assert doctor._run_python(["-c", "raise ImportError('libmpi.so not found')"], 30) == (
        "ImportError: libmpi.so not found"
    )
    assert doctor._run_python(["-c", "import os; os.abort()"], 30) == "exit status -6"
    assert doctor._run_python(["-c", "import time; time.sleep(60)"], 1) == "no answer within 1 s"
    assert doctor._run_python(["-c", 'print(\'{"error": "no hook"}\'); raise SystemExit(1)'], 30) == "no hook"


def test_the_probe_runs_a_rewritten_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    probe: dict[str, Any] = doctor._run_probe()
    assert "error" not in probe
    assert probe["platform"] == "cpu"
    outcome = doctor._run_python(["-c", "print('answer')"], 30)
    assert isinstance(outcome, subprocess.CompletedProcess)
    assert outcome.stdout == "answer\n"
