"""Whether a strategy may be executed: the last gate before XLA.

Structure (ownership, cycles, order) is judged by ``units`` and ``order``; this adds what depends on
the backend: what may share a kernel, and what may share a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from disco_hlo.core.kernels import group_refusal
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.bitcasts import kernel_nodes
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.opcodes import COLLECTIVE
from disco_hlo.plan.kernels import FUSION_KINDS
from disco_hlo.plan.strategy import Bucket, Strategy
from disco_hlo.plan.units import UnitGraph

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
    results: dict[int, list[int]] = {}
    for value in units.values:
        results.setdefault(value.producer, []).append(value.node)
    for number, group in enumerate(strategy.groups):
        returned = results.get(units.index[f"g{number}"], [])
        if group.kind not in FUSION_KINDS:
            yield number, f"kind {group.kind!r} is none of {', '.join(FUSION_KINDS)}"
            continue
        if (frozenset(group.ops), tuple(returned)) in known:
            continue
        reason = group_refusal(graph, kernel_nodes(graph, group.ops), returned, group.kind)
        if reason:
            yield number, reason


def bucket_of(graph: Graph, members: Sequence[int], form: str = "concat") -> Bucket:
    """The bucket of these collectives, in the wanted form where they can have it: only all-reduces can be concatenated,
    whatever else travels together is one instruction with several operands."""
    if len(members) == 1:
        return Bucket(tuple(members))
    known = COLLECTIVE.get(graph.nodes[members[0]].opcode)
    return Bucket(tuple(members), form if known is not None and known.concatenates else "variadic")


def bucket_refusal(graph: Graph, bucket: Bucket) -> str | None:
    """Why these all-reduces may not travel together, or None where they may."""
    if bucket.form not in FORMS:
        return f"form {bucket.form!r} is none of {', '.join(FORMS)}"
    first = graph.nodes[bucket.all_reduces[0]]
    if bucket != bucket_of(graph, bucket.all_reduces, bucket.form):
        return (
            f"{len(bucket.all_reduces)} of {first.opcode} are in form {bucket.form!r}, which they cannot have"
        )
    for number in bucket.all_reduces[1:]:
        node = graph.nodes[number]
        if node.collective != first.collective:
            return f"n{first.id} and n{number} reduce over other devices, in another way or in another type"
    return None
