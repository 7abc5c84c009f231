"""From a strategy to the tasks that the engine runs: the one part of the simulator that reads HLO.

It follows what ``apply`` writes. A group or single op is one task on the compute stream. A bucket
is a collective on a channel, or a task on the compute stream where collectives block or where it
is small enough for a one-shot kernel. A concatenated bucket of several has a ``pack`` kernel
before it; generated kernels cut their gradients out of its result themselves, for any other
reader one ``unpack`` kernel per gradient does so. With an order, ``b2.start`` packs and issues,
``b2.done`` waits, and a gradient is unpacked right before its first reader.

An op that runs collectives of its own, such as a loop, is two tasks: what it does before the first of them, and the
rest. Collectives take turns, so those that were issued before the op are over before the rest begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.cost_model import CostModel, Kernels, OnOneLine, on_one_line
from disco_hlo.hlo.graph import Graph, Kind, behind_bitcasts, kernel_nodes
from disco_hlo.hlo.opcodes import PRODUCTS
from disco_hlo.plan.legal import check_order, default_order
from disco_hlo.plan.plan import Group, Strategy
from disco_hlo.plan.read import Repeat
from disco_hlo.plan.units import Unit, UnitGraph, Value, unit_graph
from disco_hlo.simulator.costs import MAX_TOTAL_NS, MachineModel, bucket_times, checked, holds_ns, unit_for
from disco_hlo.simulator.problem import Buffers, Lists, Problem

RESIDENT = (Kind.PARAMETER, Kind.CONSTANT)
CUTS_GRADIENTS = ("loop", "input")
"""Group kinds whose kernels read a gradient where it lies in its bucket."""


@dataclass(frozen=True, eq=False)
class Built:
    """A problem with where its tasks come from."""

    problem: Problem
    units: UnitGraph
    unit_of: tuple[int, ...]
    """For each task, the index of its unit in ``units``."""
    calls: tuple[int, ...] = ()
    """Tasks that begin where the first collective inside an op does."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """For each task, the token of its unit (``b2`` for a bucket's collective, pack and unpacks)."""
        return tuple(self.units.units[unit].token for unit in self.unit_of)


def build(
    graph: Graph,
    strategy: Strategy,
    cost_model: CostModel,
    machine: MachineModel,
    *,
    repeats: Sequence[Repeat] = (),
) -> Built:
    """The problem that ``strategy`` poses on ``machine``, in the default order where it has none.

    Args:
        repeats: what runs besides (:func:`~disco_hlo.plan.read.repeats`); each counts as part of what runs next.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph, or its order is wrong.
        DiscoError: the cost model gave a negative or non-finite time or too few of them; the
            message names the unit.
    """
    [built] = in_orders(graph, strategy, [strategy.order], cost_model, machine, repeats=repeats)
    return built


def in_orders(
    graph: Graph,
    strategy: Strategy,
    orders: Sequence[tuple[str, ...]],
    cost_model: CostModel,
    machine: MachineModel,
    *,
    repeats: Sequence[Repeat] = (),
) -> Iterator[Built]:
    """:func:`build` of a strategy in each of some orders, in the place of its own. Its tasks and buffers, which take
    most of the time, are found once."""
    units = unit_graph(graph, strategy)
    tasks, shared = _Tasks(), None
    for given in orders:
        order = given or default_order(units, machine.asynchronous)
        check_order(units, order, machine.asynchronous)
        if shared is None:
            nodes_ns = checked(
                cost_model.op_ns(graph), len(graph), lambda node: f"node {node} ({graph.nodes[node].opcode})"
            )
            tasks = _tasks(graph, strategy, units, cost_model, machine, nodes_ns)
            _add_repeats(tasks, graph, units, repeats, cost_model, machine, nodes_ns)
        entries = _entries(tasks, units, order)
        if shared is None:
            unit_ns = _unit_of(tasks, machine)
            shared = Problem(
                names=tuple(tasks.names),
                duration_ns=_counted(tasks.duration_ns, unit_ns),
                resource=np.array(tasks.resource, np.int32),
                predecessors=_predecessors(tasks, units),
                communicates=np.array(tasks.communicates, np.bool_),
                speed_ppm=machine.speed_ppm(),
                products=np.array(tasks.products, np.bool_),
                hold_ns=np.array(tasks.hold_ns, np.int64) // unit_ns * unit_ns,
                transfer_wait_ns=machine.wait_ns // unit_ns * unit_ns,
                order=entries,
                buffers=_buffers(graph, units, tasks, cost_model.temporary_bytes(graph)),
                resident_bytes=resident_bytes(graph),
                unit_ns=unit_ns,
            )
        problem = replace(shared, order=entries)
        yield Built(problem, units, tuple(tasks.unit_of), tuple(tasks.main[unit] for unit in tasks.head))


def ready_ns(graph: Graph, built: Built, spans_ns: NDArray[np.int64]) -> dict[int, int]:
    """When what each collective reads exists, by the spans of the tasks (``[2, tasks]``)."""
    units = built.units.units
    ends = np.zeros(len(units), np.int64)
    np.maximum.at(ends, list(built.unit_of), spans_ns[1])
    exists = {node: int(end) for unit, end in zip(units, ends, strict=True) for node in unit.nodes}
    for node in graph.nodes:
        exists.setdefault(node.id, max((exists[x] for x in node.operands), default=0))
    return {x: max(exists[y] for y in graph.nodes[x].operands) for x in graph.collectives}


def resident_bytes(graph: Graph) -> int:
    """What a step's parameters and constants take up, whatever its plan."""
    return sum(node.shape.size_bytes for node in graph.nodes if node.kind in RESIDENT)


def _unit_of(tasks: _Tasks, machine: MachineModel) -> int:
    """What the time of all tasks together can be counted in."""
    total_ns = math.fsum(tasks.duration_ns) + machine.wait_ns * sum(map(bool, tasks.resource))
    if total_ns > MAX_TOTAL_NS:
        raise DiscoError(f"Durations add up to {total_ns:.3g} ns, expected at most {MAX_TOTAL_NS:.3g}.")
    return unit_for(total_ns)


def _counted(times_ns: Sequence[int], unit_ns: int) -> NDArray[np.int64]:
    """Times as whole multiples of a unit, what takes any at least one of it."""
    return -(-np.array(times_ns, np.int64) // unit_ns) * unit_ns


@dataclass(slots=True)
class _Tasks:
    """Tasks while they are collected."""

    names: list[str] = field(default_factory=list)
    duration_ns: list[int] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    communicates: list[bool] = field(default_factory=list)
    products: list[bool] = field(default_factory=list)
    hold_ns: list[int] = field(default_factory=list)
    unit_of: list[int] = field(default_factory=list)
    main: dict[int, int] = field(default_factory=dict)
    """Kernel or collective of each unit."""
    pack: dict[int, int] = field(default_factory=dict)
    """Kernel that packs a bucket."""
    head: dict[int, int] = field(default_factory=dict)
    """What a unit does before the first of its own collectives."""
    unpack: dict[int, int] = field(default_factory=dict)
    """Kernel that cuts a gradient, by its collective's node, out of its bucket."""
    unpacked_for: dict[int, list[int]] = field(default_factory=dict)
    """Collectives that a unit can read only unpacked."""

    def add(self, name: str, unit: int, duration_ns: int) -> int:
        self.names.append(name)
        self.unit_of.append(unit)
        self.duration_ns.append(duration_ns)
        self.resource.append(0)
        self.communicates.append(False)
        self.products.append(False)
        self.hold_ns.append(0)
        return len(self.names) - 1

    def first(self, unit: int) -> int:
        return self.pack.get(unit, self.head.get(unit, self.main[unit]))


def _tasks(
    graph: Graph,
    strategy: Strategy,
    units: UnitGraph,
    cost_model: CostModel,
    machine: MachineModel,
    nodes_ns: NDArray[np.int64],
) -> _Tasks:
    of_groups_ns = groups_ns(graph, units, cost_model, nodes_ns)
    collectives = on_one_line(graph, cost_model)
    hold_ns = holds_ns(cost_model, graph, nodes_ns)
    first_ns = cost_model.first_collective_ns(graph) if machine.asynchronous else {}
    tasks = _Tasks()
    for i in sorted(range(len(units.units)), key=lambda i: min(units.units[i].nodes)):
        unit = units.units[i]
        number = int(unit.token[1:])
        if unit.is_bucket:
            _add_bucket(tasks, graph, strategy, units, i, collectives, machine)
            continue
        alone_ns = nodes_ns[number] if unit.token[0] == "n" else of_groups_ns[number]
        takes_ns = int(alone_ns) + machine.launch_ns
        if unit.token[0] == "n" and number in first_ns:
            head_ns = min(first_ns[number], takes_ns)
            tasks.head[i] = tasks.add(unit.token + ".head", i, head_ns)
            takes_ns -= head_ns
        tasks.main[i] = tasks.add(unit.token, i, takes_ns)
        tasks.products[tasks.main[i]] = holds_product(graph, unit)
        longest_ns = int(hold_ns[list(unit.nodes)].max())
        tasks.hold_ns[tasks.main[i]] = max(0, min(tasks.duration_ns[tasks.main[i]] - 1, longest_ns))
    return tasks


def _add_repeats(
    tasks: _Tasks,
    graph: Graph,
    units: UnitGraph,
    repeats: Sequence[Repeat],
    cost_model: CostModel,
    machine: MachineModel,
    nodes_ns: NDArray[np.int64],
) -> None:
    unit_of = {node: number for number, unit in enumerate(units.units) for node in unit.nodes}
    kernels = [number for number, unit in enumerate(units.units) if not unit.is_bucket]
    if not repeats or not kernels:
        return
    last = max(kernels, key=lambda number: max(units.units[number].nodes))
    shortest_ns = min((ns for ns in nodes_ns.tolist() if ns > 0), default=0)
    for one in repeats:
        if not one.members:
            copied_bytes = sum(graph.nodes[x].shape.size_bytes for x in one.results)
            times = np.array([max(machine.copy_ns(copied_bytes) - machine.launch_ns, shortest_ns)])
        elif len(one.members) == 1:
            times = nodes_ns[[*one.members]]
        else:
            members = kernel_nodes(graph, one.members)
            times = cost_model.kernels_ns(graph, Kernels.of_lists([members], [one.results]))
        again_ns = checked(times, 1, lambda _: "a kernel of XLA's that computes something again")
        following = unit_of.get(one.before, last)
        tasks.duration_ns[tasks.main[following]] += int(again_ns[0]) + machine.launch_ns


def holds_product(graph: Graph, unit: Unit) -> bool:
    """Whether a kernel loses during collectives what matmuls lose."""
    return any(graph.nodes[node].opcode in PRODUCTS for node in unit.nodes)


def groups_ns(
    graph: Graph, units: UnitGraph, costs: CostModel, nodes_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Times of the strategy's groups, ``[groups]``.

    A kernel of one op costs what the op costs (``nodes_ns``, of all nodes), unless Triton emits it.

    Raises:
        DiscoError: as :func:`build` of a wrong time.
    """
    times = np.zeros(len(units.strategy.groups), np.int64)
    asked: list[int] = []
    for i, group in enumerate(units.strategy.groups):
        if group.kind != "triton" and len(group.ops) == 1:
            times[i] = nodes_ns[group.ops[0]]
        else:
            asked.append(i)
    if asked:
        found = costs.kernels_ns(graph, units.kernels(graph).chosen(np.array(asked)))
        times[asked] = checked(found, len(asked), lambda i: f"g{asked[i]}")
    return times


def _add_bucket(
    tasks: _Tasks,
    graph: Graph,
    strategy: Strategy,
    units: UnitGraph,
    unit: int,
    collectives: OnOneLine,
    machine: MachineModel,
) -> None:
    token, members = units.units[unit].token, units.units[unit].nodes
    form = strategy.buckets[int(token[1:])].form
    packed_bytes = None if form == "variadic" else sum(graph.nodes[x].shape.size_bytes for x in members)
    times = bucket_times(
        collectives.line, machine, collectives.of(members), packed_bytes=packed_bytes, name=token
    )
    if times.pack_ns is not None:
        tasks.pack[unit] = tasks.add(token + ".pack", unit, times.pack_ns)
    main = tasks.add(token, unit, times.main_ns)
    tasks.main[unit], tasks.communicates[main], tasks.resource[main] = main, True, int(times.on_channel)
    for value in units.values_of[unit] if times.pack_ns is not None else ():
        _add_unpack(tasks, graph, strategy, units, value, machine)


def _add_unpack(
    tasks: _Tasks, graph: Graph, strategy: Strategy, units: UnitGraph, value: Value, machine: MachineModel
) -> None:
    readers = [
        reader
        for reader in value.readers
        if not cuts_gradient(graph, _kernel(strategy, units.units[reader]), value.node)
    ]
    if not readers and not value.returned:
        return
    name = f"{units.units[value.producer].token}.unpack{value.node}"
    tasks.unpack[value.node] = tasks.add(name, value.producer, machine.copy_ns(value.size_bytes))
    for reader in readers:
        tasks.unpacked_for.setdefault(reader, []).append(value.node)


def _kernel(strategy: Strategy, unit: Unit) -> Group | int:
    """The group that a unit is, or the op; of a bucket any of its collectives."""
    return strategy.groups[int(unit.token[1:])] if unit.token[0] == "g" else unit.nodes[0]


def cuts_gradient(graph: Graph, kernel: Group | int, gradient: int) -> bool:
    """Whether the kernel of a group, or of an op by itself, finds a gradient in its bucket by itself."""
    if isinstance(kernel, Group):
        generated, ops = kernel.kind in CUTS_GRADIENTS, kernel.ops
    else:
        generated, ops = graph.nodes[kernel].kind is Kind.FUSIBLE, (kernel,)
    shown = behind_bitcasts(graph)
    return generated and any(shown[x] == gradient for op in ops for x in graph.nodes[op].operands)


def _predecessors(tasks: _Tasks, units: UnitGraph) -> Lists:
    rows: list[list[int]] = [[] for _ in tasks.names]
    for unit, needed in enumerate(units.dependencies):
        row = rows[tasks.first(unit)]
        row += [tasks.main[other] for other in needed]
        row += [tasks.unpack[node] for node in tasks.unpacked_for.get(unit, ())]
        row.sort()
    for unit, first in (*tasks.pack.items(), *tasks.head.items()):
        rows[tasks.main[unit]].append(first)
    for task in tasks.unpack.values():
        rows[task].append(tasks.main[tasks.unit_of[task]])
    return Lists.of(rows)


def _entries(tasks: _Tasks, units: UnitGraph, order: Sequence[str]) -> NDArray[np.int32]:
    entries: list[int] = []
    packed = dict(tasks.unpack)
    in_flight: dict[int, None] = {}
    for token in order:
        name, _, part = token.partition(".")
        unit = units.index[name]
        main = tasks.main[unit]
        if part == "done":
            entries += [~main] if tasks.resource[main] else []
            in_flight.pop(main, None)
            continue
        gradients = tasks.unpacked_for.get(unit, ())
        entries += [packed.pop(node) for node in gradients if node in packed]
        if unit in tasks.head:
            entries += [tasks.head[unit], *(~task for task in in_flight)]
        entries += [tasks.pack[unit], main] if unit in tasks.pack else [main]
        if tasks.resource[main]:
            in_flight[main] = None
    return np.array([*entries, *packed.values()], np.int32)


def _buffers(graph: Graph, units: UnitGraph, tasks: _Tasks, temporary_bytes: Mapping[int, int]) -> Buffers:
    """Buffers of all values, one for those that share storage, of packed buckets, and of ops that run other regions."""
    given = {buffer for node in graph.nodes if node.kind in RESIDENT for buffer in graph.lies_in[node.id]}
    returned = {*graph.lies_in[graph.root]}
    read_by = _readers(graph, units)
    rows: dict[int, tuple[int, int, set[int]]] = {}
    in_bucket: dict[int, set[int]] = {unit: set() for unit in tasks.pack}
    for value in sorted(units.values, key=lambda value: value.node):
        producer = tasks.unpack.get(value.node, tasks.main[value.producer])
        cutting: list[int] = []
        if value.producer in tasks.pack:
            cutting = [r for r in value.readers if value.node not in tasks.unpacked_for.get(r, ())]
            in_bucket[value.producer] |= {tasks.first(reader) for reader in cutting}
            if value.node not in tasks.unpack:
                continue
            in_bucket[value.producer].add(producer)
        leaves = graph.nodes[value.node].shape.leaves
        for buffer, leaf in zip(graph.lies_in[value.node], leaves, strict=True):
            if buffer in given:
                continue
            readers = {tasks.first(reader) for reader in read_by.get(buffer, ()) if reader not in cutting}
            size_bytes, first, others = rows.get(buffer, (leaf.size_bytes, producer, set[int]()))
            rows[buffer] = (size_bytes, first, others | readers | {producer})
    listed = [(*row, buffer in returned) for buffer, row in rows.items()]
    for unit, one in enumerate(units.units):
        if (needed := temporary_bytes.get(one.nodes[0], 0)) > 0:
            listed.append((needed, tasks.main[unit], set(), False))
    for unit, pack in tasks.pack.items():
        size_bytes = sum(graph.nodes[node].shape.size_bytes for node in units.units[unit].nodes)
        main = tasks.main[unit]
        listed += [(size_bytes, pack, {main}, False), (size_bytes, main, in_bucket[unit], False)]
    return Buffers.of([(size, task, sorted(readers), kept) for size, task, readers, kept in listed])


def _readers(graph: Graph, units: UnitGraph) -> dict[int, set[int]]:
    """By buffer the units that read it. Who reads one member of a tuple reads no other."""
    found: dict[int, set[int]] = {}
    for number, unit in enumerate(units.units):
        inside = set(unit.nodes)
        for x in {x for node in inside for x in graph.nodes[node].operands} - inside:
            for buffer in graph.lies_in[x]:
                found.setdefault(buffer, set()).add(number)
    return found
