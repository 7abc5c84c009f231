"""The Chrome trace."""

from __future__ import annotations

from disco_hlo.simulator.timeline import chrome_trace, simulate
from tests.simulator.drawing import problem

TIMELINE = simulate(problem("a 2000\nx 4000 on 1 after a\nb 3500 after a", "a x b ~x", compute_speed=0.5))


def test_every_task_is_an_event_on_a_named_track() -> None:
    events = chrome_trace({"two ops": TIMELINE})["traceEvents"]
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


def test_each_timeline_is_a_process() -> None:
    trace = chrome_trace({"entry": TIMELINE, "loop1": TIMELINE})
    events = trace["traceEvents"]
    processes = [(event["pid"], event["args"]["name"]) for event in events if event["name"] == "process_name"]
    assert processes == [(0, "entry"), (1, "loop1")]
    assert [sum(event["ph"] == "X" and event["pid"] == number for event in events) for number in (0, 1)] == [
        3,
        3,
    ]
    assert trace["otherData"]["loop1"]["makespan_ns"] == TIMELINE.makespan_ns
