from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.optimize.costs import costs_for
from disco_hlo.optimize.regions import Predicted, lower_bound, predict
from disco_hlo.report.bundle import Bundle, open_bundle
from disco_hlo.report.data import bucket_rows, group_rows, ready_ns
from disco_hlo.report.printable import LONGEST, Strings
from disco_hlo.report.timelines import exposed_intervals, overlap_ns, timeline_data
from disco_hlo.simulator.timeline import simulate
from tests.simulator.problems import problem, random_problem


def test_exposed_communication_of_a_drawn_step() -> None:
    # a  aaa......bb
    # x  ...xxxxx...      exposed from 3 to 8, when b begins
    drawn = problem("a 3\nx 5 on 1 after a\nb 2 after x", "a x ~x b")
    assert exposed_intervals(simulate(drawn)).tolist() == [[3], [8]]


def test_communication_beside_compute_is_not_exposed() -> None:
    # a  aaabbbb...cc
    # x  ...xxxxxxx      b hides 3 to 7, 7 to 10 is exposed
    drawn = problem("a 3\nb 4\nx 7 on 1 after a\nc 2 after x", "a x b ~x c")
    found = exposed_intervals(simulate(drawn))
    assert found.tolist() == [[7], [10]]
    assert overlap_ns(found, 3, 8) == 1
    assert overlap_ns(found, 0, 7) == 0


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 3))
def test_exposed_intervals_add_up_to_the_exposed_communication(seed: int, tasks: int, channels: int) -> None:
    timeline = simulate(random_problem(seed, tasks, channels))
    start, end = exposed_intervals(timeline)
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
    ready = ready_ns(bundle.source.graph, plan)
    assert len(set(ready.values())) > 30


def test_a_group_that_xla_has_too_says_so(simulated: Any) -> None:
    bundle, plan, default, _ = simulated
    rows = group_rows(bundle, plan, default, Strings())
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
