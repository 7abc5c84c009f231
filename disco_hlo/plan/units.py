"""What a strategy makes XLA execute: its units, and what each of them waits for.

This is the structural half of a strategy's legality (DisCo, section 4.5: "if H' is valid"):
whatever the backend, a strategy must own every op at most once, carry every all-reduce exactly
once, and leave no unit waiting for itself through a path outside. Which ops may share a kernel
is the backend's business (``disco_hlo/hlo/legality.py``). ``apply``, the simulator and the
search all take units, dependencies and order from here, so they cannot disagree.

A unit reads a value from the unit that owns it. Nodes that are no units hand reads through:
a parameter or constant is there from the start; a free node (tuple, get-tuple-element, bitcast)
outside groups stands for what its operands stand for. A duplicated op is recomputed by its
reader, so the reader waits for the op's operands and not for its owner; a single op that every
reader recomputes is not executed at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import lt
from weakref import ref

import numpy as np

from disco_hlo.errors import CircleError, IllegalStrategyError
from disco_hlo.hlo.flat_graph import flat_graph
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.strategy import Bucket, Group, Strategy


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing that XLA executes: an op group, an all-reduce bucket or a single op."""

    token: str
    """``g3``, ``b2`` or ``n17``, as in :mod:`disco_hlo.plan.strategy`."""
    nodes: tuple[int, ...]
    """Nodes whose values come from this unit (a bucket's all-reduces in transfer order)."""
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


@dataclass(frozen=True)
class UnitGraph:
    """The units of a strategy and their dependencies: acyclic, and without any order."""

    units: tuple[Unit, ...]
    """Groups, then buckets, then single ops by ascending node id."""
    dependencies: tuple[tuple[int, ...], ...]
    """For each unit, the indices of the units that must have finished before it starts, ascending."""
    values: tuple[Value, ...]
    """What the units leave in memory, by producer, then node id. No parameters, no constants."""

    @cached_property
    def index(self) -> dict[str, int]:
        """Unit index of each token (a bucket's is ``b2``, also where it has start and done)."""
        return {unit.token: i for i, unit in enumerate(self.units)}

    @cached_property
    def dependents(self) -> tuple[tuple[int, ...], ...]:
        """The reverse of :attr:`dependencies`."""
        found: list[list[int]] = [[] for _ in self.units]
        for i, needed in enumerate(self.dependencies):
            for j in needed:
                found[j].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def values_of(self) -> tuple[tuple[Value, ...], ...]:
        """For each unit, the values that it leaves in memory."""
        found: list[list[Value]] = [[] for _ in self.units]
        for value in self.values:
            found[value.producer].append(value)
        return tuple(map(tuple, found))


_KEPT = 8
_RECENT: list[tuple[ref[Graph], Strategy, UnitGraph]] = []
"""The last few answers: a strategy is read, checked, simulated and written, and each asks for its units."""


def unit_graph(graph: Graph, strategy: Strategy) -> UnitGraph:
    """Units of ``strategy`` on ``graph``; ``strategy.order`` is not looked at.

    Raises:
        IllegalStrategyError: an id is out of range or of a kind that cannot stand there, a node
            is owned twice, a duplicate is read by nothing in its group, an all-reduce is in no
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
    units = _all_units(graph, strategy)
    sources = _sources(graph, {node for unit in units for node in unit.nodes})
    reads = [_reads(graph, unit, sources) for unit in units]
    executed = _executed(graph, units, reads, sources[graph.root])
    units = [units[i] for i in executed]
    reads = [reads[i] for i in executed]
    owner = {node: i for i, unit in enumerate(units) for node in unit.nodes}
    dependencies = [{owner[source] for source in read} for read in reads]
    _add_before_pairs(graph, units, dependencies)
    _reject_cycle(units, dependencies)
    values = _values(graph, units, reads, set(sources[graph.root]))
    return UnitGraph(tuple(units), tuple(tuple(sorted(needed)) for needed in dependencies), values)


def _all_units(graph: Graph, strategy: Strategy) -> list[Unit]:
    kind = flat_graph(graph).kind
    fusible = {*np.flatnonzero(kind == Kind.FUSIBLE).tolist()}
    units = [_group_unit(graph, i, group, fusible) for i, group in enumerate(strategy.groups)]
    units += [_bucket_unit(graph, i, bucket) for i, bucket in enumerate(strategy.buckets)]
    owner: dict[int, str] = {}
    for unit in units:
        for node in unit.nodes:
            if node in owner:
                raise IllegalStrategyError(
                    f"{_name(graph, node)} belongs to {owner[node]} and to {unit.token}; one may own it."
                )
            owner[node] = unit.token
    left_out = [node for node in graph.all_reduces if node not in owner]
    if left_out:
        raise IllegalStrategyError(
            f"All-reduces are in no bucket: {some(_name(graph, node) for node in left_out)}."
        )
    running = np.flatnonzero((kind == Kind.FUSIBLE) | (kind == Kind.FIXED))
    return units + [Unit(f"n{node}", (node,)) for node in running.tolist() if node not in owner]


def _group_unit(graph: Graph, number: int, group: Group, fusible: Set[int]) -> Unit:
    token = f"g{number}"
    if not group.nodes:
        raise IllegalStrategyError(f"{token} owns no node.")
    inside = {*group.nodes, *group.duplicates}
    for ids in (group.nodes, group.duplicates):
        is_ascending = all(map(lt, ids, ids[1:]))
        _check_ids(graph, token, (*ids[:1], *ids[-1:]) if is_ascending else ids)
        if not is_ascending:
            raise IllegalStrategyError(f"{token} does not list its nodes in ascending order: {some(ids)}.")
    for node in (*group.nodes, *group.duplicates) if not inside <= fusible else ():
        if not _may_be_grouped(graph, node):
            raise IllegalStrategyError(
                f"{token} holds {_name(graph, node)}, which cannot be part of a kernel "
                f"({graph.nodes[node].kind.name.lower()})."
            )
    both = set(group.nodes).intersection(group.duplicates)
    for node in group.duplicates:
        if node in both:
            raise IllegalStrategyError(f"{token} both owns and duplicates {_name(graph, node)}.")
        if inside.isdisjoint(graph.users[node]):
            raise IllegalStrategyError(f"{token} duplicates {_name(graph, node)}, which nothing in it reads.")
    return Unit(token, group.nodes, group.duplicates)


def _bucket_unit(graph: Graph, number: int, bucket: Bucket) -> Unit:
    token = f"b{number}"
    if not bucket.all_reduces:
        raise IllegalStrategyError(f"{token} holds no all-reduce.")
    _check_ids(graph, token, bucket.all_reduces)
    for node in bucket.all_reduces:
        if graph.nodes[node].kind is not Kind.ALL_REDUCE:
            raise IllegalStrategyError(f"{token} holds {_name(graph, node)}, which is no all-reduce.")
    return Unit(token, bucket.all_reduces)


def _check_ids(graph: Graph, token: str, ids: Iterable[int]) -> None:
    for node in ids:
        if not 0 <= node < len(graph):
            raise IllegalStrategyError(
                f"{token} holds node {node}, but the graph has nodes 0 to {len(graph) - 1}."
            )


def _may_be_grouped(graph: Graph, node: int) -> bool:
    kind = graph.nodes[node].kind
    if kind is Kind.FREE:
        return graph.nodes[node].opcode not in ("tuple", "get-tuple-element", "opt-barrier")
    return kind in (Kind.FUSIBLE, Kind.FIXED)


def _sources(graph: Graph, owned: Collection[int]) -> list[tuple[int, ...]]:
    """For each node, the owned nodes whose values one gets by reading it from outside."""
    sources: list[tuple[int, ...]] = []
    for node in graph.nodes:
        if node.id in owned:
            sources.append((node.id,))
        elif len(node.operands) == 1:
            sources.append(sources[node.operands[0]])
        elif node.operands:
            sources.append(tuple(dict.fromkeys(s for operand in node.operands for s in sources[operand])))
        else:
            sources.append(())
    return sources


def _reads(graph: Graph, unit: Unit, sources: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    computed = (*unit.nodes, *unit.duplicates)
    if len(computed) == 1 and len(graph.nodes[computed[0]].operands) == 1:
        return tuple(sorted(sources[graph.nodes[computed[0]].operands[0]]))
    operands: set[int] = set()
    for node in computed:
        operands.update(graph.nodes[node].operands)
    # A bucket's members travel at once: one that reads another waits for its own bucket, a cycle.
    if not unit.is_bucket:
        operands.difference_update(computed)
    found: set[int] = set()
    for operand in operands:
        found.update(sources[operand])
    return tuple(sorted(found))


def _executed(
    graph: Graph, units: Sequence[Unit], reads: Sequence[tuple[int, ...]], returned: Sequence[int]
) -> list[int]:
    """Indices of the units that run: all but single fusible ops which every reader recomputes."""
    owner = {node: i for i, unit in enumerate(units) for node in unit.nodes}
    executed = {owner[node] for node in returned} | {
        i for i, unit in enumerate(units) if unit.token[0] != "n" or _runs_unread(graph, unit.nodes[0])
    }
    pending = list(executed)
    while pending:
        for source in reads[pending.pop()]:
            if owner[source] not in executed:
                executed.add(owner[source])
                pending.append(owner[source])
    return sorted(executed)


def _runs_unread(graph: Graph, node: int) -> bool:
    return graph.nodes[node].kind is Kind.FIXED or not graph.users[node]


def _add_before_pairs(graph: Graph, units: Sequence[Unit], dependencies: Sequence[set[int]]) -> None:
    if not graph.before:
        return
    computing: dict[int, list[int]] = {}
    for i, unit in enumerate(units):
        for node in (*unit.nodes, *unit.duplicates):
            computing.setdefault(node, []).append(i)

    def running(node: int) -> set[int]:
        """Units that execute a node; for a member of a tuple, those that read it."""
        found: set[int] = set()
        pending = [node]
        while pending:
            current = pending.pop()
            found.update(computing.get(current, ()))
            if graph.nodes[current].opcode == "get-tuple-element":
                pending += graph.users[current]
        return found

    buffers = _overwritten(graph)
    for first, second in graph.before:
        earlier = {i for i in running(first) if not _has_own_copy(units[i].duplicates, buffers.get(second))}
        for later in running(second):
            dependencies[later] |= earlier - {later}


def _overwritten(graph: Graph) -> dict[int, list[int]]:
    """What each node that updates in place overwrites."""
    found: dict[int, list[int]] = {}
    for buffer, writer in graph.inplace:
        found.setdefault(writer, []).append(buffer)
    return found


def _has_own_copy(duplicates: Collection[int], buffers: Sequence[int] | None) -> bool:
    """Whether a kernel recomputes all that is overwritten, and so may read it afterwards."""
    return buffers is not None and all(buffer in duplicates for buffer in buffers)


def groups_with_own_copies(graph: Graph, groups: Sequence[Group]) -> frozenset[int]:
    """Positions of the groups that use a value which another unit overwrites, but recompute it, so that
    they may run after that unit. XLA makes such kernels; the search does not reckon with them."""
    buffers = _overwritten(graph)
    writers: dict[int, list[int]] = {}
    for first, second in graph.before:
        writers.setdefault(first, []).append(second)
    return frozenset(
        i
        for i, group in enumerate(groups)
        if group.duplicates
        and any(
            _has_own_copy(group.duplicates, buffers.get(second))
            for node in (*group.nodes, *group.duplicates)
            for second in writers.get(node, ())
        )
    )


def _reject_cycle(units: Sequence[Unit], dependencies: Sequence[set[int]]) -> None:
    missing = [len(needed) for needed in dependencies]
    dependents: list[list[int]] = [[] for _ in units]
    for i, needed in enumerate(dependencies):
        for j in needed:
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
        path.append(min(dependencies[path[-1]] & stuck))
    cycle = path[path.index(path[-1]) :]
    raise CircleError(
        "Units wait for each other in a circle: "
        + " waits for ".join(_describe(units[i]) for i in cycle)
        + ".",
        tuple(units[i].token for i in cycle[:-1]),
    )


def _values(
    graph: Graph, units: Sequence[Unit], reads: Sequence[tuple[int, ...]], returned: Collection[int]
) -> tuple[Value, ...]:
    readers: dict[int, list[int]] = {}
    for i, read in enumerate(reads):
        for node in read:
            readers.setdefault(node, []).append(i)
    values = []
    for i, unit in enumerate(units):
        results = [node for node in unit.nodes if node in readers or node in returned]
        if unit.token[0] == "g" and not results:
            raise IllegalStrategyError(f"Nothing reads what {_describe(unit)} produces.")
        for node in sorted(results if unit.token[0] == "g" else unit.nodes):
            size_bytes = graph.nodes[node].shape.size_bytes
            values.append(Value(node, size_bytes, i, tuple(readers.get(node, ())), node in returned))
    return tuple(values)


def _describe(unit: Unit) -> str:
    return unit.token if unit.token[0] == "n" else f"{unit.token} (nodes {some(unit.nodes)})"


def _name(graph: Graph, node: int) -> str:
    named = graph.nodes[node]
    return f"node {node} ({named.opcode} {named.name})" if named.name else f"node {node} ({named.opcode})"


def some(items: Iterable[object], limit: int = 8) -> str:
    """The first few of ``items``, comma separated, for the text of an error."""
    listed = list(items)
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(map(str, listed[:limit])) + rest
