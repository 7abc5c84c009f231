"""Between a :class:`Strategy`, which people and files hold, and the arrays that the search changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disco_hlo.core.legality import emitter_kind
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.graph import Graph, flat_lists, kernel_nodes
from disco_hlo.plan.legal import bucket_of
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import State, empty_state, new_scratch
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.moves.arrange import heads_by_position

Signature = tuple[tuple[int, ...], tuple[int, ...]]
"""Ops that a group owns and duplicates: what a group is to the search."""


@dataclass(frozen=True)
class Given:
    """What the search keeps of the strategies it starts from, so that untouched parts come out as they went in."""

    groups: Mapping[Signature, Group]
    """With their emitter kinds and settings."""
    results: Mapping[Signature, tuple[int, ...]]
    """What each of them returned."""
    forms: Mapping[tuple[int, ...], Bucket]
    """Buckets by their sorted all-reduces."""


def given(graph: Graph, strategies: Sequence[Strategy]) -> Given:
    """The groups and buckets of ``strategies`` as they were written; the first writer of one counts."""
    groups: dict[Signature, Group] = {}
    results: dict[Signature, tuple[int, ...]] = {}
    forms: dict[tuple[int, ...], Bucket] = {}
    for strategy in strategies:
        returned = unit_graph(graph, strategy).results_of_groups
        for group, returns in zip(strategy.groups, returned, strict=True):
            groups.setdefault(signature(group), group)
            results.setdefault(signature(group), returns)
        for bucket in strategy.buckets:
            forms.setdefault(tuple(sorted(bucket.all_reduces)), bucket)
    return Given(groups, results, forms)


def signature(group: Group) -> Signature:
    """A group as the search sees it."""
    return group.nodes, group.duplicates


def with_owners(graph: Graph, strategy: Strategy) -> Strategy:
    """The same strategy, in which an op that all its readers recompute, so that nobody runs it, belongs to the first of
    them."""
    owned = {x for group in strategy.groups for x in group.nodes}.union(
        unit_graph(graph, strategy).alone.tolist()
    )
    groups: list[Group] = []
    for group in strategy.groups:
        adopted = {*group.duplicates} - owned
        owned |= adopted
        nodes, copies = {*group.nodes} | adopted, {*group.duplicates} - adopted
        groups.append(replace(group, nodes=tuple(sorted(nodes)), duplicates=tuple(sorted(copies))))
    return replace(strategy, groups=tuple(groups))


def from_strategy(graph: Graph, step: Step, strategy: Strategy) -> State:
    """The state that stands for ``strategy`` (:func:`with_owners`); its order becomes the order of the units.

    Raises:
        IllegalStrategyError: as :func:`unit_graph`, or units wait for each other in a circle.
    """
    groups = strategy.groups
    state = empty_state(step, sum(len(group.duplicates) for group in groups))
    alone = np.flatnonzero(step.node[at.FLAGS, : len(graph)] & at.ACTIVE)
    state.word[at.OWNER, alone], state.word[at.COUNT, alone] = alone, 1
    own(state, [*(group.nodes for group in groups), *(bucket.all_reduces for bucket in strategy.buckets)])
    _duplicate(state, [(group.nodes[0], group.duplicates) for group in groups if group.duplicates])
    _lay_out(state, _heads_in_order(step, state, strategy))
    return state


def _heads_in_order(step: Step, state: State, strategy: Strategy) -> NDArray[np.int64]:
    """Units in a topological order: that of the strategy as far as it is one, else by smallest node."""
    position = np.full(state.word.shape[1], -1, np.int64)
    for i, token in enumerate(strategy.order):
        if not token.endswith(".done"):
            position[_head(strategy, token)] = i
    heads: NDArray[np.int64] = heads_by_position(step, state, new_scratch(step, logs=False), position)
    if heads.size < np.sum(state.word[at.COUNT] > 0):
        raise IllegalStrategyError("In the terms of the search units wait for each other in a circle.")
    return heads


def _head(strategy: Strategy, token: str) -> int:
    number = int(token.removesuffix(".start")[1:])
    if token[0] == "n":
        return number
    if token[0] == "b":
        return min(strategy.buckets[number].all_reduces)
    return strategy.groups[number].nodes[0]


def own(state: State, units: Iterable[Sequence[int]]) -> None:
    """Make one unit of each of some lists of nodes, of which every one is a unit alone; it gets no place."""
    filled = [sorted(unit) for unit in units if unit]
    nodes = np.array([x for unit in filled for x in unit], np.int64)
    heads = np.array([unit[0] for unit in filled], np.int64)
    counts = np.array([len(unit) for unit in filled], np.int64)
    state.word[at.OWNER, nodes], state.word[at.COUNT, nodes] = np.repeat(heads, counts), 0
    state.word[at.NEXT, nodes[:-1]] = nodes[1:]
    state.word[at.NEXT, nodes[np.cumsum(counts) - 1]] = -1
    state.word[at.COUNT, heads] = counts


def _duplicate(state: State, units: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Let some units, each given by its head, recompute nodes, in a state in which nothing is recomputed yet."""
    word = state.word
    start, nodes = flat_lists(
        [copies[::-1] for _, copies in units]
    )  # each cell is put before the last of its unit
    cells, heads = np.arange(nodes.size), np.array([unit for unit, _ in units], np.int64)
    word[at.CELL_NODE, cells], word[at.CELL_UNIT, cells] = nodes, np.repeat(heads, np.diff(start))
    word[at.NEXT_OF_UNIT, cells] = cells - 1
    word[at.NEXT_OF_UNIT, start[:-1]] = -1
    word[at.COPIES, heads] = start[1:] - 1
    by_node = np.argsort(nodes, kind="stable")
    is_first = np.diff(nodes[by_node], prepend=-1) != 0
    word[at.NEXT_OF_NODE, by_node[1:]] = by_node[:-1]
    word[at.NEXT_OF_NODE, by_node[is_first]] = -1
    word[at.COPIERS, nodes[by_node]] = by_node
    word[at.TOTAL, at.FREE_CELL] = nodes.size


def _lay_out(state: State, heads: NDArray[np.int64]) -> None:
    """Give every unit as many slots as it has nodes, so that it can come apart again."""
    word = state.word
    ends = np.cumsum(word[at.COUNT, heads])
    slots = ends - word[at.COUNT, heads]
    word[at.ORDER, slots], word[at.PLACE, heads] = heads, slots
    word[at.TOTAL, at.UNITS] = heads.size
    word[at.TOTAL, at.SLOTS] = ends[-1] if heads.size else 0


def to_strategy(
    graph: Graph, step: Step, state: State, kept: Given, started: NDArray[np.int64], asynchronous: bool
) -> Strategy:
    """The strategy a state stands for, not in normal form.

    Args:
        kept: the strategies that the search started from.
        started: the order, as ``ready_queue`` and ``timeline`` write it; empty for the default order.
        asynchronous: whether buckets have a start and a done.
    """
    heads = [x for x in range(len(graph)) if state.word[at.OWNER, x] == x]
    groups: list[Group] = []
    buckets: list[Bucket] = []
    tokens: dict[int, str] = {}
    for head in heads:
        owned, copies = members_of(state, head)
        if step.node[at.FLAGS, head] & at.ALL_REDUCE:
            tokens[head] = f"b{len(buckets)}"
            buckets.append(_bucket(graph, step, owned, kept))
        elif len(owned) > 1 or copies or (owned, copies) in kept.groups:
            tokens[head] = f"g{len(groups)}"
            groups.append(Group(owned, copies))
        else:
            tokens[head] = f"n{head}"
    units = unit_graph(graph, Strategy(tuple(groups), tuple(buckets)))
    written = zip(groups, units.results_of_groups, strict=True)
    # An op that all its readers recompute has a place in the state's order; no strategy runs it.
    order = (
        token
        for token in _tokens(state, tokens, started, asynchronous)
        if token.partition(".")[0] in units.index
    )
    return Strategy(tuple(_labelled(graph, kept, *one) for one in written), tuple(buckets), tuple(order))


def _labelled(graph: Graph, kept: Given, group: Group, results: tuple[int, ...]) -> Group:
    """A group as it was given where it still returns what it did, else with XLA's label of its kernel."""
    if kept.results.get(signature(group)) == results:
        return kept.groups[signature(group)]
    return replace(group, kind=emitter_kind(graph, kernel_nodes(graph, group.ops), results))


def _tokens(
    state: State, names: Mapping[int, str], started: NDArray[np.int64], asynchronous: bool
) -> Iterator[str]:
    """Tokens in the order in which units start (and transfers are waited for)."""
    for entry in started.tolist():
        task = entry if entry >= 0 else -1 - entry
        head, part = divmod(task, 3)
        if part == at.UNPACK:  # a gradient cut out of its bucket is part of no unit's name
            continue
        name = names[head]
        first = at.PACK if state.times[head, at.PACK] >= 0 else at.MAIN
        if name[0] != "b" or not asynchronous:
            if part == first:
                yield name
            continue
        if entry >= 0 and part == first:
            yield name + ".start"
        if part == at.MAIN and (entry < 0 or not state.times[head, at.ON_CHANNEL]):
            yield name + ".done"


def members_of(state: State, head: int) -> Signature:
    """What a unit owns and what it duplicates, ascending."""
    word = state.word
    owned = []
    x = head
    while x != -1:
        owned.append(int(x))
        x = word[at.NEXT, x]
    copies = []
    cell = word[at.COPIES, head]
    while cell != -1:
        copies.append(int(word[at.CELL_NODE, cell]))
        cell = word[at.NEXT_OF_UNIT, cell]
    return tuple(owned), tuple(copies)


def _bucket(graph: Graph, step: Step, all_reduces: tuple[int, ...], kept: Given) -> Bucket:
    if all_reduces in kept.forms:
        return kept.forms[all_reduces]
    return bucket_of(graph, sorted(all_reduces, key=lambda x: int(step.node[at.RANK, x])))
