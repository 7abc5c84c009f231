"""Simulated and measured steps as rows of spans, on the page and in the trace."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.optimize.costs import costs_for
from disco_hlo.optimize.regions import Predicted, lower_bound, predict
from disco_hlo.printable import LONGEST, Strings
from disco_hlo.profiler.timeline import FILE_NAME, MeasuredStep, encode
from disco_hlo.report.bundle import Bundle, open_bundle
from disco_hlo.report.data import bucket_rows, group_rows
from disco_hlo.report.facts import group_facts
from disco_hlo.report.timelines import Intervals, exposed_intervals, overlap_ns, report_trace, timeline_data
from disco_hlo.simulator.timeline import Timeline, simulate
from tests.report import plans
from tests.simulator.problems import problem, random_problem


def exposed_of(timeline: Timeline) -> Intervals:
    return exposed_intervals(timeline.spans_ns, timeline.problem.communicates)


def test_exposed_communication_of_a_drawn_step() -> None:
    # a  aaa......bb
    # x  ...xxxxx...      exposed from 3 to 8, when b begins
    drawn = problem("a 3\nx 5 on 1 after a\nb 2 after x", "a x ~x b")
    assert exposed_of(simulate(drawn)).tolist() == [[3], [8]]


def test_communication_beside_compute_is_not_exposed() -> None:
    # a  aaabbbb...cc
    # x  ...xxxxxxx      b hides 3 to 7, 7 to 10 is exposed
    drawn = problem("a 3\nb 4\nx 7 on 1 after a\nc 2 after x", "a x b ~x c")
    found = exposed_of(simulate(drawn))
    assert found.tolist() == [[7], [10]]
    assert overlap_ns(found, 3, 8) == 1
    assert overlap_ns(found, 0, 7) == 0


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_exposed_intervals_add_up_to_the_exposed_communication(seed: int, tasks: int) -> None:
    timeline = simulate(random_problem(seed, tasks))
    start, end = exposed_of(timeline)
    assert int((end - start).sum()) == timeline.exposed_ns
    assert np.all(start[1:] > end[:-1])
    assert np.all(end > start)


@pytest.fixture(scope="module")
def simulated(vgg19_plan: Path) -> tuple[Bundle, Predicted, Predicted, Any]:
    bundle = open_bundle(vgg19_plan / "plan.json")
    assert bundle.source is not None
    assert bundle.default is not None
    graph = bundle.source.graph
    costs = costs_for(bundle.source, bundle.profile, "NVIDIA H200")
    plan, default = predict(graph, bundle.strategy, costs), predict(graph, bundle.default, costs)
    return bundle, plan, default, costs


def test_spans_of_a_row_follow_each_other_and_fill_the_step(simulated: Any) -> None:
    bundle, plan, _, _ = simulated
    data = timeline_data(bundle.source.graph, plan, Strings())
    assert [row["label"] for row in data["rows"]] == ["compute", "communication"]
    for row, busy in zip(data["rows"], (data["compute"], data["communication"]), strict=True):
        spans = np.array(row["spans"]).reshape(-1, 5)
        assert np.all(spans[1:, 0] >= spans[:-1, 0] + spans[:-1, 1])
        assert spans[:, 1].sum() == busy
    assert sum(len(row["spans"]) for row in data["rows"]) == 5 * len(plan.timeline.problem)
    assert data["step"] == data["compute"] + data["exposed"]


def test_every_gradient_is_ready_before_its_bucket_leaves(simulated: Any) -> None:
    bundle, plan, default, _ = simulated
    rows = bucket_rows(bundle, plan, default, Strings())
    assert len(rows) == len(bundle.strategy.buckets)
    assert [row["start"] for row in rows] == sorted(row["start"] for row in rows)
    for row in rows:
        assert 0 < max(member[5] for member in row["members"]) <= row["start"] < row["end"]
        assert 0 <= row["exposed"] <= row["end"] - row["start"]
        assert row["bytes"] == sum(member[1] for member in row["members"])
    assert sum(row["exposed"] for row in rows) == plan.timeline.exposed_ns
    assert len({member[5] for row in rows for member in row["members"]}) > 30


def test_a_group_that_xla_has_too_says_so(simulated: Any) -> None:
    bundle, plan, default, _ = simulated
    rows = group_rows(group_facts(bundle), plan, default, Strings())
    assert all(row["xla"]["same"] for row in rows)
    assert all(row["predicted"] > 0 for row in rows)
    assert [len(row["nodes"]) + len(row["duplicates"]) for row in rows][:2] == [224, 164]


def test_the_bound_is_below_both_timelines(simulated: Any) -> None:
    bundle, plan, default, costs = simulated
    limit = lower_bound(bundle.source, [plan.strategy, default.strategy], costs)
    assert limit.full_overlap_ns <= limit.makespan_ns
    assert limit.makespan_ns <= min(plan.timeline.makespan_ns, default.timeline.makespan_ns)


@given(st.lists(st.text(max_size=30)))
def test_equal_texts_are_kept_once(texts: list[str]) -> None:
    strings = Strings()
    indices = [strings(text) for text in texts]
    assert len(strings.as_list()) == len(set(texts))
    assert [strings(text) for text in texts] == indices


def test_long_texts_are_cut() -> None:
    strings = Strings()
    strings("y" * 10_000)
    assert strings.as_list() == ["y" * LONGEST + "… (10000 characters)"]


HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J"


def with_timelines(plan: Path, folder: Path) -> Path:
    """A copy of a plan folder with two made-up measured steps beside it."""
    shutil.copytree(plan, folder)
    bundle = open_bundle(folder / "plan.json")
    assert bundle.source is not None
    graph, bucket = bundle.source.graph, bundle.strategy.buckets[0].collectives[0]
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
    digest = hashlib.sha256((folder / "module.hlo.pb").read_bytes()).hexdigest()
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
    assert r"<img src=x onerror=alert(1)>\x1b[2J" in strings
    assert not any("\x1b" in event["name"] for event in report_trace(data)["traceEvents"])
    spans = np.array(plan["rows"][0]["spans"]).reshape(-1, 5)
    assert [strings[plan["units"][unit][0]] for unit in spans[:, 2]] == ["b0", "g0"]
    assert [strings[name] for name in spans[:, 4]] == ["b0_pack", "g0_add"]
    assert strings[plan["units"][plan["rows"][1]["spans"][2]][0]] == "b0"


def test_the_trace_has_a_process_for_each_step_and_a_named_track_for_each_row(
    cpu_plan: Path, tmp_path: Path
) -> None:
    events = report_trace(plans.content(with_timelines(cpu_plan, tmp_path / "plan") / "plan.json"))[
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


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / FILE_NAME).write_bytes(b"\x1f\x8b"), "damaged gzip file"),
        (lambda folder: (folder / FILE_NAME).unlink() or (folder / FILE_NAME).mkdir(), "not a regular file"),
        (
            lambda folder: (folder / FILE_NAME).write_bytes(encode("0" * 64, [])),
            "measured steps of another plan",
        ),
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
