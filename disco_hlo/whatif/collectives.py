"""How long a collective takes on a machine: the fastest of the algorithms that its topology has, for a size.

Each algorithm is a line T = C x + D over the bytes x that the collective has on one device (of a reduce-scatter its
operand, of an all-gather its result, of an all-to-all all that a device holds). So the time over all sizes is their
lower envelope.

* ``switch``: NCCL 2.8's own model (``src/graph/tuning.cc``): rings and double trees, each with the protocols LL, LL128
  and Simple. Left out: its limits by channel, which differ by generation, and the factors by which it corrects
  all-reduces alone (trees by size, rings between nodes), since rings of other collectives would then seem faster.
* ``ring``: (N - 1)/N x B bytes a phase in N - 1 messages, two phases for an all-reduce (Patarasuk and Yuan, JPDC 2009).
* ``mesh``: all joined with all: each phase is one message to every other device at once.
* ``torus``: rings along both dimensions, one after the other. In an all-to-all each device passes on what is not for
  it: of n devices on a ring each sends n (n - 1)/2 parts of 1/n (ASTRA-sim, ``collective/Ring.cc``), half of them in
  each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isqrt, log2
from typing import Literal

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.whatif.machine import MOST_DEVICES, Machine, Network

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
    return best(machine, kind, size_bytes, devices).ns(size_bytes)


def best(machine: Machine, kind: Kind, size_bytes: float, devices: int | None = None) -> Algorithm:
    """The fastest algorithm for a size; raises as :func:`collective_ns`."""
    return min(algorithms(machine, kind, devices), key=lambda one: one.ns(size_bytes))


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
    if (
        kind == "all-to-all"
    ):  # each device sends to each other: within the node over its link, else over its ports
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
