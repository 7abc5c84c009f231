"""Timelines as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

The Trace Event Format: complete events (``ph`` X) with times in microseconds, each timeline a process with one named
track per resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disco_hlo.simulator.timeline import Timeline


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The trace as a JSON value.

    Args:
        timelines: by title; a step's first, then one execution of each of its regions. All begin at 0.
    """
    events = []
    for process, (title, timeline) in enumerate(timelines.items()):
        events.append(_metadata("process_name", process, 0, name=title))
        events.append(_metadata("process_sort_index", process, 0, sort_index=process))
        for resource in range(timeline.problem.channels + 1):
            track = "compute stream" if resource == 0 else f"channel {resource}"
            events.append(_metadata("thread_name", process, resource, name=track))
            events.append(_metadata("thread_sort_index", process, resource, sort_index=resource))
            events += [_complete(timeline, process, resource, span.task) for span in timeline.spans(resource)]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {title: _totals(timeline) for title, timeline in timelines.items()},
    }


def _totals(timeline: Timeline) -> dict[str, int]:
    return {
        "makespan_ns": timeline.makespan_ns,
        "compute_ns": timeline.compute_ns,
        "communication_ns": timeline.communication_ns,
        "overlap_ns": timeline.overlap_ns,
        "exposed_ns": timeline.exposed_ns,
        "peak_bytes": timeline.peak_bytes,
    }


def _metadata(kind: str, process: int, resource: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": resource, "args": args}


def _complete(timeline: Timeline, process: int, resource: int, task: int) -> dict[str, Any]:
    start_ns, end_ns = timeline.spans_ns[:, task].tolist()
    alone_ns = int(timeline.problem.duration_ns[task])
    return {
        "ph": "X",
        "name": timeline.problem.names[task],
        "cat": "communication" if timeline.problem.communicates[task] else "compute",
        "pid": process,
        "tid": resource,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {"task": task, "alone_ns": alone_ns, "slowed_ns": end_ns - start_ns - alone_ns},
    }
