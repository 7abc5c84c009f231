"""What a data-parallel step would gain if the state of its optimizer were split over the devices.

CoCoNet, sections 4 and 6.1.1: all-reduce and update (AR-Opt) against reduce-scatter, update of a share, all-gather
(RS-Opt-AG). The plan cannot make that move, since the step's signature holds the whole state; the user can. What
is said here is the simulator's word on the step as planned, with its kernels, buckets and order: the kernels of the
update take a Dth, each bucket becomes a reduce-scatter where it stands, and the all-gathers follow the kernels that
make what they gather.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.plan import Sharding
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import Unit
from disco_hlo.search.optimizer_state import Update, find_update
from disco_hlo.simulator.build import Built, build
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.timeline import Timeline, simulate

_NORM_BYTES = 4
_MIB = 1 << 20


def sharding_advice(
    graph: Graph,
    strategy: Strategy,
    costs: CostModel,
    machine: MachineModel,
    *,
    devices: int,
    replicated: Collection[int],
    everywhere: Collection[int],
) -> Sharding | None:
    """What the step would gain, carried out by ``strategy``; None where no state is to be split.

    Args:
        devices: over how many it would be split.
        replicated: entry parameters (their nodes) of which every device holds the whole.
        everywhere: all-reduces that all devices take part in together.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    update = find_update(graph, devices, replicated, everywhere)
    if update is None:
        return None
    built = build(graph, strategy, costs, machine)
    state_bytes = sum(graph.nodes[node].shape.size_bytes for node in update.state)
    return Sharding(
        devices=devices,
        state=update.state,
        state_bytes=state_bytes,
        saved_bytes=state_bytes - state_bytes // devices,
        step_ns=simulate(built.problem).makespan_ns,
        sharded_ns=_sharded_ns(graph, strategy, built, update, costs, machine, devices),
    )


def sentence(advice: Sharding) -> str:
    """The advice in words."""
    gained_ns = advice.step_ns - advice.sharded_ns
    saved = f"{advice.saved_bytes / _MIB:.1f} MiB a device"
    of_step = f"about {abs(gained_ns) / 1e6:.2f} ms of {advice.step_ns / 1e6:.2f} ms"
    return (
        f"sharding the optimizer state ({len(advice.state)} arrays, {advice.state_bytes / _MIB:.1f} MiB) over the "
        f"{advice.devices} devices would "
        + (f"save {of_step} and {saved}" if gained_ns >= 0 else f"cost {of_step} and save {saved}")
    )


def _sharded_ns(
    graph: Graph,
    strategy: Strategy,
    built: Built,
    update: Update,
    costs: CostModel,
    machine: MachineModel,
    devices: int,
) -> int:
    transfers = _Transfers(costs, machine, strategy)
    duration_ns = built.problem.duration_ns.copy()
    for task, unit in enumerate(built.unit_of):
        found = built.units.units[unit]
        if built.problem.communicates[task]:
            duration_ns[task] += _scattered_ns(graph, found, update, transfers)
        elif not found.is_bucket:
            work_ns = int(duration_ns[task]) - machine.launch_ns
            duration_ns[task] -= round(work_ns * _share(graph, found, update) * (1 - 1 / devices))
    timeline = simulate(replace(built.problem, duration_ns=duration_ns))
    end_ns = _gathered_ns(graph, built, timeline, update, transfers)
    return end_ns + (transfers.time_ns(None, [_NORM_BYTES]) if update.norms else 0)


@dataclass(frozen=True)
class _Transfers:
    """Times of transfers as the simulator has them."""

    costs: CostModel
    machine: MachineModel
    strategy: Strategy

    def time_ns(self, bucket: Unit | None, sizes_bytes: list[int]) -> int:
        """Of several arrays that travel as a bucket does, given by the all-reduces that move as many bytes."""
        sizes = np.array([size for size in sizes_bytes if size], np.int64)
        if not sizes.size:
            return 0
        form = "" if bucket is None else self.strategy.buckets[int(bucket.token[1:])].form
        if form != "variadic" or self.machine.asynchronous:
            sizes = sizes.sum(keepdims=True)
        return int(self.costs.all_reduce()(sizes).sum())


def _share(graph: Graph, unit: Unit, update: Update) -> float:
    """How much of a kernel is the update's, by the bytes that its ops make; what every kernel writes for itself
    (broadcasts, constants) is of no account."""
    made = [
        graph.nodes[node]
        for node in (*unit.nodes, *unit.duplicates)
        if graph.nodes[node].kind in (Kind.FUSIBLE, Kind.FIXED) and graph.nodes[node].opcode != "broadcast"
    ]
    total = sum(node.shape.size_bytes for node in made)
    return sum(node.shape.size_bytes for node in made if node.id in update.work) / max(1, total)


def _scattered_ns(graph: Graph, bucket: Unit, update: Update, transfers: _Transfers) -> int:
    """How much longer a bucket takes if the update's gradients in it are scattered: less than nothing, mostly."""
    scattered = [graph.transfer_bytes(node) for node in bucket.nodes if node in update.gradients]
    rest = [graph.transfer_bytes(node) for node in bucket.nodes if node not in update.gradients]
    if not scattered:
        return 0
    after_ns = transfers.time_ns(bucket, [size // 2 for size in scattered]) + transfers.time_ns(bucket, rest)
    return after_ns - transfers.time_ns(bucket, scattered + rest)


def _gathered_ns(
    graph: Graph, built: Built, timeline: Timeline, update: Update, transfers: _Transfers
) -> int:
    """End of the step with one all-gather for each bucket, after the kernels that make what it gathers."""
    units = built.units.units
    made_at = {node: i for i, unit in enumerate(units) for node in unit.nodes}
    end_ns = np.zeros(len(units), np.int64)
    np.maximum.at(end_ns, np.array(built.unit_of, np.int64), timeline.spans_ns[1])
    ready_ns: dict[int, int] = defaultdict(int)
    halves: dict[int, list[int]] = defaultdict(list)
    for output, gradient in update.gathered:
        maker = output
        while maker not in made_at:  # a bitcast
            maker = graph.nodes[maker].operands[0]
        bucket = made_at[gradient]
        ready_ns[bucket] = max(ready_ns[bucket], int(end_ns[made_at[maker]]))
        halves[bucket].append(graph.nodes[output].shape.size_bytes // 2)
    times_ns = {bucket: transfers.time_ns(units[bucket], sizes) for bucket, sizes in halves.items()}
    if not transfers.machine.asynchronous:
        launch_ns = transfers.machine.launch_ns
        return timeline.makespan_ns + sum(ns + launch_ns for ns in times_ns.values())
    free_ns = int(timeline.spans_ns[1, built.problem.communicates].max(initial=0))
    for bucket in sorted(times_ns, key=lambda bucket: (ready_ns[bucket], bucket)):
        free_ns = max(free_ns, ready_ns[bucket]) + times_ns[bucket]
    return max(timeline.makespan_ns, free_ns)
