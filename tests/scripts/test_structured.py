"""The benchmark of structures: every schedule measured beside XLA's default, and taken up where it stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from evaluation.measure import at_once
from evaluation.record import CellName, Record, read

from disco_hlo.plugin.measuring.runner import time_once
from tests.e2e.jobs import QUICK_COMPILES

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "XLA_FLAGS": QUICK_COMPILES},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_schedules_are_measured_beside_the_default_and_only_once(tmp_path: Path) -> None:
    command = ["adam-10", "--size", "tiny", "--link", "nvlink", "--rounds", "3", "--out", str(tmp_path)]
    command += ["--schedules", "chunk-2,sharded-update,no-such"]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "  no pattern for no-such; this step has chunk-2, chunk-4, sharded-update" in done.stdout
    record = read(tmp_path / "adam-10-tiny-nvlink-2.json")
    rows = record["rows"]
    assert 1 <= record["facts"]["steps_at_once"] <= 20
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
    again = run(*command)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1] == "  nothing left to do"


class Steps:
    """A runner that notes how it was asked to run."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def run(self) -> int:
        self.asked.append(1)
        return 4_000_000

    def run_in_a_row(self, count: int) -> int:
        self.asked.append(count)
        return 3_000_000

    def learn_handing_on(self, count: int) -> None:
        self.asked.append(count)

    def donated_bytes(self) -> int:
        return 0


def test_the_number_is_chosen_once_and_kept_with_the_record(tmp_path: Path) -> None:
    record = Record.open(tmp_path, CellName("adam-10", "tiny", "nvlink", 2))
    first, later = Steps(), Steps()
    assert at_once(record, first) == 20  # type: ignore[arg-type]
    assert first.asked == [1, 1, 1, 21]
    assert at_once(Record.open(tmp_path, record.cell), later) == 20  # type: ignore[arg-type]
    assert later.asked == []
    assert time_once(later, 5) == 3_000_000  # type: ignore[arg-type]
    assert time_once(later, 1) == 4_000_000  # type: ignore[arg-type]
    assert later.asked == [5, 1]
