"""CoCoNet (Jangda et al., ASPLOS 2022): its schedules by name, on its cluster or another machine.

A schedule's time is the sum of its kernels and collectives, but where CoCoNet overlaps them. There the output is cut
into buffer tiles (section 5.1; 16 MB, figure 9), and these pass through what is overlapped one after the other: all
takes as long as what is busiest, and the first or last tile of the rest. What shares a link adds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from disco_hlo.whatif.machine import Machine, Matmul, algorithms, collective_ns, matmul_ns, send

HALF = 2
"""Bytes of a 16-bit element."""
BUFFER_BYTES = 16 * 2**20
"""CoCoNet, figure 9."""
CHANNELS = 8
"""Compute units that a collective takes from a matmul next to it: assumed, what NCCL 2.8 needs at 16.7 GB/s each
(``src/graph/tuning.cc``) to fill 120 GB/s."""
HIDDEN = 0.8
"""Share of a matmul that an overlapped all-reduce hides where it takes longer (figure 1's sentence); that is less than
all but the first chunk, and why is not given."""
POINTWISE_BYTES = 6
"""Of bias, dropout and residual in one kernel, an element: two read, one written."""

Optimizer = Literal["Adam", "LAMB"]
UPDATE_BYTES: dict[Optimizer, int] = {"Adam": 28, "LAMB": 40}
"""What a mixed-precision update reads and writes, an element. Adam: gradient (2), weight, momentum and velocity (12)
in; these (12) and the 16-bit weight (2) out. LAMB writes its update (4) in a first pass, and in a second reads it with
the weight (8)."""
UPDATE_KERNELS: dict[Optimizer, int] = {"Adam": 1, "LAMB": 2}


# ---- section 6.1.1, figure 10: gradients are all-reduced, weights updated


def update_schedules(machine: Machine, optimizer: Optimizer, elements: int) -> dict[str, float]:
    """Time of each schedule of figure 10 in ns; ``UB`` is the all-reduce alone."""
    size, devices = HALF * elements, machine.network.devices
    all_reduce = collective_ns(machine, "all-reduce", size)
    own = _update_ns(machine, optimizer, elements / devices)
    return {
        "AR-Opt": _launches_ns(machine, 1) + all_reduce + _update_ns(machine, optimizer, elements),
        "GShard-Eq": _launches_ns(machine, 2) + _scatter_ns(machine, size) + own + _gather_ns(machine, size),
        "fuse(RS-Opt-AG)": _launches_ns(machine, 1) + fused_ring_ns(machine, size) + own
        - _launches_ns(machine, UPDATE_KERNELS[optimizer]),
        "UB": _launches_ns(machine, 1) + all_reduce,
    }  # fmt: skip


def fused_ring_ns(machine: Machine, size: float, devices: int | None = None) -> float:
    """A reduce-scatter and an all-gather in one kernel: an all-reduce around the ring."""
    rings = [
        one for one in algorithms(machine, "all-reduce", devices) if one.name.startswith(("ring", "direct"))
    ]
    return min(one.ns(size) for one in rings)


def _update_ns(machine: Machine, optimizer: Optimizer, elements: float) -> float:
    moved = UPDATE_BYTES[optimizer] * elements
    return _launches_ns(machine, UPDATE_KERNELS[optimizer]) + moved / machine.gpu.memory_gb_per_s


def _launches_ns(machine: Machine, count: int) -> float:
    return count * machine.gpu.launch_us * 1e3


def _scatter_ns(machine: Machine, size: float, devices: int | None = None) -> float:
    return collective_ns(machine, "reduce-scatter", size, devices)


def _gather_ns(machine: Machine, size: float, devices: int | None = None) -> float:
    return collective_ns(machine, "all-gather", size, devices)


# ---- section 6.1.3, table 1: training BERT


@dataclass(frozen=True, slots=True)
class Bert:
    """A model of table 1. Widths and layers are those of NVIDIA's scripts and of Megatron-LM's 3.9 B model."""

    name: str
    layers: int
    width: int
    parameters: float


BERTS = (
    Bert("336M", 24, 1024, 336e6),
    Bert("1.2B", 24, 2048, 1.2e9),
    Bert("3.9B", 48, 2560, 3.9e9),
)
LENGTH, HEAD = 128, 64
"""Tokens of a sequence (assumed: the first phase of NVIDIA's script) and width of a head."""
LAYER_KERNELS = 28
"""Of a layer forward, twice as many backward (assumed: the operators of NVIDIA's script, one by one)."""
APEX_BYTES: dict[Optimizer, int] = {"Adam": 40, "LAMB": 64}
"""What NVIDIA's script, Apex at O2, moves to update an element. Adam: the gradient to 32 bits (6); gradient, weight,
momentum and velocity (16) in, three of them out (12); the weight to 16 bits (6). LAMB besides: norms of gradient,
weight and update (12), and an update written (4) and applied in a pass of its own (8)."""
SUM_BYTES, DDP_BYTES = 12, 25e6
"""What a part of a batch moves for each parameter to add its gradient to the sum (2 out, 2 in; 4 in and out: Apex at
O2); a bucket of PyTorch DDP."""
STATE_BYTES: dict[str, dict[Optimizer, tuple[int, int]]] = {
    "NV BERT": {"Adam": (18, 0), "LAMB": (22, 0)},
    "PyTorch DDP": {"Adam": (18, 0), "LAMB": (22, 0)},
    "ZeRO": {"Adam": (6, 12), "LAMB": (22, 0)},
    "CoCoNet": {"Adam": (4, 12), "LAMB": (4, 16)},
}
"""Bytes a parameter on every device, and bytes that the devices share: weight and gradient (4), the gradients' buffer
(2), the optimizer's state (12; LAMB's update 4)."""


def has_memory(machine: Machine, system: str, optimizer: Optimizer, model: Bert) -> bool:
    """Whether weights, gradients and optimizer fit, before any activation."""
    whole, shared = STATE_BYTES[system][optimizer]
    return model.parameters * (whole + shared / machine.network.devices) < machine.gpu.memory_gb * 1e9


def training_ns(
    machine: Machine, system: str, optimizer: Optimizer, model: Bert, micro_batch: int, batch: int
) -> float:
    """Time of an iteration with a global ``batch``, in parts of ``micro_batch`` sequences on a device."""
    part = _forward_and_backward_ns(machine, model, micro_batch)
    size, mem = HALF * model.parameters, machine.gpu.memory_gb_per_s
    all_reduce = collective_ns(machine, "all-reduce", size)
    update = _launches_ns(machine, UPDATE_KERNELS[optimizer]) + APEX_BYTES[optimizer] * model.parameters / mem
    copies = 4 * size / mem  # into one buffer and out of it
    backward, bucket = 2 / 3 * part, collective_ns(machine, "all-reduce", DDP_BYTES)
    buckets = size / DDP_BYTES * bucket  # the backward pass next to them has fewer compute units
    slower = CHANNELS / (machine.gpu.compute_units - CHANNELS)
    exposed = max(bucket, buckets - backward) + slower * min(buckets, backward)
    after = {
        "NV BERT": copies + all_reduce + update,
        "PyTorch DDP": copies + exposed + update,
        "ZeRO": copies
        + (
            update_schedules(machine, optimizer, int(model.parameters))["GShard-Eq"]
            if optimizer == "Adam"
            else all_reduce + update
        ),
        "CoCoNet": update_schedules(machine, optimizer, int(model.parameters))["fuse(RS-Opt-AG)"],
    }
    return computing_ns(machine, model, micro_batch, batch) + after[system]


def computing_ns(machine: Machine, model: Bert, micro_batch: int, batch: int) -> float:
    """What an iteration computes but for the update."""
    parts = batch / machine.network.devices / micro_batch
    added = SUM_BYTES * model.parameters / machine.gpu.memory_gb_per_s if parts > 1 else 0.0
    return parts * (_forward_and_backward_ns(machine, model, micro_batch) + added)


def _forward_and_backward_ns(machine: Machine, model: Bert, sequences: int) -> float:
    """Matmuls, three times those of the forward pass, and what else passes through memory.

    A layer keeps 34 s h + 5 a s s bytes a sequence for the backward pass (Korthikanti et al., MLSys 2023): written
    once, read once, and once more as much for the gradients.
    """
    tokens, width = sequences * LENGTH, model.width
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    products = sum(matmul_ns(machine.gpu, Matmul(tokens, columns, depth)) for columns, depth in shapes)
    products += _launches_ns(machine, LAYER_KERNELS)
    kept = sequences * (34 * LENGTH * width + 5 * width / HEAD * LENGTH * LENGTH)
    return model.layers * 3 * (products + kept / machine.gpu.memory_gb_per_s)


# ---- section 6.2, figures 1 and 11: a matmul, an all-reduce and pointwise computations


def matmul_schedules(
    machine: Machine, matmul: Matmul, devices: int, *, pointwise: bool = True
) -> dict[str, float]:
    """Time of each schedule of figure 11 in ns; without ``pointwise`` those of figure 1."""
    size = matmul.output_bytes
    product, all_reduce = matmul_ns(machine.gpu, matmul), collective_ns(machine, "all-reduce", size, devices)
    moved = POINTWISE_BYTES * matmul.rows * matmul.columns if pointwise else 0
    rest = moved / machine.gpu.memory_gb_per_s
    apart = _scatter_ns(machine, size, devices) + rest / devices + _gather_ns(machine, size, devices)
    tiles = ceil(size / BUFFER_BYTES)
    beside = matmul_ns(machine.gpu, matmul, units=max(1, machine.gpu.compute_units - CHANNELS))
    ring = fused_ring_ns(machine, size, devices) + rest / devices
    return {
        "MM+AR+C": _launches_ns(machine, 3 if pointwise else 2) + product + all_reduce + rest,
        "GShard-Eq": _launches_ns(machine, 4 if pointwise else 3) + product + apart,
        "OL(MM,fuse(RS+C+AG))": _launches_ns(machine, 1)
        + max((1 - HIDDEN) * product + ring, beside + ring / tiles),
    }


# ---- section 6.3, figure 12: layers on groups of devices, sends between them


def pipeline_schedules(machine: Machine, elements: int) -> dict[str, float]:
    """Time of each schedule of figure 12 in ns, from one node to the next."""
    group, size = machine.network.node_devices, HALF * elements
    all_reduce = collective_ns(machine, "all-reduce", size, group)
    scatter, gather = _scatter_ns(machine, size, group), _gather_ns(machine, size, group)
    whole, sliced = send_ns(machine, size), send_ns(machine, size / group)
    rest = POINTWISE_BYTES * elements / machine.gpu.memory_gb_per_s
    tiles = ceil(size / BUFFER_BYTES)
    # The reduce-scatter and the all-gather are on one link, within nodes that do both at once; the sends on another.
    within, between = scatter + gather + rest / group, sliced
    return {
        "AR+P2P+C": _launches_ns(machine, 3) + all_reduce + whole + rest,
        "AR+P2P+C+AG": _launches_ns(machine, 4) + all_reduce + sliced + rest / group + gather,
        "GShard-Eq": _launches_ns(machine, 4) + scatter + sliced + rest / group + gather,
        "OL(RS+C,P2P,AG)": _launches_ns(machine, 1)
        + max(within, between) + min(within, between) / tiles,
    }  # fmt: skip


def send_ns(machine: Machine, size: float) -> float:
    """Each device of a node sends so many bytes to its counterpart in the next node, all at once."""
    return send(machine, between_nodes=True).ns(size)
