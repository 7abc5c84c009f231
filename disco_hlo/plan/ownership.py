"""Who computes what: the nodes that a strategy lists, each owned by one unit, or the error that says which are not.

The first half of a strategy's structural legality: ids that exist, of kinds that can stand where they do, every node
owned at most once and every all-reduce carried once. What follows from it, who reads whom, is in ``units``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.flat_graph import flat_graph, flat_lists
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.strategy import Strategy


class Members(NamedTuple):
    """What units compute: pairs of a unit and a node, by unit."""

    own_unit: NDArray[np.int64]
    own_node: NDArray[np.int64]
    copy_unit: NDArray[np.int64]
    copy_node: NDArray[np.int64]


def listed_members(graph: Graph, strategy: Strategy) -> Members:
    """What groups and buckets say that they compute.

    Raises:
        IllegalStrategyError: one of them is empty, or lists a node that does not exist, of a kind that cannot
            stand there, or out of order.
    """
    groups, buckets = strategy.groups, strategy.buckets
    lists = [*(group.nodes for group in groups), *(bucket.all_reduces for bucket in buckets)]
    listed = len(lists)
    lists += [group.duplicates for group in groups]
    try:
        begin, node = flat_lists(lists)
    except OverflowError:  # numbers that no array holds
        for i, ids in enumerate(lists):
            _check_ids(graph, token_of(strategy, i % listed), ids)
        raise
    lengths = np.diff(begin)
    list_of = np.repeat(np.arange(len(lists)), lengths)
    unit = np.where(list_of < listed, list_of, list_of - listed)
    for i in np.flatnonzero(lengths[:listed] == 0).tolist():
        nothing = "owns no node" if i < len(groups) else "holds no all-reduce"
        raise IllegalStrategyError(f"{token_of(strategy, i)} {nothing}.")
    for place in np.flatnonzero((node < 0) | (node >= len(graph))).tolist():
        _check_ids(graph, token_of(strategy, unit[place]), (int(node[place]),))
    is_grouped = unit < len(groups)
    descends = (np.diff(node) <= 0) & (np.diff(list_of) == 0) & is_grouped[1:]
    for place in np.flatnonzero(descends).tolist():
        token, ids = token_of(strategy, unit[place]), lists[list_of[place]]
        raise IllegalStrategyError(f"{token} does not list its nodes in ascending order: {some(ids)}.")
    _check_kinds(graph, strategy, unit, node, is_grouped)
    owned = int(begin[listed])
    return Members(unit[:owned], node[:owned], unit[owned:], node[owned:])


def _check_ids(graph: Graph, token: str, ids: Iterable[int]) -> None:
    for node in ids:
        if not 0 <= node < len(graph):
            raise IllegalStrategyError(
                f"{token} holds node {node}, but the graph has nodes 0 to {len(graph) - 1}."
            )


def _check_kinds(
    graph: Graph,
    strategy: Strategy,
    unit: NDArray[np.int64],
    node: NDArray[np.int64],
    is_grouped: NDArray[np.bool_],
) -> None:
    kind = flat_graph(graph).kind[node]
    for place in np.flatnonzero(is_grouped & (kind != Kind.FUSIBLE) & (kind != Kind.FIXED)).tolist():
        named = graph.nodes[node[place]]
        why = f"which cannot be part of a kernel ({named.kind.name.lower()})"
        if named.opcode == "bitcast":
            why = "and strategies name no bitcasts: each belongs to whatever reads it. Search again"
        raise IllegalStrategyError(
            f"{token_of(strategy, unit[place])} holds {name_of(graph, named.id)}, {why}."
        )
    for place in np.flatnonzero(~is_grouped & (kind != Kind.ALL_REDUCE)).tolist():
        token, name = token_of(strategy, unit[place]), name_of(graph, int(node[place]))
        raise IllegalStrategyError(f"{token} holds {name}, which is no all-reduce.")


def owners(graph: Graph, strategy: Strategy, members: Members) -> NDArray[np.int64]:
    """``[nodes]``: the unit that owns each, a single op where no other does; -1 for what is never executed.

    Raises:
        IllegalStrategyError: a node is owned twice, or owned and duplicated by one unit, or an all-reduce is in no
            bucket.
    """
    if members.own_node.size and np.bincount(members.own_node).max() > 1:
        met: dict[int, str] = {}
        for i, x in zip(members.own_unit.tolist(), members.own_node.tolist(), strict=True):
            token = token_of(strategy, i)
            if x in met:
                raise IllegalStrategyError(
                    f"{name_of(graph, x)} belongs to {met[x]} and to {token}; one may own it."
                )
            met[x] = token
    owner = np.full(len(graph), -1, np.int64)
    owner[members.own_node] = members.own_unit
    left_out = [x for x in graph.all_reduces if owner[x] < 0]
    if left_out:
        raise IllegalStrategyError(
            f"All-reduces are in no bucket: {some(name_of(graph, x) for x in left_out)}."
        )
    for place in np.flatnonzero(owner[members.copy_node] == members.copy_unit).tolist():
        token = token_of(strategy, members.copy_unit[place])
        name = name_of(graph, int(members.copy_node[place]))
        raise IllegalStrategyError(f"{token} both owns and duplicates {name}.")
    kind = flat_graph(graph).kind
    alone = np.flatnonzero(((kind == Kind.FUSIBLE) | (kind == Kind.FIXED)) & (owner < 0))
    first = len(strategy.groups) + len(strategy.buckets)
    owner[alone] = np.arange(first, first + alone.size)
    return owner


def token_of(strategy: Strategy, unit: int, alone: Sequence[int] | NDArray[np.int64] = ()) -> str:
    """The token of unit number ``unit``; ``alone`` are the single ops, which come last."""
    groups, listed = len(strategy.groups), len(strategy.groups) + len(strategy.buckets)
    if unit < groups:
        return f"g{unit}"
    return f"b{unit - groups}" if unit < listed else f"n{alone[unit - listed]}"


def described(strategy: Strategy, alone: NDArray[np.int64], unit: int) -> str:
    """A unit in the text of an error: its token, and which nodes it has."""
    token, groups = token_of(strategy, unit, alone), len(strategy.groups)
    if token[0] == "n":
        return token
    nodes = strategy.groups[unit].nodes if unit < groups else strategy.buckets[unit - groups].all_reduces
    return f"{token} (nodes {some(nodes)})"


def name_of(graph: Graph, node: int) -> str:
    """A node in the text of an error."""
    named = graph.nodes[node]
    return f"node {node} ({named.opcode} {named.name})" if named.name else f"node {node} ({named.opcode})"


def some(items: Iterable[object], limit: int = 8) -> str:
    """The first few of ``items``, comma separated, for the text of an error."""
    listed = list(items)
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(map(str, listed[:limit])) + rest
