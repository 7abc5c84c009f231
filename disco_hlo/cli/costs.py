"""What the offline commands compute with: a profile, one that comes with the package, or stated constants.

The what-if replaces the measured all-reduce line by a formula over the number of devices N, the
bandwidth B of a device's link in each direction and the latency a of one message, for S bytes:

* ring:  T = 2 (N - 1) a + 2 (N - 1)/N S/B   (Patarasuk and Yuan, "Bandwidth optimal all-reduce
  algorithms for clusters of workstations", JPDC 69(2), 2009; alpha-beta model as in Thakur,
  Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
  19(1), 2005);
* two binary trees: T = 2 ceil(log2 N) a + 2 S/B   (Sanders, Speck and Traeff, "Two-tree algorithms
  for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009; NCCL since 2.4).

Libraries take whichever is faster for a size, and so does the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError
from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.hlo.cost_model import Kernels, LinearPieces
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin.costing import costs_of, machine_of
from disco_hlo.profiler.costs import MeasuredCosts
from disco_hlo.profiler.profile import Profile
from disco_hlo.profiler.profile import load as load_profile
from disco_hlo.report import predict
from disco_hlo.simulator.costs import CPU, GPU, MachineModel

UNKNOWN_DEVICE = "unknown"
"""Device kind of a plan for a module of which nobody said where it runs."""


SHIPPED_DEVICE, _SHIPPED = "NVIDIA H200", "nvidia-h200-nvlink"
"""What a GPU step without a profile is taken to run on, and the profile for it."""


@dataclass(frozen=True, slots=True)
class Constants:
    """A device that nobody measured."""

    name: str
    memory_bytes_per_s: float
    flops_per_s: float
    launch_ns: int
    all_reduce_ns_per_byte: float
    all_reduce_fixed_ns: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.memory_bytes_per_s / 1e9:g} GB/s of memory, "
            f"{self.flops_per_s / 1e12:g} TFLOP/s, {self.launch_ns / 1e3:g} µs a kernel, "
            f"all-reduce {self.all_reduce_fixed_ns / 1e3:g} µs + {self.all_reduce_ns_per_byte:g} ns/byte"
        )


CONSTANTS = {
    "gpu": Constants("an H200 on NVLink", 4.0e12, 4.0e14, 2000, 0.0063, 20_000.0),
    "cpu": Constants("two CPU cores, gloo on one host", 1.0e10, 5.0e10, 2000, 1.0, 150_000.0),
}
"""What stands in where there is no profile. The GPU's are rounded from measurements of one machine; the
CPU's are of the right order only, since CPUs differ by more than any constant could say."""


@dataclass(frozen=True, slots=True)
class Link:
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


class Costs(predict.Costs):
    """A cost model for the simulator, with its machine and the words that say where it comes from."""

    def __init__(
        self,
        model: AnalyticModel | MeasuredCosts,
        machine: MachineModel,
        pieces: LinearPieces,
        lines: Sequence[str],
    ) -> None:
        self.model = model
        self.machine = machine
        self.pieces = pieces
        self.lines = tuple(lines)
        """What a reader must know of these costs, one sentence each."""
        self._priced: tuple[Graph, NDArray[np.int64]] | None = None

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Time of each node as a kernel of its own, ``[len(graph)]``."""
        if self._priced is None or self._priced[0] is not graph:
            self._priced = (graph, self.model.op_ns(graph))
        return self._priced[1]

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        """Time of each kernel, ``[len(kernels)]``."""
        return self.model.kernels_ns(graph, kernels)

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        """As the model has them."""
        return self.model.read_classes(graph)

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        """As the model has them."""
        return self.model.hold_shares(graph)

    def all_reduce(self) -> LinearPieces:
        """Time of an all-reduce over its size."""
        return self.pieces

    def imagine(self, link: Link) -> Costs:
        """The same devices on another network."""
        lines = [*self.lines, f"what if: {link}; all-reduce by the faster of ring and two trees"]
        return Costs(self.model, self.machine, formula(link), lines)


_LARGEST_BYTES = 1 << 62
"""More than any transfer has; sizes are 64-bit integers."""


def formula(link: Link) -> LinearPieces:
    """All-reduce time over size on a network: the faster of ring and two binary trees."""
    n, per_byte, latency_ns = link.devices, 1.0 / link.gigabytes_per_s, link.latency_us * 1e3
    ring = (2 * (n - 1) / n * per_byte, 2 * (n - 1) * latency_ns)
    tree = (2 * per_byte, 2 * (n - 1).bit_length() * latency_ns)
    crossing = int((ring[1] - tree[1]) / (tree[0] - ring[0]))
    if crossing <= 0:
        return LinearPieces.of((0, *ring))
    if crossing > _LARGEST_BYTES:
        return LinearPieces.of((0, *tree))
    return LinearPieces.of((0, *tree), (crossing, *ring))


def costs_for(
    graph: Graph, profile: Profile | None, device_kind: str | None, plans: Sequence[Strategy] = ()
) -> Costs:
    """Costs of a step from a profile, from the one that comes with the package, or from constants; ``lines`` say which.

    Args:
        device_kind: what the step runs on, where that is known.
        plans: see :func:`~disco_hlo.plugin.costing.costs_of`.

    Raises:
        ProfileError: the profile was taken on another kind of device.
    """
    if profile is None:
        shipped = shipped_profile(graph.backend, device_kind)
        return _analytic(graph.backend) if shipped is None else _of_shipped(graph, shipped, plans)
    # On CPU the profile names the processor, which JAX does not; of a module alone nobody knows the device.
    known = graph.backend == "gpu" and device_kind != UNKNOWN_DEVICE
    profile.require(device_kind if known else None, graph.backend)
    model = costs_of(profile, graph, plans)
    lines = [f"times from the profile of {profile.platform}"]
    unmeasured = model.unmeasured(graph)
    if unmeasured:
        first = unmeasured[0]
        lines.append(
            f"{len(unmeasured)} ops are not in the profile and are estimated from bytes and flops, "
            f"first n{first.id} ({first.opcode} {first.shape})"
        )
    pieces = profile.transfers
    if pieces is None:
        pieces = _line(CONSTANTS[graph.backend])
        lines.append(f"the profile has no all-reduce sweep; taken instead: {CONSTANTS[graph.backend]}")
    return Costs(model, machine_of(profile), pieces, lines)


def shipped_profile(backend: str, device_kind: str | None) -> Profile | None:
    """What comes with the package for steps of this device, or of a GPU that nobody named; None: nothing does.

    Raises:
        ProfileError: the package is damaged.
    """
    if backend != "gpu" or device_kind not in (None, UNKNOWN_DEVICE, SHIPPED_DEVICE):
        return None
    with as_file(files("disco_hlo") / "data" / "profiles" / f"{_SHIPPED}.json") as path:
        return load_profile(path)


def _of_shipped(graph: Graph, shipped: Profile, plans: Sequence[Strategy]) -> Costs:
    made = costs_for(graph, shipped, shipped.platform.device_kind, plans)
    first = f"no profile: taken instead: {_SHIPPED}, which comes with disco-hlo (--profile names another)"
    return Costs(made.model, made.machine, made.pieces, [first, *made.lines])


def _analytic(backend: str) -> Costs:
    constants = CONSTANTS[backend]
    machine = replace(
        GPU if backend == "gpu" else CPU,
        launch_ns=constants.launch_ns,
        memory_bytes_per_us=round(constants.memory_bytes_per_s / 1e6),
    )
    device = DeviceModel(constants.memory_bytes_per_s, constants.flops_per_s, hoists=backend == "cpu")
    return Costs(
        AnalyticModel(device), machine, _line(constants), [f"no profile: analytic model of {constants}"]
    )


def _line(constants: Constants) -> LinearPieces:
    return LinearPieces.of((0, constants.all_reduce_ns_per_byte, constants.all_reduce_fixed_ns))


def find_profile(named: Path | None, beside: Profile | None) -> Profile | None:
    """The profile named on the command line, else the one that lies beside the module.

    Raises:
        ProfileError: the named file cannot be read.
    """
    return beside if named is None else load_profile(named)
