"""From a strategy to the tasks that the engine runs: the one part of the simulator that reads HLO.

A group or single op is one task on the compute stream. A bucket is a transfer on a channel, or on
the compute stream where collectives block or the bucket is small enough for a one-shot kernel;
a concatenated bucket of several also has a ``pack`` before it and an ``unpack`` after it.
With an order, ``b2.start`` packs and issues, ``b2.done`` waits and unpacks. Without one (the
paper's ready queue) whatever is ready runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.order import UnitGraph, check_order, default_unit_order, unit_graph
from disco_hlo.plan.strategy import Bucket, Strategy
from disco_hlo.simulator.costs import MAX_TOTAL_NS, CostModel, MachineModel
from disco_hlo.simulator.problem import Buffers, Lists, Problem


@dataclass(frozen=True, eq=False)
class Built:
    """A problem with where its tasks come from."""

    problem: Problem
    units: UnitGraph
    unit_of: tuple[int, ...]
    """For each task, the index of its unit in ``units``."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """For each task, the token of its unit (``b2`` for a bucket's transfer, pack and unpack)."""
        return tuple(self.units.units[unit].token for unit in self.unit_of)


@dataclass(slots=True)
class _Tasks:
    """Tasks while they are collected, and each unit's first, main and last one."""

    names: list[str] = field(default_factory=list)
    duration_ns: list[int] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    communicates: list[bool] = field(default_factory=list)
    unit_of: list[int] = field(default_factory=list)
    first: dict[int, int] = field(default_factory=dict)
    main: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    def add(
        self, name: str, unit: int, duration_ns: int, resource: int = 0, communicates: bool = False
    ) -> int:
        self.names.append(name)
        self.duration_ns.append(duration_ns)
        self.resource.append(resource)
        self.communicates.append(communicates)
        self.unit_of.append(unit)
        return len(self.names) - 1


def build(
    graph: Graph,
    strategy: Strategy,
    cost_model: CostModel,
    machine: MachineModel,
    *,
    ready_queue: bool = False,
) -> Built:
    """The problem that ``strategy`` poses on ``machine``.

    Args:
        ready_queue: leave the order to the ready queue of DisCo, section 4.4, instead of taking
            ``strategy.order`` (or the default order where that is empty).

    Raises:
        IllegalStrategyError: the strategy does not fit the graph, or its order is wrong.
        DiscoError: the cost model gave a negative or non-finite time or too few of them; the
            message names the unit.
    """
    units = unit_graph(graph, strategy)
    order = None if ready_queue else strategy.order or default_unit_order(units, machine.asynchronous)
    if order is not None:
        check_order(units, order, machine.asynchronous)
    tasks = _tasks(graph, strategy, units, cost_model, machine)
    if machine.asynchronous:
        _spread_over_channels(tasks, units, order, machine.channels)
    problem = Problem(
        names=tuple(tasks.names),
        duration_ns=np.array(tasks.duration_ns, np.int64),
        resource=np.array(tasks.resource, np.int32),
        predecessors=_predecessors(tasks, units),
        communicates=np.array(tasks.communicates, np.bool_),
        speed_ppm=machine.speed_ppm(),
        order=None if order is None else _entries(tasks, units, order),
        buffers=_buffers(graph, units, tasks),
        resident_bytes=sum(
            node.shape.size_bytes for node in graph.nodes if node.kind in (Kind.PARAMETER, Kind.CONSTANT)
        ),
    )
    return Built(problem, units, tuple(tasks.unit_of))


def _tasks(
    graph: Graph, strategy: Strategy, units: UnitGraph, cost_model: CostModel, machine: MachineModel
) -> _Tasks:
    nodes, groups = graph.nodes, strategy.groups
    nodes_ns = _checked(cost_model.nodes_ns(graph), len(nodes), lambda i: f"node {i} ({nodes[i].opcode})")
    groups_ns = _checked(cost_model.groups_ns(graph, groups), len(groups), lambda i: f"g{i}")
    tasks = _Tasks()
    for i in sorted(range(len(units.units)), key=lambda i: min(units.units[i].nodes)):
        unit = units.units[i]
        number = int(unit.token[1:])
        if unit.is_bucket:
            _add_bucket(tasks, graph, i, number, strategy.buckets[number], cost_model, machine)
            continue
        alone_ns = nodes_ns[number] if unit.token[0] == "n" else groups_ns[number]
        task = tasks.add(unit.token, i, int(alone_ns) + machine.launch_ns)
        tasks.first[i] = tasks.main[i] = tasks.last[i] = task
    return tasks


def _add_bucket(
    tasks: _Tasks,
    graph: Graph,
    unit: int,
    number: int,
    bucket: Bucket,
    cost_model: CostModel,
    machine: MachineModel,
) -> None:
    sizes = np.array([graph.nodes[node].shape.size_bytes for node in bucket.all_reduces], np.int64)
    total = int(sizes.sum())
    token = f"b{number}"
    packed = bucket.form == "concat" and len(sizes) > 1
    # Where collectives block, the operands of a variadic all-reduce are transferred one by one.
    apart = bucket.form == "variadic" and not machine.asynchronous
    carried = sizes if apart else np.array([total], np.int64)
    times = cost_model.all_reduce_ns(carried)
    transfer_ns = int(_checked(times, len(carried), lambda i: f"{token} of {carried[i]} bytes").sum())
    on_channel = machine.asynchronous and total > machine.one_shot_max_bytes
    if packed:
        pack_ns = machine.launch_ns + _copy_ns(total, machine.pack_bytes_per_us)
        tasks.first[unit] = tasks.add(token + ".pack", unit, pack_ns)
    launch_ns = 0 if on_channel else machine.launch_ns
    tasks.main[unit] = tasks.add(token, unit, transfer_ns + launch_ns, int(on_channel), True)
    if packed:
        unpack_ns = len(sizes) * machine.launch_ns + _copy_ns(total, machine.unpack_bytes_per_us)
        tasks.last[unit] = tasks.add(token + ".unpack", unit, unpack_ns)
    tasks.first.setdefault(unit, tasks.main[unit])
    tasks.last.setdefault(unit, tasks.main[unit])


def _copy_ns(size_bytes: int, bytes_per_us: int) -> int:
    return -(-size_bytes * 1000 // bytes_per_us) if bytes_per_us else 0


def _checked(times: ArrayLike, count: int, name: Callable[[int], str]) -> NDArray[np.int64]:
    """Times of a cost model as int64; refuses what cannot be one."""
    found = np.asarray(times)
    if found.shape != (count,) or found.dtype.kind not in "iuf":
        raise DiscoError(
            f"The cost model returned {found.dtype}{list(found.shape)}, expected {count} times in ns."
        )
    wrong = np.flatnonzero(~((found >= 0) & (found <= MAX_TOTAL_NS)))
    if wrong.size:
        first = int(wrong[0])
        raise DiscoError(
            f"The cost model says that {name(first)} takes {found[first]} ns, "
            f"expected a number from 0 to {MAX_TOTAL_NS}."
        )
    return np.rint(found).astype(np.int64)


def _spread_over_channels(
    tasks: _Tasks, units: UnitGraph, order: tuple[str, ...] | None, channels: int
) -> None:
    """Give the transfers to the channels in turn, in the order in which they are issued."""
    issued = (
        sorted(tasks.main.values())
        if order is None
        else [tasks.main[units.index[token.partition(".")[0]]] for token in order if token.endswith(".start")]
    )
    for turn, task in enumerate(task for task in issued if tasks.resource[task] > 0):
        tasks.resource[task] = 1 + turn % channels


def _predecessors(tasks: _Tasks, units: UnitGraph) -> Lists:
    rows: list[list[int]] = [[] for _ in tasks.names]
    for unit, needed in enumerate(units.dependencies):
        first, main, last = tasks.first[unit], tasks.main[unit], tasks.last[unit]
        rows[first] += sorted(tasks.last[other] for other in needed)
        if first != main:
            rows[main].append(first)
            rows[last].append(main)
    return Lists.of(rows)


def _entries(tasks: _Tasks, units: UnitGraph, order: tuple[str, ...]) -> NDArray[np.int32]:
    entries: list[int] = []
    for token in order:
        name, _, part = token.partition(".")
        unit = units.index[name]
        first, main, last = tasks.first[unit], tasks.main[unit], tasks.last[unit]
        if part != "done":
            entries += [first, main] if first != main else [main]
        if part == "done" and tasks.resource[main] > 0:
            entries.append(~main)
        if part != "start" and last != main:
            entries.append(last)
    return np.array(entries, np.int32)


def _buffers(graph: Graph, units: UnitGraph, tasks: _Tasks) -> Buffers:
    rows: dict[int, tuple[int, int, set[int], bool]] = {}
    storage = _storage(graph, {value.node for value in units.values})
    for value in sorted(units.values, key=lambda value: value.node):
        producer = tasks.last[value.producer]
        readers = {tasks.first[reader] for reader in value.readers}
        place = storage.get(value.node, value.node)
        if place == value.node:
            rows[place] = (value.size_bytes, producer, readers, value.returned)
        elif place in rows:
            size_bytes, first, others, returned = rows[place]
            rows[place] = (size_bytes, first, others | readers | {producer}, returned or value.returned)
    listed = list(rows.values())
    for unit, first in tasks.first.items():
        main, last = tasks.main[unit], tasks.last[unit]
        if first != main:
            size_bytes = sum(graph.nodes[node].shape.size_bytes for node in units.units[unit].nodes)
            listed += [(size_bytes, first, {main}, False), (size_bytes, main, {last}, False)]
    return Buffers.of([(size, producer, sorted(readers), kept) for size, producer, readers, kept in listed])


def _storage(graph: Graph, values: set[int]) -> dict[int, int]:
    """For each op that overwrites a buffer in place, the node whose storage it ends up in."""
    storage: dict[int, int] = {}
    for buffer, writer in sorted(graph.inplace, key=lambda pair: pair[1]):
        node = buffer
        while graph.nodes[node].kind is Kind.FREE and node not in values and graph.nodes[node].operands:
            node = graph.nodes[node].operands[0]
        storage[writer] = storage.get(node, node)
    return storage
