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
        "bench_activation.py --ranks 0",
        "bench_estimator.py --seconds nan",
        "bench_estimator.py --ops 0",
        "bench_looks.py --modules missing -o looks.json",
        "bench_looks.py -o .",
        "bench_looks.py --error nan -o looks.json",
        "bench_memory.py missing.py",
        "bench_search.py throughput --module missing",
        "bench_search.py race --modules missing",
        "bench_simulator.py --repeats 0",
        "bench_simulator.py --tasks 0",
        "bench_startup.py --no-such-option",
        "compare_estimators.py rnnlm --link nvlink --out out --search-seconds nan",
        "gpu_dump.py --out out --width 0",
        "network_testbed.py --timeout nan -- true",
        "sweep_search.py --module missing",
        "sweep_search.py --module /dev/null",
        "sweep_search.py --seeds 0",
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
