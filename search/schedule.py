"""Buckets and order for given kernels: what is left to decide once the op fusion is fixed.

DisCo leaves the order to a ready queue and combines neighbouring all-reduces at random (sections 4.4
and 4.5). With the kernels fixed both can be computed. A list schedule brings the gradients forward;
its compute order fixes when each gradient exists; for that order the best buckets of neighbouring
gradients follow by dynamic programming over the finishing time of the channel; and with the buckets
the order is made again, since an all-reduce now waits for its last member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.cost_model import CostModel, as_all_reduces
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.opcodes import moves_data
from disco_hlo.plan.baselines import all_reduce_depths, unfused
from disco_hlo.plan.legal import bucket_of
from disco_hlo.plan.normal import normal_form
from disco_hlo.plan.order import default_unit_order, late_waits
from disco_hlo.plan.strategy import Bucket, Group, Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.simulator.build import Built, build
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.orders import Prefetch, list_schedule
from disco_hlo.simulator.timeline import simulate

MOST_AHEAD = (4, 16, 1 << 20)
"""How many all-gathers may be ahead of their readers: orders with each of these are tried."""
MOST_GRADIENTS = 1024
"""Of more of them not every run is looked at: that would be millions."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A strategy with its order written out."""

    strategy: Strategy
    predicted_ns: int
    peak_bytes: int


def with_order(
    graph: Graph,
    strategy: Strategy,
    costs: CostModel,
    machine: MachineModel,
    limit_bytes: int | None = None,
) -> Scheduled:
    """``strategy`` in normal form with the best of the orders at hand: its own, the default, a list schedule; and where
    collectives overlap with kernels, its kernels as they come with collectives started early.

    Args:
        limit_bytes: most memory that an order may be predicted to need, if any needs no more.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    normal = normal_form(graph, strategy)
    built = build(graph, replace(normal, order=()), costs, machine)
    listed = list_schedule(built.units, *_unit_times(built), asynchronous=machine.asynchronous)
    own = normal.order or default_unit_order(built.units, machine.asynchronous)
    orders = [listed, default_unit_order(built.units, machine.asynchronous), own]
    if machine.asynchronous:
        orders += _early_collectives(graph, built, own)
    return best_of(graph, normal, orders, costs, machine, limit_bytes)


def with_early_collectives(
    graph: Graph,
    strategy: Strategy,
    costs: CostModel,
    machine: MachineModel,
    limit_bytes: int | None = None,
) -> Scheduled:
    """``strategy`` in normal form, its kernels in the order that it gives them, and every collective started as early
    as its operand allows; on a machine whose collectives overlap with kernels.

    What is known of a kernel's time holds for the order in which it was measured: no estimate of another decides here.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    normal = normal_form(graph, strategy)
    built = build(graph, replace(normal, order=()), costs, machine)
    own = normal.order or default_unit_order(built.units, machine.asynchronous)
    return best_of(graph, normal, _early_collectives(graph, built, own), costs, machine, limit_bytes)


def best_of(
    graph: Graph,
    strategy: Strategy,
    orders: Sequence[tuple[str, ...]],
    costs: CostModel,
    machine: MachineModel,
    limit_bytes: int | None = None,
) -> Scheduled:
    """A strategy in the fastest of some orders that needs no more memory than the limit; if all do, in that which needs
    least. Asynchronous copies are waited for where they are read."""
    units = unit_graph(graph, strategy)
    found = []
    for order in dict.fromkeys(late_waits(graph, units, order) for order in orders):
        ordered = replace(strategy, order=order)
        timeline = simulate(build(graph, ordered, costs, machine).problem)
        found.append(Scheduled(ordered, timeline.makespan_ns, timeline.peak_bytes))
    fitting = [one for one in found if limit_bytes is None or one.peak_bytes <= limit_bytes]
    if not fitting:
        return min(found, key=lambda one: one.peak_bytes)
    return min(fitting, key=lambda one: one.predicted_ns)


def _early_collectives(graph: Graph, built: Built, own: Sequence[str]) -> list[tuple[str, ...]]:
    units, (durations, collectives) = built.units, _unit_times(built)
    kernels = [units.index[token] for token in own if token[0] != "b"]
    gathers = [unit.is_bucket and graph.nodes[unit.nodes[0]].opcode == "all-gather" for unit in units.units]
    moves = [
        all(moves_data(graph.nodes[node]) for node in (*unit.nodes, *unit.duplicates)) for unit in units.units
    ]
    windows = MOST_AHEAD if any(gathers) else MOST_AHEAD[-1:]
    return [
        Prefetch(units, kernels, durations, collectives, moves, gathers, most).order() for most in windows
    ]


def best_buckets(
    graph: Graph,
    groups: Sequence[Group],
    costs: CostModel,
    machine: MachineModel,
    *,
    form: str = "concat",
    rounds: int = 2,
) -> Scheduled:
    """The best buckets and order found for these kernels.

    Args:
        form: how a bucket of several travels (see ``Bucket``).
        rounds: how often buckets are recomputed for the order that the previous ones led to.

    Raises:
        IllegalStrategyError: the groups do not fit the graph.
    """
    best = with_order(graph, unfused(graph, groups), costs, machine)
    current = best
    for _ in range(rounds):
        ready = _ready_times(graph, current.strategy, costs, machine)
        buckets = _neighbours_together(graph, ready, costs, machine, form)
        try:
            current = with_order(graph, Strategy(tuple(groups), buckets), costs, machine)
        except IllegalStrategyError:
            # A kernel both reads one member and makes another: these gradients cannot wait for each other.
            break
        best = min(best, current, key=lambda one: one.predicted_ns)
    return best


def contiguous_buckets(
    ready_ns: Sequence[int],
    sizes_bytes: Sequence[int],
    kinds: Sequence[object],
    transfer_ns: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    wait_ns: int = 0,
) -> list[list[int]]:
    """Split gradients, in the order in which they become ready, into runs that travel together.

    The channel serves the runs in turn; a run starts when the channel is free and its last gradient is
    ready. Of all ways to cut, this is one whose last transfer ends first, with the fewest runs among
    equals. O(n^2) for n gradients; of more than :data:`MOST_GRADIENTS` neighbours are taken together first.

    Args:
        ready_ns: when each gradient exists, ascending.
        sizes_bytes: its size.
        kinds: only equal kinds may travel together.
        transfer_ns: times of all-reduces of so many bytes.
        wait_ns: what each takes longer where it begins beside compute: here all do.
    """
    count = len(ready_ns)
    if not count:
        return []
    if count > MOST_GRADIENTS:
        blocks = _blocks(kinds, -(-count // MOST_GRADIENTS))
        if len(blocks) > 2 * MOST_GRADIENTS:  # few of them may travel with their neighbours
            return blocks
        found = _best_runs(
            [ready_ns[block[-1]] for block in blocks],
            [sum(sizes_bytes[i] for i in block) for block in blocks],
            [kinds[block[0]] for block in blocks],
            transfer_ns,
            wait_ns,
        )
        return [[i for block in run for i in blocks[block]] for run in found]
    return _best_runs(ready_ns, sizes_bytes, kinds, transfer_ns, wait_ns)


def _best_runs(
    ready_ns: Sequence[int],
    sizes_bytes: Sequence[int],
    kinds: Sequence[object],
    transfer_ns: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    wait_ns: int,
) -> list[list[int]]:
    count = len(ready_ns)
    ends = np.cumsum([0, *sizes_bytes], dtype=np.int64)
    together_ns = np.asarray(transfer_ns(np.maximum(ends[None, :] - ends[:, None], 0)), np.int64) + wait_ns
    alike = np.zeros(count, np.int64)
    for i in range(1, count):
        alike[i] = alike[i - 1] if kinds[i] == kinds[i - 1] else i
    cut = _cuts(np.array(ready_ns, np.int64), together_ns, alike)
    found: list[list[int]] = []
    end = count
    while end:
        found.append(list(range(cut[end], end)))
        end = int(cut[end])
    return found[::-1]


def _blocks(kinds: Sequence[object], most: int) -> list[list[int]]:
    """Runs of neighbours of one kind, so many at most."""
    blocks: list[list[int]] = []
    for i, kind in enumerate(kinds):
        if blocks and len(blocks[-1]) < most and kinds[blocks[-1][0]] == kind:
            blocks[-1].append(i)
        else:
            blocks.append([i])
    return blocks


@compiled
def _cuts(ready_ns: Any, together_ns: Any, alike: Any) -> Any:
    """Where the last run begins if gradients end there, for each number of gradients.

    Args:
        together_ns: ``[gradients + 1, gradients + 1]``: time of a run by where it begins and where it ends.
        alike: for each gradient the first that it may travel with.
    """
    count = ready_ns.size
    finish, runs, cut = (
        np.zeros(count + 1, np.int64),
        np.zeros(count + 1, np.int64),
        np.zeros(count + 1, np.int64),
    )
    for end in range(1, count + 1):
        for start in range(alike[end - 1], end):
            total = max(finish[start], ready_ns[end - 1]) + together_ns[start, end]
            fewer = total == finish[end] and runs[start] + 1 < runs[end]
            if start == alike[end - 1] or total < finish[end] or fewer:
                finish[end], runs[end], cut[end] = total, runs[start] + 1, start
    return cut


def _unit_times(built: Built) -> tuple[list[int], list[int]]:
    """For each unit, its time on the compute stream and on a channel."""
    durations = [0] * len(built.units.units)
    transfers = [0] * len(built.units.units)
    for task, unit in enumerate(built.unit_of):
        times = transfers if built.problem.communicates[task] else durations
        times[unit] += int(built.problem.duration_ns[task])
    return durations, transfers


def _ready_times(graph: Graph, strategy: Strategy, costs: CostModel, machine: MachineModel) -> dict[int, int]:
    """When the operand of each all-reduce exists, in the simulated order of ``strategy``."""
    built = build(graph, strategy, costs, machine)
    spans: NDArray[np.int64] = simulate(built.problem).spans_ns
    end = [0] * len(built.units.units)
    for task, unit in enumerate(built.unit_of):
        end[unit] = max(end[unit], int(spans[1, task]))
    maker = {node: i for i, unit in enumerate(built.units.units) for node in unit.nodes}

    def exists(node: int) -> int:
        if node in maker:
            return end[maker[node]]
        return max((exists(operand) for operand in graph.nodes[node].operands), default=0)

    return {node: exists(graph.nodes[node].operands[0]) for node in graph.all_reduces}


def _neighbours_together(
    graph: Graph, ready: dict[int, int], costs: CostModel, machine: MachineModel, form: str
) -> tuple[Bucket, ...]:
    if not ready:  # a step on one device, whose profile knows no transfers
        return ()
    depth = all_reduce_depths(graph)
    ranked = sorted(ready, key=lambda node: (ready[node], node))
    line, size_bytes = as_all_reduces(graph, costs)
    sizes = size_bytes[ranked].tolist()
    kinds = [(graph.nodes[node].collective, graph.nodes[node].shape.dtype, depth[node]) for node in ranked]
    # Where collectives block the compute stream it does not matter when a gradient is ready.
    times = [ready[node] if machine.asynchronous else 0 for node in ranked]
    runs = contiguous_buckets(times, sizes, kinds, line, machine.pace().wait_ns)
    return tuple(bucket_of(graph, [ranked[i] for i in run], form) for run in runs)
