"""Read the strategy that a module already embodies: XLA's own plan, or one of ours after compilation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.attributes import triton_settings
from disco_hlo.hlo.canonical import CanonicalModule, Origin
from disco_hlo.hlo.flatten import emitter_of
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.normal import normal_form
from disco_hlo.plan.order import check_order
from disco_hlo.plan.strategy import Bucket, Group, Strategy
from disco_hlo.plan.units import unit_graph


def read(source: CanonicalModule) -> Strategy:
    """The strategy of a module in canonical form: its kernels, buckets and schedule.

    A node that several kernels compute is owned by the first one that returns it (or else by the
    first one that computes it) and duplicated in the others. Kernels of one op are no
    groups, unless Triton emits them, since its tiles are part of the plan.

    The order is left open where it runs something before what it must wait for.
    """
    graph = source.graph
    kernels = [origin for origin in source.origins if origin.role == "fusion" and _runs(graph, origin)]
    owner = _owners(source.origins)
    groups: list[Group] = []
    token_of: dict[str, str] = {}
    for kernel in kernels:
        nodes = tuple(n for n in _computes(graph, kernel) if owner[n] == kernel.name)
        duplicates = tuple(n for n in _computes(graph, kernel) if owner[n] != kernel.name)
        if not nodes:
            continue
        kind = emitter_of(kernel.proto)
        if len(nodes) + len(duplicates) == 1 and kind != "triton":
            token_of[kernel.name] = f"n{nodes[0]}"
            continue
        token_of[kernel.name] = f"g{len(groups)}"
        groups.append(
            Group(nodes, duplicates, kind, triton_settings(kernel.proto) if kind == "triton" else "")
        )
    buckets, bucket_of = _buckets(graph, source)
    order = _order(graph, source, token_of, bucket_of)
    found = normal_form(graph, Strategy(tuple(groups), buckets, order))
    try:
        check_order(unit_graph(graph, found), found.order, asynchronous=graph.backend == "gpu")
    except IllegalStrategyError:
        return replace(found, order=())
    return found


@dataclass(frozen=True, slots=True)
class Repeat:
    """A kernel of a module that computes again what others compute as well, and nothing else; or that only copies a
    gradient out of its bucket.

    No strategy holds it, since none owns an op twice, and kernels that we write read a gradient where it lies: plans,
    and XLA's kernels as we write them, go without.
    """

    members: tuple[int, ...]
    """Nodes that it computes, ascending; empty where it only copies."""
    results: tuple[int, ...]
    """Those that leave it, ascending."""
    before: int
    """A node of the kernel or op that runs next; -1 at the end of the step."""


def repeats(source: CanonicalModule) -> tuple[Repeat, ...]:
    """What a module executes beside the strategy that :func:`read` gives of it, in its order."""
    graph, owner = source.graph, _owners(source.origins)
    found: list[Repeat] = []
    following = -1
    for origin in reversed(source.origins):
        if origin.role == "fusion" and _runs(graph, origin):
            own = [node for node in _computes(graph, origin) if owner[node] == origin.name]
            if not own:
                found.append(Repeat(_computes(graph, origin), origin.results, following))
                continue
            following = own[0]
        elif origin.role == "op" and _single(graph, origin):
            following = next(n for n in origin.nodes if graph.nodes[n].kind in (Kind.FUSIBLE, Kind.FIXED))
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


def _computes(graph: Graph, origin: Origin) -> tuple[int, ...]:
    return tuple(
        n for n in origin.nodes if graph.nodes[n].kind not in (Kind.PARAMETER, Kind.CONSTANT, Kind.ALL_REDUCE)
    )


def _runs(graph: Graph, origin: Origin) -> bool:
    """Whether the kernel does anything; one that only renames dimensions is a bitcast in canonical form."""
    return any(graph.nodes[node].kind is not Kind.FREE for node in _computes(graph, origin))


def _owners(origins: tuple[Origin, ...]) -> dict[int, str]:
    owner: dict[int, str] = {}
    for origin in origins:
        for node in origin.results:
            owner.setdefault(node, origin.name)
    for origin in origins:
        for node in origin.nodes:
            owner.setdefault(node, origin.name)
    return owner


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
        operands = origin.proto.operand_ids
        buckets.append(Bucket(members, "variadic" if len(members) > 1 and len(operands) > 1 else "concat"))
    return tuple(buckets), token_of


def _order(
    graph: Graph, source: CanonicalModule, token_of: dict[str, str], bucket_of: dict[str, str]
) -> tuple[str, ...]:
    order: dict[str, None] = {}
    starts: dict[int, str] = {}
    for origin in source.origins:
        if origin.role == "fusion":
            token = token_of.get(origin.name)
        elif origin.name in bucket_of:
            token = bucket_of[origin.name] + (".start" if origin.role == "start" else "")
            if origin.role != "start" and graph.backend == "gpu":  # a transfer that nothing runs beside
                order.setdefault(f"{token}.start")
                token += ".done"
            starts.update(dict.fromkeys(origin.nodes, bucket_of[origin.name]))
        elif origin.role == "done":
            token = starts[origin.nodes[0]] + ".done"
        else:
            token = _single(graph, origin)
        if token:
            order.setdefault(token)
    return tuple(order)


def _single(graph: Graph, origin: Origin) -> str | None:
    units = [n for n in origin.nodes if graph.nodes[n].kind in (Kind.FUSIBLE, Kind.FIXED)]
    return f"n{units[0]}" if units else None
