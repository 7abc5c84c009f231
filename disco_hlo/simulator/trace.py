"""A timeline as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

The Trace Event Format: complete events (``ph`` X) with times in microseconds on one named
track per resource.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from disco_hlo.simulator.timeline import Timeline


def chrome_trace(timeline: Timeline, title: str = "simulated step") -> dict[str, Any]:
    """The trace as a JSON value."""
    events = [_metadata("process_name", 0, name=title)]
    for resource in range(timeline.problem.channels + 1):
        track = "compute stream" if resource == 0 else f"channel {resource}"
        events.append(_metadata("thread_name", resource, name=track))
        events.append(_metadata("thread_sort_index", resource, sort_index=resource))
        events += [_complete(timeline, resource, span.task) for span in timeline.spans(resource)]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "makespan_ns": timeline.makespan_ns,
            "compute_ns": timeline.compute_ns,
            "communication_ns": timeline.communication_ns,
            "overlap_ns": timeline.overlap_ns,
            "exposed_ns": timeline.exposed_ns,
            "peak_bytes": timeline.peak_bytes,
        },
    }


def write_chrome_trace(timeline: Timeline, path: Path, title: str = "simulated step") -> None:
    """Write the trace to a file, which appears complete or not at all."""
    text = json.dumps(chrome_trace(timeline, title), separators=(",", ":"))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _metadata(kind: str, resource: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 0, "tid": resource, "args": args}


def _complete(timeline: Timeline, resource: int, task: int) -> dict[str, Any]:
    start_ns, end_ns = timeline.spans_ns[:, task].tolist()
    alone_ns = int(timeline.problem.duration_ns[task])
    return {
        "ph": "X",
        "name": timeline.problem.names[task],
        "cat": "communication" if timeline.problem.communicates[task] else "compute",
        "pid": 0,
        "tid": resource,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {"task": task, "alone_ns": alone_ns, "slowed_ns": end_ns - start_ns - alone_ns},
    }
