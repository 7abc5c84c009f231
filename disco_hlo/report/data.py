"""All that a report shows, as one JSON value: op groups, buckets and timelines of a step's regions, and XLA's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.costs import Costs
from disco_hlo.optimize.regions import Predicted, StepTimes, lower_bound
from disco_hlo.optimize.regions import step_times as simulated_times
from disco_hlo.plan.plan import Plan
from disco_hlo.plan.units import UnitGraph
from disco_hlo.printable import Strings, printable
from disco_hlo.report.bundle import Bundle
from disco_hlo.report.facts import (
    GroupFacts,
    bucket_facts,
    compare,
    group_facts,
    order_facts,
    order_of,
    step_times,
    with_order,
)
from disco_hlo.report.regions import RegionFacts, region_facts
from disco_hlo.report.timelines import (
    exposed_intervals,
    measured_data,
    opcode_text,
    overlap_ns,
    timeline_data,
)
from disco_hlo.simulator.build import ready_ns

VERSION = 1


def page_data(bundle: Bundle, costs: Costs | None, said: Sequence[str] = ()) -> dict[str, Any]:
    """The content of a report.

    Args:
        costs: what the timelines are simulated with; None where the module is missing.
        said: what a reader must know of the costs.

    Raises:
        DiscoError: the costs do not fit the module.
    """
    strings = Strings()
    times = simulated(bundle, costs)
    entry = _region(bundle, times, ENTRY, strings)
    limit = None
    if entry["timelines"] and bundle.source is not None and bundle.default is not None and costs is not None:
        limit = lower_bound(bundle.source, [bundle.strategy, bundle.default], costs)
    body = {
        "version": VERSION,
        "head": _head(bundle, strings),
        **entry,
        "bound": None if limit is None else {"step": limit.makespan_ns, "fullOverlap": limit.full_overlap_ns},
        "exposed": [one.exposed_ns for one in (times.default, times.plan) if one is not None],
        "regionTable": [
            {**msgspec.to_builtins(row), "what": strings(row.what)} for row in times.rows(bundle)
        ],
        "regions": [
            _region(bundle.of_region(name), times, name, strings)
            for name in bundle.region_names
            if name != ENTRY
        ],
        "curve": [list(step) for step in bundle.plan.search.improvements],
        "allReduce": _all_reduce(bundle),
        "launch": costs.machine.launch_ns if costs else 0,
        "notes": [printable(note, 2000) for note in _notes(bundle, said)],
    }
    return body | {"strings": strings.as_list()}


def _region(bundle: Bundle, times: Simulated, name: str, strings: Strings) -> dict[str, Any]:
    """Kernels, buckets, order and timelines of one region of a step; the entry has them at the top of the page's data.

    Args:
        bundle: of that region.
    """
    plan, default = times.of_region(name)
    plan = None if default is None else plan
    graph = bundle.source.graph if bundle.source else None
    order, explicit = order_of(bundle)
    groups = group_facts(bundle)
    used = sorted({node for group in groups for node in (*group.nodes, *group.duplicates)})
    body = {
        "region": name,
        "groups": group_rows(groups, plan, default, strings),
        "buckets": bucket_rows(bundle, plan, default, strings),
        "ops": {} if graph is None else op_rows(graph, used, strings),
        "order": msgspec.to_builtins(order_facts(order, explicit)),
        "timelines": [],
        "measuredTimelines": [],
        "difference": None,
    }
    if plan is not None and default is not None and graph is not None:
        body["timelines"] = [timeline_data(graph, one, strings) for one in (default, plan)]
        body["difference"] = _difference(graph, bundle, default)
        body["measuredTimelines"] = measured_timelines(bundle, (default, plan), strings)
    return body


def measured_timelines(
    bundle: Bundle, predicted: Sequence[Predicted], strings: Strings
) -> list[dict[str, Any]]:
    """The measured steps of XLA's default and of the plan; none where one of them is missing."""
    if bundle.source is None or len(bundle.timelines) != len(predicted):
        return []
    graph, pairs = bundle.source.graph, zip(predicted, bundle.timelines, strict=True)
    return [
        measured_data(graph, one.built.units, step, strings, ours=number > 0)
        for number, (one, step) in enumerate(pairs)
    ]


def _head(bundle: Bundle, strings: Strings) -> dict[str, Any]:
    plan = bundle.plan
    times = step_times(plan)
    return {
        "module": printable(plan.target.module_name),
        "target": _texts(msgspec.to_builtins(plan.target)),
        "versions": _texts(plan.versions),
        "chosen": printable(plan.chosen),
        "created": printable(plan.measured.created) if plan.measured else "",
        "predicted": msgspec.to_builtins(plan.prediction) | {"chosen_ns": times.predicted_plan},
        "predictedSpeedup": times.predicted_speedup,
        "measuredSpeedup": times.measured_speedup,
        "candidates": _candidates(plan, strings),
        "search": _texts({"method": plan.search.method, **plan.search.settings})
        | {"evaluations": plan.search.evaluations},
        "seconds": _seconds(plan),
        "sha256": plan.module_sha256,
    }


def _candidates(plan: Plan, strings: Strings) -> list[dict[str, Any]]:
    if plan.measured is None:
        return []
    texts = [
        (strings(one.name), strings(one.error) if one.error else None) for one in plan.measured.candidates
    ]
    return [
        {**msgspec.to_builtins(one), "name": name, "error": error}
        for one, (name, error) in zip(plan.measured.candidates, texts, strict=True)
    ]


def _seconds(plan: Plan) -> dict[str, Any]:
    if plan.measured is None:
        return {}
    spent = plan.measured
    return {
        "profile_s": spent.profile_s,
        "search_s": spent.search_s,
        "measure_s": spent.measure_s,
        "evaluations_per_s": spent.evaluations_per_s,
    }


def _notes(bundle: Bundle, said: Sequence[str]) -> list[str]:
    noted = bundle.plan.notes
    return [*noted, *(f"timelines: {line}" for line in said if line not in noted), *bundle.missing]


def _texts(fields: dict[str, Any]) -> dict[str, Any]:
    return {printable(k): printable(v) if isinstance(v, str) else v for k, v in fields.items()}


def _all_reduce(bundle: Bundle) -> dict[str, Any]:
    """The fitted lines, from the plan, and the points behind them, from the profile."""
    lines = bundle.plan.measured.all_reduce if bundle.plan.measured else ()
    swept = bundle.profile.all_reduce if bundle.profile else None
    if swept is not None and not lines:
        lines = swept.line.lines
    points = swept.points if swept is not None else ()
    return {
        "pieces": [[line.from_bytes, line.ns_per_byte, line.offset_ns] for line in lines],
        "points": [[point.size_bytes, point.median_ns, point.spread_ns] for point in points],
        "medianError": swept.median_error if swept is not None else None,
    }


def _difference(graph: Graph, bundle: Bundle, default: Predicted) -> dict[str, Any]:
    """How the plan differs from XLA's own, in numbers."""
    found = compare(with_order(graph, default.strategy), with_order(graph, bundle.strategy))
    sizes = [bucket.size_bytes for bucket in bucket_facts(default.strategy, graph)]
    return {
        "groupsInBoth": found.common_groups,
        "groupsXla": len(default.strategy.groups),
        "bucketsXla": len(default.strategy.buckets),
        "xlaBucketBytes": sizes,
        "collectivesMoved": len(found.moved_collectives),
        "unitsInBoth": found.common_units,
        "unitsMoved": len(found.moved_units),
    }


_LISTED = 40
"""Kernels of XLA's that are named beside one of ours."""


def group_rows(
    groups: Sequence[GroupFacts], plan: Predicted | None, default: Predicted | None, strings: Strings
) -> list[dict[str, Any]]:
    """The op groups, largest first; times where they are simulated or measured."""
    durations = {} if plan is None else _durations(plan)
    homes = {} if default is None else _homes(default.built.units)
    default_durations = {} if default is None else _durations(default)
    known = {} if default is None else {(g.nodes, g.duplicates) for g in default.strategy.groups}
    rows = []
    for group in groups:
        row: dict[str, Any] = {
            "token": group.token,
            "kind": strings(group.kind),
            "nodes": list(group.nodes),
            "duplicates": list(group.duplicates),
            "what": strings(opcode_text(Counter(dict(group.opcodes)))),
            "source": strings(group.source),
            "saved": group.bytes_saved if group.opcodes else None,
            "predicted": durations.get(group.token),
            "measured": group.measured_ns,
        }
        if default is not None:
            tokens = list(dict.fromkeys(token for node in group.nodes for token in homes.get(node, ())))
            row["xla"] = {
                "same": (group.nodes, group.duplicates) in known,
                "kernels": len(tokens),
                "tokens": [strings(token) for token in tokens[:_LISTED]],
                "predicted": sum(default_durations.get(token, 0) for token in tokens),
            }
        rows.append(row)
    return rows


def bucket_rows(
    bundle: Bundle, plan: Predicted | None, default: Predicted | None, strings: Strings
) -> list[dict[str, Any]]:
    """The buckets in the order of their collectives: members, when each was ready, when they travelled."""
    graph = bundle.source.graph if bundle.source else None
    ready = {} if plan is None or graph is None else ready_ns(graph, plan.built, plan.timeline.spans_ns)
    homes = {} if default is None else _homes(default.built.units)
    exposed = None
    if plan is not None:
        exposed = exposed_intervals(plan.timeline.spans_ns, plan.timeline.problem.communicates)
    rows = []
    for bucket in bucket_facts(bundle.strategy, graph):
        row: dict[str, Any] = {
            "token": bucket.token,
            "form": strings(bucket.form),
            "bytes": bucket.size_bytes,
            "members": [_member(graph, node, ready.get(node), homes, strings) for node in bucket.collectives],
        }
        if plan is not None and exposed is not None:
            task = plan.timeline.problem.names.index(bucket.token)
            start, end = plan.timeline.spans_ns[:, task].tolist()
            row |= {"start": start, "end": end, "exposed": overlap_ns(exposed, start, end)}
        rows.append(row)
    return sorted(rows, key=lambda row: row.get("start", 0))


def _member(
    graph: Graph | None, node: int, ready: int | None, homes: dict[int, list[str]], strings: Strings
) -> list[int | None]:
    """[node, bytes, name, shape, source, ready in ns, XLA's bucket], texts by index."""
    if graph is None:
        return [node, None, None, None, None, None, None]
    found = graph.nodes[node]
    return [
        node,
        found.shape.size_bytes,
        strings(found.op_name or found.name),
        strings(str(found.shape)),
        strings(found.source),
        ready,
        strings(homes[node][0]) if homes.get(node) else None,
    ]


def op_rows(graph: Graph, nodes: Sequence[int], strings: Strings) -> dict[str, list[int]]:
    """Columns of the ops with these numbers: [node, opcode, shape, name, source], texts by index."""
    listed = [graph.nodes[node] for node in nodes]
    return {
        "node": [node.id for node in listed],
        "opcode": [strings(node.opcode) for node in listed],
        "shape": [strings(str(node.shape)) for node in listed],
        "name": [strings(node.op_name or node.name) for node in listed],
        "source": [strings(node.source) for node in listed],
    }


def _durations(predicted: Predicted) -> dict[str, int]:
    problem = predicted.timeline.problem
    return dict(zip(problem.names, problem.duration_ns.tolist(), strict=True))


def _homes(units: UnitGraph) -> dict[int, list[str]]:
    """For each node, the units that compute it."""
    found: dict[int, list[str]] = {}
    for unit in units.units:
        for node in (*unit.nodes, *unit.duplicates):
            found.setdefault(node, []).append(unit.token)
    return found


@dataclass(frozen=True, eq=False)
class Simulated:
    """The steps under both; None where the module is missing, and XLA's where the plan's ops are not its."""

    plan: StepTimes | None
    default: StepTimes | None

    def of_region(self, name: str) -> tuple[Predicted | None, Predicted | None]:
        """One execution of a region, under the plan and under XLA's own."""
        plan, default = (
            None if times is None else times.predicted[name] for times in (self.plan, self.default)
        )
        return plan, default

    def rows(self, bundle: Bundle) -> list[RegionFacts]:
        """The table of the regions."""
        if bundle.source is None or self.plan is None:
            return []
        return region_facts(bundle.source, self.plan, bundle.plan.strategy, self.default)


def simulated(bundle: Bundle, costs: Costs | None) -> Simulated:
    """Both steps of a bundle.

    Raises:
        DiscoError: the costs do not fit the module.
    """
    if bundle.source is None or costs is None:
        return Simulated(None, None)
    plan = simulated_times(bundle.source, bundle.strategy, costs)
    if bundle.default is None:
        return Simulated(plan, None)
    return Simulated(plan, simulated_times(bundle.source, bundle.default, costs, as_compiled=True))
