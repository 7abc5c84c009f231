"""CoCoNet (Jangda et al., ASPLOS 2022): its schedules by name, on its cluster or another machine.

A schedule's time is the sum of its kernels and collectives, but where CoCoNet overlaps them. There the output is cut
into buffer tiles (section 5.1; 16 MB, figure 9), and these pass through what is overlapped one after the other: all
takes as long as what is busiest, and the first or last tile of the rest. What shares a link adds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from disco_hlo.whatif.machine import HALF, Machine, Matmul, algorithms, collective_ns, matmul_ns, send

BUFFER_BYTES = 16 * 2**20
"""CoCoNet, figure 9."""
CHANNELS, INFERENCE_CHANNELS = 32, 12
"""Compute units that a collective takes from a matmul next to it, one a channel (section 5.1). NCCL's channels are set
in the authors' repositories: ``coconet/experiments/model-parallel-exp.py`` and
``coconet-experiments/Nvidia-Bert/coconet-experiments.py``; ``MegatronLM-Model-Parallel/eval_8_batchsize.sh``."""
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
    """A model of table 1. Widths and layers are those of the authors' ``bert_config_*.json``."""

    name: str
    layers: int
    width: int
    inner: int
    """Width inside the MLP. The authors' files have 4096 throughout; the sizes that table 1 names need four widths."""
    parameters: float


BERTS = (
    Bert("336M", 24, 1024, 4096, 336e6),
    Bert("1.2B", 24, 2048, 8192, 1.2e9),
    Bert("3.9B", 48, 2560, 10240, 3.9e9),
)
LENGTH, HEAD, VOCABULARY = 128, 64, 30528
"""Tokens of a sequence: NVIDIA's ``config_DGX2_16x16x64x4_wiki_books.sh`` has them for table 1's cluster, batch and
micro batch (LAMB, 336M). Width of a head. Words, filled up to a multiple of 8."""
LAYER_KERNELS, LAYER_TENSORS = 28, 16
"""Of a layer forward, twice as many backward: the operators of NVIDIA's ``modeling.py``, one by one; its parameters."""
KERNEL_US, SLOWDOWN = 17.90, 1.141
"""Of PyTorch's operators, fitted to NVIDIA's own measurements on one V100 (``configs/papers/coconet.toml``): time from
one kernel to the next, and time over what their matmuls and bytes need."""
LAYER_BYTES, SCORE_BYTES = (90, 128), (21, 23)
"""What passes through memory besides the layers' matmuls, forward and backward, in the operators of NVIDIA's
``modeling.py``. For each token and unit of width, forward: biases of five outputs (20), bias and GELU in one kernel on
the inner width (16), copies of heads (16), the attention's matmuls (8), two dropouts (10), two additions (12), two
normalizations (8). Backward: normalizations (20), dropouts (10), additions (24), biases (18), GELU (24), copies of
heads (16), the attention's matmuls (16). For each score, forward: product (2), scale, mask and softmax (4 each),
dropout (5), read (2); backward: products (8), dropout (5), softmax (6), scale (4)."""
LOGIT_BYTES = 18
"""What passes through memory for each token and word besides matmuls: bias (2 in, 2 out) and its gradient (2),
log-softmax (4) and its gradient (6), the gradient of the likelihood (2). NVIDIA's script of PyTorch 1.5 computes all
tokens' scores, not those of masked tokens alone (``BertPretrainingCriterion`` in ``run_pretraining.py``)."""
TIED_BYTES = 8
"""For each word and unit of width, in each part of a batch: the word embeddings are the scores' weights too, so a
gradient of their lookup is filled with zeros (2) and added to the scores' (6)."""
APEX_BYTES: dict[Optimizer, int] = {"Adam": 34, "LAMB": 58}
"""What Apex at O2 moves to update an element. Adam: gradient, weight, momentum and velocity (16) in, three of them out
(12); the weight to 16 bits (6). LAMB besides: norms of gradient, weight and update (12), and an update written (4) and
applied in a pass of its own (8)."""
APEX_SUM_BYTES = (6, 10)
"""Apex at O2, ``apex/amp/_process_optimizer.py``: the gradients of a batch's first part become 32-bit (2 in, 4 out);
those of each other part are added to these (6 in, 4 out)."""
SUM_BYTES = 6
"""Autograd adds each part's 16-bit gradients in place (4 in, 2 out) where they stay: CoCoNet (the authors'
``run_pretraining.py``, ``--fused_allreduce_fp16``) and DeepSpeed without ZeRO."""
FLAT_BYTES = 12
"""What passes through memory around an all-reduce, an element. NVIDIA's script (``take_optimizer_step``): 32-bit
gradients into a 16-bit buffer (6) and back (6). PyTorch 1.5's ``reducer.cpp``: into the bucket (4), divided there (4),
and back (4); so does DeepSpeed's ``buffered_allreduce_fallback``."""
DDP_BYTES = 25e6
"""A bucket of PyTorch DDP."""
ZERO_BYTES, GATHER_BYTES = 8, 4
"""DeepSpeed's ``stage2.py``: gradients into a contiguous buffer (4), divided there (4); and the list of partitions that
PyTorch copies out of the gathered buffer (``ProcessGroupNCCL::allgather``)."""
UNFUSED_KERNELS = 3
"""Of each parameter, in DeepSpeed's LAMB, which goes parameter by parameter; it has a norm of gradients (2) besides."""
STATE_BYTES: dict[str, dict[Optimizer, tuple[int, int]]] = {
    "NV BERT": {"Adam": (22, 0), "LAMB": (22, 0)},
    "PyTorch DDP": {"Adam": (22, 0), "LAMB": (22, 0)},
    "ZeRO": {"Adam": (6, 12), "LAMB": (18, 0)},
    "CoCoNet": {"Adam": (4, 12), "LAMB": (4, 16)},
}
"""Bytes a parameter on every device, and bytes that the devices share: weight and gradient (4), the gradients' buffer
(2), the optimizer's state (12; LAMB's update 4, which Apex writes over the gradient), Apex' 32-bit gradients (4)."""


def has_memory(machine: Machine, system: str, optimizer: Optimizer, model: Bert) -> bool:
    """Whether weights, gradients and optimizer fit, before any activation."""
    whole, shared = STATE_BYTES[system][optimizer]
    return model.parameters * (whole + shared / machine.network.devices) < machine.gpu.memory_gb * 1e9


def training_ns(
    machine: Machine, system: str, optimizer: Optimizer, model: Bert, micro_batch: int, batch: int
) -> float:
    """Time of an iteration with a global ``batch``, in parts of ``micro_batch`` sequences on a device."""
    parts = batch // machine.network.devices // micro_batch
    elements, size = model.parameters, HALF * model.parameters

    def through_memory_ns(element_bytes: float) -> float:
        return element_bytes * elements / machine.gpu.memory_gb_per_s

    first, further = APEX_SUM_BYTES
    apex_sum = through_memory_ns(first + (parts - 1) * further)
    apex_update = _launches_ns(machine, UPDATE_KERNELS[optimizer]) + through_memory_ns(APEX_BYTES[optimizer])
    plain_sum = through_memory_ns(parts * SUM_BYTES)
    all_reduce = collective_ns(machine, "all-reduce", size) + through_memory_ns(FLAT_BYTES)
    if system == "NV BERT":
        after = apex_sum + all_reduce + apex_update
    elif system == "PyTorch DDP":
        each = _buckets_ns(machine, model, micro_batch) + through_memory_ns(FLAT_BYTES)
        after = apex_sum + each + apex_update
    elif system == "CoCoNet":
        after = plain_sum + update_schedules(machine, optimizer, int(elements))["fuse(RS-Opt-AG)"]
    elif optimizer == "Adam":
        each = _scatter_ns(machine, size) + through_memory_ns(ZERO_BYTES)
        own = _update_ns(machine, optimizer, elements / machine.network.devices)
        after = parts * each + own + _gather_ns(machine, size) + through_memory_ns(GATHER_BYTES)
    else:
        launches = _launches_ns(machine, UNFUSED_KERNELS * LAYER_TENSORS * model.layers)
        after = plain_sum + all_reduce + launches + through_memory_ns(2 + UPDATE_BYTES[optimizer])
    return computing_ns(machine, model, micro_batch, batch) + after


def computing_ns(machine: Machine, model: Bert, micro_batch: int, batch: int) -> float:
    """What the forward and backward passes of an iteration take alone."""
    parts = batch // machine.network.devices // micro_batch
    return parts * _forward_and_backward_ns(machine, model, micro_batch)


def _buckets_ns(machine: Machine, model: Bert, micro_batch: int) -> float:
    """What DDP's buckets add to a backward pass: it has fewer compute units next to them, and waits for the last.

    The authors' ``coconet-experiments/Nvidia-Bert`` reduces gradients once an iteration, with NCCL's rings and protocol
    Simple alone.
    """
    backward = 2 / 3 * _forward_and_backward_ns(machine, model, micro_batch)
    bucket = next(one for one in algorithms(machine, "all-reduce") if one.name == "ring Simple").ns(DDP_BYTES)
    buckets = HALF * model.parameters / DDP_BYTES * bucket
    return bucket + max(buckets * CHANNELS / machine.gpu.compute_units, buckets - backward)


def _forward_and_backward_ns(machine: Machine, model: Bert, sequences: int, length: int = LENGTH) -> float:
    """Matmuls of the layers and of the tokens' scores, and what else passes through memory."""
    tokens, width, gpu = sequences * length, model.width, machine.gpu
    shapes = [(width, width)] * 4 + [(model.inner, width), (width, model.inner)]
    products = sum(_linear_ns(machine, tokens, columns, depth) for columns, depth in shapes)
    products += 3 * 4 * tokens * length * width / gpu.matmul_flops_per_ns  # the attention's, two forward
    moved = sum(LAYER_BYTES) * tokens * width + sum(SCORE_BYTES) * tokens * length * width / HEAD
    scores = _linear_ns(machine, tokens, VOCABULARY, width)
    scores += (LOGIT_BYTES * tokens + TIED_BYTES * width) * VOCABULARY / gpu.memory_gb_per_s
    layers = model.layers * (products + moved / gpu.memory_gb_per_s)
    return _operators_ns(layers + scores, 3 * LAYER_KERNELS * model.layers)


def _operators_ns(needed_ns: float, kernels: int) -> float:
    """Time of PyTorch's operators, which need so much for their matmuls and bytes."""
    return SLOWDOWN * needed_ns + kernels * KERNEL_US * 1e3


def sequences_per_s(machine: Machine, model: Bert, micro_batch: int, length: int) -> float:
    """What one device trains with NVIDIA's script, in parts of ``micro_batch``; its update is spread over many."""
    _, further = APEX_SUM_BYTES
    added = further * model.parameters / machine.gpu.memory_gb_per_s
    return 1e9 * micro_batch / (_forward_and_backward_ns(machine, model, micro_batch, length) + added)


def _linear_ns(machine: Machine, tokens: int, columns: int, depth: int) -> float:
    """A linear layer's three matmuls: its result, and the gradients of its input and of its weight."""
    three = (Matmul(tokens, columns, depth), Matmul(tokens, depth, columns), Matmul(depth, columns, tokens))
    return sum(matmul_ns(machine.gpu, one) for one in three)


# ---- section 6.2, figures 1 and 11: a matmul, an all-reduce and pointwise computations


def matmul_schedules(
    machine: Machine, matmul: Matmul, devices: int, *, pointwise: bool = True, channels: int = CHANNELS
) -> dict[str, float]:
    """Time of each schedule of figure 11 in ns; without ``pointwise`` those of figure 1."""
    size = matmul.output_bytes
    product, all_reduce = matmul_ns(machine.gpu, matmul), collective_ns(machine, "all-reduce", size, devices)
    moved = POINTWISE_BYTES * matmul.rows * matmul.columns if pointwise else 0
    rest = moved / machine.gpu.memory_gb_per_s
    apart = _scatter_ns(machine, size, devices) + rest / devices + _gather_ns(machine, size, devices)
    tiles = ceil(size / BUFFER_BYTES)
    beside = matmul_ns(machine.gpu, matmul, units=max(1, machine.gpu.compute_units - channels))
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
    # The reduce-scatter and the all-gather are on one link, within nodes that do both at once; the sends on another.
    overlapped = in_tiles_ns(size, scatter + gather + rest / group, sliced)
    return {
        "AR+P2P+C": _launches_ns(machine, 3) + all_reduce + whole + rest,
        "AR+P2P+C+AG": _launches_ns(machine, 4) + all_reduce + sliced + rest / group + gather,
        "GShard-Eq": _launches_ns(machine, 4) + scatter + sliced + rest / group + gather,
        "OL(RS+C,P2P,AG)": _launches_ns(machine, 1) + overlapped,
    }


def in_tiles_ns(size_bytes: float, first_ns: float, second_ns: float) -> float:
    """Two works on one array, which passes through both buffer tile by buffer tile."""
    return max(first_ns, second_ns) + min(first_ns, second_ns) / ceil(size_bytes / BUFFER_BYTES)


def send_ns(machine: Machine, size: float) -> float:
    """Each device of a node sends so many bytes to its counterpart in the next node, all at once."""
    return send(machine, between_nodes=True).ns(size)


# ---- sections 6.2.1 and 6.3.1: inference with Megatron-LM, end to end


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model whose layers are split over the devices of a node; its numbers are those of Megatron-LM and GPT-3."""

    name: str
    width: int
    length: int
    heads: int


BERT, GPT2, GPT3 = (
    Transformer("BERT 3.9B", 2560, 512, 40),
    Transformer("GPT-2 8.3B", 3072, 1024, 32),
    Transformer("GPT-3 175B", 12288, 2048, 96),
)
NORMALIZATION_BYTES = 8
"""Of :data:`LAYER_BYTES` forward: what each device does for all tokens."""


@dataclass(frozen=True, slots=True)
class Operators:
    """Of a layer forward besides its matmuls, in one of two copies of Megatron-LM (coconet-experiments)."""

    sliced_bytes: int
    """For each token and unit of width, of a device's heads and part of the matmuls."""
    score_bytes: int
    rest_kernels: int
    """But for the two matmuls that an all-reduce follows, and what comes after these."""
    tail_bytes: int
    """After an all-reduce: bias, dropout and residual, an element."""
    tail_kernels: int


MODEL_PARALLEL = Operators(52, SCORE_BYTES[0], LAYER_KERNELS - 10, 15, 3)
"""``MegatronLM-Model-Parallel`` times a forward pass of training, ``AR-C``; operators as in :data:`LAYER_BYTES`, with
bias (4), dropout (5) and residual (6) apart."""
PIPELINE_PARALLEL = Operators(40, 17, 12, 7, 1)
"""``MegatronLM-Pipeline-Parallel``, ``megatron/model/transformer.py``, with its scripts' options: bias of three outputs
(12), bias and GELU (16), one copy of heads (4), the attention's matmuls (8); for each score product (2), mask and
softmax (4 each), dropout (5), read (2); one kernel for bias, dropout (its mask 1) and residual."""
WORDS, WORD_BYTES, WORD_KERNELS = 51200, 38, 7
"""GPT's words, filled up to a multiple of 128 x 16. What passes through memory for each token and word of a device in
the copy's ``megatron/mpu/cross_entropy.py``: to 32 bits (6), maximum (4), its subtraction (8), exponential (8), sum
(4), division (8); kernels with the matmul."""
MICRO_BATCHES = 16
"""Of a batch, which begins with an empty pipeline: the authors' ``pretrain_gpt3_175B_16VM.sh`` (one layer a node, 96 in
micro batches of 6) and ``..._16VM_96layer.sh`` (six, 16 of 1)."""


def tensor_parallel_speed_up(machine: Machine, model: Transformer, sequences: int) -> float:
    """Section 6.2.1: a layer of Megatron-LM over the same with both its all-reduces overlapped."""
    rest, tails = _split_layer(machine, model, sequences, MODEL_PARALLEL)
    group = machine.network.node_devices
    overlapped = [matmul_schedules(machine, one, group, channels=INFERENCE_CHANNELS) for one in tails]
    unfused = sum(_tail_ns(machine, one, MODEL_PARALLEL) for one in tails)
    return (rest + unfused) / (rest + sum(one["OL(MM,fuse(RS+C+AG))"] for one in overlapped))


def pipeline_speed_up(
    machine: Machine,
    model: Transformer,
    sequences: int,
    layers: int,
    micro_batches: float = MICRO_BATCHES,
) -> float:
    """Section 6.3.1: a node's ``layers`` and its sends over the same with the last all-reduce and send overlapped.

    The first micro batch passes all nodes, one after the other; then each takes as long as the slowest node needs for
    it: one that receives and sends, or the last, which receives and scores words. Overlapped, what a node receives is
    gathered meanwhile, and what it sends is reduced.
    """
    network, gpu, further = machine.network, machine.gpu, micro_batches - 1
    group, before = network.node_devices, network.devices // network.node_devices - 1
    rest, tails = _split_layer(machine, model, sequences, PIPELINE_PARALLEL)
    tokens, elements = tails[-1].rows, tails[-1].rows * tails[-1].columns
    size, launch_ns = HALF * elements, _launches_ns(machine, 1)
    scored = matmul_ns(gpu, Matmul(tokens, WORDS // group, model.width))
    scored += WORD_BYTES * tokens * WORDS / group / gpu.memory_gb_per_s
    node = layers * (rest + sum(_tail_ns(machine, one, PIPELINE_PARALLEL) for one in tails))
    last = node + _operators_ns(scored, WORD_KERNELS)
    kept = node - _tail_ns(machine, tails[-1], PIPELINE_PARALLEL) + _tail_matmul_ns(machine, tails[-1])
    whole, sliced = launch_ns + send_ns(machine, size), send_ns(machine, size / group)
    pointwise = POINTWISE_BYTES * elements / group / gpu.memory_gb_per_s
    gather = launch_ns + in_tiles_ns(size, _gather_ns(machine, size, group), sliced)
    scatter = launch_ns + in_tiles_ns(size, _scatter_ns(machine, size, group) + pointwise, sliced)
    through = pipeline_schedules(machine, elements)["OL(RS+C,P2P,AG)"]
    plain_ns = before * (node + whole) + last + further * (whole + max(node + whole, last))
    return plain_ns / (before * (kept + through) + last + further * (gather + max(kept + scatter, last)))


def _split_layer(
    machine: Machine, model: Transformer, sequences: int, operators: Operators
) -> tuple[float, list[Matmul]]:
    """What a layer takes but for the two matmuls whose results are all-reduced, and these."""
    group, gpu = machine.network.node_devices, machine.gpu
    tokens, width = sequences * model.length, model.width
    products = (Matmul(tokens, 3 * width // group, width), Matmul(tokens, 4 * width // group, width))
    scores = tokens * model.length * model.heads / group
    moved = tokens * width * (NORMALIZATION_BYTES + operators.sliced_bytes / group)
    moved += operators.score_bytes * scores
    rest = sum(matmul_ns(gpu, one) for one in products) + moved / gpu.memory_gb_per_s
    rest += 4 * tokens * model.length * width / group / gpu.matmul_flops_per_ns
    tails = [Matmul(tokens, width, width // group), Matmul(tokens, width, 4 * width // group)]
    return _operators_ns(rest, operators.rest_kernels), tails


def _tail_matmul_ns(machine: Machine, matmul: Matmul) -> float:
    return _operators_ns(matmul_ns(machine.gpu, matmul), 1)


def _tail_ns(machine: Machine, matmul: Matmul, operators: Operators) -> float:
    all_reduce = collective_ns(machine, "all-reduce", matmul.output_bytes, machine.network.node_devices)
    pointwise = operators.tail_bytes * matmul.rows * matmul.columns / machine.gpu.memory_gb_per_s
    pointwise = _operators_ns(pointwise, operators.tail_kernels)
    return _tail_matmul_ns(machine, matmul) + _launches_ns(machine, 1) + all_reduce + pointwise
