"""Paper 004 (Punniyamurthy et al., SC 2024): operators that send what they compute while they compute the rest.

Section III. A kernel of long-running workgroups computes slices one after the other; each slice that another device
needs goes out as soon as it is done. With the communication-aware order those come first. The kernel ends when its own
slices are computed and all slices from others have arrived.

Embedding is bound by memory: pooling reads the rows of a table and writes one. Its time is what it moves at the
memory's full bandwidth, whatever the order; what occupancy changes is figure 13's alone (:func:`pooling_ns`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disco_hlo.whatif.machine import HALF, Machine, Matmul, collective_ns, matmul_ns

FLOAT = 4
SLICE = 32
"""Embedding vectors that are sent together (section IV.A)."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Pooling over the tables of one device, for the whole batch."""

    batch: int
    """Over all devices."""
    tables: int
    """On one device."""
    width: int = 256
    """Paper 004, section IV.A."""
    pooling: int = 70
    """Rows that a vector is the sum of: stated for the simulation (table II), assumed for the kernels."""

    @property
    def output_bytes(self) -> int:
        """All vectors of one device."""
        return self.batch * self.tables * self.width * FLOAT

    def ns(self, machine: Machine) -> float:
        """Time of the pooling by itself, without its launch."""
        return (self.pooling + 1) * self.output_bytes / machine.gpu.memory_gb_per_s


@dataclass(frozen=True, slots=True)
class Compared:
    """Kernels one after the other, and one fused kernel; in ns."""

    separate_ns: float
    fused_ns: float

    @property
    def saved(self) -> float:
        """Share of the time by which the fused kernel is faster: what the paper's figures show."""
        return 1 - self.fused_ns / self.separate_ns


def embedding_all_to_all(machine: Machine, embedding: Embedding) -> Compared:
    """Figures 8 (one node) and 12 (two nodes)."""
    size, launch_ns = embedding.output_bytes, machine.gpu.launch_us * 1e3
    compute_ns = embedding.ns(machine)
    separate = 2 * launch_ns + compute_ns + collective_ns(machine, "all-to-all", size)
    ends = fused_ends_ns(machine, embedding, [True] * machine.network.devices)
    remote = size * (1 - 1 / machine.network.devices)
    # Within a node threads store to the other device: what they send is not written here first, nor read again.
    stored = 2 * remote / machine.gpu.memory_gb_per_s if machine.network.node_devices > 2 else 0.0
    return Compared(separate + stored, launch_ns + float(ends.max()))


def fused_ends_ns(machine: Machine, embedding: Embedding, aware: list[bool]) -> NDArray[np.float64]:
    """When each device is done, ``[devices]``.

    Args:
        aware: of each device, whether slices for others come first; else they come as the batch has them: those for
            device 0 first.
    """
    devices = len(aware)
    per_device = max(1, round(embedding.batch * embedding.tables / devices / SLICE))
    step_ns = embedding.ns(machine) / (per_device * devices)
    message_ns = SLICE * embedding.width * FLOAT / machine.network.link_gb_per_s
    arrived = np.full(devices, embedding.ns(machine))
    for sender in range(devices):
        others = [one for one in range(devices) if one != sender]
        order = [*others, sender] if aware[sender] else list(range(devices))
        target = np.repeat(order, per_device)
        done = step_ns * np.arange(1, len(target) + 1)
        remote = target != sender
        # A link sends one after the other: each begins when it is computed and the one before has gone.
        waits = done[remote] - message_ns * np.arange(remote.sum())
        ends = np.maximum.accumulate(waits) + message_ns * np.arange(1, remote.sum() + 1)
        ends += machine.network.link_latency_us * 1e3
        for other in others:
            arrived[other] = max(arrived[other], ends[target[remote] == other][-1])
    return arrived


def skew(machine: Machine, embedding: Embedding, *, aware: bool) -> float:
    """Figure 14: by how much the slower of two devices is slower."""
    # Of an unaware kernel device 1 has the same order under both: what device 0 needs comes first.
    ends = fused_ends_ns(machine, embedding, [aware, aware])
    return float(ends.max() / ends.min() - 1)


LANES = 64
WAVES = 32
"""Of a compute unit at full occupancy (CDNA 2: eight on each of four SIMDs)."""


def pooling_ns(machine: Machine, embedding: Embedding, occupancy: float) -> float:
    """Figure 13: memory is busy where what is in flight is the bandwidth times the latency, and takes longer below that
    (Little's law).

    A wave has one element a lane in flight: PyTorch's kernel (``EmbeddingBag.cu``) sums a feature's rows in one thread,
    one after the other, each where an index says. The indices are taken to be there in time.

    Args:
        occupancy: share of the waves that the device holds.
    """
    in_flight = machine.gpu.compute_units * WAVES * occupancy * LANES * FLOAT
    bandwidth = min(machine.gpu.read_gb_per_s, in_flight / machine.gpu.latency_ns)
    return embedding.ns(machine) * machine.gpu.memory_gb_per_s / bandwidth


def gemv_all_reduce(machine: Machine, rows: int, depth: int) -> Compared:
    """Figure 9: a matrix times a vector, all-reduced; both in 16 bits."""
    launch_ns, size = machine.gpu.launch_us * 1e3, HALF * rows
    compute_ns = HALF * rows * depth / machine.gpu.memory_gb_per_s
    all_reduce = collective_ns(machine, "all-reduce", size)
    share = 1 - 1 / machine.network.devices
    # What another device reduces comes first; its sums come back at the end.
    back_ns = machine.network.link_latency_us * 1e3 + share * size / machine.network.link_gb_per_s
    fused = max(compute_ns, share * size / machine.network.link_gb_per_s) + back_ns
    return Compared(2 * launch_ns + compute_ns + all_reduce, launch_ns + fused)


def matmul_all_to_all(machine: Machine, matmul: Matmul) -> Compared:
    """Figure 10."""
    launch_ns = machine.gpu.launch_us * 1e3
    compute_ns = matmul_ns(machine.gpu, matmul)
    all_to_all = collective_ns(machine, "all-to-all", matmul.output_bytes)
    return Compared(2 * launch_ns + compute_ns + all_to_all, launch_ns + max(compute_ns, all_to_all))


@dataclass(frozen=True, slots=True)
class Dlrm:
    """The recommendation model of table II."""

    batch: int = 64 * 1024
    """Assumed: 512 a device, which the paper does not give."""
    tables: int = 8
    """On a device; assumed, not given either."""
    width: int = 92
    pooling: int = 70
    layers: int = 43
    layer_width: int = 682


def dlrm(machine: Machine, model: Dlrm) -> Compared:
    """Figure 15: one training pass.

    Forward: embedding, all-to-all, the perceptron. Backward: the perceptron twice, an all-to-all of gradients, and
    the tables' update, which reads and writes what the forward pass read. The perceptron's all-reduce overlaps with the
    update. Fused, embedding and all-to-all overlap, forward and backward.
    """
    devices = machine.network.devices
    embedding = Embedding(model.batch, model.tables, model.width, model.pooling)
    forward_ns = embedding.ns(machine)
    update_ns = 2 * forward_ns
    exchange_ns = collective_ns(machine, "all-to-all", embedding.output_bytes)
    layer = Matmul(model.batch // devices, model.layer_width, model.layer_width)
    layer_ns = matmul_ns(machine.gpu, layer) + machine.gpu.launch_us * 1e3
    perceptron_ns = 3 * model.layers * layer_ns
    gradients = FLOAT * model.layers * model.layer_width**2
    all_reduce_ns = collective_ns(machine, "all-reduce", gradients)
    separate = forward_ns + exchange_ns + perceptron_ns + exchange_ns + max(update_ns, all_reduce_ns)
    fused = max(forward_ns, exchange_ns) + perceptron_ns + max(exchange_ns, update_ns, all_reduce_ns)
    return Compared(separate, fused)
