"""``disco inspect``: what a plan does, in the terminal."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer
from msgspec import UNSET, to_builtins

from disco_hlo.cli.inputs import AsJson, PlanName, RegionName
from disco_hlo.cli.output import (
    add_row,
    plan_directory,
    print_json,
    region_table,
    regions_as_json,
    say,
    show,
    table,
    warn_all,
)
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.graph import Node
from disco_hlo.hlo.regions import ENTRY, inner_collectives, not_simulated
from disco_hlo.plan.bans import Bans
from disco_hlo.plan.plan import DEFAULT, Plan
from disco_hlo.printable import counted, listed, printable, size_text, time_text
from disco_hlo.report.bundle import Bundle, locate, open_bundle
from disco_hlo.report.facts import (
    BucketFacts,
    GroupFacts,
    OrderFacts,
    bucket_facts,
    group_facts,
    order_facts,
    order_of,
    step_times,
)
from disco_hlo.report.regions import RegionFacts, check_region


def inspect(
    plan: PlanName,
    top: Annotated[int, typer.Option(min=0, help="How many groups and buckets to show.")] = 15,
    region: RegionName = ENTRY,
    as_json: AsJson = False,
) -> None:
    """Show what a plan does: its regions, and of one its kernels, largest first, buckets and order; times before and
    after."""
    whole = open_bundle(locate(plan, plan_directory()))
    check_region(region, whole.region_names)
    bundle = whole.of_region(region)
    inner = () if whole.source is None else not_simulated(whole.source)
    warn_all((*whole.missing, *inner))
    regions = _regions(whole)
    if as_json:
        print_json(_as_json(whole, bundle, region, regions))
        return
    groups = group_facts(bundle)
    buckets = bucket_facts(bundle.strategy, bundle.source.graph if bundle.source else None)
    order, explicit = order_of(bundle)
    show(*_head(whole.plan), *_banned(whole), *_structure(whole.plan), "", *_times(whole.plan), "")
    if regions:
        show(*region_table(regions), f"{region}:")
    elif len(whole.region_names) > 1:
        show(f"regions: {', '.join(whole.region_names)}", f"{region}:")
    show(*_groups(groups, top), "", *_buckets(bundle, buckets, top), "")
    show(_order_line(order_facts(order, explicit)), *_all_reduce(whole.plan))
    show(*(f"note: {printable(note, 1000)}" for note in whole.plan.notes))


def _regions(bundle: Bundle) -> list[RegionFacts]:
    """The step's regions under the plan, next to XLA's own; none where the entry is all there is or nobody knows."""
    if bundle.source is None or not bundle.source.regions:
        return []
    from disco_hlo.optimize.costs import costs_for
    from disco_hlo.report.data import simulated

    strategies = [bundle.default or bundle.strategy]
    try:
        costs = costs_for(bundle.source, bundle.profile, bundle.plan.target.device_kind, strategies)
        return simulated(bundle, costs).rows(bundle)
    except DiscoError as error:  # the rest of the plan can be shown
        say(f"the regions are shown without times: {error}")
        return []


def _head(plan: Plan) -> list[str]:
    target = plan.target
    versions = ", ".join(f"{name} {version}" for name, version in sorted(plan.versions.items()))
    created = f", {plan.measured.created}" if plan.measured else ""
    return [
        f"{printable(target.module_name)}  key {target.key[:16]}",
        f"for {target.device_count} x {printable(target.device_kind)} ({printable(target.backend)}), "
        f"{counted(target.process_count, 'process')}; {printable(versions)}{printable(created)}",
        f"chosen: {printable(plan.chosen)}; found by {printable(plan.search.method)} "
        f"in {counted(plan.search.evaluations, 'evaluation')}",
        *(["the host launches each kernel by itself"] if plan.launched_singly is True else []),
    ]


def _banned(bundle: Bundle) -> list[str]:
    reason = _ban(bundle)
    return [f"banned, and not enacted: {printable(reason, 1000)}"] if reason else []


def _ban(bundle: Bundle) -> str:
    """Why the plan is not enacted from where it lies; empty if it is."""
    return Bans(bundle.path.parent).reason(bundle.plan.module_sha256)


def _structure(plan: Plan) -> list[str]:
    """The moves of a plan that changes the step's structure, equal ones counted."""
    structure = plan.structure
    if structure is UNSET:
        return []
    counts = Counter(_move_text(move) for move in structure.moves)
    listed = [f"  {counted(number, 'time')} {text}" for text, number in counts.most_common()]
    return [
        f"structure: {printable(structure.name)}, {counted(len(structure.moves), 'move')} on the module "
        f"{structure.key[:16]}",
        *listed,
    ]


_LISTED = {
    "instructions": "instruction",
    "gathers": "all-gather",
    "reductions": "reduction",
    "pairs": "value",
}
"""What a move has lists of, and what one of them is; pairs may be of kernels, too."""


def _move_text(move: dict[str, Any]) -> str:
    """A move without the positions of its instructions: how many, and what is done to them."""
    lists = {name: move[name] for name in _LISTED if isinstance(move.get(name), list)}
    pairs = lists.pop("pairs", [])
    parts = [counted(len(listed), _LISTED[name]) for name, listed in lists.items()]
    parts += [f"{name} {move[name]}" for name in ("opcode", "dimension", "parts") if name in move]
    kernels = [str(one.get("kernel")) for one in pairs if isinstance(one, dict)]
    parts += [f"{kernel} {counted(number, 'time')}" for kernel, number in Counter(kernels).most_common()]
    values = sum(isinstance(one, list) for one in pairs)
    parts += [counted(values, _LISTED["pairs"])] if values else []
    return printable(f"{move.get('move', '')}{': ' if parts else ''}{', '.join(parts)}", 200)


def _times(plan: Plan) -> list[Any]:
    times = step_times(plan)
    made = table("step time", "predicted", "measured", "spread", right=(1, 2, 3))
    predicted = plan.prediction
    candidates = plan.measured.candidates if plan.measured else ()
    for one in candidates:
        name = f"{one.name} (this plan)" if one.name == plan.chosen else one.name
        ran = one.samples > 0 and not one.error
        measured = time_text(one.median_ns) if ran else one.error or "not measured"
        measured += " (numbers not compared)" if ran and one.only_timed else ""
        guess = time_text(one.predicted_ns) if one.predicted_ns else ""
        add_row(made, name, guess, measured, f"± {time_text(one.spread_ns)}" if ran else "")
    rest = [("bound", predicted.bound_ns), ("full overlap", predicted.full_overlap_ns)]
    if not candidates:
        rest = [
            (DEFAULT, predicted.default_ns),
            ("this plan", times.predicted_plan),
            ("unfused", predicted.unfused_ns),
            *rest,
        ]
    for name, prediction in rest:
        add_row(made, name, time_text(prediction), "", "")
    said = f"predicted {times.predicted_speedup:.2f}x" if times.predicted_speedup else "predicted unknown"
    speedup = times.measured_speedup
    both = f"{said}, not measured" if speedup is None else f"measured {speedup:.2f}x, {said}"
    return [made, f"speed-up: {both}"]


def _groups(groups: list[GroupFacts], top: int) -> list[Any]:
    duplicates = sum(len(group.duplicates) for group in groups)
    fused = sum(len(group.nodes) for group in groups)
    heading = f"{counted(len(groups), 'op group')} with {counted(fused, 'op')}, {duplicates} duplicated"
    made = table(
        "group", "ops", "dup", "kind", "bytes saved", "measured", "what", "source", right=(1, 2, 4, 5)
    )
    for group in groups[:top]:
        what = listed([f"{count} {opcode}" for opcode, count in group.opcodes], 4)
        saved = size_text(group.bytes_saved) if group.opcodes else ""
        measured = "" if group.measured_ns is None else time_text(group.measured_ns)
        source = "/".join(group.source.split("/")[-2:])  # enough to recognise it
        add_row(
            made, group.token, group.size, len(group.duplicates), group.kind, saved, measured,
            what, source,
        )  # fmt: skip
    return [heading, *([made] if groups and top else []), *_more(len(groups), top)]


def _buckets(bundle: Bundle, buckets: list[BucketFacts], top: int) -> list[Any]:
    count = sum(len(bucket.collectives) for bucket in buckets)
    total = sum(bucket.size_bytes or 0 for bucket in buckets)
    heading = f"{counted(len(buckets), 'bucket')} with {counted(count, 'collective')}" + (
        f", {size_text(total)}" if total else ""
    )
    made = table("bucket", "collectives", "size", "form", "first", right=(1, 2))
    for bucket in buckets[:top]:
        size = "" if bucket.size_bytes is None else size_text(bucket.size_bytes)
        first = _called(bundle, bucket.collectives[0])
        add_row(made, bucket.token, len(bucket.collectives), size, bucket.form, first)
    return [heading, *([made] if buckets and top else []), *_more(len(buckets), top)]


def _called(bundle: Bundle, node: int) -> str:
    if bundle.source is None:
        return f"n{node}"
    found = bundle.source.graph.nodes[node]
    return f"n{node} {found.opcode} {found.shape} {printable(found.op_name or found.name, 60)}"


def _more(count: int, top: int) -> list[str]:
    return [f"  and {count - top} more (--top, or --json for all)"] if count > top else []


def _order_line(order: OrderFacts) -> str:
    made = "the plan's own" if order.explicit else "the default one"
    return (
        f"order ({made}): {counted(order.units, 'unit')}; {order.kernels_before_first_bucket} of "
        f"{counted(order.kernels, 'kernel')} before the first bucket, {order.kernels_after_last_bucket} after the "
        f"last, {order.most_in_flight} in flight at most"
    )


def _all_reduce(plan: Plan) -> list[str]:
    lines = plan.measured.all_reduce if plan.measured else ()
    return [
        f"all-reduce from {size_text(line.from_bytes)}: T = {line.ns_per_byte:.4g} ns/byte x size "
        f"+ {time_text(line.offset_ns)}"
        for line in lines
    ]


def _as_json(whole: Bundle, bundle: Bundle, region: str, regions: list[RegionFacts]) -> dict[str, Any]:
    plan = whole.plan
    graph = bundle.source.graph if bundle.source else None
    times = step_times(plan)
    order, explicit = order_of(bundle)
    groups = [
        asdict(group) | {"opcodes": dict(group.opcodes), "size": group.size} for group in group_facts(bundle)
    ]
    used = sorted({node for group in bundle.strategy.groups for node in (*group.nodes, *group.duplicates)})
    members = [node for bucket in bundle.strategy.buckets for node in bucket.collectives]
    return {
        "path": str(whole.path),
        "target": to_builtins(plan.target),
        "chosen": plan.chosen,
        "banned": _ban(whole),
        "structure": None if plan.structure is UNSET else to_builtins(plan.structure),
        "launched_singly": plan.launched_singly is True,
        "versions": plan.versions,
        "predicted": to_builtins(plan.prediction),
        "collectives_not_simulated": inner_collectives(whole.source) if whole.source else None,
        "regions": regions_as_json(regions),
        "region": region,
        "measured": to_builtins(plan.measured),
        "predicted_speedup": times.predicted_speedup,
        "measured_speedup": times.measured_speedup,
        "search": to_builtins(plan.search),
        "groups": groups,
        "buckets": [asdict(bucket) for bucket in bucket_facts(bundle.strategy, graph)],
        "order": asdict(order_facts(order, explicit)) | {"tokens": list(order)},
        "ops": {} if graph is None else {n: _op(graph.nodes[n]) for n in (*used, *members)},
        "notes": list(plan.notes),
        "missing": list(whole.missing),
    }


def _op(node: Node) -> dict[str, Any]:
    """Names come from the module and may hold anything."""
    return {
        "node": node.id,
        "opcode": node.opcode,
        "shape": str(node.shape),
        "size_bytes": node.shape.size_bytes,
        "name": node.name,
        "op_name": node.op_name,
        "source": node.source,
    }
