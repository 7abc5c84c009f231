"""What a strategy makes XLA execute: its units, who computes what, and what each of them waits for.

This is the structural half of a strategy's legality (DisCo, section 4.5: "if H' is valid"): whatever the backend, a
strategy must name nodes that exist, of kinds that can stand where they do, own every op at most once, carry every
collective exactly once, and leave no unit waiting for itself through a path outside. Which ops may share a kernel is
the backend's business (``disco_hlo/core/legality.py``). ``apply``, the simulator and the search all take units and
dependencies from here, so they cannot disagree.

A unit reads a value from the unit that owns it. Nodes that are no units hand reads through:
a parameter or constant is there from the start; a free node (tuple, get-tuple-element, bitcast)
stands for what its operands stand for. A duplicated op is recomputed by its
reader, so the reader waits for the op's operands and not for its owner; a single op that every
reader recomputes is not executed at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import CircleError, IllegalStrategyError
from disco_hlo.hlo.cost_model import Kernels, triton_emitter
from disco_hlo.hlo.graph import (
    Graph,
    Kind,
    Shape,
    ascending,
    behind_bitcasts,
    flat_graph,
    flat_lists,
    grouped,
    kernel_nodes,
    rewriting,
    stretches,
)
from disco_hlo.plan.plan import Group, Strategy

_KEPT = 8
_RECENT: list[tuple[ref[Graph], Strategy, UnitGraph]] = []
"""The last few answers: a strategy is read, checked, simulated and written, and each asks for its units."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing that XLA executes: an op group, a bucket or a single op."""

    token: str
    """``g3``, ``b2`` or ``n17``, as in :mod:`disco_hlo.plan.plan`."""
    nodes: tuple[int, ...]
    """Nodes whose values come from this unit (a bucket's collectives in transfer order)."""
    duplicates: tuple[int, ...] = ()
    """Nodes that a group recomputes for its own use."""

    @property
    def is_bucket(self) -> bool:
        """Whether this unit is communication."""
        return self.token[0] == "b"

    def start_token(self, asynchronous: bool) -> str:
        """The token at which the unit is issued."""
        return self.token + ".start" if asynchronous and self.is_bucket else self.token

    def done_token(self, asynchronous: bool) -> str:
        """The token after which the unit's values may be read."""
        return self.token + ".done" if asynchronous and self.is_bucket else self.token


@dataclass(frozen=True, slots=True)
class Value:
    """One array (or tuple) that a unit leaves in memory."""

    node: int
    size_bytes: int
    producer: int
    """Index of the unit that makes it."""
    readers: tuple[int, ...]
    """Indices of the units that read it, ascending; the producer is not among them."""
    returned: bool
    """Whether the entry root holds it, so that it lives until the end of the step."""


@dataclass(frozen=True, eq=False)
class UnitGraph:
    """The units of a strategy and their dependencies: acyclic, and without any order.

    Units are numbered: groups, then buckets, then single ops. Arrays are never written; what is made of them is made
    when it is asked for.
    """

    strategy: Strategy
    alone: NDArray[np.int64]
    """Single ops that run, ascending."""
    needed_at: NDArray[np.int64]
    needed: NDArray[np.int64]
    """Unit i waits for ``needed[needed_at[i] : needed_at[i + 1]]``, ascending."""
    result_at: NDArray[np.int64]
    result: NDArray[np.int64]
    """Unit i leaves the nodes ``result[result_at[i] : result_at[i + 1]]`` in memory, ascending."""
    shapes: Sequence[Shape]
    """Of each of these."""
    is_returned: NDArray[np.bool_]
    """For each of these whether the entry root holds it."""
    reader: NDArray[np.int64]
    source: NDArray[np.int64]
    """Who reads what: pairs of a unit and a node, ascending."""

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Groups, then buckets, then single ops by ascending node id."""
        groups, buckets = self.strategy.groups, self.strategy.buckets
        units = [Unit(f"g{i}", group.nodes, group.duplicates) for i, group in enumerate(groups)]
        units += [Unit(f"b{i}", bucket.collectives) for i, bucket in enumerate(buckets)]
        return (*units, *(Unit(f"n{node}", (node,)) for node in self.alone.tolist()))

    @cached_property
    def dependencies(self) -> tuple[tuple[int, ...], ...]:
        """For each unit, the indices of the units that must have finished before it starts, ascending."""
        return _cut(self.needed_at, self.needed)

    @cached_property
    def dependents(self) -> tuple[tuple[int, ...], ...]:
        """The reverse of :attr:`dependencies`."""
        waiting = np.repeat(np.arange(self.needed_at.size - 1), np.diff(self.needed_at))
        return _cut(*grouped(self.needed, waiting, self.needed_at.size - 1))

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """What the units leave in memory, by producer, then node id. No parameters, no constants."""
        by_source = np.argsort(self.source, kind="stable")
        ends = np.searchsorted(self.source[by_source], [self.result, self.result + 1]).T
        readers = self.reader[by_source].tolist()
        producers = np.repeat(np.arange(self.result_at.size - 1), np.diff(self.result_at))
        return tuple(
            Value(node, shape.size_bytes, producer, tuple(readers[first:last]), is_returned)
            for node, shape, producer, (first, last), is_returned in zip(
                self.result.tolist(), self.shapes, producers.tolist(), ends.tolist(), self.is_returned.tolist(),
                strict=True,
            )
        )  # fmt: skip

    @cached_property
    def index(self) -> dict[str, int]:
        """Unit index of each token (a bucket's is ``b2``, also where it has start and done)."""
        return {unit.token: i for i, unit in enumerate(self.units)}

    @cached_property
    def values_of(self) -> tuple[tuple[Value, ...], ...]:
        """For each unit, the values that it leaves in memory."""
        begin = self.result_at.tolist()
        return tuple(self.values[first:last] for first, last in pairwise(begin))

    @property
    def results_of_groups(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that each group leaves in memory, ascending."""
        return _cut(self.result_at[: len(self.strategy.groups) + 1], self.result)

    def kernels(self, graph: Graph) -> Kernels:
        """The op groups, of this graph, as a cost model is asked for them."""
        groups = self.strategy.groups
        return Kernels.of_lists(
            [kernel_nodes(graph, group.ops) for group in groups],
            self.results_of_groups,
            [triton_emitter(group.config) if group.kind == "triton" else "" for group in groups],
        )


def unit_graph(graph: Graph, strategy: Strategy) -> UnitGraph:
    """Units of ``strategy`` on ``graph``; ``strategy.order`` is not looked at.

    Raises:
        IllegalStrategyError: an id is out of range or of a kind that cannot stand there, a node
            is owned twice, a duplicate is read by nothing in its group, a collective is in no
            or in two buckets, or a group's results are read by nobody. The message names the
            units and the nodes.
        CircleError: units wait for each other in a circle.
    """
    recent = list(_RECENT)
    for of, known, found in recent:
        if of() is graph and known.groups == strategy.groups and known.buckets == strategy.buckets:
            return found
    found = _unit_graph(graph, strategy)
    _RECENT[:] = [(ref(graph), strategy, found), *recent[: _KEPT - 1]]
    return found


def _unit_graph(graph: Graph, strategy: Strategy) -> UnitGraph:
    count, listed = len(graph), len(strategy.groups) + len(strategy.buckets)
    members = listed_members(graph, strategy)
    owner = owners(graph, strategy, members)
    alone = np.flatnonzero(owner >= listed)
    own = np.concatenate([members.own_unit, owner[alone]]), np.concatenate([members.own_node, alone])
    members = Members(*own, members.copy_unit, members.copy_node)
    shown, behind = _shown(graph, owner)
    is_returned = np.zeros(count, np.bool_)
    is_returned[_behind(int(shown[graph.root]), owner, behind)] = True
    reader, source = _reads(graph, strategy, members, owner, shown, behind)
    idle = _idle(graph, alone, owner, reader, source, is_returned)
    if idle:  # they are no units, and those behind them move up
        owner[idle] = -1
        runs = np.ones(listed + alone.size, np.bool_)
        runs[listed + np.searchsorted(alone, idle)] = False
        number, kept = np.cumsum(runs) - 1, runs[reader]
        alone, reader, source = alone[runs[listed:]], number[reader[kept]], source[kept]
        owner[alone] = np.arange(listed, listed + alone.size)
        kept = runs[members.own_unit]
        own = number[members.own_unit[kept]], members.own_node[kept]
        members = Members(*own, members.copy_unit, members.copy_node)
    units = listed + alone.size
    pairs = np.concatenate([reader * units + owner[source], _before_pairs(graph, strategy, members, units)])
    waiting, needed = np.divmod(ascending(pairs), max(units, 1))
    needed_at = _begins(waiting, units)
    _reject_cycle(strategy, alone, needed_at, needed)
    result_at, result = _results(strategy, alone, members, is_returned, source)
    shapes = [graph.nodes[x].shape for x in result.tolist()]
    return UnitGraph(
        strategy, alone, needed_at, needed, result_at, result, shapes, is_returned[result], reader, source
    )


def _cut(begin: NDArray[np.int64], items: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    """The lists that lie one after the other in ``items``."""
    listed, ends = items.tolist(), begin.tolist()
    return tuple(tuple(listed[first:last]) for first, last in pairwise(ends))


def _begins(numbers: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Where the entries of each of ``count`` numbers begin in ``numbers``, which ascend."""
    return np.searchsorted(numbers, np.arange(count + 1))


# Who computes what ------------------------------------------------------------------------------


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
    lists = [*(group.nodes for group in groups), *(bucket.collectives for bucket in buckets)]
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
        nothing = "owns no node" if i < len(groups) else "holds no collective"
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
    for place in np.flatnonzero(~is_grouped & (kind != Kind.COLLECTIVE)).tolist():
        token, name = token_of(strategy, unit[place]), name_of(graph, int(node[place]))
        raise IllegalStrategyError(f"{token} holds {name}, which is no collective that a plan moves.")


def owners(graph: Graph, strategy: Strategy, members: Members) -> NDArray[np.int64]:
    """``[nodes]``: the unit that owns each, a single op where no other does; -1 for what is never executed.

    Raises:
        IllegalStrategyError: a node is owned twice, or owned and duplicated by one unit, or a collective is in no
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
    left_out = [x for x in graph.collectives if owner[x] < 0]
    if left_out:
        raise IllegalStrategyError(
            f"Collectives are in no bucket: {some(name_of(graph, x) for x in left_out)}."
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


# Who reads what ---------------------------------------------------------------------------------


def _shown(graph: Graph, owner: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[int, list[int]]]:
    """For each node what one gets by reading it from outside: itself where it is owned, else what it shows if it has
    one operand. That may be a node with several operands and no owner; of these, all owned nodes behind them."""
    flat = flat_graph(graph)
    operands = np.diff(flat.operand_at)
    passing = np.flatnonzero((owner < 0) & (operands == 1))
    shown = np.arange(owner.size)
    shown[passing] = flat.operand[flat.operand_at[passing]]
    while np.any((further := shown[shown[passing]]) != shown[passing]):
        shown[passing] = further
    behind: dict[int, list[int]] = {}
    for x in np.flatnonzero((owner < 0) & (operands > 1)).tolist():
        read = shown[flat.operand[flat.operand_at[x] : flat.operand_at[x + 1]]].tolist()
        behind[x] = list(dict.fromkeys(z for y in read for z in _behind(y, owner, behind)))
    return shown, behind


def _behind(node: int, owner: NDArray[np.int64], behind: Mapping[int, list[int]]) -> Sequence[int]:
    return (node,) if owner[node] >= 0 else behind.get(node, ())


def _reads(
    graph: Graph,
    strategy: Strategy,
    members: Members,
    owner: NDArray[np.int64],
    shown: NDArray[np.int64],
    behind: Mapping[int, list[int]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Who reads what: pairs of a unit and an owned node, ascending. Each duplicate must be read by its own unit."""
    flat, count = flat_graph(graph), len(graph)
    unit = np.concatenate([members.own_unit, members.copy_unit])
    node = np.concatenate([members.own_node, members.copy_node])
    begin = flat.operand_at[node]
    operands = flat.operand_at[node + 1] - begin
    reader, operand = np.repeat(unit, operands), flat.shown[flat.operand[stretches(begin, operands)]]
    # A bucket's members travel at once: one that reads another waits for its own bucket, a cycle.
    is_inside = (owner[operand] == reader) & (flat.kind[operand] != Kind.COLLECTIVE)
    if members.copy_node.size:
        copied, asked = members.copy_unit * count + members.copy_node, reader * count + operand
        place = np.minimum(np.searchsorted(copied, asked), copied.size - 1)
        is_copied = copied[place] == asked
        is_inside |= is_copied
        is_read = np.zeros(copied.size, np.bool_)
        is_read[place[is_copied]] = True
        for i in np.flatnonzero(~is_read).tolist():
            token, name = token_of(strategy, members.copy_unit[i]), name_of(graph, int(members.copy_node[i]))
            raise IllegalStrategyError(f"{token} duplicates {name}, which nothing in it reads.")
    reader, source = reader[~is_inside], shown[operand[~is_inside]]
    is_owned = owner[source] >= 0
    pairs = reader[is_owned] * count + source[is_owned]
    lies_before = np.zeros(count, np.bool_)
    lies_before[list(behind)] = True
    through = np.flatnonzero(lies_before[source])
    if through.size:
        begin, nodes = flat_lists([behind[x] for x in source[through].tolist()])
        pairs = np.concatenate([pairs, np.repeat(reader[through], np.diff(begin)) * count + nodes])
    reader, source = np.divmod(ascending(pairs), count)
    return reader, source


def _idle(
    graph: Graph,
    alone: NDArray[np.int64],
    owner: NDArray[np.int64],
    reader: NDArray[np.int64],
    source: NDArray[np.int64],
    is_returned: NDArray[np.bool_],
) -> list[int]:
    """Single ops that do not run: fusible ones which every reader recomputes."""
    flat = flat_graph(graph)
    may_idle = np.zeros(len(graph), np.bool_)
    may_idle[alone] = (flat.kind[alone] == Kind.FUSIBLE) & ~is_returned[alone]
    may_idle &= np.bincount(flat.operand, minlength=len(graph)) > 0
    readers = np.bincount(source, minlength=len(graph))
    pending: list[int] = np.flatnonzero(may_idle & (readers == 0)).tolist()
    idle: list[int] = []
    first, last = (
        np.searchsorted(reader, owner, side).tolist() if pending else [] for side in ("left", "right")
    )
    while pending:
        x = pending.pop()
        idle.append(x)
        for y in source[first[x] : last[x]].tolist():
            readers[y] -= 1
            if readers[y] == 0 and may_idle[y]:
                pending.append(y)
    return sorted(idle)


def _results(
    strategy: Strategy,
    alone: NDArray[np.int64],
    members: Members,
    is_returned: NDArray[np.bool_],
    source: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What each unit leaves in memory: of a group what is read or returned, of other units all they own."""
    groups, count = len(strategy.groups), is_returned.size
    leaves = is_returned.copy()
    leaves[source] = True
    is_result = leaves[members.own_node] | (members.own_unit >= groups)
    producer, result = members.own_unit[is_result], members.own_node[is_result]
    producer, result = np.divmod(np.sort(producer * count + result), count)
    result_at = _begins(producer, groups + len(strategy.buckets) + alone.size)
    for i in np.flatnonzero(np.diff(result_at[: groups + 1]) == 0).tolist():
        raise IllegalStrategyError(f"Nothing reads what {described(strategy, alone, i)} produces.")
    return result_at, result


# What waits for what ----------------------------------------------------------------------------


def _before_pairs(graph: Graph, strategy: Strategy, members: Members, units: int) -> NDArray[np.int64]:
    """Who waits for whom by ``Graph.before``: the unit, times their number, plus that which it waits for."""
    if not graph.before and not rewriting(graph):
        return np.zeros(0, np.int64)
    unit = np.concatenate([members.own_unit, members.copy_unit])
    node = np.concatenate([members.own_node, members.copy_node])
    begin, computing = (found.tolist() for found in grouped(node, unit, len(graph)))

    def running(node: int) -> set[int]:
        """Units that execute a node; for a member of a tuple, those that read it."""
        found: set[int] = set()
        pending = [node]
        while pending:
            current = pending.pop()
            found.update(computing[begin[current] : begin[current + 1]])
            if graph.nodes[current].opcode == "get-tuple-element":
                pending += graph.users[current]
        return found

    groups, buffers = strategy.groups, overwritten_by(graph)
    pairs: list[int] = []
    for first, second in graph.before:
        overwritten = buffers.get(second, ())
        earlier = {
            i
            for i in running(first)
            if i >= len(groups) or not reads_own_copies(graph, groups[i], first, overwritten)
        }
        for later in running(second):
            pairs += [later * units + i for i in earlier if i != later]
    owner = dict(zip(members.own_node.tolist(), members.own_unit.tolist(), strict=True))
    for value, writer in rewriting(graph) if members.copy_node.size else ():
        later = owner.get(writer, -1)
        pairs += [
            later * units + i
            for i in running(writer)
            if later not in (-1, i) and not reads_own_copies(graph, groups[i], writer, (value,))
        ]
    return np.array(pairs, np.int64)


def overwritten_by(graph: Graph) -> dict[int, list[int]]:
    """What each node that updates in place overwrites."""
    found: dict[int, list[int]] = {}
    for buffer, writer in graph.inplace:
        found.setdefault(writer, []).append(buffer)
    return found


def reads_own_copies(graph: Graph, group: Group, reader: int, overwritten: Collection[int]) -> bool:
    """Whether a kernel recomputes all that one of its nodes reads of what another unit overwrites, and so may run
    after that unit. (A loop overwrites several arrays, and few read all of them.)"""
    if not group.duplicates:
        return False
    shown = behind_bitcasts(graph)
    read = [x for x in graph.nodes[reader].operands if graph.shown[x] in overwritten]
    return bool(read) and all(shown[x] in group.duplicates for x in read)


def groups_with_own_copies(graph: Graph, groups: Sequence[Group]) -> frozenset[int]:
    """Positions of the groups that use a value which another unit overwrites, but recompute it, so that
    they may run after that unit; and of those that recompute what overwrites its operand, which must run before.
    XLA makes such kernels; the search does not reckon with them."""
    buffers = overwritten_by(graph)
    recomputed = {writer for _, writer in rewriting(graph)}
    writers: dict[int, list[int]] = {}
    for first, second in graph.before:
        writers.setdefault(first, []).append(second)
    return frozenset(
        i
        for i, group in enumerate(groups)
        if not recomputed.isdisjoint(group.duplicates)
        or any(
            reads_own_copies(graph, group, node, buffers.get(second, ()))
            for node in group.ops
            for second in writers.get(node, ())
        )
    )


def _reject_cycle(
    strategy: Strategy, alone: NDArray[np.int64], needed_at: NDArray[np.int64], needed: NDArray[np.int64]
) -> None:
    dependencies = _cut(needed_at, needed)
    missing = [len(needs) for needs in dependencies]
    dependents: list[list[int]] = [[] for _ in dependencies]
    for i, needs in enumerate(dependencies):
        for j in needs:
            dependents[j].append(i)
    ready = [i for i, count in enumerate(missing) if count == 0]
    while ready:
        for i in dependents[ready.pop()]:
            missing[i] -= 1
            if missing[i] == 0:
                ready.append(i)
    stuck = {i for i, count in enumerate(missing) if count}
    if not stuck:
        return
    # Every stuck unit waits for a stuck one, so walking back must come round.
    path = [min(stuck)]
    while path[-1] not in path[:-1]:
        path.append(min(stuck.intersection(dependencies[path[-1]])))
    cycle = path[path.index(path[-1]) :]
    raise CircleError(
        "Units wait for each other in a circle: "
        + " waits for ".join(described(strategy, alone, i) for i in cycle)
        + ".",
        tuple(token_of(strategy, i, alone) for i in cycle[:-1]),
    )


# Texts of errors --------------------------------------------------------------------------------


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
    nodes = strategy.groups[unit].nodes if unit < groups else strategy.buckets[unit - groups].collectives
    return f"{token} (nodes {some(nodes)})"


def name_of(graph: Graph, node: int) -> str:
    """A node in the text of an error."""
    named = graph.nodes[node]
    return f"node {node} ({named.opcode} {named.name})" if named.name else f"node {node} ({named.opcode})"


def some(items: Iterable[object]) -> str:
    """The first few of ``items``, comma separated, for the text of an error."""
    listed = list(items)
    rest = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return ", ".join(map(str, listed[:8])) + rest
