"""Between a :class:`Strategy`, which people and files hold, and the arrays that the search changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from disco_hlo.core.kernels import emitter_kind
from disco_hlo.core.rows import keeps_own_buffer
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.flat_graph import flat_graph, flat_lists
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.legal import bucket_of
from disco_hlo.plan.strategy import Bucket, Group, Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import State, empty_state, new_scratch
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.moves.arrange import heads_by_position

Signature = tuple[tuple[int, ...], tuple[int, ...]]
"""Fusible nodes that a group owns and duplicates: what a group is to the search."""


@dataclass(frozen=True)
class Given:
    """What the search keeps of the strategies it starts from, so that untouched parts come out as they went in."""

    groups: Mapping[Signature, Group]
    """With their bitcasts, emitter kinds and settings."""
    results: Mapping[Signature, tuple[int, ...]]
    """What each of them returned."""
    forms: Mapping[tuple[int, ...], Bucket]
    """Buckets by their sorted all-reduces."""


def given(
    graph: Graph, strategies: Sequence[Strategy], memberships: Sequence[Sequence[Signature]] | None = None
) -> Given:
    """The groups and buckets of ``strategies`` as they were written; the first writer of one counts.

    ``memberships`` are their :func:`signatures`, where these are at hand.
    """
    memberships = memberships or [signatures(graph, strategy) for strategy in strategies]
    bitcasts, shown = _bitcasts(graph), flat_graph(graph).shown.tolist()
    groups: dict[Signature, Group] = {}
    results: dict[Signature, tuple[int, ...]] = {}
    forms: dict[tuple[int, ...], Bucket] = {}
    for strategy, found in zip(strategies, memberships, strict=True):
        returned = unit_graph(graph, strategy).results_of_groups
        for number, signature in enumerate(found):
            kept = _kept(graph, strategy.groups[number], signature[0], bitcasts, shown)
            if kept is not None and signature not in groups:
                groups[signature], results[signature] = kept, returned[number]
        for bucket in strategy.buckets:
            forms.setdefault(tuple(sorted(bucket.all_reduces)), bucket)
    return Given(groups, results, forms)


def _kept(
    graph: Graph, group: Group, owned: Sequence[int], bitcasts: frozenset[int], shown: Sequence[int]
) -> Group | None:
    """A group as it was given, that owns what the search has it own, and bitcasts of that (``FlatGraph.shown``); None
    where it is none that computes the same.

    Whoever reads a bitcast waits for its owner; in the search that is the owner of the value itself. And of an op that
    the search has given to another group, or to this one, there is one owner (:func:`_take_over`, :func:`_idle`). A
    group that computes a value and reads a bitcast of it from outside waits for whoever makes that; in the search it
    reads its own.
    """
    if set(owned).isdisjoint(group.nodes):  # it owned bitcasts alone
        return None
    computed = {*group.nodes, *group.duplicates}
    nodes = {*owned, *(x for x in bitcasts.intersection(group.nodes) if shown[x] in owned)}
    used, pending = set(nodes), [*nodes]
    while pending:
        operands = graph.nodes[pending.pop()].operands
        if any(x in bitcasts and x not in computed and shown[x] in computed for x in operands):
            return None
        read = computed.intersection(operands) - used
        used |= read
        pending += read
    if used != computed:
        return None
    return replace(group, nodes=tuple(sorted(nodes)), duplicates=tuple(sorted(used - nodes)))


def _bitcasts(graph: Graph) -> frozenset[int]:
    return frozenset(np.flatnonzero(flat_graph(graph).is_bitcast).tolist())


def from_strategy(
    graph: Graph, step: Step, strategy: Strategy, memberships: Sequence[Signature] | None = None
) -> State:
    """The state that stands for ``strategy``; its order becomes the order of the units.

    A kernel that only writes down in other dimensions what another one owns is left out: bitcasts
    cost nothing in the search. ``memberships`` are its :func:`signatures`, where these are at hand.

    Raises:
        IllegalStrategyError: as :func:`unit_graph`, or units wait for each other in a circle.
    """
    memberships = signatures(graph, strategy) if memberships is None else memberships
    state = empty_state(step, sum(len(copies) for _, copies in memberships))
    alone = np.flatnonzero(step.node[at.FLAGS, : len(graph)] & at.ACTIVE)
    state.word[at.OWNER, alone], state.word[at.COUNT, alone] = alone, 1
    own(state, [*(owned for owned, _ in memberships), *(bucket.all_reduces for bucket in strategy.buckets)])
    _duplicate(state, [(owned[0], copies) for owned, copies in memberships if owned and copies])
    _lay_out(state, _heads_in_order(step, state, strategy, memberships))
    return state


def signatures(graph: Graph, strategy: Strategy) -> list[Signature]:
    """Each group as the search sees it: without bitcasts, and owning what nobody executes for it.

    A group that owned bitcasts alone owns what they show, unless another gives it to others.
    """
    units, bitcasts = unit_graph(graph, strategy), _bitcasts(graph)
    shown = flat_graph(graph).shown.tolist()
    owning = [
        group.nodes if bitcasts.isdisjoint(group.nodes) else tuple(sorted({*group.nodes} - bitcasts))
        for group in strategy.groups
    ]
    copying = [{*group.duplicates} - bitcasts for group in strategy.groups]
    if not all(owning):
        _take_over(strategy, shown, {*units.result.tolist()}, owning, copying)
    stripped = [
        (owned, _used(graph, shown, owned, copied)) for owned, copied in zip(owning, copying, strict=True)
    ]
    idle = _idle(graph, stripped)
    return [_adopting(signature, idle) for signature in stripped]


def _take_over(
    strategy: Strategy,
    shown: Sequence[int],
    given_away: Set[int],
    owning: list[tuple[int, ...]],
    copying: Sequence[set[int]],
) -> None:
    """Let groups that own bitcasts alone own what these show (``FlatGraph.shown``), where they compute it."""
    owner = {x: i for i, owned in enumerate(owning) for x in owned}
    for i in [i for i, owned in enumerate(owning) if not owned]:
        for x in sorted({shown[node] for node in strategy.groups[i].nodes} & copying[i] - given_away):
            home = owner.get(x)
            if home is not None and len(owning[home]) == 1:
                continue  # what owns nothing else keeps it
            if home is not None:
                owning[home] = tuple(y for y in owning[home] if y != x)
                copying[home].add(x)
            owning[i] = tuple(sorted((*owning[i], x)))
            copying[i].discard(x)
            owner[x] = i


def _idle(graph: Graph, memberships: Sequence[Signature]) -> set[int]:
    """Ops that kernels recompute, that no kernel owns, and that nobody runs: all who read them recompute them."""
    owned_by_some = {x for owned, _ in memberships for x in owned}
    unowned = {x for _, copies in memberships for x in copies} - owned_by_some
    if not unowned:
        return set()
    homes: dict[int, list[int]] = {}
    for i, (owned, copies) in enumerate(memberships):
        for x in (*owned, *copies):
            homes.setdefault(x, []).append(i)
    inside = [{*owned, *copies} for owned, copies in memberships]
    idle: set[int] = set()
    for x in sorted(unowned, reverse=True):
        readers = _readers(graph, x)
        runs = graph.nodes[x].kind is not Kind.FUSIBLE or not graph.users[x] or graph.root in readers
        for reader in readers:
            runs = runs or (reader not in owned_by_some and reader not in idle)
            runs = runs or any(x not in inside[i] for i in homes.get(reader, ()))
        if not runs:
            idle.add(x)
    return idle


def _readers(graph: Graph, x: int) -> set[int]:
    """Who reads a node, directly or through free nodes, and the root where it returns it."""
    found: set[int] = set()
    pending = [x]
    while pending:
        current = pending.pop()
        if current == graph.root:
            found.add(current)
        for user in graph.users[current]:
            if graph.nodes[user].kind is Kind.FREE:
                pending.append(user)
            else:
                found.add(user)
    return found


def _used(graph: Graph, shown: Sequence[int], owned: Sequence[int], copied: Set[int]) -> tuple[int, ...]:
    """What a kernel duplicates and uses for what it owns, directly or through bitcasts (``FlatGraph.shown``)."""
    left = {*copied}
    pending = [*owned] if left else []
    copies: list[int] = []
    while pending:
        for operand in graph.nodes[pending.pop()].operands:
            source = shown[operand]
            if source in left:
                left.remove(source)
                copies.append(source)
                pending.append(source)
    return tuple(sorted(copies))


def _adopting(signature: Signature, idle: set[int]) -> Signature:
    """The first kernel that recomputes what nobody runs owns it."""
    owned, copies = signature
    if idle.isdisjoint(copies):
        return signature
    adopted = [x for x in copies if x in idle]
    idle.difference_update(adopted)
    return tuple(sorted((*owned, *adopted))), tuple(x for x in copies if x not in adopted)


def _heads_in_order(
    step: Step, state: State, strategy: Strategy, memberships: Sequence[Signature]
) -> NDArray[np.int64]:
    """Units in a topological order: that of the strategy as far as it is one, else by smallest node."""
    position = np.full(state.word.shape[1], -1, np.int64)
    for i, token in enumerate(strategy.order):
        head = -1 if token.endswith(".done") else _head(strategy, memberships, token)
        if head != -1:
            position[head] = i
    heads: NDArray[np.int64] = heads_by_position(step, state, new_scratch(step, logs=False), position)
    if heads.size < np.sum(state.word[at.COUNT] > 0):
        raise IllegalStrategyError("In the terms of the search units wait for each other in a circle.")
    return heads


def _head(strategy: Strategy, memberships: Sequence[Signature], token: str) -> int:
    number = int(token.removesuffix(".start")[1:])
    if token[0] == "n":
        return number
    if token[0] == "b":
        return min(strategy.buckets[number].all_reduces)
    return next(iter(memberships[number][0]), -1)


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
    written: list[Signature] = []
    buckets: list[Bucket] = []
    tokens: dict[int, str] = {}
    for head in heads:
        owned, copies = members_of(state, head)
        if step.node[at.FLAGS, head] & at.ALL_REDUCE:
            tokens[head] = f"b{len(buckets)}"
            buckets.append(_bucket(graph, step, owned, kept))
        elif len(owned) > 1 or copies or (owned, copies) in kept.groups or _cuts_bitcast(graph, state, head):
            tokens[head] = f"g{len(groups)}"
            written.append((owned, copies))
            groups.append(kept.groups.get((owned, copies)) or written_group(graph, owned, copies))
        else:
            tokens[head] = f"n{head}"
    order = tuple(_tokens(state, tokens, started, asynchronous))
    strategy = Strategy(tuple(groups), tuple(buckets), order)
    settled = replace(strategy, groups=tuple(_settled(graph, strategy, written, kept)))
    return _without_idle_ops(graph, _without_lone_ops(settled))


def _without_idle_ops(graph: Graph, strategy: Strategy) -> Strategy:
    """An op that all its readers recompute has a place in the state's order; no strategy runs it."""
    known = unit_graph(graph, strategy).index
    order = tuple(token for token in strategy.order if token.partition(".")[0] in known)
    return replace(strategy, order=order)


def _without_lone_ops(strategy: Strategy) -> Strategy:
    """A group of one op alone, as is left where a kernel no longer shows its value through a bitcast, is no
    group: the op runs by itself."""
    names: dict[str, str] = {}
    groups: list[Group] = []
    for i, group in enumerate(strategy.groups):
        names[f"g{i}"] = f"n{group.nodes[0]}" if is_lone(group) else f"g{len(groups)}"
        groups += [] if is_lone(group) else [group]
    order = tuple(names.get(token, token) for token in strategy.order)
    return Strategy(tuple(groups), strategy.buckets, order)


def is_lone(group: Group) -> bool:
    """Whether a group is written as the op that it consists of."""
    return len(group.nodes) == 1 and not group.duplicates and group.kind != "triton"


def _settled(graph: Graph, strategy: Strategy, written: Sequence[Signature], kept: Given) -> Iterator[Group]:
    """Groups as they were given where they still return what they did, else as the search writes them."""
    returned = unit_graph(graph, strategy).results_of_groups
    for group, signature, results in zip(strategy.groups, written, returned, strict=True):
        same = signature not in kept.groups or results == kept.results[signature]
        yield group if same else written_group(graph, *signature)


def _cuts_bitcast(graph: Graph, state: State, x: int) -> bool:
    """Whether a single op reads, through a bitcast, a gradient that shares its bucket with others."""
    owner, count = state.word[at.OWNER], state.word[at.COUNT]
    return any(count[owner[source]] > 1 for source in gradients_behind_bitcasts(graph, x))


def gradients_behind_bitcasts(graph: Graph, x: int) -> list[int]:
    """The all-reduces that a single op reads through bitcasts, which its kernel can have in it."""
    if graph.nodes[x].kind is not Kind.FUSIBLE or keeps_own_buffer(graph, graph.nodes[x]):
        return []
    chains = [_bitcasts_to_source(graph, operand) for operand in graph.nodes[x].operands]
    sources = [graph.nodes[chain[-1]].operands[0] for chain in chains if chain]
    return [source for source in sources if graph.nodes[source].kind is Kind.ALL_REDUCE]


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


def as_searched(graph: Graph, strategy: Strategy) -> Strategy:
    """The units of a strategy in the terms of the search, without labels and order.

    The search starts from a strategy for which this is legal (``plan.units.unit_graph``).
    """
    kernels = [written_group(graph, *pair, labelled=False) for pair in signatures(graph, strategy) if pair[0]]
    return Strategy(tuple(kernels), strategy.buckets)


def kept_as_given(graph: Graph, strategy: Strategy) -> frozenset[int]:
    """Positions of groups that the search writes as they were given for as long as they compute and return the same to
    it, whoever reads them.

    Others return a value as a bitcast of it, and may come to be read by another name. To the search these are one.
    """
    memberships, kept = signatures(graph, strategy), given(graph, [strategy])
    names: dict[int, list[int]] = {}
    for node, shown in enumerate(graph.shown):
        names.setdefault(shown, []).append(node)
    return frozenset(
        i
        for i, signature in enumerate(memberships)
        if signature in kept.groups
        and all(
            _leaving(graph, kept.groups[signature], names[value])
            == {x for x in kept.results[signature] if graph.shown[x] == value}
            for value in {graph.shown[x] for x in kept.results[signature]}
        )
    )


def _leaving(graph: Graph, group: Group, names: Sequence[int]) -> set[int]:
    """Under which of its names, the first of which is no bitcast, a group may have to return a value to others."""
    inside, owned = {*group.nodes, *group.duplicates}, {*group.nodes}
    read = [x for x in names if x == graph.root or not inside.issuperset(graph.users[x])]
    found = {*names[:1]} if len(read) > 1 else set()  # who reads two names reads the value (plan.names)
    for x in read:
        while x not in owned and graph.nodes[x].opcode == "bitcast":
            x = graph.nodes[x].operands[0]
        found |= {x} & owned  # who reads a member of a tuple, or a barrier, reads what that was made of
    return found


def written_group(
    graph: Graph, owned: Sequence[int], copies: Sequence[int], *, labelled: bool = True
) -> Group:
    """A group of the search as a :class:`Group`, with the bitcasts that belong to it.

    These are the bitcasts between its members, and those through which it reads all-reduces (see
    ``legality.add_bitcasts``). They are given as duplicates: outside readers see the value itself.
    Without ``labelled`` XLA's label of the kernel, which takes longest to find, is left at ``loop``.
    """
    inside = {*owned, *copies}
    bitcasts: set[int] = set()
    for x in inside:
        for operand in graph.nodes[x].operands:
            chain = _bitcasts_to_source(graph, operand)
            source = graph.nodes[chain[-1]].operands[0] if chain else operand
            if source in inside or graph.nodes[source].kind is Kind.ALL_REDUCE:
                bitcasts.update(chain)
    duplicates = tuple(sorted({*copies, *bitcasts}))
    return Group(
        tuple(owned), duplicates, kind=_emitter(graph, owned, inside | bitcasts) if labelled else "loop"
    )


def _bitcasts_to_source(graph: Graph, x: int) -> list[int]:
    chain = []
    while graph.nodes[x].opcode == "bitcast":
        chain.append(x)
        x = graph.nodes[x].operands[0]
    return chain


def _emitter(graph: Graph, owned: Sequence[int], inside: Collection[int]) -> str:
    """XLA's label of the kernel."""
    read = {x for x in owned if any(user not in inside for user in graph.users[x])}
    return emitter_kind(graph, inside, sorted(read or owned))
