"""All that a report shows, as one JSON value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.costs import Costs
from disco_hlo.optimize.regions import Predicted, lower_bound
from disco_hlo.plan.plan import Plan
from disco_hlo.report.bundle import Bundle
from disco_hlo.report.compare import compare
from disco_hlo.report.facts import bucket_facts, group_facts, order_facts, step_times
from disco_hlo.report.measured import measured_data
from disco_hlo.report.order import order_of, with_order
from disco_hlo.report.printable import printable
from disco_hlo.report.regions import RegionFacts
from disco_hlo.report.rows import bucket_rows, group_rows, op_rows, used_nodes
from disco_hlo.report.simulated import Simulated, simulated
from disco_hlo.report.strings import Strings
from disco_hlo.report.timelines import timeline_data

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
        "regionTable": [_region_row(row, strings) for row in times.rows(bundle)],
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
    body = {
        "region": name,
        "groups": group_rows(bundle, plan, default, strings),
        "buckets": bucket_rows(bundle, plan, default, strings),
        "ops": {} if graph is None else op_rows(graph, used_nodes(group_facts(bundle)), strings),
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


def _region_row(row: RegionFacts, strings: Strings) -> dict[str, Any]:
    return {
        "name": row.name,
        "by": row.strategy,
        "what": strings(row.what),
        "executions": row.executions,
        "execution": row.execution_ns,
        "share": row.share,
        "kernels": row.kernels,
        "buckets": row.buckets,
        "collectives": row.collectives,
        "bytes": row.collective_bytes,
        "exposed": row.exposed_ns,
        "peak": row.peak_bytes,
    }


def measured_timelines(
    bundle: Bundle, predicted: Sequence[Predicted], strings: Strings
) -> list[dict[str, Any]]:
    """The measured steps of XLA's default and of the plan; none where one of them is missing."""
    if bundle.source is None or len(bundle.timelines) != len(predicted):
        return []
    return [
        measured_data(
            bundle.source.graph, one.built.units, step, strings, ours=step is not bundle.timelines[0]
        )
        for one, step in zip(predicted, bundle.timelines, strict=True)
    ]


def _head(bundle: Bundle, strings: Strings) -> dict[str, Any]:
    plan = bundle.plan
    times, searches = step_times(plan), plan.search.searches
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
        | {"evaluations": plan.search.evaluations}
        | ({} if searches is UNSET else {"of each search": " + ".join(map(str, searches))}),
        "seconds": _seconds(plan),
        "sha256": plan.module_sha256,
    }


def _candidates(plan: Plan, strings: Strings) -> list[dict[str, Any]]:
    if plan.measured is None:
        return []
    return [
        {
            "name": strings(one.name),
            "predicted": one.predicted_ns,
            "median": one.median_ns,
            "spread": one.spread_ns,
            "samples": one.samples,
            "error": strings(one.error) if one.error else None,
            "onlyTimed": bool(one.only_timed),
        }
        for one in plan.measured.candidates
    ]


def _seconds(plan: Plan) -> dict[str, Any]:
    if plan.measured is None:
        return {}
    spent = plan.measured
    return {
        "profile_s": spent.profile_s,
        "search_s": spent.search_s,
        "searches_s": [] if spent.searches_s is UNSET else list(spent.searches_s),
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
        "groupsPlan": len(bundle.strategy.groups),
        "bucketsInBoth": found.common_buckets,
        "bucketsXla": len(default.strategy.buckets),
        "bucketsPlan": len(bundle.strategy.buckets),
        "xlaBucketBytes": sizes,
        "allReducesMoved": len(found.moved_all_reduces),
        "unitsInBoth": found.common_units,
        "unitsMoved": len(found.moved_units),
    }
