"""Measured steps on the page and in the trace, beside the simulated ones."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from disco_hlo.profiler.timeline import FILE_NAME, MeasuredStep, encode
from disco_hlo.report.bundle import open_bundle
from disco_hlo.report.timelines import chrome_trace
from tests.report import plans

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J"


def with_timelines(plan: Path, folder: Path, *, module: bytes | None = None) -> Path:
    """A copy of a plan folder with two made-up measured steps beside it."""
    shutil.copytree(plan, folder)
    bundle = open_bundle(folder / "plan.json")
    assert bundle.source is not None
    graph, bucket = bundle.source.graph, bundle.strategy.buckets[0].all_reduces[0]
    fixed = bundle.strategy.groups[0].nodes[0]
    steps = [
        MeasuredStep(
            "XLA default", 100, ("compute", "communication", "compute"),
            ((HOSTILE, fixed), ("all-reduce.1", bucket), ("fusion.9", len(graph) + 5)),
            ((0, 0, 40, 0), (2, 20, 30, 2), (1, 30, 50, 1), (0, 90, 10, 0)),
        ),
        MeasuredStep(
            "plan", 60, ("compute", "communication"),
            (("g0_add", -1), ("b0_all-reduce", -1), ("b0_pack", -1)),
            ((2, 0, 5, 0), (1, 5, 30, 1), (0, 10, 50, 0)),
        ),
    ]  # fmt: skip
    digest = hashlib.sha256((folder / "module.hlo.pb").read_bytes() if module is None else module).hexdigest()
    (folder / FILE_NAME).write_bytes(encode(digest, steps))
    return folder


def test_measured_steps_are_rows_like_the_simulated_ones(cpu_plan: Path, tmp_path: Path) -> None:
    data = plans.content(with_timelines(cpu_plan, tmp_path / "plan") / "plan.json")
    default, plan = data["measuredTimelines"]
    assert [row["label"] for row in default["rows"]] == ["compute", "compute 2", "communication"]
    # compute 0-50 and 90-100, communication 30-80: 20 of it hidden.
    assert [default[key] for key in ("step", "compute", "communication", "overlap", "exposed")] == [
        100, 60, 50, 20, 30,
    ]  # fmt: skip
    assert default["exposedSpans"] == [50, 80]
    assert [plan[key] for key in ("step", "compute", "communication", "overlap", "exposed")] == [
        60, 55, 30, 25, 5,
    ]  # fmt: skip
    strings = data["strings"]
    spans = np.array(plan["rows"][0]["spans"]).reshape(-1, 5)
    assert [strings[plan["units"][unit][0]] for unit in spans[:, 2]] == ["b0", "g0"]
    assert [strings[name] for name in spans[:, 4]] == ["b0_pack", "g0_add"]
    assert strings[plan["units"][plan["rows"][1]["spans"][2]][0]] == "b0"


def test_the_trace_has_a_process_for_each_step_and_a_named_track_for_each_row(
    cpu_plan: Path, tmp_path: Path
) -> None:
    events = chrome_trace(plans.content(with_timelines(cpu_plan, tmp_path / "plan") / "plan.json"))[
        "traceEvents"
    ]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        0: "XLA default, simulated", 1: "plan, simulated", 2: "XLA default, measured", 3: "plan, measured",
    }  # fmt: skip
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2]
    assert tracks == ["compute", "compute 2", "communication"]
    ran = [event for event in events if event["ph"] == "X" and event["pid"] == 3]
    assert [(event["name"], event["ts"], event["dur"]) for event in ran] == [
        ("b0_pack", 0.0, 0.005), ("g0_add", 0.01, 0.05), ("b0_all-reduce", 0.005, 0.03),
    ]  # fmt: skip
    assert all(event["tid"] in range(3) for event in events)


def test_a_hostile_instruction_is_text_in_the_page_and_in_the_trace(cpu_plan: Path, tmp_path: Path) -> None:
    data = plans.content(with_timelines(cpu_plan, tmp_path / "plan") / "plan.json")
    assert r"<img src=x onerror=alert(1)>\x1b[2J" in data["strings"]
    assert not any("\x1b" in event["name"] for event in chrome_trace(data)["traceEvents"])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / FILE_NAME).write_bytes(b"\x1f\x8b"), "damaged gzip file"),
        (lambda folder: (folder / FILE_NAME).unlink() or (folder / FILE_NAME).mkdir(), "not a regular file"),
    ],
)
def test_timelines_that_cannot_be_read_are_left_out_with_a_note(
    cpu_plan: Path, tmp_path: Path, damage: object, said: str
) -> None:
    folder = with_timelines(cpu_plan, tmp_path / "plan")
    damage(folder)  # type: ignore[operator]
    data = plans.content(folder / "plan.json")
    assert data["measuredTimelines"] == []
    assert any(said in note for note in data["notes"])


def test_timelines_of_another_plan_are_left_out_with_a_note(cpu_plan: Path, tmp_path: Path) -> None:
    data = plans.content(with_timelines(cpu_plan, tmp_path / "plan", module=b"another") / "plan.json")
    assert data["measuredTimelines"] == []
    assert any("holds measured steps of another plan" in note for note in data["notes"])
