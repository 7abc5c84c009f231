"""Steps as rows of spans on one time axis, for people: simulated, measured, and both as one Chrome trace.

Measured steps have the form of the simulated ones, beside which they are shown. In the trace (Trace Event Format, for
ui.perfetto.dev or chrome://tracing) each step is a process of named tracks; behind the step comes one execution of
each of its regions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from disco_hlo.optimize.regions import Predicted
from disco_hlo.plan.units import Unit, UnitGraph
from disco_hlo.printable import Strings, counted, listed, size_text
from disco_hlo.profiler.timeline import MeasuredStep
from disco_hlo.simulator.timeline import covered_ns

GROUP, SINGLE, LIBRARY, COPY, COLLECTIVE = range(5)
"""What a span is: a fused kernel, an op alone, a library call or loop, a copy for a bucket, a collective."""

Intervals = NDArray[np.int64]
"""``[2, n]``: starts and ends, ascending, apart from each other."""


def timeline_data(graph: Graph, predicted: Predicted, strings: Strings) -> dict[str, Any]:
    """One strategy's step: rows of spans, its units, the exposed communication, and the totals in ns."""
    timeline = predicted.timeline
    units = [unit_row(graph, unit, strings) for unit in predicted.built.units.units]
    rows = _rows(graph, predicted, strings)
    communicates = timeline.problem.communicates
    data = _step_data(timeline.makespan_ns, timeline.spans_ns, communicates, rows, units)
    return {**data, "peak": timeline.peak_bytes}


def _step_data(
    step_ns: int,
    spans_ns: NDArray[np.int64],
    communicates: NDArray[np.bool_],
    rows: list[dict[str, Any]],
    units: list[list[int]],
) -> dict[str, Any]:
    compute, communication = (covered_ns(spans_ns[:, those]) for those in (~communicates, communicates))
    exposed = covered_ns(spans_ns) - compute
    return {
        "step": step_ns,
        "compute": compute,
        "communication": communication,
        "overlap": communication - exposed,
        "exposed": exposed,
        "rows": rows,
        "units": units,
        "exposedSpans": exposed_intervals(spans_ns, communicates).T.reshape(-1).tolist(),
    }


def exposed_intervals(spans_ns: NDArray[np.int64], communicates: NDArray[np.bool_]) -> Intervals:
    """When something is communicated and nothing is computed, of spans ``[2, n]`` of which some communicate."""
    edges_ns = np.unique(spans_ns)
    talks, works = (_under_way(spans_ns[:, those], edges_ns) for those in (communicates, ~communicates))
    turns = np.diff(talks & ~works, prepend=False)
    return edges_ns[turns].reshape(-1, 2).T


def _under_way(spans_ns: NDArray[np.int64], at_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether any span has begun by then that has not ended."""
    begun, ended = (np.searchsorted(np.sort(times_ns), at_ns, side="right") for times_ns in spans_ns)
    return begun > ended


def overlap_ns(intervals: Intervals, start_ns: int, end_ns: int) -> int:
    """How much of ``start_ns`` to ``end_ns`` the intervals cover."""
    low, high = np.maximum(intervals[0], start_ns), np.minimum(intervals[1], end_ns)
    return int(np.maximum(high - low, 0).sum())


def _rows(graph: Graph, predicted: Predicted, strings: Strings) -> list[dict[str, Any]]:
    problem = predicted.timeline.problem
    rows: list[dict[str, Any]] = [
        {"label": kind, "kind": kind, "spans": []} for kind in ("compute", "communication")
    ]
    starts, ends = predicted.timeline.spans_ns.tolist()
    for task in np.argsort(predicted.timeline.spans_ns[0], kind="stable").tolist():
        unit = predicted.built.unit_of[task]
        communicates = bool(problem.communicates[task])
        kind = COLLECTIVE if communicates else _kind(graph, predicted.built.units.units[unit])
        row = rows[communicates]
        row["spans"] += [starts[task], ends[task] - starts[task], unit, kind, strings(problem.names[task])]
    return rows


def _kind(graph: Graph, unit: Unit) -> int:
    """What a unit's spans of compute are."""
    if unit.is_bucket:
        return COPY
    if unit.token[0] == "g":
        return GROUP
    return LIBRARY if graph.nodes[unit.nodes[0]].kind is Kind.FIXED else SINGLE


def unit_row(graph: Graph, unit: Unit, strings: Strings) -> list[int]:
    """A unit as the page knows it: [token, what it is, source line, number of ops], texts by index."""
    inside = [graph.nodes[node] for node in (*unit.nodes, *unit.duplicates)]
    if unit.is_bucket:
        size_bytes = sum(node.shape.size_bytes for node in inside)
        what = f"{_collectives(inside)}, {size_text(size_bytes)}"
    elif len(inside) == 1:
        what = f"{inside[0].opcode} {_shape_text(inside[0].shape)} {inside[0].op_name or inside[0].name}"
    else:
        what = opcode_text(Counter(node.opcode for node in inside))
    source = next((node.source for node in inside if node.source), "")
    return [strings(unit.token), strings(what), strings(source), len(inside)]


def _collectives(inside: list[Node]) -> str:
    kinds = {node.opcode for node in inside}
    return counted(len(inside), kinds.pop() if len(kinds) == 1 else "collective")


def _shape_text(shape: Shape) -> str:
    """A shape; of a large tuple its size alone."""
    return (
        str(shape) if len(shape.elements) < 4 else f"({len(shape.elements)} arrays, {shape.size_bytes} bytes)"
    )


def opcode_text(counts: Counter[str]) -> str:
    """``7 add, 3 multiply, ...``."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return listed([f"{count} {opcode}" for opcode, count in ranked], 6)


_TOKEN = re.compile(r"[gbn]\d{1,9}(?=[_.]|$)")


def measured_data(
    graph: Graph, units: UnitGraph, step: MeasuredStep, strings: Strings, *, ours: bool
) -> dict[str, Any]:
    """One measured step: rows of spans, its units, exposed communication and totals in ns.

    Args:
        units: of the strategy that the step executed.
        ours: the module was written by us, so that its instructions are called after units.
    """
    owner = {node: number for number, unit in enumerate(units.units) for node in unit.nodes}
    found = [
        _unit_of(units, name, owner.get(node, len(units.units)), ours) for name, node in step.instructions
    ]
    spans = np.array([(start, start + length) for _, start, length, _ in step.spans], np.int64).reshape(-1, 2)
    talks = np.array([step.lanes[lane] == "communication" for *_, lane in step.spans], np.bool_)
    rows = _measured_rows(graph, units, step, found, strings)
    unit_rows = [unit_row(graph, unit, strings) for unit in units.units]
    unit_rows.append([strings("n"), strings(""), strings(""), 1])
    return {"name": strings(step.name), **_step_data(step.step_ns, spans.T, talks, rows, unit_rows)}


def _unit_of(units: UnitGraph, name: str, owner: int, ours: bool) -> int:
    """Index of the unit behind an instruction; one past the last where that is not known."""
    token = _TOKEN.match(name) if ours else None
    return owner if token is None else units.index.get(token[0], owner)


def _measured_rows(
    graph: Graph, units: UnitGraph, step: MeasuredStep, found: list[int], strings: Strings
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"label": f"{kind} {step.lanes[: i + 1].count(kind)}".removesuffix(" 1"), "kind": kind, "spans": []}
        for i, kind in enumerate(step.lanes)
    ]
    for instruction, start, length, lane in step.spans:
        unit = found[instruction]
        kind = SINGLE if unit == len(units.units) else _kind(graph, units.units[unit])
        kind = COLLECTIVE if step.lanes[lane] == "communication" else kind
        rows[lane]["spans"] += [start, length, unit, kind, strings(step.instructions[instruction][0])]
    return sorted(rows, key=lambda row: row["kind"] == "communication")


_KINDS = ("fused kernel", "op alone", "library call or loop", "packing a bucket", "collective")


def report_trace(data: dict[str, Any]) -> dict[str, Any]:
    """The trace of a report, of what :func:`~disco_hlo.report.data.page_data` returned."""
    steps = [
        (f"{who}, {how}" + ("" if region is data else f", {region['region']}"), step)
        for region in (data, *data["regions"])
        for how, steps in (("simulated", region["timelines"]), ("measured", region["measuredTimelines"]))
        for who, step in zip(("XLA default", "plan"), steps, strict=False)
    ]
    return chrome_trace(data["head"]["module"], steps, data["strings"])


def chrome_trace(
    module: str, steps: Sequence[tuple[str, dict[str, Any]]], strings: list[str]
) -> dict[str, Any]:
    """Steps with their titles, as :func:`timeline_data` and :func:`measured_data` have them, as the JSON value of a
    trace; ``strings`` are their texts."""
    events: list[dict[str, Any]] = []
    for process, (name, step) in enumerate(steps):
        events.append(_about("process_name", process, 0, name=name))
        events.append(_about("process_sort_index", process, 0, sort_index=process))
        for track, row in enumerate(step["rows"]):
            events.append(_about("thread_name", process, track, name=row["label"]))
            events.append(_about("thread_sort_index", process, track, sort_index=track))
            events += _spans(process, track, step, row["spans"], strings)
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"module": module}}


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


def _about(kind: str, process: int, track: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": args}
