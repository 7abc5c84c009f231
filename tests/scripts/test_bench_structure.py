"""The benchmark of structures: every schedule measured beside XLA's default, and taken up where it stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from evaluation.record import read

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_structure.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_schedules_are_measured_beside_the_default_and_only_once(tmp_path: Path) -> None:
    command = ["adam-10", "--size", "tiny", "--link", "nvlink", "--rounds", "3", "--out", str(tmp_path)]
    command += ["--schedules", "chunk-2,sharded-update,no-such"]
    done = run(*command, "--keep-modules")
    assert done.returncode == 0, done.stderr
    assert "  no pattern for no-such; this step has chunk-2, chunk-4, sharded-update" in done.stdout
    rows = read(tmp_path / "adam-10-tiny-nvlink-2.json")["rows"]
    orders = ("XLA's order", "our order")
    assert set(rows) == {"XLA default", "whole, our order"} | {
        f"{name}, {order}" for name in ("chunk-2", "sharded-update") for order in orders
    }
    for row in rows.values():
        assert row["status"] == "ok"
        assert row["numbers"]["max_relative_difference"] < 1e-5
        assert row["predicted"]["step_ms"] > 0
        assert row["memory"]["total_bytes"] > 0
        assert len(row["times_ms"]) == 3
        assert {"compute_ms", "communication_ms", "hidden_ms"} <= set(row["trace"])
    assert (tmp_path / "adam-10-tiny-nvlink-2" / "sharded-update.hlo.pb.gz").exists()
    again = run(*command)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1] == "  nothing left to do"


def test_a_step_that_is_none_is_refused(tmp_path: Path) -> None:
    done = run("adam-99", "--link", "nvlink", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "'adam-99' is no step: expected tp-forward" in done.stderr
    assert "Traceback" not in done.stderr
