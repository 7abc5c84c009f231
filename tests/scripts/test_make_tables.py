"""Tables of the evaluation from small, literal records."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import make_tables
import pytest
from evaluation import tables
from evaluation.fidelity import Point, days, fidelity, kendall_tau
from evaluation.record import ALONE_XLA

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tables.py"


def row(median_ms: float, of_default: float, predicted_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "status": "ok", "median_ms": median_ms, "spread_ms": 0.5, "of_default": of_default,
        "of_default_noise": 0.01, "predicted": {"step_ms": predicted_ms, "hidden_ms": 8.0, "exposed_ms": 12.0},
        "memory": {"total_bytes": 3 << 20}, **more,
    }  # fmt: skip


def trace(compute: float, communication: float, hidden: float) -> dict[str, float]:
    span = compute + communication - hidden + 1.0
    return {
        "compute_ms": compute, "communication_ms": communication, "hidden_ms": hidden,
        "exposed_ms": communication - hidden, "idle_ms": 1.0, "span_ms": span,
    }  # fmt: skip


def record() -> dict[str, Any]:
    """Default 100 ms, thresholds 90 and 95, PGLE 80, plan 60, FO 40, bound 50."""
    return {
        "format": "disco-hlo evaluation", "version": 1,
        "cell": {"model": "bert", "size": "full", "link": "sockets", "devices": 2},
        "facts": {
            "chosen": "plan", "bounds": {"full_overlap_ms": 40.0, "bound_ms": 50.0}, "device": "H200",
            "versions": {"jax": "0.12.0", "jaxlib": "0.12.0"}, "date": "2026-11-20",
            "profile_s": 30.0, "search_s": 20.0, "compile_all_s": 40.0, "measure_s": 10.0, "evaluations": 1234,
        },
        "rows": {
            "XLA default": row(100.0, 1.0, 110.0, trace=trace(70.0, 50.0, 10.0)),
            "no all-reduce combining": {"status": "failed", "reason": "out of memory"},
            "threshold 1 MiB": row(90.0, 0.9, 90.0),
            "threshold everything": row(95.0, 0.95, 94.0),
            "PGLE": row(88.0, 0.8, 88.0),
            "plan": row(60.0, 0.6, 57.0, trace=trace(68.0, 50.0, 45.0)),
            "plan's order only": row(70.0, 0.7, 70.0),
        },
    }  # fmt: skip


def test_other_searches_are_beside_the_plan_s_own() -> None:
    made = record()
    assert tables.searches([made])[1] == []
    made["facts"]["bounds"]["predicted_plan_ms"] = 57.0
    made["facts"]["other_searches"] = {
        "plan of Algorithm 1": {"predicted_ms": 61.0, "evaluations": 77, "search_s": 21.5},
        "plan by analytical estimates": {"predicted_ms": 50.0, "evaluations": 99, "search_s": 19.0},
    }
    made["rows"]["plan of Algorithm 1"] = row(75.0, 0.75, 66.0)
    assert tables.searches([made])[1] == [
        ("bert, sockets, 2", "plan", "1234", "20.0", "57.0", "60.0", "0.600", "0.010"),
        ("bert, sockets, 2", "plan of Algorithm 1", "77", "21.5", "61.0", "75.0", "0.750", "0.010"),
        ("bert, sockets, 2", "plan by analytical estimates", "99", "19.0", "50.0", "-", "-", "-"),
    ]


def test_of_many_random_plans_the_best_is_told() -> None:
    made = record()
    made["rows"] |= {f"random plan {number}": row(90.0, 0.9 + number / 100, 90.0) for number in range(1, 4)}
    assert tables.simple_ways([made])[1][0][3] == "0.910, 0.920, 0.930"
    made["rows"]["random plan 20"] = row(90.0, 0.61, 90.0)
    assert tables.simple_ways([made])[1][0][3] == "0.610, the best of 4"
    assert tables.simple_ways([made])[1][0][-1] == "random plans"


def test_a_row_timed_before_the_record_had_a_default_counts_as_it_was_timed() -> None:
    made = record()
    made["rows"]["PyTorch DDP"] = {"status": "ok", "median_ms": 120.0, "spread_ms": 1.0, "not_in_turn": True}
    assert tables.step_ms(made, "PyTorch DDP") == 120.0


def test_speed_up_and_share_of_the_gap_closed() -> None:
    assert tables.speed_ups([record()])[1] == [
        (
            "bert, sockets, 2", "PGLE", "80.0", "60.0", "plan", "0.600", "33.3 %", "100.0 %", "60.0 %", "50.0 %",
            "66.7 %",
        ),
    ]  # fmt: skip


def test_a_gap_too_small_to_measure_is_not_said_to_be_closed() -> None:
    close = record()
    close["facts"]["bounds"] = {"full_overlap_ms": 77.0, "bound_ms": 81.0}
    assert tables.speed_ups([close])[1][0][-2:] == ("-", "-")


def test_the_default_counts_as_the_plan_where_it_was_chosen() -> None:
    kept = record()
    kept["facts"]["chosen"] = "XLA default"
    assert tables.speed_ups([kept])[1][0][3:7] == ("100.0", "XLA default", "1.000", "-20.0 %")


def test_a_day_s_cells_are_brought_together() -> None:
    first, other = record(), record()
    first["facts"]["date"] = other["facts"]["date"] = "2026-11-25"
    other["cell"] = {**other["cell"], "link": "staged"}
    other["facts"]["bounds"] = {
        "full_overlap_ms": 60.0,
        "bound_ms": 65.0,
    }  # closed beyond the bound: 20 of 15 ms
    day = days([first, other])[1]
    assert day == [
        (
            "2026-11-25, 2", "2", "12", "4.3 %", "10.0 %", "XLA default", "bert 1.00", "2", "100.0 %", "83.3 %",
        )
    ]  # fmt: skip
    first["facts"]["date"] = "2026-11-24"
    assert [row[0] for row in days([first, other])[1]] == ["2026-11-24, 2", "2026-11-25, 2"]


def test_a_link_that_changed_breaks_the_promise_and_not_the_prediction() -> None:
    changed = record()
    for one in changed["rows"].values():
        if "predicted" in one:
            one["predicted_in_rounds"] = {"step_ms": 100.0 * one["of_default"]}
    changed["rows"][ALONE_XLA] = row(150.0, 1.5, 120.0, predicted_in_rounds={"step_ms": 150.0})
    found = fidelity([changed])[1][0]
    assert found[:3] == ("bert, sockets, 2", "6", "0.0 %"), "the row that tells of the link is none of them"
    assert found[-1] == "4.3 %"


def test_kendall_s_tau_leaves_out_what_noise_hides() -> None:
    def point(measured: float, predicted: float, noise: float = 1.0) -> Point:
        return Point("", measured, noise, predicted, predicted)

    in_order = [point(10, 11), point(20, 19), point(30, 33)]
    assert kendall_tau(in_order) == 1.0
    assert kendall_tau([*in_order, point(21, 5)]) == pytest.approx((3 + 0 - 1 + 1) / 5)
    assert kendall_tau([*in_order, point(21, 5, noise=40)]) == 1.0
    assert kendall_tau([point(10, 11)]) is None


def test_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bert-full-sockets-2.json").write_text(json.dumps(record()))
    monkeypatch.setattr(sys, "argv", ["make_tables.py", str(tmp_path)])
    assert make_tables.main() == 0
    text = (tmp_path / "tables.md").read_text()
    assert "- H200, jax 0.12.0, jaxlib 0.12.0, 2026-11-20" in text
    titles = [title for title, *_ in make_tables.SECTIONS]
    missing = [title for title in titles if f"## {title}\n" not in text]
    # No record has a look or is of a CPU, no row has numbers to compare.
    assert missing == ["By other searches", "Looking again", "Every plan on CPU", "Numbers"]


@pytest.mark.parametrize(
    ("content", "message"), [(None, "holds no record"), ("{}", "is no disco-hlo evaluation")]
)
def test_a_folder_without_records_is_refused(
    content: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / "one.json").write_text(content)
    monkeypatch.setattr(sys, "argv", ["make_tables.py", str(tmp_path)])
    assert make_tables.main() == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "tables.md").exists()
