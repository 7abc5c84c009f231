"""The timelines of a report as one Chrome trace: simulated and measured steps, each a process of named
tracks; behind the step one execution of each of its regions.

The Trace Event Format, for ui.perfetto.dev or chrome://tracing: complete events (``ph`` X), times in
microseconds.
"""

from __future__ import annotations

from typing import Any

_KINDS = ("fused kernel", "op alone", "library call or loop", "packing a bucket", "collective")


def chrome_trace(data: dict[str, Any]) -> dict[str, Any]:
    """The trace as a JSON value, of what :func:`~disco_hlo.report.data.page_data` returned."""
    strings: list[str] = data["strings"]
    events: list[dict[str, Any]] = []
    steps = [
        (f"{who}, {how}" + ("" if region is data else f", {region['region']}"), step)
        for region in (data, *data["regions"])
        for how, steps in (("simulated", region["timelines"]), ("measured", region["measuredTimelines"]))
        for who, step in zip(("XLA default", "plan"), steps, strict=False)
    ]
    for process, (name, step) in enumerate(steps):
        events.append(_named("process_name", process, 0, name))
        events.append(_sorted("process_sort_index", process, 0, process))
        for track, row in enumerate(step["rows"]):
            events.append(_named("thread_name", process, track, row["label"]))
            events.append(_sorted("thread_sort_index", process, track, track))
            events += _spans(process, track, step, row["spans"], strings)
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"module": data["head"]["module"]}}


def _spans(
    process: int, track: int, step: dict[str, Any], spans: list[int], strings: list[str]
) -> list[dict[str, Any]]:
    made = []
    for at in range(0, len(spans), 5):
        start_ns, length_ns, unit, kind, name = spans[at : at + 5]
        token, what, source, _ = step["units"][unit]
        args = {"unit": strings[token], "what": strings[what], "source": strings[source]}
        made.append(
            {
                "ph": "X", "name": strings[name], "cat": _KINDS[kind], "pid": process, "tid": track,
                "ts": start_ns / 1000, "dur": length_ns / 1000, "args": args,
            }
        )  # fmt: skip
    return made


def _named(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _sorted(kind: str, process: int, track: int, place: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"sort_index": place}}
