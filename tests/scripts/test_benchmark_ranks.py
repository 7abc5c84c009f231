"""The fidelity benchmark of a CPU job: its arguments, and what it makes of batches."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import benchmark_ranks
import pytest
from evaluation import ranks
from evaluation.fidelity import cpu_plans, fidelity

from disco_hlo.plan.plan import DEFAULT


def processes_that_mention(text: str) -> list[str]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = command.read_bytes().split(b"\0")
            if text.encode() in words:
                found.append(b" ".join(words).decode())
    return found


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_told_to_end_it_leaves_no_process_of_its_job(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    started = subprocess.Popen(
        [sys.executable, benchmark_ranks.__file__, "bert", "--out", out], stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: len(processes_that_mention(out)) >= 4)  # itself, mpiexec, two ranks
        started.send_signal(signal.SIGTERM)
        _, said = started.communicate(timeout=60)
    finally:
        started.kill()
    assert (started.returncode, said) == (130, "benchmark_ranks.py: stopped; its processes have ended\n")
    wait_until(lambda: not processes_that_mention(out))


def test_what_others_use_is_what_the_job_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.os, "cpu_count", lambda: 2)
    before = ranks._Use(at_s=10.0, machine_s=100.0, own_s=0.0)
    now = ranks._Use(at_s=20.0, machine_s=116.0, own_s=7.0)
    monkeypatch.setattr(ranks._Use, "now", classmethod(lambda _: now))
    assert before.of_others_since(job_s=13.0) == pytest.approx(0.15)
    assert before.of_others_since(job_s=20.0) == 0.0


def test_processor_time_of_this_process_is_counted() -> None:
    before = ranks._Use.now()
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert before.of_this_process_since() >= 0.05


def test_the_record_makes_a_row_of_the_fidelity_table() -> None:
    row = {"status": "ok", "median_ms": 100.0, "of_default_noise": 0.02, "predicted": {"step_ms": 90.0}}
    cell = {"model": "transformer_lm", "size": "tiny", "link": "gloo", "devices": 2}
    record = {"cell": cell, "facts": {"backend": "cpu"}, "rows": {DEFAULT: row}}
    _, rows = fidelity([record])
    assert rows[0][1:4] == ("1", "10.0 %", "-10.0 %")
    _, rows = cpu_plans([record, {**record, "facts": {"backend": "gpu"}}])
    assert rows == [("transformer_lm (tiny), gloo, 2", DEFAULT, "100.0", "2.00", "90.0", "-10.0 %")]
