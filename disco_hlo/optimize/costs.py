"""What a search computes with: a step's costs from its profile, from one that comes with the package, or constants.

They may be those of a network to imagine (:func:`formula`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import BACKENDS, Backend, Constants
from disco_hlo.errors import DiscoError
from disco_hlo.estimator.analytic import (
    AnalyticModel,
    DeviceModel,
    calibrated,
    library_flops_per_s,
    measured_ops,
)
from disco_hlo.estimator.gnn import estimator_for
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import CollectiveKind, collective_bytes
from disco_hlo.hlo.cost_model import MOST_NS, CostModel, LinearPieces
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.printable import counted
from disco_hlo.profiler.collectives import CollectiveFit
from disco_hlo.profiler.costs import NONE, Corrections, MeasuredCosts, Seen, corrections
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.profiler.profile import Contention, Platform, Profile, load
from disco_hlo.simulator.build import groups_ns
from disco_hlo.simulator.costs import MACHINES, MachineModel, speed_ppm
from disco_hlo.whatif.machine import PHASES, Algorithm, Machine, fastest, names, pieces, send
from disco_hlo.whatif.machine import load as load_machine

UNKNOWN_DEVICE = "unknown"
"""Device kind of a plan for a module of which nobody said where it runs."""
SENDS = frozenset({"collective-permute", "send"})
_WAITS = frozenset({"collective-permute-done", "recv", "recv-done", "send-done"})
"""Of a send that another instruction begins: it has all of the time."""


class Inner(NamedTuple):
    """What an op takes, above all one that runs a region: a loop, conditional or call."""

    takes_ns: int
    temporary_bytes: int = 0
    """Of memory beside what it is given and returns."""
    first_collective_ns: int | None = None
    """When the first collective in there begins; None where there is none that overlaps with kernels."""


class Costs(MeasuredCosts):
    """A profile's cost model with the machine it was taken on, for plugin, command line and benchmarks alike.

    Args:
        profile: with lines of collectives.
        estimator: of what the profile does not know.
        corrections: of its estimates.
    """

    def __init__(self, profile: Profile, estimator: CostModel, corrections: Corrections = NONE) -> None:
        super().__init__(profile, estimator, corrections)
        self.machine = machine_of(profile)
        self.lines: tuple[str, ...] = ()
        """What a reader must know of these costs, one sentence each."""

        self._around: tuple[str, Mapping[int, Inner]] = "", {}
        """By fingerprint: another process has the graph as well."""
        self._elsewhere: tuple[Machine, int] | None = None

    def around(self, graph: Graph, inner: Mapping[int, Inner]) -> Costs:
        """These costs where some ops of a graph take another time, above all those that run regions."""
        if not inner:
            return self
        found = copy(self)
        counted = {node: one._replace(takes_ns=min(one.takes_ns, MOST_NS)) for node, one in inner.items()}
        found._around = graph.fingerprint, {**self._inner(graph), **counted}
        return found

    def slowed(self, contention: Contention) -> Costs:
        """These costs on a machine whose kernels and collectives slow each other in another way."""
        found = copy(self)
        found.machine = machine_of(replace(self.profile, contention=contention))
        return found

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Time of each node as a kernel of its own, ``[len(graph)]``; 0 where it takes none."""
        times = super().op_ns(graph)
        for op in graph.nodes if self._elsewhere else ():
            opcode = op.opcode.removesuffix("-start")
            if op.opcode in _WAITS:
                times[op.id] = 0
            elif opcode in COLLECTIVES | SENDS and op.kind != Kind.COLLECTIVE:
                times[op.id] = self.collective(CollectiveKind(opcode, op.groups))(sent_bytes(graph, op.id))
        for node, one in self._inner(graph).items():
            if graph.nodes[node].kind != Kind.COLLECTIVE:
                times[node] = one.takes_ns
        return times

    def transfers_ns(self, graph: Graph) -> Mapping[int, int]:
        """Of nodes that travel those that take another time than their kind's."""
        return {
            node: one.takes_ns
            for node, one in self._inner(graph).items()
            if graph.nodes[node].kind == Kind.COLLECTIVE
        }

    def temporary_bytes(self, graph: Graph) -> Mapping[int, int]:
        """Memory that ops need while they run, beside what they are given and return; 0 for ops not named."""
        return {node: one.temporary_bytes for node, one in self._inner(graph).items()}

    def first_collective_ns(self, graph: Graph) -> Mapping[int, int]:
        """When the first collective inside an op begins; ops without are not named."""
        return {
            node: one.first_collective_ns
            for node, one in self._inner(graph).items()
            if one.first_collective_ns is not None
        }

    def _inner(self, graph: Graph) -> Mapping[int, Inner]:
        return self._around[1] if self._around[0] == graph.fingerprint else {}

    def imagine(self, network: Network) -> Costs:
        """The same devices on another network."""
        line = _not_swept(formula(network))
        profile = replace(self.profile, all_reduce=line, in_step=None, together=None, collectives={})
        costs = Costs(profile, self.estimator, self.corrections)
        costs.lines = (*self.lines, f"what if: {network}; all-reduce by the faster of ring and two trees")
        return costs

    def on(self, machine: Machine, devices: int) -> Costs:
        """The step on so many devices of another machine.

        Kernels keep their times where they were measured on this kind of device; else they are estimated from bytes
        and flops. Collectives go by the machine's topology.
        """
        told = f"what if: {devices} GPUs of {machine.name} ({machine.title}); collectives by {machine.network.topology}"
        line = _not_swept(pieces(machine, "all-reduce", devices))
        if self.profile.platform.device_kind == machine.device_kind:
            profile = replace(self.profile, all_reduce=line, in_step=None, together=None, collectives={})
            costs = Costs(profile, self.estimator, self.corrections)
            costs.lines = (*self.lines, told)
        else:
            device = machine.gpu
            bandwidth, flops = device.memory_gb_per_s * 1e9, device.matmul_flops_per_ns * 1e9
            platform = Platform(machine.title, self.profile.platform.backend, "", "", "")
            launch_ns = round(device.launch_us * 1e3)
            profile = Profile(platform, {}, launch_ns, bandwidth, flops, line)
            costs = Costs(profile, AnalyticModel(DeviceModel(bandwidth, flops, hoists=False)))
            estimated = "kernels by bytes and flops; overlap costs nothing, since nobody measured it there"
            costs.lines = (told, estimated)
        costs._elsewhere = machine, devices
        return costs

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        """Time of a collective over its bytes: as measured, or on the machine that is imagined. There a group of some
        devices stays as large as it is, and a send that names no pairs leaves the node where there are several."""
        if self._elsewhere is not None and kind.opcode in SENDS:
            machine, devices = self._elsewhere
            node_devices = machine.network.node_devices
            pairs = kind.groups or ((0, devices - 1),)
            between = any(source // node_devices != target // node_devices for source, target in pairs)
            return fastest([send(machine, between_nodes=between)])
        opcode = next((known for known in PHASES if known == kind.opcode), None)
        if self._elsewhere is None or opcode is None:
            return super().collective(kind)
        machine, devices = self._elsewhere
        return pieces(machine, opcode, max(2, max(map(len, kind.groups), default=devices)))


def sent_bytes(graph: Graph, node: int) -> int:
    """Of a send or another collective. What begins one leaves a tuple: its operand counts."""
    if graph.nodes[node].shape.dtype != "tuple":
        return collective_bytes(graph, node)
    return sum(graph.nodes[operand].shape.size_bytes for operand in graph.nodes[node].operands)


@dataclass(frozen=True, slots=True)
class Network:
    """A network to imagine."""

    devices: int
    gigabytes_per_s: float
    """Of one device's link, in each direction."""
    latency_us: float
    """Of one message."""

    def __post_init__(self) -> None:
        if self.devices < 2:
            raise DiscoError(f"{self.devices} GPUs: expected at least 2, one has nothing to reduce with")

    def __str__(self) -> str:
        return f"{self.devices} GPUs at {self.gigabytes_per_s:g} GB/s, {self.latency_us:g} µs a message"


def formula(network: Network) -> LinearPieces:
    """All-reduce time over size on a network: the faster of ring and two binary trees, as libraries take it.

    Over the number of devices N, the bandwidth B of a device's link in each direction and the latency a of one message,
    for S bytes:

    * ring:  T = 2 (N - 1) a + 2 (N - 1)/N S/B   (Patarasuk and Yuan, "Bandwidth optimal all-reduce
      algorithms for clusters of workstations", JPDC 69(2), 2009; alpha-beta model as in Thakur,
      Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
      19(1), 2005);
    * two binary trees: T = 2 ceil(log2 N) a + 2 S/B   (Sanders, Speck and Traeff, "Two-tree algorithms
      for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009; NCCL since 2.4).
    """
    n, per_byte, latency_ns = network.devices, 1.0 / network.gigabytes_per_s, network.latency_us * 1e3
    ring = (2 * (n - 1) / n * per_byte, 2 * (n - 1) * latency_ns)
    tree = (2 * per_byte, 2 * (n - 1).bit_length() * latency_ns)
    return fastest([Algorithm("ring", *ring), Algorithm("trees", *tree)])


def costs_of(
    profile: Profile, source: CanonicalModule, plans: Sequence[Strategy] = (), *, analytical: bool = False
) -> Costs:
    """Measured times where the profile has them, else the estimator for its device, calibrated by it.

    Args:
        source: the step; all its regions calibrate the estimator.
        plans: of the step. What their measured kernels take corrects the estimates of others.
        analytical: whether no network corrects the analytical estimate.
    """
    platform, graph = profile.platform, source.graph
    backend = BACKENDS[platform.backend]
    swept = profile.transfers is not None
    if not swept:
        profile = replace(profile, all_reduce=_all_reduce(backend.constants))
    base = DeviceModel(profile.memory_bandwidth, profile.flops_per_s, hoists=backend.hoists)
    times = {key: float(time.median_ns) for key, time in profile.ops.items()}
    graphs = [one.graph for one in source.computations.values()]
    rates = {**_described_rates(profile), **library_flops_per_s(graphs, times)}
    analytic = AnalyticModel(calibrated(base, measured_ops(graphs, times)), rates)
    estimator: CostModel = analytic
    if not analytical:
        estimator = estimator_for(platform.backend, platform.device_kind, analytic, times)
    costs = Costs(profile, estimator, corrections(graph, seen_kernels(profile, graph, estimator, plans)))
    lines = [f"times from the profile of {platform}"]
    if unmeasured := costs.unmeasured(graph):
        first, are = unmeasured[0], "is" if len(unmeasured) == 1 else "are"
        lines.append(
            f"{counted(len(unmeasured), 'op')} {are} not in the profile and {are} estimated from bytes and flops, "
            f"first n{first.id} ({first.opcode} {first.shape})"
        )
    if not swept:
        lines.append(f"the profile has no all-reduce sweep; taken instead: {backend.constants}")
    costs.lines = tuple(lines)
    return costs


def costs_for(
    source: CanonicalModule, profile: Profile | None, device_kind: str | None, plans: Sequence[Strategy] = ()
) -> Costs:
    """Costs of a step by the best that is at hand without a device; ``lines`` say what that is.

    Args:
        profile: of this step or of its device; None takes the one that comes with the package, else constants.
        device_kind: what the step runs on, where that is known.
        plans: as for :func:`costs_of`.

    Raises:
        ProfileError: the profile was taken on another kind of device.
    """
    graph = source.graph
    if profile is not None:
        # On CPU the profile names the processor, which JAX does not; of a module alone nobody knows the device.
        known = BACKENDS[graph.backend].names_devices and device_kind != UNKNOWN_DEVICE
        profile.require(device_kind if known else None, graph.backend)
        return costs_of(profile, source, plans)
    backend = BACKENDS[graph.backend]
    shipped = shipped_profile(graph.backend, device_kind)
    if shipped is None or backend.shipped is None:
        return _analytic(backend)
    costs = costs_of(shipped, source, plans)
    _, name = backend.shipped
    first = f"no profile: taken instead: {name}, which comes with disco-hlo (--profile names another)"
    costs.lines = (first, *costs.lines)
    return costs


def shipped_profile(backend: str, device_kind: str | None) -> Profile | None:
    """What comes with the package for steps of this device, or of a GPU that nobody named; None: nothing does.

    Raises:
        ProfileError: the package is damaged.
    """
    shipped = BACKENDS[backend].shipped
    if shipped is None or device_kind not in (None, UNKNOWN_DEVICE, shipped[0]):
        return None
    with as_file(files("disco_hlo") / "data" / "profiles" / f"{shipped[1]}.json") as path:
        return load(path)


def seen_kernels(
    profile: Profile, graph: Graph, estimator: CostModel, plans: Sequence[Strategy]
) -> list[Seen]:
    """The measured kernels of ``plans`` that can correct estimates, each once.

    A kernel of one op is left out: nobody estimates it as a kernel. So is Triton's (``profiler.costs``).

    Raises:
        IllegalStrategyError: a plan does not fit the graph.
    """
    if not plans:
        return []
    op_ns = estimator.op_ns(graph)
    found: dict[str, Seen] = {}
    for plan in plans:
        units = unit_graph(graph, plan)
        estimates, keys = groups_ns(graph, units, estimator, op_ns), kernel_keys(graph, units.kernels(graph))
        for group, key, estimated_ns in zip(plan.groups, keys, estimates.tolist(), strict=True):
            if key in profile.ops and key not in found and len(group.ops) > 1 and group.kind != "triton":
                found[key] = Seen(group.ops, estimated_ns, profile.ops[key].median_ns)
    return list(found.values())


def machine_of(profile: Profile) -> MachineModel:
    """How this device runs kernels and collectives that overlap.

    No collective counts as a kernel on the compute stream, however small: XLA:GPU makes such kernels before
    the hook, where they are ops like others, and what a plan moves goes through NCCL.
    """
    machine = MACHINES[profile.platform.backend]
    machine = replace(
        machine,
        launch_ns=profile.launch_ns,
        memory_bytes_per_us=int(profile.memory_bandwidth / 1e6),
    )
    slowed = profile.contention
    if slowed is None:
        return machine
    return replace(
        machine,
        compute_speed_ppm=speed_ppm(slowed.compute),
        product_speed_ppm=0 if slowed.products is None else speed_ppm(slowed.products),
        other_speed_ppm=0 if slowed.others is None else speed_ppm(slowed.others),
        transfer_speed_ppm=speed_ppm(slowed.communication),
        # Work that overlaps with compute, which goes as slowly as the collective's.
        transfer_wait_ns=round(slowed.transfer_wait_ns / slowed.communication),
    )


def _described_rates(profile: Profile) -> dict[str, float]:
    """Flop rates of matmuls where nobody measured one: of f32 the microbenchmark's, of 16 bits what the package says of
    this device, if it does."""
    kind = profile.platform.device_kind
    machine = next((one for one in map(load_machine, names()) if kind and one.device_kind == kind), None)
    found = {"f32": profile.flops_per_s}
    if machine is not None:
        found.update(dict.fromkeys(("bf16", "f16"), machine.gpu.matmul_flops_per_ns * 1e9))
    return found


def _all_reduce(constants: Constants) -> CollectiveFit:
    return _not_swept(LinearPieces.of((0, constants.all_reduce_ns_per_byte, constants.all_reduce_fixed_ns)))


def _analytic(backend: Backend) -> Costs:
    constants = backend.constants
    profile = Profile(
        Platform(constants.name, backend.name, "", "", ""), {}, constants.launch_ns,
        constants.memory_bytes_per_s, constants.flops_per_s, _all_reduce(constants),
    )  # fmt: skip
    device = DeviceModel(constants.memory_bytes_per_s, constants.flops_per_s, hoists=backend.hoists)
    costs = Costs(profile, AnalyticModel(device))
    costs.lines = (f"no profile: analytic model of {constants}",)
    return costs


def _not_swept(line: LinearPieces) -> CollectiveFit:
    return CollectiveFit(line, (), 0.0, 0.0)


def estimates_ns(costs: CostModel, graph: Graph, plan: Strategy) -> NDArray[np.int64]:
    """Of each group what a search is told by ``costs``, as the simulator asks for it."""
    return groups_ns(graph, unit_graph(graph, plan), costs, costs.op_ns(graph))
