"""``disco diff``: how two plans of one training step differ, or a plan and XLA's own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import typer
from msgspec import UNSET

from disco_hlo.cli.inputs import AsJson
from disco_hlo.cli.output import add_row, plan_directory, print_json, show, table, warn_all
from disco_hlo.errors import PlanError
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.plan.plan import DEFAULT, Plan, Strategy
from disco_hlo.printable import counted, listed, size_text, time_text
from disco_hlo.report.bundle import Bundle, locate, open_bundle
from disco_hlo.report.facts import Difference, GroupChange, compare, require_comparable, with_order
from disco_hlo.report.regions import check_region


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A plan, its folder, or the start of its key.")],
    b: Annotated[str | None, typer.Argument(metavar="[B]", help="The plan to compare it with.")] = None,
    default: Annotated[bool, typer.Option("--default", help="Compare with XLA's own plan.")] = False,
    top: Annotated[int, typer.Option(min=0, help="How many differences of each kind to show.")] = 10,
    region: Annotated[
        str | None, typer.Option("--region", metavar="NAME", help="Compare one region of the step alone.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show exactly how plan B differs from plan A, or how plan A differs from XLA's own (--default)."""
    if default == (b is not None):
        raise PlanError("expected two plans, or one plan and --default")
    directory = plan_directory()
    first = open_bundle(locate(a, directory))
    second, fields = first, {}
    if b is not None:
        second = open_bundle(locate(b, directory))
        require_comparable(first.plan, second.plan)
        fields = _fields(first.plan, second.plan)
    else:
        structure = first.plan.structure
        if structure is not UNSET:
            changed = f"{first.path} changes the step's structure ({structure.name})"
            raise PlanError(f"{changed}: its ops are not those of XLA's plan")
        if first.default is None:
            raise PlanError(f"{first.path}: XLA's own plan cannot be read: {'; '.join(first.missing)}")
    names = ("A", "B") if b is not None else (DEFAULT, "plan")
    reader = first if first.source is not None else second
    regions = tuple(dict.fromkeys((*first.region_names, *second.region_names)))
    if region is not None:
        check_region(region, regions)
        regions = (region,)
    found = {}
    for name in regions:
        one = reader.of_region(name)
        sides = (first.of_region(name), second.of_region(name)) if b is not None else (None, one)
        left, right = (_alike(one, one.default if side is None else side.plan.strategy) for side in sides)
        found[name] = compare(left, right)
    warn_all(reader.missing)
    if as_json:
        print_json(_as_json(found, names, fields))
        return
    _print(found, names, fields, reader, top)


def _alike(reader: Bundle, strategy: Strategy | None) -> Strategy:
    """In normal form and with its order, as far as the module is at hand."""
    assert strategy is not None  # XLA's own, which was asked for
    if reader.source is None:
        return strategy
    from disco_hlo.plan.variants import normal_form

    graph = reader.source.graph
    return normal_form(graph, with_order(graph, strategy))


def _fields(a: Plan, b: Plan) -> dict[str, tuple[Any, Any]]:
    """Fields beside the strategy in which two plans differ, by dotted name."""
    left, right = _flat(a), _flat(b)
    return {
        name: (left.get(name), right.get(name))
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    }


def _flat(plan: Plan) -> dict[str, Any]:
    body = msgspec.to_builtins(plan)
    del body["strategy"]
    flat: dict[str, Any] = {}
    pending = [("", body)]
    while pending:
        prefix, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{prefix}.{key}" if prefix else key, inner) for key, inner in value.items()]
        else:
            flat[prefix] = list(value) if isinstance(value, tuple) else value
    return flat


def _print(
    found: dict[str, Difference],
    names: tuple[str, str],
    fields: dict[str, tuple[Any, Any]],
    reader: Bundle,
    top: int,
) -> None:
    a, b = names
    same = all(one.same for one in found.values())
    for name, one in found.items():
        where = "" if list(found) == [ENTRY] else f"{name}: "
        if one.same and same and where:
            continue
        if one.same:
            show(
                f"{where}{a} and {b} execute the same: op groups ({one.common_groups}), "
                f"buckets ({one.common_buckets}) and order are equal."
            )
        else:
            _print_one(one, names, where, reader.of_region(name), top)
    if same and list(found) != [ENTRY]:
        show(f"{a} and {b} execute the same in {', '.join(found)}.")
    changed = {name: pair for name, pair in fields.items() if not isinstance(pair[0] or pair[1], list)}
    if changed:
        made = table("field", a, b)
        for name, pair in changed.items():
            is_time = name.endswith("_ns")
            add_row(made, name, *(time_text(v) if is_time and isinstance(v, int) else v for v in pair))
        show(made)


def _print_one(found: Difference, names: tuple[str, str], where: str, reader: Bundle, top: int) -> None:
    a, b = names
    show(
        f"{where}groups: {found.common_groups} in both, {len(found.groups_a)} only in {a}, "
        f"{len(found.groups_b)} only in {b}"
    )
    _print_groups(found.groups_a, f"only in {a}", b, top)
    _print_groups(found.groups_b, f"only in {b}", a, top)
    show(
        f"{where}buckets: {found.common_buckets} in both, {len(found.buckets_a)} only in {a}, "
        f"{len(found.buckets_b)} only in {b}; {counted(len(found.moved_collectives), 'collective')} in another bucket"
    )
    _print_buckets(found, names, reader, top)
    moved = listed(found.moved_units, top)
    show(
        f"{where}order: {len(found.moved_units)} of {counted(found.common_units, 'common unit')} moved"
        + (f" ({moved} of {b})" if moved else "")
    )


def _print_groups(changes: tuple[GroupChange, ...], heading: str, other: str, top: int) -> None:
    if not changes or not top:
        return
    made = table(heading, "ops", "dup", "kind", f"its ops in {other}", right=(1, 2))
    largest = sorted(changes, key=lambda change: -len(change.group.nodes) - len(change.group.duplicates))
    for change in largest[:top]:
        size, shares = len(change.group.ops), listed(change.shares_with, 8)
        add_row(made, change.token, size, len(change.group.duplicates), change.group.kind, shares)
    show(made)


def _print_buckets(found: Difference, names: tuple[str, str], reader: Bundle, top: int) -> None:
    graph = reader.source.graph if reader.source else None
    for name, buckets in zip(names, (found.buckets_a, found.buckets_b), strict=True):
        if not buckets or not top:
            continue
        made = table(f"only in {name}", "collectives", "size", "form", "members", right=(1, 2))
        for token, bucket in buckets[:top]:
            members = bucket.collectives
            size = "" if graph is None else size_text(sum(graph.nodes[n].shape.size_bytes for n in members))
            add_row(made, token, len(members), size, bucket.form, listed([f"n{n}" for n in members], 8))
        show(made)


def _as_json(
    found: dict[str, Difference], names: tuple[str, str], fields: dict[str, tuple[Any, Any]]
) -> dict[str, Any]:
    """What differs in the entry, or the one region that was asked for, at the top; all others under ``regions``."""
    first, *others = found
    return {
        "a": names[0],
        "b": names[1],
        "region": first,
        "same": all(one.same for one in found.values()),
        **_one_as_json(found[first]),
        "regions": {name: {"same": found[name].same, **_one_as_json(found[name])} for name in others},
        "fields": {name: {"a": left, "b": right} for name, (left, right) in fields.items()},
    }


def _one_as_json(found: Difference) -> dict[str, Any]:
    body = asdict(found)
    for side in ("buckets_a", "buckets_b"):
        body[side] = [{"token": token, **msgspec.structs.asdict(bucket)} for token, bucket in body[side]]
    return body
