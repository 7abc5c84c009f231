"""The tables of a report: op groups and buckets of a plan, each with what XLA did instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from disco_hlo.hlo.graph import Graph
from disco_hlo.optimize.regions import Predicted
from disco_hlo.plan.units import UnitGraph
from disco_hlo.report.bundle import Bundle
from disco_hlo.report.facts import GroupFacts, bucket_facts, group_facts
from disco_hlo.report.strings import Strings
from disco_hlo.report.timelines import exposed_intervals, opcode_text, overlap_ns

_LISTED = 40
"""Kernels of XLA's that are named beside one of ours."""


def group_rows(
    bundle: Bundle, plan: Predicted | None, default: Predicted | None, strings: Strings
) -> list[dict[str, Any]]:
    """The op groups, largest first; times where they are simulated or measured."""
    durations = {} if plan is None else _durations(plan)
    homes = {} if default is None else _homes(default.built.units)
    default_durations = {} if default is None else _durations(default)
    known = {} if default is None else {(g.nodes, g.duplicates) for g in default.strategy.groups}
    rows = []
    for group in group_facts(bundle):
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
    ready = {} if plan is None or graph is None else ready_ns(graph, plan)
    homes = {} if default is None else _homes(default.built.units)
    exposed = None if plan is None else exposed_intervals(plan.timeline)
    rows = []
    for bucket in bucket_facts(bundle.strategy, graph):
        row: dict[str, Any] = {
            "token": bucket.token,
            "form": strings(bucket.form),
            "bytes": bucket.size_bytes,
            "members": [_member(graph, node, ready.get(node), homes, strings) for node in bucket.all_reduces],
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


def ready_ns(graph: Graph, plan: Predicted) -> dict[int, int]:
    """For each all-reduce, when what it reduces has been computed."""
    ends = plan.timeline.spans_ns[1].tolist()
    end_of = dict(zip(plan.timeline.problem.names, ends, strict=True))
    units = plan.built.units
    owner = {node: unit.token for unit in units.units for node in unit.nodes}
    known: dict[int, int] = {}

    def ready(node: int) -> int:
        pending, latest, seen = [node], 0, {node}
        while pending:
            current = pending.pop()
            if current in owner:
                latest = max(latest, end_of.get(owner[current], 0))
                continue
            fresh = [n for n in graph.nodes[current].operands if n not in seen]
            seen.update(fresh)
            pending += fresh
        return latest

    for node in graph.all_reduces:
        known[node] = max((ready(operand) for operand in graph.nodes[node].operands), default=0)
    return known


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


def used_nodes(groups: Sequence[GroupFacts]) -> list[int]:
    """Nodes that stand in any of the groups, ascending."""
    return sorted({node for group in groups for node in (*group.nodes, *group.duplicates)})


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
