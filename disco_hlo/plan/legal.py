"""Whether a strategy may be executed: the last gate before XLA.

Structure (ownership, cycles) is judged by ``units``; this adds what depends on the backend, what may share a kernel and
what may share a bucket, and the order.

An order has every token of the strategy once. Where collectives are asynchronous (GPU), bucket 2
has two: at ``b2.start`` its collective is issued to a communication channel, at ``b2.done`` whatever
is issued later begins to wait for it. Elsewhere it is the single token ``b2``. DisCo leaves the
order to a ready queue (section 4.4); here it is part of the plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from disco_hlo.core.legality import group_refusal
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph, kernel_nodes
from disco_hlo.hlo.opcodes import COLLECTIVE
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.plan.units import UnitGraph, some
from disco_hlo.plan.writer import FUSION_KINDS

FORMS = ("concat", "variadic")
Kernel = tuple[frozenset[int], tuple[int, ...]]
"""The ops that one kernel computes, and which of them it returns (ascending). The results matter: the same
ops with one result more can be a kernel that crashes XLA."""


def check_strategy(graph: Graph, strategy: Strategy, units: UnitGraph, attested: Iterable[Kernel]) -> None:
    """Refuse what XLA could not execute correctly.

    Args:
        attested: kernels that XLA itself compiles in this module; they need no rule.

    Raises:
        IllegalStrategyError: naming the group or bucket and the reason.
    """
    for number, why in refused_groups(graph, strategy, units, attested):
        raise IllegalStrategyError(f"g{number}: {why}")
    for number, bucket in enumerate(strategy.buckets):
        reason = bucket_refusal(graph, bucket)
        if reason:
            raise IllegalStrategyError(f"b{number}: {reason}")


def planned_regions(source: CanonicalModule, strategy: Strategy) -> Mapping[str, Strategy]:
    """The strategies of a step's loop bodies, branches and calls, by their names.

    Raises:
        IllegalStrategyError: it names one that the step does not have.
    """
    known = [region.name for region in source.regions]
    for name, _ in strategy.regions:
        if name not in known:
            raise IllegalStrategyError(
                f"the strategy names region {name!r}; the step has {', '.join(known) or 'none'}"
            )
    return dict(strategy.regions)


def refused_groups(
    graph: Graph, strategy: Strategy, units: UnitGraph, attested: Iterable[Kernel]
) -> Iterator[tuple[int, str]]:
    """The groups, by number, that XLA could not execute correctly, and why not; arguments as for
    :func:`check_strategy`."""
    known = set(attested)
    for number, (group, returned) in enumerate(zip(strategy.groups, units.results_of_groups, strict=True)):
        if group.kind not in FUSION_KINDS:
            yield number, f"kind {group.kind!r} is none of {', '.join(FUSION_KINDS)}"
            continue
        if (frozenset(group.ops), returned) in known:
            continue
        reason = group_refusal(graph, kernel_nodes(graph, group.ops), returned, group.kind)
        if reason:
            yield number, reason


def bucket_of(graph: Graph, members: Sequence[int], form: str = "concat") -> Bucket:
    """The bucket of these collectives, in the wanted form where they can have it: what cannot be concatenated is one
    instruction with several operands."""
    if len(members) == 1:
        return Bucket(tuple(members))
    known = COLLECTIVE.get(graph.nodes[members[0]].opcode)
    return Bucket(tuple(members), form if known is not None and known.concatenates else "variadic")


def bucket_refusal(graph: Graph, bucket: Bucket) -> str | None:
    """Why these collectives may not travel together, or None where they may."""
    if bucket.form not in FORMS:
        return f"form {bucket.form!r} is none of {', '.join(FORMS)}"
    first = graph.nodes[bucket.collectives[0]]
    if bucket != bucket_of(graph, bucket.collectives, bucket.form):
        return (
            f"{len(bucket.collectives)} of {first.opcode} are in form {bucket.form!r}, which they cannot have"
        )
    for number in bucket.collectives[1:]:
        node = graph.nodes[number]
        if node.collective != first.collective:
            return f"n{first.id} and n{number} are over other devices, of another kind or of another type"
    return None


# Order ------------------------------------------------------------------------------------------


def check_order(units: UnitGraph, order: Sequence[str], asynchronous: bool) -> None:
    """Refuse an order that is incomplete or runs a unit before what it waits for.

    Raises:
        IllegalStrategyError: naming the missing, unknown or repeated token, or the two tokens
            that stand the wrong way round.
    """
    position = {token: i for i, token in enumerate(order)}
    known: dict[str, None] = {}
    for unit in units.units:
        known[unit.start_token(asynchronous)] = known[unit.done_token(asynchronous)] = None
    for what, tokens in (
        ("names units that the strategy does not have", [token for token in position if token not in known]),
        ("leaves out units of the strategy", [token for token in known if token not in position]),
        ("names units twice", [token for i, token in enumerate(order) if position[token] != i]),
    ):
        if tokens:
            raise IllegalStrategyError(f"The order {what}: {some(tokens)}.")
    for i, unit in enumerate(units.units):
        start = unit.start_token(asynchronous)
        earlier = [units.units[j].done_token(asynchronous) for j in units.dependencies[i]]
        if unit.is_bucket and asynchronous:
            _check_pair(position, start, unit.done_token(asynchronous))
        for token in earlier:
            _check_pair(position, token, start)


def _check_pair(position: dict[str, int], first: str, second: str) -> None:
    if position[first] < position[second]:
        return
    raise IllegalStrategyError(
        f"The order has {second} at position {position[second]}, before {first} at position "
        f"{position[first]}, which it must wait for."
    )


def default_order(units: UnitGraph, asynchronous: bool) -> tuple[str, ...]:
    """The order that an empty ``strategy.order`` stands for.

    Topological, by smallest node id among what is ready. A bucket is issued as soon as its last
    input is. Where collectives are asynchronous, its ``done`` stands right before its first
    reader, and readers come when nothing else is left to run, those of the bucket issued
    first coming first; dones that nobody but the root waits for come last.

    Args:
        asynchronous: whether a bucket has the two tokens ``b2.start`` and ``b2.done``.
    """
    missing = [len(needed) for needed in units.dependencies]
    in_flight: dict[int, int] = {}
    """Buckets that were issued and not waited for, with the position at which each was issued."""
    order: list[str] = []
    left = set(range(len(missing)))
    ready: list[_Rank] = []

    def offer(some: Iterable[int]) -> None:
        for i in some:
            if not missing[i]:  # all that it waits for was issued
                heapq.heappush(ready, _rank(units, i, in_flight))

    offer(left)
    while ready:
        i = heapq.heappop(ready)[-1]
        if i not in left:
            continue
        held_up_by = sorted(in_flight.keys() & {*units.dependencies[i]}, key=in_flight.__getitem__)
        for bucket in held_up_by:
            del in_flight[bucket]
            order.append(units.units[bucket].done_token(asynchronous))
            # What others hold up as well keeps the place that it has.
            offer(j for j in units.dependents[bucket] if in_flight.keys().isdisjoint(units.dependencies[j]))
        if held_up_by:
            continue
        left.remove(i)
        if asynchronous and units.units[i].is_bucket:
            in_flight[i] = len(order)
        order.append(units.units[i].start_token(asynchronous))
        for dependent in units.dependents[i]:
            missing[dependent] -= 1
        offer(units.dependents[i])
    return (*order, *(units.units[bucket].done_token(asynchronous) for bucket in in_flight))


def started_late(buckets: Sequence[Bucket], order: Sequence[str]) -> tuple[str, ...]:
    """The order with each collective under which nothing runs started right before it ends, as XLA:GPU puts it behind
    the hook: it would hide nothing, so it goes to the stream of the kernels. A bucket that is packed runs a kernel.

    Source: XLA's ``ConvertAsyncCollectivesToSync`` and ``GpuConvertAsyncCollectivesToSync``.
    """
    packed = {f"b{i}.start" for i, one in enumerate(buckets) if one.is_packed}
    flying: set[str] = set()
    alone: set[str] = set()
    for token in order:
        unit, _, part = token.partition(".")
        if not part or token in packed:
            flying.clear()
        if part == "start":
            flying.add(unit)
        elif part == "done" and unit in flying:
            alone.add(unit)
    found: list[str] = []
    for token in order:
        unit, _, part = token.partition(".")
        if unit not in alone:
            found.append(token)
        elif part == "done":
            found += (f"{unit}.start", token)
    return tuple(found)


_Rank = tuple[int, bool, int, int]


def _rank(units: UnitGraph, i: int, in_flight: Mapping[int, int]) -> _Rank:
    """When a unit comes: first those that nothing in flight holds up (-1), buckets before kernels."""
    last = max((in_flight.get(j, -1) for j in units.dependencies[i]), default=-1)
    return last, last < 0 and not units.units[i].is_bucket, min(units.units[i].nodes), i


def late_waits(graph: Graph, units: UnitGraph, order: Sequence[str]) -> tuple[str, ...]:
    """A legal order with the end of each asynchronous copy right before its first reader, which is still legal.

    Such a copy runs next to the kernels until the compute stream waits for it.
    """
    ends = {
        i
        for i, unit in enumerate(units.units)
        if graph.nodes[unit.nodes[0]].opcode in ("async-done", "copy-done")
    }
    waiting: dict[int, None] = {}
    found: list[str] = []
    for token in order:
        unit = units.index[token.partition(".")[0]]
        read = [end for end in waiting if end in units.dependencies[unit]]
        if unit in ends and not read:
            waiting[unit] = None
            continue
        for end in read:
            del waiting[end]
            found.append(units.units[end].token)
        found.append(token)
    return (*found, *(units.units[end].token for end in waiting))
