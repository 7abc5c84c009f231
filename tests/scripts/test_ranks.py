"""The fidelity benchmark of a CPU job: what it makes of batches."""

from __future__ import annotations

import time

import pytest
from evaluation import ranks
from evaluation.fidelity import cpu_plans, fidelity

from disco_hlo.plan.plan import DEFAULT


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
