"""Between a :class:`Strategy`, which people and files hold, and the arrays that the search changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from disco_hlo.search import layout as at
from disco_hlo.search.board import State, empty_state
from disco_hlo.search.step import Step
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.hlo.legality import keeps_own_buffer
from disco_hlo.plan.order import default_unit_order
from disco_hlo.plan.strategy import Bucket, Group, Strategy
from disco_hlo.plan.units import unit_graph

Signature = tuple[tuple[int, ...], tuple[int, ...]]
"""Fusible nodes that a group owns and duplicates: what a group is to the search."""


@dataclass(frozen=True)
class Given:
    """What the search keeps of the strategies it starts from, so that untouched parts come out as they went in."""

    groups: Mapping[Signature, Group]
    """With their bitcasts, emitter kinds and settings."""
    forms: Mapping[tuple[int, ...], Bucket]
    """Buckets by their sorted all-reduces."""


def given(graph: Graph, strategies: Sequence[Strategy]) -> Given:
    """The groups and buckets of ``strategies`` as they were written; the first writer of one counts."""
    groups: dict[Signature, Group] = {}
    forms: dict[tuple[int, ...], Bucket] = {}
    for strategy in strategies:
        for members, group in zip(_memberships(graph, strategy), strategy.groups, strict=True):
            groups.setdefault(members, group)
        for bucket in strategy.buckets:
            forms.setdefault(tuple(sorted(bucket.all_reduces)), bucket)
    return Given(groups, forms)


def from_strategy(graph: Graph, step: Step, strategy: Strategy) -> State:
    """The state that stands for ``strategy``; its order becomes the order of the units.

    Raises:
        IllegalStrategyError: as :func:`unit_graph`.
    """
    units = unit_graph(graph, strategy)
    state = empty_state(step, sum(len(group.duplicates) for group in strategy.groups))
    for x in range(len(graph)):
        if step.node[at.FLAGS, x] & at.ACTIVE:
            own(state, [x])
    memberships = _memberships(graph, strategy)
    for owned, _ in memberships:
        own(state, owned)
    for bucket in strategy.buckets:
        own(state, sorted(bucket.all_reduces))
    for owned, copies in memberships:
        if owned:
            _duplicate(state, owned[0], copies)
    tokens = [t for t in strategy.order if not t.endswith(".done")] or default_unit_order(units, False)
    # A kernel that only writes another op's value down in other dimensions is no unit of the search.
    tokens = [t for t in tokens if t[0] != "g" or memberships[int(t[1:])][0]]
    _lay_out(state, [_head(state, strategy, token.removesuffix(".start")) for token in tokens])
    return state


def _memberships(graph: Graph, strategy: Strategy) -> list[Signature]:
    """Each group as the search sees it: without bitcasts, and owning what nobody executes for it."""
    executed = {x for unit in unit_graph(graph, strategy).units for x in unit.nodes}
    found: list[Signature] = []
    for group in strategy.groups:
        copies = [x for x in group.duplicates if graph.nodes[x].opcode != "bitcast"]
        adopted = [x for x in copies if x not in executed]
        executed.update(adopted)
        owned = sorted([x for x in group.nodes if graph.nodes[x].opcode != "bitcast"] + adopted)
        found.append((tuple(owned), tuple(x for x in copies if x not in adopted)))
    return found


def own(state: State, nodes: Sequence[int]) -> None:
    """Make one unit of some nodes (ascending) that others may have owned; it gets no place."""
    if not nodes:
        return
    for x, following in zip(nodes, [*nodes[1:], -1], strict=True):
        state.word[at.OWNER, x] = nodes[0]
        state.word[at.NEXT, x] = following
        state.word[at.COUNT, x] = 0
    state.word[at.COUNT, nodes[0]] = len(nodes)


def _duplicate(state: State, unit: int, copies: Sequence[int]) -> None:
    word = state.word
    following = -1
    for node in reversed(copies):
        cell = int(word[at.TOTAL, at.FREE_CELL])
        if cell == -1:
            raise DiscoError("A starting strategy duplicates more ops than the step has.")
        word[at.TOTAL, at.FREE_CELL] = word[at.NEXT_OF_UNIT, cell]
        word[at.CELL_NODE, cell], word[at.CELL_UNIT, cell] = node, unit
        word[at.NEXT_OF_UNIT, cell], word[at.NEXT_OF_NODE, cell] = following, word[at.COPIERS, node]
        word[at.COPIERS, node] = following = cell
    word[at.COPIES, unit] = following


def _head(state: State, strategy: Strategy, token: str) -> int:
    number = int(token[1:])
    if token[0] == "n":
        return number
    if token[0] == "b":
        return min(strategy.buckets[number].all_reduces)
    return min(x for x in strategy.groups[number].nodes if state.word[at.OWNER, x] != -1)


def _lay_out(state: State, heads: Sequence[int]) -> None:
    """Give every unit as many slots as it has nodes, so that it can come apart again."""
    word = state.word
    slot = units = 0
    placed: set[int] = set()
    for head in heads:
        head = int(word[at.OWNER, head])
        if head in placed:
            continue
        placed.add(head)
        word[at.ORDER, slot] = head
        word[at.PLACE, head] = slot
        slot += int(word[at.COUNT, head])
        units += 1
    word[at.TOTAL, at.UNITS] = units
    word[at.TOTAL, at.SLOTS] = slot


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
            buckets.append(_bucket(step, owned, kept))
        elif len(owned) > 1 or copies or (owned, copies) in kept.groups or _cuts_bitcast(graph, state, head):
            tokens[head] = f"g{len(groups)}"
            groups.append(kept.groups.get((owned, copies)) or written_group(graph, owned, copies))
        else:
            tokens[head] = f"n{head}"
    order = tuple(_tokens(state, tokens, started, asynchronous))
    return Strategy(tuple(groups), tuple(buckets), order)


def _cuts_bitcast(graph: Graph, state: State, x: int) -> bool:
    """Whether a single op reads, through a bitcast, a gradient that shares its bucket with others."""
    if graph.nodes[x].kind is not Kind.FUSIBLE or keeps_own_buffer(graph, graph.nodes[x]):
        return False
    for operand in graph.nodes[x].operands:
        chain = _bitcasts_to_source(graph, operand)
        source = graph.nodes[chain[-1]].operands[0] if chain else x
        if (
            graph.nodes[source].kind is Kind.ALL_REDUCE
            and state.word[at.COUNT, state.word[at.OWNER, source]] > 1
        ):
            return True
    return False


def _tokens(
    state: State, names: Mapping[int, str], started: NDArray[np.int64], asynchronous: bool
) -> Iterator[str]:
    """Tokens in the order in which units start (and transfers are waited for)."""
    for entry in started.tolist():
        task = entry if entry >= 0 else -1 - entry
        head, part = divmod(task, 3)
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


def _bucket(step: Step, all_reduces: tuple[int, ...], kept: Given) -> Bucket:
    if all_reduces in kept.forms:
        return kept.forms[all_reduces]
    return Bucket(tuple(sorted(all_reduces, key=lambda x: int(step.node[at.RANK, x]))))


def written_group(graph: Graph, owned: Sequence[int], copies: Sequence[int]) -> Group:
    """A group of the search as a :class:`Group`, with the bitcasts that belong to it.

    These are the bitcasts between its members, and those through which it reads all-reduces (see
    ``legality.add_bitcasts``). They are given as duplicates: outside readers see the value itself.
    """
    inside = {*owned, *copies}
    bitcasts: set[int] = set()
    for x in inside:
        for operand in graph.nodes[x].operands:
            chain = _bitcasts_to_source(graph, operand)
            source = graph.nodes[chain[-1]].operands[0] if chain else operand
            if source in inside or graph.nodes[source].kind is Kind.ALL_REDUCE:
                bitcasts.update(chain)
    return Group(tuple(owned), tuple(sorted({*copies, *bitcasts})), kind=_emitter(graph, inside))


def _bitcasts_to_source(graph: Graph, x: int) -> list[int]:
    chain = []
    while graph.nodes[x].opcode == "bitcast":
        chain.append(x)
        x = graph.nodes[x].operands[0]
    return chain


def _emitter(graph: Graph, inside: Collection[int]) -> str:
    """XLA's label of a kernel: on GPU one with a reduction is an input fusion."""
    if graph.backend == "gpu" and any(graph.nodes[x].opcode == "reduce" for x in inside):
        return "input"
    return "loop"
