"""Between a :class:`Strategy`, which people and files hold, and the arrays that the search changes.

A search begins with the graph as arrays and with the states of the strategies it starts from (:func:`prepare`). What it
finds is written down (:func:`to_strategy`) and checked once more by the rules everybody else goes by (:func:`checked`):
the compiled rules are held equal to those of ``hlo`` and ``plan`` by tests, but a user's training does not depend on
that. A strategy that fails there is dropped, and whoever searches is told how many were.

Who reads a gradient and cannot find it inside a shared bucket, so that a kernel must cut it out (``UNCUT_AT``), is
decided for strategies by ``simulator.build``. To a state it comes down to the kernels that stand as they came with a
start (Triton's read what they were made for), to the entry root, and to ops that no kernel holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disco_hlo.core.legality import emitter_kind
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.graph import Graph, Kind, flat_graph, flat_lists, grouped, kernel_nodes
from disco_hlo.plan.legal import Kernel, bucket_of, check_order, check_strategy
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph
from disco_hlo.plan.variants import normal_form
from disco_hlo.search import layout as at
from disco_hlo.search.arrange import heads_by_position
from disco_hlo.search.kernels import LARGE_KERNELS, count_results
from disco_hlo.search.state import MAXIMUM_MEMBERS, State, empty_state, kernel_digests, new_scratch
from disco_hlo.search.step import Step, build_step
from disco_hlo.simulator.build import cuts_gradient

Signature = tuple[tuple[int, ...], tuple[int, ...]]
"""Ops that a group owns and duplicates: what a group is to the search."""
Uncut = tuple[int, int, int]
"""A collective, the head of a unit that does not find it in its bucket, and the digest of that unit."""
_WHATEVER_UNIT = 0
_ROOT = -1


@dataclass(frozen=True)
class Given:
    """What the search keeps of the strategies it starts from, so that untouched parts come out as they went in."""

    groups: Mapping[Signature, Group]
    """With their emitter kinds and settings."""
    results: Mapping[Signature, tuple[int, ...]]
    """What each of them returned."""
    forms: Mapping[tuple[int, ...], Bucket]
    """Buckets by their sorted collectives."""


@dataclass(frozen=True)
class Starts:
    """One graph with the strategies to start from."""

    step: Step
    kept: Given
    states: tuple[State, ...]
    """One for each strategy, not priced yet."""


def prepare(graph: Graph, strategies: Sequence[Strategy]) -> Starts:
    """Arrays and states for a search that starts from ``strategies``.

    Raises:
        IllegalStrategyError: a strategy does not fit the graph.
    """
    strategies = [with_owners(graph, strategy) for strategy in strategies]
    step, kept = build_step(graph), given(graph, strategies)
    states = tuple(from_strategy(graph, step, strategy) for strategy in strategies)
    scratch = new_scratch(step)
    for state in states:
        count_results(step, state, scratch)
    hashes = kernel_digests([(*known, kept.results[known]) for known in kept.groups])
    tiled = [group.kind == "triton" for group in kept.groups.values()]
    rows = dict(zip(hashes[:, 0].tolist(), zip(hashes[:, 1].tolist(), tiled, strict=True), strict=True))
    digests = dict(zip(kept.groups, hashes.sum(axis=1).tolist(), strict=True))
    large = {len(owned) for owned, _ in kept.groups if len(owned) > MAXIMUM_MEMBERS}
    limits = np.array([*step.limits[:LARGE_KERNELS], len(large), *sorted(large)], np.int64)
    step = with_uncut(graph, step, [unit_graph(graph, strategy) for strategy in strategies], digests)
    return Starts(step._replace(special=_hashed(rows), limits=limits), kept, states)


def _hashed(rows: dict[int, tuple[int, bool]]) -> NDArray[np.int64]:
    slots = 1
    while slots < 2 * len(rows):
        slots *= 2
    table = np.zeros((slots, 3), np.int64)
    for digest, (results, only) in rows.items():
        slot = digest & (slots - 1)
        while table[slot, 0]:
            slot = (slot + 1) & (slots - 1)
        table[slot] = digest, results, only
    return table


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
            forms.setdefault(tuple(sorted(bucket.collectives)), bucket)
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
    own(state, [*(group.nodes for group in groups), *(bucket.collectives for bucket in strategy.buckets)])
    _duplicate(state, [(group.nodes[0], group.duplicates) for group in groups if group.duplicates])
    _lay_out(state, _heads_in_order(step, state, strategy))
    return state


def _heads_in_order(step: Step, state: State, strategy: Strategy) -> NDArray[np.int64]:
    """Units in a topological order: that of the strategy as far as it is one, else by smallest node."""
    position = np.full(state.word.shape[1], -1, np.int64)
    for i, token in enumerate(strategy.order):
        if not token.endswith(".done"):
            position[_head(strategy, token)] = i
    heads: NDArray[np.int64] = heads_by_position(step, state, new_scratch(step), position)
    if heads.size < np.sum(state.word[at.COUNT] > 0):
        raise IllegalStrategyError("In the terms of the search units wait for each other in a circle.")
    return heads


def _head(strategy: Strategy, token: str) -> int:
    number = int(token.removesuffix(".start")[1:])
    if token[0] == "n":
        return number
    if token[0] == "b":
        return min(strategy.buckets[number].collectives)
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


def with_uncut(
    graph: Graph, step: Step, starts: Sequence[UnitGraph], digests: Mapping[Signature, int]
) -> Step:
    """``step`` with ``UNCUT_AT`` and ``UNCUT`` filled in; ``digests`` are those of the groups of ``starts``."""
    found = _uncut_by_others(graph, step, {*digests.values()})
    for units in starts:
        found |= _uncut_by_given(graph, units, digests)
    uncut = np.array(sorted(found), np.int64).reshape(-1, 3)
    kernels = uncut[uncut[:, 2] != _WHATEVER_UNIT]
    pairs = np.concatenate([uncut[:, 1:], kernels[:, ::2]])
    nodes = np.concatenate([uncut[:, 0], kernels[:, 1]])
    begin, pairs = grouped(nodes, pairs, len(graph))
    step.node[at.UNCUT_AT] = step.edge.size + 2 * begin
    step.node[at.FLAGS, nodes] |= at.UNCUT
    return step._replace(edge=np.concatenate([step.edge, pairs.ravel()]))


def _uncut_by_given(graph: Graph, units: UnitGraph, digests: Mapping[Signature, int]) -> set[Uncut]:
    """What the kernels of a start do not find in a bucket."""
    groups = units.strategy.groups
    asked = (units.reader < len(groups)) & (flat_graph(graph).kind[units.source] == Kind.COLLECTIVE)
    found: set[Uncut] = set()
    for number, gradient in zip(units.reader[asked].tolist(), units.source[asked].tolist(), strict=True):
        group = groups[number]
        if not cuts_gradient(graph, group, gradient):
            found.add((gradient, group.nodes[0], digests[signature(group)]))
    return found


def _uncut_by_others(graph: Graph, step: Step, given_digests: set[int]) -> set[Uncut]:
    """What the entry root, other transfers, and ops by themselves do not find in a bucket."""
    flags, begin = step.node[at.FLAGS], step.node[at.READERS_AT]
    found: set[Uncut] = set()
    for gradient in graph.collectives:
        if flags[gradient] & at.RETURNED:
            found.add((gradient, _ROOT, _WHATEVER_UNIT))
        for x in step.edge[begin[gradient] : begin[gradient + 1]].tolist():
            if flags[x] & at.COLLECTIVE:
                found.add((gradient, x, _WHATEVER_UNIT))
            elif not flags[x] & at.FUSIBLE:
                is_result = flags[x] & at.RETURNED or begin[x + 1] > begin[x]
                digest = int(kernel_digests([((x,), (), (x,) if is_result else ())]).sum())
                if digest not in given_digests and not cuts_gradient(graph, x, gradient):
                    found.add((gradient, x, digest))
    return found


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
        if step.node[at.FLAGS, head] & at.COLLECTIVE:
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


def _bucket(graph: Graph, step: Step, collectives: tuple[int, ...], kept: Given) -> Bucket:
    if collectives in kept.forms:
        return kept.forms[collectives]
    return bucket_of(graph, sorted(collectives, key=lambda x: int(step.node[at.RANK, x])))


def kernels_of(graph: Graph, strategy: Strategy) -> set[Kernel]:
    """The kernels of a strategy, each by the ops that it computes and those that it returns.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    units = unit_graph(graph, strategy)
    return {
        (frozenset(group.ops), results)
        for group, results in zip(strategy.groups, units.results_of_groups, strict=True)
    }


def checked(graph: Graph, strategy: Strategy, asynchronous: bool, attested: Set[Kernel]) -> Strategy:
    """``strategy`` in normal form.

    Args:
        asynchronous: whether its order has a start and a done for every bucket.
        attested: kernels that need no rule, because XLA made them.

    Raises:
        DiscoError: it is not legal.
    """
    normal = normal_form(graph, strategy)
    units = unit_graph(graph, normal)
    check_order(units, normal.order, asynchronous)
    check_strategy(graph, normal, units, attested)
    _check_tiles(graph, normal, attested)
    return normal


def _check_tiles(graph: Graph, strategy: Strategy, attested: Set[Kernel]) -> None:
    """Triton's tiles fit one kernel, with its very results."""
    tiled = {frozenset(group.ops) for group in strategy.groups if group.kind == "triton"}
    for members, results in kernels_of(graph, strategy):
        if members in tiled and (members, results) not in attested:
            raise IllegalStrategyError(f"the kernel of n{min(members)} has tiles made for other results")
