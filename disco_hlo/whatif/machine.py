"""Machines as data, and how long their collectives and matmuls take.

``disco_hlo/data/machines/*.toml`` (``configs/machines`` in the repository) has one machine a file; a parameter is
``name = [value, "source"]``, where the source is a paper's table, a public document, or begins with "assumed" or
"fitted".

**Collectives.** Each algorithm is a line T = C x + D over the bytes x that the collective has on one device (of a
reduce-scatter its operand, of an all-gather its result, of an all-to-all all that a device holds). The fastest one
counts, so the time over all sizes is their lower envelope.

* ``switch``: NCCL 2.8's own model (``src/graph/tuning.cc``): rings and double trees, each with the protocols LL, LL128
  and Simple. Left out: its limits by channel, which differ by generation, and the factors by which it corrects
  all-reduces alone (trees by size, rings between nodes), since rings of other collectives would then seem faster.
* ``ring``: (N - 1)/N x B bytes a phase in N - 1 messages, two phases for an all-reduce (Patarasuk and Yuan, JPDC 2009).
* ``mesh``: all joined with all: each phase is one message to every other device at once.
* ``torus``: rings along both dimensions, one after the other. In an all-to-all each device passes on what is not for
  it: of n devices on a ring each sends n (n - 1)/2 parts of 1/n (ASTRA-sim, ``collective/Ring.cc``), half of them in
  each direction.

**Matmuls** run in stages of tiles (T3, sections 2.5 and 6.1.2), as many output tiles as there are compute units. While
the products of a stage are computed its inputs are read; then all tiles are written at once, and nothing is computed
meanwhile. The cache takes what is written at its own bandwidth, and writes it to memory while the next stage computes;
what goes around the cache, as T3's updates do, waits for the memory ("L2 bypassing ... of GEMM writes hurts", section
6.1.3).

What is read from memory: the second operand, the weights, once. BLAS has matrices by columns, so a layer is computed as
its transpose, one feature a row; tiles are taken along rows (T3, section 4.2.1), which is along the tokens. So the
first operand, the activations, is read again by each row of tiles; what the cache holds of what was read since the last
time is not. A cache as GPUs have it replaces at random, so the share that it still holds is (its size) / (what passed
through it since), at most 1. What is written passes through it, too, unless it goes around.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from math import ceil, isqrt, log2
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from disco_hlo.errors import DiscoError, why_unreadable
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.regular_file import read_regular

MOST_DEVICES = 1 << 20
_MOST_BYTES = 1 << 16
_FOLDER = files("disco_hlo") / "data" / "machines"

Positive = Annotated[float, Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=MOST_DEVICES)]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device."""

    compute_units: Count
    clock_ghz: Positive
    flops_per_cycle: Positive
    """Of 16-bit matmuls, in one compute unit; a multiplication and an addition are two."""
    matmul_efficiency: Share
    """Share of the peak that a large matmul reaches."""
    memory_gb_per_s: Positive
    """What a kernel reaches, where somebody measured it; else what the maker says."""
    cache_mb: Positive
    """Last level of the cache."""
    cache_gb_per_s: Positive
    """What it takes in."""
    memory_gb: Positive
    launch_us: NotNegative
    """From the end of a kernel to the start of the next."""
    stage_us: NotNegative = 0.0
    """What a matmul's stage takes besides its products and its writes."""
    read_gb_per_s: NotNegative = 0.0
    """What reads from memory were measured to reach; 0 where that is not known."""
    latency_ns: NotNegative = 0.0
    """Of one read from memory, where there is no other; 0 likewise."""

    @property
    def matmul_flops_per_ns(self) -> float:
        """What a large matmul reaches."""
        return self.compute_units * self.clock_ghz * self.flops_per_cycle * self.matmul_efficiency


@dataclass(frozen=True, slots=True)
class Network:
    """What joins the devices: nodes of some devices, and nodes to each other."""

    topology: Literal["ring", "mesh", "switch", "torus"]
    """Of the devices of a node: a ring, all joined with all, or a switch; ``torus`` joins nodes of one device in two
    dimensions."""
    devices: Count
    """How many there are, unless asked for otherwise."""
    node_devices: Count
    """How many a node has."""
    link_gb_per_s: Positive
    """What a device sends to its node, in all, while it receives as much; on a torus, over one of its four links."""
    link_latency_us: NotNegative
    node_gb_per_s: NotNegative = 0.0
    """What a node sends to others while it receives as much; 0 where there is one node."""
    node_latency_us: NotNegative = 0.0
    kernel_us: NotNegative = 0.0
    """What a collective's kernel takes besides its messages, on a ``mesh``."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine."""

    name: str
    title: str
    device_kind: str
    """What JAX calls the device; empty where it never runs on one."""
    gpu: Gpu
    network: Network
    sources: Mapping[str, str]
    """By parameter (``gpu.clock_ghz``), where its value comes from."""

    def sourced(self, by: str) -> tuple[str, ...]:
        """Parameters whose source begins so: those that nobody stated, with "assumed"."""
        return tuple(name for name, source in self.sources.items() if source.startswith(by))


Part = TypeVar("Part", Gpu, Network)
Entry = tuple[float | int | str, Annotated[str, Meta(min_length=1)]]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    gpu: dict[str, Entry]
    network: dict[str, Entry]
    device_kind: str = ""


def names() -> tuple[str, ...]:
    """Machines that come with the package."""
    return tuple(sorted(x.name.removesuffix(".toml") for x in _FOLDER.iterdir() if x.name.endswith(".toml")))


def load(name: str) -> Machine:
    """A machine that comes with the package, or one in a file of yours (``path/to/machine.toml``).

    Raises:
        DiscoError: there is none, or a parameter is missing, unknown or out of range; names it.
    """
    if name.endswith(".toml"):
        try:
            data = read_regular(Path(name), _MOST_BYTES)
        except OSError as error:
            raise DiscoError(f"no machine can be read from {name}: {error.strerror or error}") from None
        return parse(data, Path(name).stem)
    if name not in names():
        raise DiscoError(f"no machine {name!r}: expected a file *.toml, or one of {', '.join(names())}")
    return parse((_FOLDER / f"{name}.toml").read_bytes(), name)


def parse(data: bytes, name: str) -> Machine:
    """A machine from the text of its file.

    Raises:
        DiscoError: as :func:`load`.
    """
    try:
        found = msgspec.toml.decode(data, type=_File)
        parts = {"gpu": found.gpu, "network": found.network}
        gpu, network = _convert("gpu", found.gpu, Gpu), _convert("network", found.network, Network)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DiscoError(f"machine {name}: {why_unreadable(error)}") from None
    if network.devices > network.node_devices and network.node_gb_per_s == 0 and network.topology != "torus":
        raise DiscoError(
            f"machine {name}: network.node_gb_per_s is 0, but {network.devices} devices are more than one node's "
            f"{network.node_devices}"
        )
    sources = {f"{part}.{key}": entry[1] for part in parts for key, entry in parts[part].items()}
    return Machine(name, found.title, found.device_kind, gpu, network, sources)


def _convert(part: str, entries: Mapping[str, Entry], kind: type[Part]) -> Part:
    unknown = sorted(set(entries) - {field.name for field in fields(kind)})
    if unknown:
        raise msgspec.ValidationError(f"{part} has no parameter {unknown[0]!r}")
    return msgspec.convert({key: entry[0] for key, entry in entries.items()}, kind)


Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]
_LARGEST_BYTES = 1 << 62
"""More than any collective has; sizes are 64-bit integers."""
PHASES: dict[Kind, int] = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to do a collective."""

    name: str
    ns_per_byte: float
    latency_ns: float

    def ns(self, size_bytes: float) -> float:
        """Time for so many bytes."""
        return self.ns_per_byte * size_bytes + self.latency_ns


@dataclass(frozen=True, slots=True)
class _Protocol:
    """A protocol of NCCL's: latencies in us, shares of the bandwidth."""

    name: str
    ring_us: tuple[float, float, float]
    """At all, for a step within a node, for one between nodes."""
    ring_share: float
    tree_us: tuple[float, float, float]
    tree_share: float


_PROTOCOLS = (
    _Protocol("LL", (3.6, 0.47, 2.7), 1 / 4, (4.4, 0.52, 5.0), 0.9 / 3.8),
    _Protocol("LL128", (10.0, 1.9, 4.0), 0.92, (4.4, 1.2, 8.5), 0.9 * 0.915),
    _Protocol("Simple", (8.4, 3.4, 9.6), 1.0, (0.0, 28.0, 50.0), 0.9),
)


def collective_ns(machine: Machine, kind: Kind, size_bytes: float, devices: int | None = None) -> float:
    """Time of a collective by the fastest algorithm.

    Args:
        devices: how many take part; those that the machine has, where not given.

    Raises:
        DiscoError: there cannot be so many.
    """
    return min(one.ns(size_bytes) for one in algorithms(machine, kind, devices))


def algorithms(machine: Machine, kind: Kind, devices: int | None = None) -> list[Algorithm]:
    """Those that a machine has; raises as :func:`collective_ns`."""
    network, count = machine.network, machine.network.devices if devices is None else devices
    if not 2 <= count <= MOST_DEVICES:
        raise DiscoError(f"a collective over {count} devices: expected 2 to {MOST_DEVICES}")
    if network.topology != "torus" and count > network.node_devices and network.node_gb_per_s == 0:
        raise DiscoError(
            f"machine {machine.name} has one node of {network.node_devices} devices, not {count}"
        )
    return _TOPOLOGIES[network.topology](network, kind, count)


def pieces(machine: Machine, kind: Kind, devices: int | None = None) -> LinearPieces:
    """Time of a collective over its size, as the simulator takes it; raises as :func:`collective_ns`."""
    return fastest(algorithms(machine, kind, devices))


def send(machine: Machine, *, between_nodes: bool) -> Algorithm:
    """Each device sends to one other and receives from one, all at once; between nodes they share the nodes' ports."""
    network = machine.network
    between_nodes = between_nodes and network.node_gb_per_s > 0
    per_byte = network.node_devices / network.node_gb_per_s if between_nodes else 1 / network.link_gb_per_s
    latency_us = network.node_latency_us if between_nodes else network.link_latency_us
    if network.topology == "switch":
        base_us, inside_us, outside_us = _PROTOCOLS[-1].ring_us
        latency_us += base_us + (outside_us if between_nodes else inside_us)
    return Algorithm("send", per_byte, latency_us * 1e3)


def fastest(lines: Sequence[Algorithm]) -> LinearPieces:
    """The fastest of some algorithms over the size."""
    current = min(lines, key=lambda one: (one.latency_ns, one.ns_per_byte))
    found = [(0, current.ns_per_byte, current.latency_ns)]
    while True:  # ends: C falls each time
        crossings = [(_crossing(current, one), one) for one in lines if one.ns_per_byte < current.ns_per_byte]
        start, current = min(
            crossings, key=lambda at: (at[0], at[1].ns_per_byte), default=(_LARGEST_BYTES, current)
        )
        if start >= _LARGEST_BYTES:
            return LinearPieces.of(*found)
        if start <= found[-1][0]:
            found.pop()
            start = found[-1][0] + 1 if found else 0
        found.append((start, current.ns_per_byte, current.latency_ns))


def _crossing(now: Algorithm, other: Algorithm) -> int:
    """From how many bytes on ``other``, which takes less a byte, is faster."""
    at = (other.latency_ns - now.latency_ns) / (now.ns_per_byte - other.ns_per_byte)
    return int(min(max(0.0, at), _LARGEST_BYTES))


def _switch(network: Network, kind: Kind, count: int) -> list[Algorithm]:
    nodes = ceil(count / network.node_devices)
    bandwidth = network.node_gb_per_s if nodes > 1 else network.link_gb_per_s
    # Each device sends to each other: within the node over its link, else over its ports.
    if kind == "all-to-all":
        inside = (min(count, network.node_devices) - 1) / count / network.link_gb_per_s
        outside = (count - network.node_devices) / count * network.node_devices
        outside = outside / network.node_gb_per_s if nodes > 1 else 0.0
        latency_us = 3.4 if nodes == 1 else 9.6
        return [Algorithm("pairs", max(inside, outside), (8.4 + latency_us) * 1e3)]
    phases = PHASES[kind]
    between = phases * (nodes - 1)
    within = phases * (count - 1) - between
    found = []
    for one in _PROTOCOLS:
        base_us, inside_us, outside_us = one.ring_us
        inside_us *= 1.8 if nodes > 1 and one.name == "LL" else 1.0
        latency_us = base_us + within * inside_us + between * outside_us
        per_byte = phases * (count - 1) / count / (bandwidth * one.ring_share)
        found.append(Algorithm(f"ring {one.name}", per_byte, latency_us * 1e3))
        if kind == "all-reduce":
            base_us, inside_us, outside_us = one.tree_us
            inside_us *= 1.8 if nodes > 1 and one.name == "LL" else 1.0
            deep = log2(nodes) if nodes > 1 else 0
            latency_us = base_us + 2 * (
                (min(count, network.node_devices) - 1) * inside_us + deep * outside_us
            )
            found.append(Algorithm(f"tree {one.name}", 2 / (bandwidth * one.tree_share), latency_us * 1e3))
    return found


def _ring(network: Network, kind: Kind, count: int) -> list[Algorithm]:
    latency_ns = network.link_latency_us * 1e3
    if kind == "all-to-all":  # a message crosses a quarter of the ring on average, in both directions
        return [Algorithm("ring", count / 4 / 2 / network.link_gb_per_s, count / 2 * latency_ns)]
    steps = PHASES[kind] * (count - 1)
    return [Algorithm("ring", steps / count / network.link_gb_per_s, steps * latency_ns)]


def _mesh(network: Network, kind: Kind, count: int) -> list[Algorithm]:
    phases = PHASES[kind]
    per_byte = phases * (count - 1) / count / network.link_gb_per_s
    latency_us = network.kernel_us + phases * network.link_latency_us
    return [Algorithm("direct", per_byte, latency_us * 1e3)]


def _torus(network: Network, kind: Kind, count: int) -> list[Algorithm]:
    rows, columns = torus_sides(count)
    latency_ns, bandwidth = network.link_latency_us * 1e3, network.link_gb_per_s
    if kind == "all-to-all":
        steps = rows + columns - 2
        return [Algorithm("torus", steps / 4 / bandwidth, steps * latency_ns)]
    phases = PHASES[kind]
    # Two links along each dimension; the second dimension moves what the first left, a row's share.
    per_byte = ((columns - 1) / columns + (rows - 1) / rows / columns) / (2 * bandwidth)
    return [Algorithm("torus", phases * per_byte, phases * (rows + columns - 2) * latency_ns)]


def torus_sides(count: int) -> tuple[int, int]:
    """The shorter and the longer side of the squarest torus of so many devices."""
    rows = next(side for side in range(isqrt(count), 0, -1) if count % side == 0)
    return rows, count // rows


_TOPOLOGIES: dict[str, Callable[[Network, Kind, int], list[Algorithm]]] = {
    "switch": _switch,
    "ring": _ring,
    "mesh": _mesh,
    "torus": _torus,
}


TILE_ROWS, TILE_COLUMNS = 128, 256
"""Of an output tile: CUTLASS's default for 16-bit matmuls on V100 (``default_gemm_configuration.h``)."""
HALF = 2
"""Bytes of a 16-bit element."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """``[rows, depth] x [depth, columns]`` on one device."""

    rows: int
    columns: int
    depth: int

    @property
    def flops(self) -> float:
        """A multiplication and an addition are two."""
        return 2.0 * self.rows * self.columns * self.depth

    @property
    def output_bytes(self) -> int:
        """Of the result."""
        return HALF * self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Stages:
    """How a device runs a matmul."""

    count: int
    products_ns: float
    """Of a stage, while nothing else uses the memory."""
    read_bytes: float
    """Of a stage, from memory."""
    write_bytes: float
    """Of a stage."""
    write_ns: float
    reads_once: bool = False
    """Whether the cache holds all that is read again."""

    @property
    def ns(self) -> float:
        """Of the whole matmul, alone."""
        return self.count * (self.products_ns + self.write_ns)


def stages(gpu: Gpu, matmul: Matmul, *, around_cache: bool = False, units: int | None = None) -> Stages:
    """The stages of a matmul on ``units`` compute units (all, where not given)."""
    units = gpu.compute_units if units is None else units
    tiles = ceil(matmul.rows / TILE_ROWS) * ceil(matmul.columns / TILE_COLUMNS)
    count = ceil(tiles / units)
    reads = memory_reads(gpu, matmul, units, around_cache=around_cache)
    flops_per_ns = gpu.matmul_flops_per_ns / gpu.compute_units
    written = matmul.output_bytes / count
    moved = reads / count + (0 if around_cache else written)
    products_ns = max(
        2.0 * TILE_ROWS * TILE_COLUMNS * matmul.depth / flops_per_ns, moved / gpu.memory_gb_per_s
    )
    products_ns += gpu.stage_us * 1e3
    write_ns = written / (gpu.memory_gb_per_s if around_cache else gpu.cache_gb_per_s)
    operands = HALF * matmul.depth * (matmul.rows + matmul.columns)
    return Stages(count, products_ns, reads / count, written, write_ns, reads <= operands)


def memory_reads(gpu: Gpu, matmul: Matmul, units: int, *, around_cache: bool) -> float:
    """Bytes that a matmul reads from memory."""
    first, second = HALF * matmul.rows * matmul.depth, HALF * matmul.depth * matmul.columns
    tiles = matmul.rows * matmul.columns / (TILE_ROWS * TILE_COLUMNS)
    sweeps = max(1.0, tiles / max(units, ceil(matmul.rows / TILE_ROWS)))
    passed = first + second / sweeps + (0 if around_cache else matmul.output_bytes / sweeps)
    kept = min(1.0, gpu.cache_mb * 2**20 / passed)
    return first + second + (sweeps - 1) * (1 - kept) * first


def matmul_ns(gpu: Gpu, matmul: Matmul, units: int | None = None) -> float:
    """Time of a matmul alone, on ``units`` compute units; without its launch."""
    return stages(gpu, matmul, units=units).ns
