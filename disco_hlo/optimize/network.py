"""A network to imagine: the time of an all-reduce by a formula, in the place of the measured line.

Over the number of devices N, the bandwidth B of a device's link in each direction and the latency a of one message,
for S bytes:

* ring:  T = 2 (N - 1) a + 2 (N - 1)/N S/B   (Patarasuk and Yuan, "Bandwidth optimal all-reduce
  algorithms for clusters of workstations", JPDC 69(2), 2009; alpha-beta model as in Thakur,
  Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA
  19(1), 2005);
* two binary trees: T = 2 ceil(log2 N) a + 2 S/B   (Sanders, Speck and Traeff, "Two-tree algorithms
  for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009; NCCL since 2.4).

Libraries take whichever is faster for a size, and so does the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.whatif.machine import Algorithm, fastest


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
    """All-reduce time over size on a network: the faster of ring and two binary trees."""
    n, per_byte, latency_ns = network.devices, 1.0 / network.gigabytes_per_s, network.latency_us * 1e3
    ring = (2 * (n - 1) / n * per_byte, 2 * (n - 1) * latency_ns)
    tree = (2 * per_byte, 2 * (n - 1).bit_length() * latency_ns)
    return fastest([Algorithm("ring", *ring), Algorithm("trees", *tree)])
