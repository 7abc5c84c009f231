"""Simulated steps as rows of spans on one time axis, for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from disco_hlo.optimize.regions import Predicted
from disco_hlo.plan.units import Unit
from disco_hlo.report.strings import Strings
from disco_hlo.simulator.timeline import Timeline

GROUP, SINGLE, LIBRARY, COPY, COLLECTIVE = range(5)
"""What a span is: a fused kernel, an op alone, a library call or loop, a copy for a bucket, a collective."""

Intervals = NDArray[np.int64]
"""``[2, n]``: starts and ends, ascending, apart from each other."""


def timeline_data(graph: Graph, predicted: Predicted, strings: Strings) -> dict[str, Any]:
    """One strategy's step: rows of spans, its units, the exposed communication, and the totals in ns."""
    timeline = predicted.timeline
    return {
        "step": timeline.makespan_ns,
        "compute": timeline.compute_ns,
        "communication": timeline.communication_ns,
        "overlap": timeline.overlap_ns,
        "exposed": timeline.exposed_ns,
        "peak": timeline.peak_bytes,
        "rows": _rows(graph, predicted, strings),
        "units": [unit_row(graph, unit, strings) for unit in predicted.built.units.units],
        "exposedSpans": exposed_intervals(timeline).T.reshape(-1).tolist(),
    }


def exposed_intervals(timeline: Timeline) -> Intervals:
    """When something is communicated and nothing is computed."""
    communicates = timeline.problem.communicates
    return exposed_between(
        union(timeline.spans_ns[:, communicates]), union(timeline.spans_ns[:, ~communicates])
    )


def exposed_between(talk: Intervals, work: Intervals) -> Intervals:
    """What of ``talk`` no part of ``work`` covers."""
    edges = np.unique(np.concatenate([talk.reshape(-1), work.reshape(-1)]))
    start, end = edges[:-1], edges[1:]
    wanted = _covers(talk, start) & ~_covers(work, start)
    return union(np.stack([start[wanted], end[wanted]]))


def overlap_ns(intervals: Intervals, start_ns: int, end_ns: int) -> int:
    """How much of ``start_ns`` to ``end_ns`` the intervals cover."""
    low, high = np.maximum(intervals[0], start_ns), np.minimum(intervals[1], end_ns)
    return int(np.maximum(high - low, 0).sum())


def overlap_between(talk: Intervals, work: Intervals) -> int:
    """How long both are under way, in ns."""
    exposed = exposed_between(talk, work)
    return int((talk[1] - talk[0]).sum() - (exposed[1] - exposed[0]).sum())


def union(spans_ns: NDArray[np.int64]) -> Intervals:
    """The spans ``[2, n]`` without what they have in common."""
    start, end = spans_ns[:, np.argsort(spans_ns[0], kind="stable")]
    if not start.size:
        return np.zeros((2, 0), np.int64)
    reached = np.maximum.accumulate(end)
    opens = np.concatenate([[True], start[1:] > reached[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    kept = start[opens] < reached[closes]
    return np.stack([start[opens][kept], reached[closes][kept]])


def _covers(intervals: Intervals, at: NDArray[np.int64]) -> NDArray[np.bool_]:
    before = np.searchsorted(intervals[0], at, side="right") - 1
    if not intervals.size:
        return np.zeros(len(at), np.bool_)
    covered: NDArray[np.bool_] = (before >= 0) & (at < intervals[1][before])
    return covered


def _rows(graph: Graph, predicted: Predicted, strings: Strings) -> list[dict[str, Any]]:
    problem = predicted.timeline.problem
    channels = sorted(set(problem.resource[problem.communicates].tolist()))
    rows: list[dict[str, Any]] = [{"label": "compute", "kind": "compute", "spans": []}]
    for number, _ in enumerate(channels):
        label = "communication" if len(channels) == 1 else f"channel {number + 1}"
        rows.append({"label": label, "kind": "communication", "spans": []})
    if not channels:
        rows.append({"label": "communication", "kind": "communication", "spans": []})
    starts, ends = predicted.timeline.spans_ns.tolist()
    for task in np.argsort(predicted.timeline.spans_ns[0], kind="stable").tolist():
        unit = predicted.built.unit_of[task]
        communicates = bool(problem.communicates[task])
        kind = _kind(graph, predicted.built.units.units[unit], problem.names[task], communicates)
        row = rows[1 + channels.index(int(problem.resource[task])) if communicates else 0]
        row["spans"] += [starts[task], ends[task] - starts[task], unit, kind, strings(problem.names[task])]
    return rows


def _kind(graph: Graph, unit: Unit, name: str, communicates: bool) -> int:
    if communicates:
        return COLLECTIVE
    if unit.is_bucket:
        return COPY
    if name[0] == "g":
        return GROUP
    return LIBRARY if graph.nodes[unit.nodes[0]].kind is Kind.FIXED else SINGLE


def unit_row(graph: Graph, unit: Unit, strings: Strings) -> list[int]:
    """A unit as the page knows it: [token, what it is, source line, number of ops], texts by index."""
    inside = [graph.nodes[node] for node in (*unit.nodes, *unit.duplicates)]
    if unit.is_bucket:
        size_bytes = sum(node.shape.size_bytes for node in inside)
        what = f"{len(inside)} {_collectives(inside)}, {size_bytes / 2**20:.3g} MiB"
    elif len(inside) == 1:
        what = f"{inside[0].opcode} {_shape_text(inside[0].shape)} {inside[0].op_name or inside[0].name}"
    else:
        what = opcode_text(Counter(node.opcode for node in inside))
    source = next((node.source for node in inside if node.source), "")
    return [strings(unit.token), strings(what), strings(source), len(inside)]


def _collectives(inside: list[Node]) -> str:
    kinds = {node.opcode for node in inside}
    return f"{kinds.pop() if len(kinds) == 1 else 'collective'}{'s' * (len(inside) != 1)}"


def _shape_text(shape: Shape) -> str:
    """A shape; of a large tuple its size alone."""
    return (
        str(shape) if len(shape.elements) < 4 else f"({len(shape.elements)} arrays, {shape.size_bytes} bytes)"
    )


def opcode_text(counts: Counter[str], most: int = 6) -> str:
    """``7 add, 3 multiply, ...``."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{count} {opcode}" for opcode, count in ranked[:most])
    return listed + (", ..." if len(ranked) > most else "")
