"""Measured steps as rows of spans, in the form of the simulated ones, beside which they are shown."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.units import UnitGraph
from disco_hlo.profiler.timeline import MeasuredStep
from disco_hlo.report.printable import Strings
from disco_hlo.report.timelines import (
    COLLECTIVE,
    COPY,
    GROUP,
    LIBRARY,
    SINGLE,
    exposed_between,
    overlap_between,
    union,
    unit_row,
)

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
    talk, work = union(spans[talks].T), union(spans[~talks].T)
    communication, overlap = _length(talk), overlap_between(talk, work)
    return {
        "name": strings(step.name),
        "step": step.step_ns,
        "compute": _length(work),
        "communication": communication,
        "overlap": overlap,
        "exposed": communication - overlap,
        "rows": _rows(graph, units, step, found, strings),
        "units": [
            *(unit_row(graph, unit, strings) for unit in units.units), [strings("n"), strings(""), strings(""), 1]
        ],
        "exposedSpans": exposed_between(talk, work).T.reshape(-1).tolist(),
    }  # fmt: skip


def _unit_of(units: UnitGraph, name: str, owner: int, ours: bool) -> int:
    """Index of the unit behind an instruction; one past the last where that is not known."""
    token = _TOKEN.match(name) if ours else None
    return owner if token is None else units.index.get(token[0], owner)


def _rows(
    graph: Graph, units: UnitGraph, step: MeasuredStep, found: list[int], strings: Strings
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"label": f"{kind} {number}".removesuffix(" 1"), "kind": kind, "spans": []}
        for kind, number in _numbered(step)
    ]
    for instruction, start, length, lane in step.spans:
        unit = found[instruction]
        kind = COLLECTIVE if step.lanes[lane] == "communication" else _kind(graph, units, unit)
        rows[lane]["spans"] += [start, length, unit, kind, strings(step.instructions[instruction][0])]
    return sorted(rows, key=lambda row: row["kind"] == "communication")


def _numbered(step: MeasuredStep) -> list[tuple[str, int]]:
    return [(kind, step.lanes[: i + 1].count(kind)) for i, kind in enumerate(step.lanes)]


def _kind(graph: Graph, units: UnitGraph, number: int) -> int:
    if number == len(units.units):
        return SINGLE
    unit = units.units[number]
    if unit.is_bucket:
        return COPY
    if len(unit.nodes) + len(unit.duplicates) > 1:
        return GROUP
    return LIBRARY if graph.nodes[unit.nodes[0]].kind is Kind.FIXED else SINGLE


def _length(intervals: NDArray[np.int64]) -> int:
    return int((intervals[1] - intervals[0]).sum())
