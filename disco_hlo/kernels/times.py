"""What a fused kernel takes and whether it pays: measured once for each size, kept in the store, a line in between.

A kernel is limited by what it computes and by what it sends, whichever takes longer (Punniyamurthy et al., section
III: the one hides the other); XLA's separate kernels take both, one after the other. What a kernel takes beyond its
limit was measured for some sizes: a line over the limit tells the others. A pair is worth a kernel where that is
less than the matmul and the collective together.

A kernel's instruction has the size for a name, and its time is kept under that, so that a time measured in one step
is found again in another. Nothing here needs jax.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from disco_hlo.errors import ProfileError
from disco_hlo.estimator.analytic import library_flops_per_s
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.hlo.graph import Kind
from disco_hlo.optimize.costs import Costs
from disco_hlo.profiler.profile import OpTime, Profile
from disco_hlo.profiler.store import ProfileStore

if TYPE_CHECKING:
    from disco_hlo.kernels.pattern import Call

COLLECTIVE_OF = {
    "all-gather-matmul": "all-gather",
    "matmul-reduce-scatter": "reduce-scatter",
    "matmul-all-reduce": "all-reduce",
    "matvec-all-reduce": "all-reduce",
    "matmul-all-to-all": "all-to-all",
    "scattered-update": "reduce-scatter",
    "normed-update": "reduce-scatter",
}
"""What a kernel has in it, by its name."""
RAN_IN_STEPS = frozenset({"all-gather-matmul", "matmul-reduce-scatter", "matmul-all-reduce"})
"""Kernels that GPUs have run inside of steps, with the same numbers: nobody who did not ask gets another."""
LAUNCH_NS = 6000.0
"""Of the kernel in which XLA lets the GPUs wait for each other before one: 4.6 to 6.4 us on two H100s
(`docs/benchmarks/kernels.md`). What a kernel of which no size was measured is taken to need beyond its limit."""
PREPARED_NS = 26_000.0
"""What the host takes to prepare a kernel for one call of its program, while nothing runs: 20 to 35 us on two H100s
(the same page). In the body of a loop it is prepared once for all turns."""
_HALF_BYTES, _WHOLE_BYTES = 2, 4
_NAME = re.compile(r"kernel\.([a-z-]+)\.(\d+)\.([a-z0-9]+)\.(\d+)\.(\d+)\.(\d+)(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class Size:
    """A kernel for arrays of one size: it multiplies (m, k) by (k, n) on each of so many devices, as a `FusedCall`. An
    update is of m elements in all, and reads or writes k arrays of a device's shard."""

    kernel: str
    devices: int
    dtype: str
    m: int
    k: int
    n: int

    @property
    def key(self) -> str:
        """Under which its time is kept, and how its instruction is called."""
        return f"kernel.{self.kernel}.{self.devices}.{self.dtype}.{self.m}.{self.k}.{self.n}"

    @property
    def multiplies(self) -> bool:
        """Whether it is no update."""
        return "mat" in self.kernel

    @property
    def rows(self) -> int:
        """Rows that each device multiplies: of an all-gather all devices'."""
        return self.m * self.devices if COLLECTIVE_OF[self.kernel] == "all-gather" else self.m

    @property
    def flops(self) -> int:
        """Of each device."""
        return 2 * self.rows * self.k * self.n if self.multiplies else 0

    @property
    def memory_bytes(self) -> int:
        """That each device's matmul or update reads and writes at least."""
        if not self.multiplies:
            return _WHOLE_BYTES * self.m // self.devices * (self.k + 2)
        return _HALF_BYTES * (self.rows * self.k + self.k * self.n + self.rows * self.n)

    @property
    def collective_bytes(self) -> int:
        """As `hlo.collectives.collective_bytes` counts them: what a device reads or leaves, whichever is more."""
        if not self.multiplies:
            return _WHOLE_BYTES * self.m
        columns = self.k if COLLECTIVE_OF[self.kernel] == "all-gather" else self.n
        return _HALF_BYTES * self.rows * columns


def size_named(name: str) -> Size | None:
    """The size that an instruction or a key is named for, whatever number XLA put behind it."""
    found = _NAME.fullmatch(name)
    if found is None or found[1] not in COLLECTIVE_OF:
        return None
    return Size(found[1], int(found[2]), found[3], *map(int, found.groups()[3:]))


@dataclass(frozen=True)
class Limits:
    """What matmuls and collectives take alone.

    Attributes:
        products_ns: by flops, of matmuls that were measured.
        flops_per_ns, bytes_per_ns: of others, whichever is slower.
        link_ns: opcode and bytes of a collective -> ns.
    """

    products_ns: Mapping[int, float]
    flops_per_ns: float
    bytes_per_ns: float
    link_ns: Callable[[str, int], float]

    def compute_ns(self, size: Size) -> float:
        """Of a kernel's matmul alone."""
        slower = max(size.flops / self.flops_per_ns, size.memory_bytes / self.bytes_per_ns)
        return self.products_ns.get(size.flops, slower)

    def collective_ns(self, size: Size, opcode: str | None = None) -> float:
        """Of its collective alone, or of another of as many bytes."""
        return self.link_ns(opcode or COLLECTIVE_OF[size.kernel], size.collective_bytes)

    def separate_ns(self, size: Size, opcode: str | None = None) -> float:
        """Of what a kernel replaces, one after the other; an update gathers as well."""
        gather_ns = 0.0 if size.multiplies else self.link_ns("all-gather", size.collective_bytes)
        return self.compute_ns(size) + self.collective_ns(size, opcode) + gather_ns

    def limit_ns(self, size: Size) -> float:
        """What a kernel takes at least: for computing, or for so many bytes more over the link. What a collective takes
        to begin a kernel does not."""
        opcode, moved = COLLECTIVE_OF[size.kernel], size.collective_bytes
        return max(self.compute_ns(size), self.link_ns(opcode, 2 * moved) - self.link_ns(opcode, moved))


def limits_of(costs: Costs, source: CanonicalModule) -> Limits:
    """As a step's profile has them."""
    profile = costs.profile
    times = {key: float(time.median_ns) for key, time in profile.ops.items()}
    graphs = [one.graph for one in source.computations.values()]
    products = {
        node.flops: times[node.key]
        for graph in graphs
        for node in graph.nodes
        if node.kind is Kind.FIXED and node.flops and node.key in times and not size_named(node.name)
    }
    rates = library_flops_per_s(graphs, times)
    rate = max((rates[one] for one in ("bf16", "f16") if one in rates), default=profile.flops_per_s)
    return Limits(
        products,
        rate / 1e9,
        profile.memory_bandwidth / 1e9,
        lambda opcode, size: float(costs.collective(CollectiveKind(opcode))(size)),
    )


def fused_ns(size: Size, measured: Mapping[Size, float], limits: Limits) -> float:
    """What a kernel takes: as measured, else by the line through the sizes of the same kernel that were."""
    if size in measured:
        return measured[size]
    alike = (size.kernel, size.devices, size.dtype)
    points = [
        (limits.limit_ns(one), ns)
        for one, ns in measured.items()
        if (one.kernel, one.devices, one.dtype) == alike
    ]
    offset_ns, factor = line(points)
    at_least_ns = limits.limit_ns(size)
    return max(at_least_ns, offset_ns + factor * at_least_ns)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Offset and slope of time over limit, with the least errors relative to the times; times grow with it."""
    if not points:
        return LAUNCH_NS, 1.0
    limits, times = np.array(points).T
    if len(set(limits.tolist())) > 1:
        slope, offset = np.polyfit(limits, times, 1, w=1 / times)
        if slope >= 0:
            return float(offset), float(slope)
    return 0.0, float(np.median(times / limits))


def is_faster(size: Size, separate_ns: float, measured: Mapping[Size, float], limits: Limits) -> bool:
    """Whether a kernel is predicted to take less than what it replaces."""
    return fused_ns(size, measured, limits) < separate_ns


def measured_kernels(profile: Profile) -> dict[Size, float]:
    """What a profile knows of kernels, in ns."""
    sizes = {size_named(key): time for key, time in profile.ops.items()}
    return {size: float(time.median_ns) for size, time in sizes.items() if size is not None}


def payer(costs: Costs, source: CanonicalModule) -> Callable[[Call, str, bool], bool]:
    """Whether a kernel is predicted to be faster than the pair that it replaces, of which the opcode of the collective
    is given and whether both are in a loop, by the costs of a step."""
    measured, limits = measured_kernels(costs.profile), limits_of(costs, source)

    def pays(call: Call, opcode: str, in_loop: bool) -> bool:
        separate_ns = limits.separate_ns(call.size, opcode) - (0.0 if in_loop else PREPARED_NS)
        return call.kernel in RAN_IN_STEPS and is_faster(call.size, separate_ns, measured, limits)

    return pays


def foretold(costs: Costs, source: CanonicalModule, like: CanonicalModule) -> dict[str, OpTime]:
    """Times of a step's kernels that its costs have not measured, by cost key.

    Args:
        costs: of the step `like`, without kernels.
        source: the step with kernels.
        like: see above.
    """
    measured, limits = measured_kernels(costs.profile), limits_of(costs, like)
    return {
        key: OpTime(round(fused_ns(size, measured, limits)), 0, 1)
        for key, size in kernel_sizes(source).items()
        if key not in costs.profile.ops
    }


def keep(store: ProfileStore, profile: Profile, source: CanonicalModule) -> None:
    """Keep what a step's kernels took, for other steps: each size once, unless the store cannot be written."""
    known = measured_kernels(profile)
    times = {
        size.key: profile.ops[key]
        for key, size in kernel_sizes(source).items()
        if key in profile.ops and size not in known
    }
    if times and store.writable:
        with suppress(ProfileError):
            store.add_ops(profile.platform, times)


def kernel_sizes(source: CanonicalModule) -> dict[str, Size]:
    """The kernels of a step, by cost key."""
    named = {
        node.key: size_named(node.name)
        for one in source.computations.values()
        for node in one.graph.nodes
        if node.kind is Kind.FIXED
    }
    return {key: size for key, size in named.items() if size is not None}
