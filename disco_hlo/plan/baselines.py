"""Plain strategies: starting points of the search, and what a found plan is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.legal import bucket_of
from disco_hlo.plan.order import default_order
from disco_hlo.plan.strategy import Bucket, Group, Strategy


def unfused(graph: Graph, groups: Sequence[Group] = ()) -> Strategy:
    """Every all-reduce by itself, and every op that is in none of ``groups``."""
    return Strategy(tuple(groups), tuple(Bucket((node,)) for node in graph.all_reduces))


def one_bucket(graph: Graph, groups: Sequence[Group] = (), form: str = "concat") -> Strategy:
    """As few buckets as can be: all-reduces travel together unless one has to wait for the other,
    reduces in another way, or is of another type."""
    depth = all_reduce_depths(graph)

    def lot(node: int) -> tuple[str, str, int]:
        return graph.nodes[node].collective, graph.nodes[node].shape.dtype, depth[node]

    lots = [tuple(members) for _, members in groupby(sorted(graph.all_reduces, key=lot), key=lot)]
    buckets = tuple(bucket_of(graph, members, form) for members in lots)
    return Strategy(tuple(groups), buckets)


def in_every_region(
    source: CanonicalModule, strategy: Strategy, change: Callable[[Graph, Strategy], Strategy]
) -> Strategy:
    """The strategies of the entry and of each named region, changed alike."""
    regions = tuple((name, change(source.computations[name].graph, one)) for name, one in strategy.regions)
    return replace(change(source.graph, strategy), regions=regions)


def by_graph(source: CanonicalModule, strategy: Strategy) -> list[tuple[Graph, Strategy]]:
    """The entry with its strategy, and each region that the strategy names with its own."""
    named = ((source.computations[name].graph, one) for name, one in strategy.regions)
    return [(source.graph, strategy), *named]


def varied(source: CanonicalModule, strategy: Strategy) -> Strategy:
    """:func:`varied_buckets` in the entry and in every named region."""
    return in_every_region(source, strategy, lambda _, one: varied_buckets(one))


def varied_buckets(strategy: Strategy) -> Strategy:
    """The same kernels, with every other of the buckets of several taken apart; no order.

    For measuring what collectives of different sizes take: buckets that were filled up to a threshold are all of one.
    """
    buckets: list[Bucket] = []
    several = 0
    for bucket in strategy.buckets:
        several += len(bucket.all_reduces) > 1
        apart = len(bucket.all_reduces) > 1 and several % 2
        buckets += [Bucket((node,)) for node in bucket.all_reduces] if apart else [bucket]
    return Strategy(strategy.groups, tuple(buckets))


def one_at_a_time(graph: Graph, strategy: Strategy) -> Strategy:
    """The same kernels and buckets in an order that ends every collective before anything else runs.

    For measuring: no kernel is slowed by a collective, nor a collective by a kernel. On a backend whose
    collectives are asynchronous; elsewhere nothing overlaps with them anyway.
    """
    order: list[str] = []
    for token in default_order(graph, strategy, asynchronous=False):
        order += [f"{token}.start", f"{token}.done"] if token[0] == "b" else [token]
    return replace(strategy, order=tuple(order))


def all_reduce_depths(graph: Graph) -> list[int]:
    """For each node, how many all-reduces lie one behind the other on the way to it."""
    depth: list[int] = []
    behind: list[int] = []  # for each node, how many lie on the way to what reads it
    for node in graph.nodes:
        read = node.operands
        depth.append(behind[read[0]] if len(read) == 1 else max([behind[x] for x in read], default=0))
        behind.append(depth[-1] + (node.kind is Kind.ALL_REDUCE))
    return depth
