"""What the rest of the package must know of a backend of XLA: one record each, and no rule tells them apart by name.

Only this file says ``cpu`` or ``gpu`` (``tests/test_package.py``).

DisCo has one backend. Bounds and flags of kernels mirror XLA's own rules (cpu_instruction_fusion.cc,
cpu_multi_output_fusion.cc; for GPU see ``core/legality_gpu``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from disco_hlo.errors import UnsupportedError


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


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend."""

    name: str
    """As in ``Graph.backend``."""
    platforms: tuple[str, ...]
    """What JAX calls it, first the name under which the hook is registered."""
    constants: Constants
    """What stands in where there is no profile."""

    # Which nodes may share a kernel
    operands_and_results: int
    """External reads plus results (GPU: MaxOperandsAndOutputsPerFusion)."""
    reductions: int
    """Reduce ops. On GPU more of them spill registers (kMaxUnnestedReductionOutputsPerFusion)."""
    emissions: int = 8
    """How often the code of one op may be repeated (XLA's code duplication guard)."""
    shared_bytes: int = 0
    """Shared memory of a block of threads, where there are blocks."""
    has_heroes: bool = False
    """Whether the code generator of a kernel goes by its heroes, as XLA:GPU's does (``legality_gpu``). Otherwise one
    loop makes all results, as XLA:CPU's does (``legality``)."""
    also_joined: frozenset[str] = frozenset()
    """Ops that may be in a kernel though they are no fusible nodes."""
    never_generated: frozenset[str] = frozenset()
    """Fusible ops that there is no code generator for."""

    # How it is recognized
    marks: tuple[bytes, ...] = ()
    """What only its modules hold in the settings of an instruction."""
    module_marks: tuple[bytes, ...] = ()
    """What only its modules hold anywhere: small ones may have no instruction with settings."""

    # How kernels and collectives are written
    fusible_alone: bool = False
    """Whether every fusible op is emitted as a kernel also where nothing is fused with it."""
    kernels_alone: frozenset[str] = frozenset()
    """Other ops that are."""
    lowers_bitcasts: bool = False
    """Whether a kernel may hold any bitcast. Only through one does XLA:GPU update an operand in place; XLA:CPU lowers
    none between permuted layouts."""
    partitions_kernels: bool = False
    """Whether a kernel runs on as many threads as its settings say."""
    concatenates_by_copy: bool = False
    """Whether a concatenate by itself is a copy of each operand, and slow in a kernel: XLA:CPU looks for the operand of
    each element there, 36 ms on a busy machine where copying 88 gradients takes 0.2."""
    asynchronous: bool = False
    """Whether collectives are pairs of a start and a done, and run on channels next to the compute stream. Otherwise
    one blocks the thread that runs it, and carries its operands one by one."""
    gathers_outermost_only: bool = False
    """Whether all-gathers and reduce-scatters are right along the outermost dimension in memory alone."""
    overlaps_kernels: bool = False
    """Whether kernels of the entry run at once unless one reads what another wrote."""

    # Which values share a buffer
    shares_by_size: bool = False
    """Whether a kernel's result may get the buffer of any operand of its size, not only of its type and layout."""
    reduces_in_place: bool = False
    """Whether an all-reduce may write over its operand."""

    # How it compiles
    is_plugin: bool = False
    """Whether it comes as a PJRT plugin of its own, behind the C API."""
    autotunes: bool = False
    """Whether a compile picks kernels by trying them on the devices, so that two compiles of a step may differ."""
    untuned: Mapping[str, int | str] = field(default_factory=dict)
    """Options of a compile that picks kernels without a device, and without other processes."""
    by_known_picks: Mapping[str, int | str] = field(default_factory=dict)
    """Options of one that takes what was picked earlier, also without these, and fails where a kernel is new."""
    copies_early: bool = False
    """Whether XLA has inserted its copies before the hook's early stage."""
    rematerializes: bool = False
    """Whether XLA may compute values again behind the hook."""
    keeps_barriers: bool = False
    """Whether an optimization barrier lasts until kernels are made. XLA:CPU takes barriers out early."""
    passes_off: str = ""
    """Passes that run before its early stage and would hide the ops that moves are about, separated by commas."""
    early_options: Mapping[str, str] = field(default_factory=dict)
    """Options of compiles with that stage."""
    combiners: tuple[str, ...] = ()
    """Options that hold the size up to which it puts parts that shall travel apart together again."""
    all_reduce_kernels: tuple[tuple[str, str | bool], ...] = ()
    """By which option, in one version or another, its own all-reduce kernels are switched off."""
    singly_options: Mapping[str, str] = field(default_factory=dict)
    """Options under which the host launches each kernel by itself, and not many by one recording (a CUDA graph, XLA's
    command buffer). A trace names every kernel under them alone, and kernels take other times."""

    # How it is measured
    queues: bool = False
    """Whether the host queues programs for devices that run them by themselves. Then steps are timed several in a row,
    a trace has the devices' own clock, and the host is free meanwhile."""
    traced_steps: int = 12
    """Steps in a trace."""
    warm_up_ns: int = 0
    """How long it computes before a trace: cool, a GPU runs kernels faster than in the middle of a training."""
    tensor_float: bool = False
    """Whether it may multiply f32 in TF32."""
    driver: str = ""
    """The library of its devices' driver, which copies to them and to the host."""

    # What times are made of
    shipped: tuple[str, str] | None = None
    """The kind of device that a step is taken to run on where nobody says, and the profile for it in
    ``data/profiles``."""
    hoists: bool = False
    """Whether loop-invariant values inside a kernel move out of its inner loops."""
    streams_steadily: bool = False
    """Whether no kernel moves bytes faster than the measured ones. On a CPU some do, whose operands are in a cache."""
    transposes_by_library: bool = False
    """Whether a copy to another layout is a library call."""
    shares_processor: bool = False
    """Whether other programs run on the same cores, so that the least of several times is the truest."""
    estimator_by_kind: bool = False
    """Whether an estimator is trained for a kind of devices. One for all kinds corrects a machine's own estimate."""
    machines_described: bool = False
    """Whether descriptions of machines (``data/machines``) are of its devices."""
    names_devices: bool = False
    """Whether JAX says what kind of device it is, and with which driver; of CPUs the profile alone does."""


CPU = Backend(
    "cpu",
    ("cpu",),
    # Of the right order only: CPUs differ by more than any constant could say.
    Constants("two CPU cores, gloo on one host", 1.0e10, 5.0e10, 2000, 1.0, 150_000.0),
    operands_and_results=64,
    reductions=5,
    fusible_alone=True,
    kernels_alone=frozenset({"dynamic-update-slice"}),
    partitions_kernels=True,
    concatenates_by_copy=True,
    gathers_outermost_only=True,
    overlaps_kernels=True,
    copies_early=True,
    # The last must go with the others: on ops that are in no fusion it drops copies between layouts, and the numbers
    # are wrong (jax 0.10.2 to 0.12: einsum("bsd,dthe->btshe", x, w) with "fusion,fusion-wrapper" off).
    passes_off="fusion,fusion-wrapper,multi_output_fusion,cpu-all-reduce-combiner,"
    "simplification after layout assignment",
    # Of matmuls and sums in 16 bits that its library shall take XLA:CPU makes none in float32. With the pass alone off
    # that hands them over, it refuses such matmuls, and such sums stagnate.
    early_options={"xla_cpu_experimental_ynn_fusion_type": ""},
    hoists=True,
    transposes_by_library=True,
    shares_processor=True,
)


GPU = Backend(  # on NVIDIA devices
    "gpu",
    ("cuda", "gpu"),
    # Rounded from measurements of one machine.
    Constants("an H200 on NVLink", 4.0e12, 4.0e14, 2000, 0.0063, 20_000.0),
    shipped=("NVIDIA H200", "nvidia-h200-nvlink"),
    marks=(b"fusion_backend_config", b"operation_queue_id", b"gemm_backend_config"),
    module_marks=(b"fingerprint_before_lhs",),  # of its scheduler
    operands_and_results=96,
    reductions=8,
    shared_bytes=48 * 1024,  # on every NVIDIA device since Maxwell, without opting in to more
    has_heroes=True,
    also_joined=frozenset({"scatter"}),
    never_generated=frozenset({"stochastic-convert"}),
    kernels_alone=frozenset({"dynamic-update-slice", "scatter"}),
    lowers_bitcasts=True,
    asynchronous=True,
    shares_by_size=True,
    reduces_in_place=True,
    is_plugin=True,
    autotunes=True,
    # Sharded, XLA exchanges what was picked whatever the level: a process waits up to a day for one that does not
    # compile the module, and that one later finds the first one's picks, which are none, in its place.
    # Nor is what was not tried kept on disk as if it had been.
    untuned={
        "xla_gpu_autotune_level": 0,
        "xla_gpu_shard_autotuning": False,
        "xla_gpu_per_fusion_autotune_cache_dir": "",
    },
    by_known_picks={"xla_gpu_require_complete_aot_autotune_results": True, "xla_gpu_shard_autotuning": False},
    rematerializes=True,
    keeps_barriers=True,
    combiners=(
        "xla_gpu_all_gather_combine_threshold_bytes",
        "xla_gpu_all_reduce_combine_threshold_bytes",
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
    ),
    all_reduce_kernels=(
        ("xla_gpu_experimental_use_collective_kernels", ""),
        ("xla_gpu_unsupported_use_all_reduce_one_shot_kernel", False),
    ),
    singly_options={"xla_gpu_enable_command_buffer": ""},
    queues=True,
    traced_steps=5,  # kernels take the same time in each, and reading a trace takes longer than running
    warm_up_ns=1_000_000_000,
    tensor_float=True,
    driver="libcuda.so.1",
    streams_steadily=True,
    estimator_by_kind=True,
    machines_described=True,
    names_devices=True,
)


BACKENDS = {backend.name: backend for backend in (CPU, GPU)}
"""By ``Graph.backend``."""


def backend_of(platform: str) -> Backend:
    """The backend that JAX calls so; UnsupportedError where there are no plans for it."""
    for backend in BACKENDS.values():
        if platform in backend.platforms:
            return backend
    raise UnsupportedError(f"platform {platform} is not supported: expected {' or '.join(BACKENDS)}")


def backend_of_module(data: bytes, settings: Iterable[bytes]) -> Backend:
    """The backend that made a module of these bytes, whose instructions have these backend configs; XLA:CPU's have no
    marks."""
    marked = [backend for backend in BACKENDS.values() if backend.marks or backend.module_marks]
    for backend in marked:
        if any(mark in data for mark in backend.module_marks):
            return backend
    for one in settings:
        for backend in marked:
            if any(mark in one for mark in backend.marks):
                return backend
    return CPU
