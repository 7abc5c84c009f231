"""Benchmarks refuse arguments they cannot use at once, with one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    "command",
    [
        "bench_calls.py --calls 1",
        "bench_memory.py missing.py",
        "bench_search.py --against missing",
        "bench_search.py --seeds 0",
        "network_testbed.py --rate slow -- true",
    ],
)
def test_a_bad_argument_is_refused_before_any_work(command: str, tmp_path: Path) -> None:
    script, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *arguments],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"{script}: error: ")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
