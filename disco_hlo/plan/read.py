"""Read the strategy that a module already embodies: XLA's own plan, or one of ours after compilation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.bitcasts import behind_bitcasts
from disco_hlo.hlo.canonical import CanonicalModule, Origin
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.legal import bucket_of
from disco_hlo.plan.normal import normal_form
from disco_hlo.plan.order import check_order
from disco_hlo.plan.source_kernels import SourceKernels, computes, is_listed, source_kernels
from disco_hlo.plan.strategy import Bucket, Group, Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph


def read(source: CanonicalModule) -> Strategy:
    """The strategy of a module in canonical form: its kernels, buckets and schedule, in its entry and in its regions.

    What of its kernels a strategy can hold is said in :func:`~disco_hlo.plan.source_kernels.source_kernels`. Kernels of
    one op are no groups, unless Triton emits them, since its tiles are part of the plan.

    The order is left open where it runs something before what it must wait for.
    """
    regions = tuple(sorted((region.name, read(region.source)) for region in source.regions))
    return replace(_read(source), regions=regions)


def _read(source: CanonicalModule) -> Strategy:
    graph = source.graph
    buckets, bucket_of = _buckets(graph, source)
    kernels = source_kernels(source, buckets)
    groups: list[Group] = []
    token_of: dict[str, str] = {}
    for name, group in kernels.groups.items():
        token_of[name] = f"g{len(groups)}" if is_listed(group) else f"n{group.nodes[0]}"
        groups += [group] if is_listed(group) else []
    asynchronous = BACKENDS[graph.backend].asynchronous
    strategy = Strategy(tuple(groups), buckets, _order(source, kernels, token_of, bucket_of))
    units = unit_graph(graph, strategy)
    # A copy that canonical form gives a value, and XLA's own module does without, is no instruction.
    if kernels.changed or {unit.done_token(asynchronous) for unit in units.units} - {*strategy.order}:
        strategy = replace(strategy, order=_in_time(units, strategy.order, asynchronous))
    found = normal_form(graph, strategy)
    try:
        check_order(unit_graph(graph, found), found.order, asynchronous)
    except IllegalStrategyError:
        return replace(found, order=())
    return found


def held_otherwise(source: CanonicalModule) -> tuple[str, ...]:
    """The kernels of a module that the strategy which :func:`read` gives of it does not have as they are: XLA's own
    that no strategy can hold. A module that was written by a strategy has none."""
    return source_kernels(source, _buckets(source.graph, source)[0]).changed


@dataclass(frozen=True, slots=True)
class Repeat:
    """A kernel of a module that computes again what others compute as well, and nothing else; or that only copies a
    gradient out of its bucket.

    No strategy holds it, since none owns an op twice, and kernels that we write read a gradient where it lies: plans,
    and XLA's kernels as we write them, go without.
    """

    members: tuple[int, ...]
    """Ops that it computes, ascending; empty where it only copies."""
    results: tuple[int, ...]
    """Those that leave it, ascending."""
    before: int
    """A node of the kernel or op that runs next; -1 at the end of the step."""


def repeats(source: CanonicalModule) -> tuple[Repeat, ...]:
    """What a module executes beside the strategy that :func:`read` gives of it, in its order."""
    graph = source.graph
    kernels = source_kernels(source, _buckets(graph, source)[0])
    found: list[Repeat] = []
    following = -1
    for origin in reversed(source.origins):
        group = kernels.groups.get(origin.name)
        if group is not None:
            following = group.nodes[0]
        elif (
            origin.role == "fusion"
            and (ops := computes(graph, origin))
            and origin.name not in kernels.changed
        ):
            shown = behind_bitcasts(graph)
            found.append(
                Repeat(ops, tuple(x for x in ops if x in {shown[y] for y in origin.results}), following)
            )
        elif origin.role == "op" and (alone := _single(graph, origin)) is not None:
            following = alone
    cut = [Repeat((), (gradient,), _first_reader(graph, gradient)) for gradient in source.cut]
    return (*reversed(found), *cut)


def _first_reader(graph: Graph, node: int) -> int:
    """What runs and reads a node, also by another shape; -1 where nothing does."""
    pending, found = [node], []
    while pending:
        for user in graph.users[pending.pop()]:
            if graph.nodes[user].kind in (Kind.FUSIBLE, Kind.FIXED):
                found.append(user)
            elif graph.nodes[user].opcode == "bitcast":
                pending.append(user)
    return min(found, default=-1)


def _buckets(graph: Graph, source: CanonicalModule) -> tuple[tuple[Bucket, ...], dict[str, str]]:
    buckets: list[Bucket] = []
    token_of: dict[str, str] = {}
    seen: set[int] = set()
    for origin in source.origins:
        members = tuple(
            n for n in origin.transfer_order if graph.nodes[n].kind is Kind.ALL_REDUCE and n not in seen
        )
        if origin.role == "done" or not members:
            continue
        seen.update(members)
        token_of[origin.name] = f"b{len(buckets)}"
        form = "variadic" if len(origin.proto.operand_ids) > 1 else "concat"
        buckets.append(bucket_of(graph, members, form))
    return tuple(buckets), token_of


def _order(
    source: CanonicalModule, kernels: SourceKernels, token_of: dict[str, str], bucket_of: dict[str, str]
) -> tuple[str, ...]:
    graph = source.graph
    order: dict[str, None] = {}
    starts: dict[int, str] = {}
    for origin in source.origins:
        if origin.role == "fusion":
            token = token_of.get(origin.name)
        elif origin.name in bucket_of:
            token = bucket_of[origin.name] + (".start" if origin.role == "start" else "")
            if (
                origin.role != "start" and BACKENDS[graph.backend].asynchronous
            ):  # and yet nothing overlaps with it
                order.setdefault(f"{token}.start")
                token += ".done"
            starts.update(dict.fromkeys(origin.nodes, bucket_of[origin.name]))
        elif origin.role == "done":
            token = starts[origin.nodes[0]] + ".done"
        else:
            alone = _single(graph, origin)
            token = f"n{alone}" if alone is not None and kernels.owner.get(alone) == origin.name else None
        if token:
            order.setdefault(token)
    return tuple(order)


def _single(graph: Graph, origin: Origin) -> int | None:
    """The op that an instruction is, where it is one that runs."""
    return next((n for n in origin.nodes if graph.nodes[n].kind in (Kind.FUSIBLE, Kind.FIXED)), None)


def _in_time(units: UnitGraph, order: Sequence[str], asynchronous: bool) -> tuple[str, ...]:
    """The order with whatever a unit must wait for right before it, where that comes later or is left out."""
    needed: dict[str, list[str]] = {}
    for unit, waits in zip(units.units, units.dependencies, strict=True):
        start, done = unit.start_token(asynchronous), unit.done_token(asynchronous)
        needed[done] = [start]
        needed[start] = [units.units[i].done_token(asynchronous) for i in waits]
    placed: dict[str, None] = {}
    pending = [token for token in reversed((*order, *needed)) if token in needed]
    while pending:
        token = pending[-1]
        waits_for = [one for one in needed[token] if one not in placed]
        if waits_for and token not in placed:
            pending += reversed(waits_for)
            continue
        placed.setdefault(pending.pop())
    return tuple(placed)
