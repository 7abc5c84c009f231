"""The Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disco_hlo.simulator.timeline import simulate
from disco_hlo.simulator.trace import chrome_trace, write_chrome_trace
from tests.simulator.drawing import problem

TIMELINE = simulate(problem("a 2000\nx 4000 on 1 after a\nb 3500 after a", "a x b ~x", compute_speed=0.5))


def test_every_task_is_an_event_on_a_named_track() -> None:
    events = chrome_trace(TIMELINE, "two ops")["traceEvents"]
    named = [(event["tid"], event["args"]["name"]) for event in events if "name" in event.get("args", {})]
    assert named == [(0, "two ops"), (0, "compute stream"), (1, "channel 1")]
    assert [event for event in events if event["ph"] == "X"] == [
        {
            "ph": "X",
            "name": "a",
            "cat": "compute",
            "pid": 0,
            "tid": 0,
            "ts": 0.0,
            "dur": 2.0,
            "args": {"task": 0, "alone_ns": 2000, "slowed_ns": 0},
        },
        {
            "ph": "X",
            "name": "b",
            "cat": "compute",
            "pid": 0,
            "tid": 0,
            "ts": 2.0,
            "dur": 5.5,
            "args": {"task": 2, "alone_ns": 3500, "slowed_ns": 2000},
        },
        {
            "ph": "X",
            "name": "x",
            "cat": "communication",
            "pid": 0,
            "tid": 1,
            "ts": 2.0,
            "dur": 4.0,
            "args": {"task": 1, "alone_ns": 4000, "slowed_ns": 0},
        },
    ]


def test_the_file_is_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    write_chrome_trace(TIMELINE, target)
    assert json.loads(target.read_text()) == chrome_trace(TIMELINE)
    assert list(tmp_path.iterdir()) == [target]


def test_nothing_is_left_where_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(OSError, match=r"trace\.json"):
        write_chrome_trace(TIMELINE, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
