"""What the simulator is told of time beside a cost model: a machine model for how work overlaps.

DisCo, sections 4.2 (T = Cx + D for an all-reduce) and 4.4 (one compute stream, one channel). The
machine model adds what the paper leaves out: launch cost, contention in both directions, backends
whose collectives block. Engines count in a coarser unit than nanoseconds where a step takes minutes
(``unit_for``, ``coarse``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.hlo.cost_model import CostModel, Kernels, LinearPieces
from disco_hlo.hlo.graph import Graph

PPM = 1_000_000
"""Full speed: speeds are integers in millionths of what a task does when it runs alone."""
COMPUTE, NO_COMPUTE, BESIDE_COMPUTE, PRODUCT, ANY_COMPUTE = 0, 1, 2, 3, 4
"""Rows of a table of speeds by the number of collectives under way: of compute beside them, of each
of them while the compute stream idles, of each of them while it computes, of matmuls that began during them, and of
kernels that are not told apart."""
MIN_SPEED_PPM = 100_000
"""The slowest a task may become. With :data:`MAX_TOTAL` it keeps the engine inside 64 bits."""
MAX_TOTAL = 800_000_000_000
"""The most that all durations of a problem may add up to, in the unit that the engine counts in."""
UNITS_NS = (1, 1_000, 1_000_000)
"""What the engine counts in: of a step that takes longer than 800 seconds not every nanosecond matters."""
MAX_TOTAL_NS = MAX_TOTAL * UNITS_NS[-1]
"""The most that a step may take: 25 years."""
MAX_WAIT_NS = 10_000_000
"""The longest that a collective may wait for a busy device."""


def unit_for(total_ns: float) -> int:
    """The smallest of :data:`UNITS_NS` in which so much time can be counted; the largest where none is enough."""
    return next((unit for unit in UNITS_NS if total_ns / unit <= MAX_TOTAL), UNITS_NS[-1])


class Pace(NamedTuple):
    """How tasks go beside each other, as the engines take it."""

    speed_ppm: NDArray[np.int64]
    """``[rows, 2]``, by row (:data:`COMPUTE`, ..) alone and beside a collective; ``[rows, 1]`` where these block."""
    wait_ns: int
    """What a collective has more to do, unless the compute stream idles when it begins."""


def checked(times: ArrayLike, count: int, name: Callable[[int], str]) -> NDArray[np.int64]:
    """Times of a cost model, ``[count]``, as int64.

    Raises:
        DiscoError: negative or non-finite times, or too few of them; ``name`` says whose the i-th is.
    """
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


@dataclass(frozen=True, slots=True)
class MachineModel:
    """How one device runs kernels and collectives beside each other.

    The defaults describe a machine on which nothing costs anything but the work itself; a
    profile's measured numbers go in by :func:`dataclasses.replace`.
    """

    name: str
    asynchronous: bool
    """Whether collectives run on a channel beside the compute stream (GPU). Where they do not (CPU),
    a collective occupies the compute stream and buckets have one token."""
    launch_ns: int = 0
    """Added to every kernel on the compute stream: the gap that launching it leaves."""
    compute_speed_ppm: int = PPM
    """Speed of compute while a collective runs, all kinds of kernels together."""
    product_speed_ppm: int = 0
    """Of kernels that hold one of :data:`~disco_hlo.hlo.opcodes.PRODUCTS`, which may lose more; 0: as of all."""
    other_speed_ppm: int = 0
    """And of the others; 0: as of all."""
    transfer_speed_ppm: int = PPM
    """Speed of a collective while compute runs."""
    transfer_wait_ns: int = 0
    """What a collective has more to do, whatever its size, unless the compute stream idles when it begins: its
    thread blocks wait for multiprocessors. Time of running alone, like its duration; 0 where collectives block."""
    memory_bytes_per_us: int = 0
    """Bytes read plus bytes written by a large copy; 0: the copies that buckets need take no time."""

    def __post_init__(self) -> None:
        if not 0 <= self.transfer_wait_ns <= MAX_WAIT_NS:
            raise DiscoError(
                f"Machine model {self.name}: transfer_wait_ns is {self.transfer_wait_ns}, expected 0 to {MAX_WAIT_NS}."
            )

    def speed_ppm(self) -> NDArray[np.int64]:
        """Speeds alone and beside a collective, ``[4, 2]``; ``[4, 1]`` where collectives block."""
        return self.pace().speed_ppm[:ANY_COMPUTE]

    @property
    def fastest_ppm(self) -> int:
        """Speed during a collective of the kernels that lose least."""
        kinds = (self.product_speed_ppm, self.other_speed_ppm)
        return max(kind or self.compute_speed_ppm for kind in kinds)

    @property
    def wait_ns(self) -> int:
        """Of collectives, where they wait."""
        return self.transfer_wait_ns if self.asynchronous else 0

    def pace(self) -> Pace:
        """Speeds (``[5, 2]``, or ``[5, 1]``) and wait of this machine's collectives and kernels."""
        compute, transfer = self.compute_speed_ppm, self.transfer_speed_ppm
        products, others = self.product_speed_ppm or compute, self.other_speed_ppm or compute
        speeds = [[PPM, others], [PPM, PPM], [transfer, transfer], [PPM, products], [PPM, compute]]
        return Pace(np.array(speeds, np.int64)[:, : 1 + self.asynchronous], self.wait_ns)

    def copy_ns(self, size_bytes: int) -> int:
        """Time of a kernel that copies so much: into a bucket, or out of it."""
        rate = self.memory_bytes_per_us
        return self.launch_ns + (-(-2 * size_bytes * 1000 // rate) if rate else 0)


MACHINES = {name: MachineModel(name, backend.asynchronous) for name, backend in BACKENDS.items()}
"""By ``Graph.backend``: XLA:CPU's collectives block the thread that runs them (measured: 4 % of them overlapped);
XLA:GPU has one compute stream in issue order, and NCCL next to it."""


def speed_ppm(slow_down: float) -> int:
    """The speed that goes with a measured slow-down (1.25: takes a quarter longer, 800,000)."""
    if not (math.isfinite(slow_down) and 1 <= slow_down <= PPM / MIN_SPEED_PPM):
        raise DiscoError(f"A slow-down of {slow_down} was given, expected 1 to {PPM // MIN_SPEED_PPM}.")
    return round(PPM / slow_down)


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """What a bucket takes, but for cutting gradients out of it."""

    main_ns: int
    """Its collective; with the launch where that occupies the compute stream."""
    on_channel: bool
    """Whether the collective overlaps with the compute stream."""
    pack_ns: int | None
    """Copying its gradients together before; None where they stay where they are."""


def bucket_times(
    line: LinearPieces,
    machine: MachineModel,
    sizes_bytes: Sequence[int],
    *,
    packed_bytes: int | None,
    name: str,
) -> BucketTimes:
    """Times of a bucket of gradients.

    Args:
        sizes_bytes: what each counts as on the line.
        packed_bytes: what they have together where they are concatenated; None where they are not.

    Raises:
        DiscoError: it takes longer than anything may; the message says ``name``.
    """
    total = sum(sizes_bytes)
    # Where collectives block, the operands of a variadic collective are transferred one by one.
    one_by_one = packed_bytes is None and not machine.asynchronous
    carried = np.array(sizes_bytes if one_by_one else [total], np.int64)
    times = checked(line(carried), len(carried), lambda i: f"{name} of {carried[i]} bytes")
    transfer_ns = int(times.sum())
    return BucketTimes(
        transfer_ns if machine.asynchronous else transfer_ns + machine.launch_ns,
        machine.asynchronous,
        None if packed_bytes is None or len(sizes_bytes) == 1 else machine.copy_ns(packed_bytes),
    )


def holds_ns(model: CostModel, graph: Graph, nodes_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much of each node as a kernel of its own must be done before a collective begins during it, ``[len(graph)]``.

    Raises:
        DiscoError: the cost model gave what is no share.
    """
    shares = np.asarray(model.hold_shares(graph))
    wrong = np.flatnonzero(~((shares >= 0) & (shares <= 1)))
    if wrong.size:
        raise DiscoError(
            f"The cost model says that node {wrong[0]} holds transfers for {shares[wrong[0]]} of its time, "
            "expected a number from 0 to 1."
        )
    return (shares * nodes_ns).astype(np.int64)


def coarse(model: CostModel, machine: MachineModel, unit_ns: int) -> tuple[CostModel, MachineModel]:
    """The same model and machine, all of whose times are in units of so many nanoseconds, rounded up."""
    if unit_ns == 1:
        return model, machine
    return _Coarse(model, unit_ns), replace(
        machine,
        launch_ns=-(-machine.launch_ns // unit_ns),
        transfer_wait_ns=machine.transfer_wait_ns // unit_ns,
        memory_bytes_per_us=machine.memory_bytes_per_us * unit_ns,
    )


@dataclass(frozen=True, slots=True)
class _Coarse(CostModel):
    model: CostModel
    unit_ns: int

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        return self._counted(self.model.op_ns(graph))

    def kernels_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        return self._counted(self.model.kernels_ns(graph, kernels))

    def moving_ns(self, graph: Graph, kernels: Kernels) -> NDArray[np.int64]:
        return self._counted(self.model.moving_ns(graph, kernels))

    def temporary_bytes(self, graph: Graph) -> Mapping[int, int]:
        return self.model.temporary_bytes(graph)

    def first_collective_ns(self, graph: Graph) -> Mapping[int, int]:
        return {node: -(-ns // self.unit_ns) for node, ns in self.model.first_collective_ns(graph).items()}

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        return self.model.collective(kind).times(1 / self.unit_ns)

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        return self.model.read_classes(graph)

    def transfers_ns(self, graph: Graph) -> Mapping[int, int]:
        return {node: -(-ns // self.unit_ns) for node, ns in self.model.transfers_ns(graph).items()}

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        return self.model.hold_shares(graph)

    def _counted(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-np.asarray(times_ns, np.int64) // self.unit_ns)
