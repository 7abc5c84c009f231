"""``disco doctor``: whether everything the plugin needs is here, and where not, what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from disco_hlo.cli.output import add_row, show, table
from disco_hlo.plugin.settings import Settings, SettingsError

_PROBE_TIMEOUT_S = 180
_MPI_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    """What was found."""
    advice: str = ""
    """What to do, where something is missing."""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check versions, the HLO hook, devices, MPI and the plan directory; exit 1 if something is missing."""
    checks = diagnose()
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        _print_table(checks)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def diagnose() -> list[Check]:
    """Look at everything, in the order in which a newcomer would have to repair it."""
    probe = _run_probe()
    return [
        _check_python(),
        _check_entry_point(),
        *_check_settings(),
        _check_hook(probe),
        _check_devices(probe),
        _check_mpiexec(),
        _check_mpi4py(),
    ]


def _check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    missing = [name for name in ("torch", "dgl") if importlib.util.find_spec(name) is None]
    if sys.version_info >= (3, 12):
        said = f"{version}; training the estimator takes Python 3.11 (DGL)"
    elif missing:
        said = f"{version} without {' and '.join(missing)}, so the estimator cannot be trained here"
    else:
        said = f"{version} with torch and DGL: the estimator can be trained here"
    return Check("python", True, said)


def _check_entry_point() -> Check:
    points = importlib.metadata.entry_points(group="jax_plugins")
    found = any(point.value == "disco_hlo.plugin" for point in points)
    detail = "jax loads disco_hlo.plugin" if found else "disco-hlo is not installed as a jax plugin"
    return Check("plugin", found, detail, "" if found else "install it: pip install disco-hlo")


def _check_settings() -> tuple[Check, Check]:
    """The settings, and the directory that they name."""
    try:
        directory = Settings.from_environment({"ENABLE_SEARCH": "1", **os.environ}).directory
    except SettingsError as error:
        settings = Check("settings", False, str(error), "correct or unset it")
        return settings, Check("directory", False, "not looked at", "correct the settings first")
    chosen = sorted(name for name in os.environ if name.startswith("DISCO_") or name == "ENABLE_SEARCH")
    return Check("settings", True, ", ".join(chosen) if chosen else "defaults"), _check_directory(directory)


def _check_directory(directory: Path) -> Check:
    try:
        existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
    except OSError as error:
        advice = "set DISCO_DIR to a directory with room that you may write to"
        return Check("directory", False, f"{directory}: {error.strerror or error}", advice)
    return Check("directory", True, f"{directory} is writable")


def _check_hook(probe: dict[str, Any]) -> Check:
    if "error" in probe:
        return Check("hook", False, str(probe["error"]), "use jax 0.10.2 to 0.12 with its own jaxlib")
    donation = "donation is kept" if probe["keeps_donation"] else "donation is lost (jax 0.11 keeps it)"
    versions = f"jax {probe['jax_version']}, jaxlib {probe['jaxlib_version']}"
    return Check("hook", True, f"{versions}: XLA ran a rewritten module; {donation}")


def _check_devices(probe: dict[str, Any]) -> Check:
    if "error" in probe:
        return Check("devices", False, "not looked at", "repair the hook first")
    return Check("devices", True, f"{probe['device_count']} x {probe['device_kind']} ({probe['platform']})")


def _check_mpiexec() -> Check:
    beside_python = Path(sys.executable).with_name("mpiexec")
    found = shutil.which("mpiexec") or (str(beside_python) if beside_python.exists() else None)
    if found is None:
        return Check("mpiexec", False, "not found", "pip install 'disco-hlo[mpi]', or put mpiexec on PATH")
    return Check("mpiexec", True, found)


def _check_mpi4py() -> Check:
    code = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"
    outcome = _run_python(["-c", code], _MPI_TIMEOUT_S)
    if isinstance(outcome, str):
        return Check("mpi4py", False, outcome, "pip install 'disco-hlo[mpi]'")
    return Check("mpi4py", True, outcome.stdout.strip().rstrip("\0"))


def _run_probe() -> dict[str, Any]:
    outcome = _run_python(["-m", "disco_hlo.plugin.probe"], _PROBE_TIMEOUT_S)
    if isinstance(outcome, str):
        return {"error": outcome}
    report = json.loads(outcome.stdout.splitlines()[-1])
    return report if isinstance(report, dict) else {"error": f"the probe printed {report!r}"}


def _run_python(arguments: list[str], timeout_s: int) -> subprocess.CompletedProcess[str] | str:
    """Run this Python apart, as a crash there must not be ours; the process, or why there is no result."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment.pop("ENABLE_SEARCH", None)
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s} s"
    if done.returncode == 0:
        return done
    lines: list[str] = (done.stdout + done.stderr).strip().splitlines() or [f"exit status {done.returncode}"]
    return _readable(lines[-1])


def _readable(line: str) -> str:
    try:
        return str(json.loads(line)["error"])
    except (json.JSONDecodeError, TypeError, KeyError):
        return line


def _print_table(checks: list[Check]) -> None:
    made = table("check", "", "found")
    for check in checks:
        add_row(made, check.name, "ok" if check.ok else "missing", check.detail)
        if check.advice:
            add_row(made, "", "", check.advice)
    show(made)
