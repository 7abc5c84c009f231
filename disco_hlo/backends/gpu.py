"""XLA:GPU, on NVIDIA devices."""

from __future__ import annotations

from disco_hlo.backends.base import Backend, Constants

GPU = Backend(
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
    naming_options={"xla_gpu_enable_command_buffer": ""},  # command buffers hide whose a kernel is
    queues=True,
    traced_steps=5,  # kernels take the same time in each, and reading a trace takes longer than running
    warm_up_ns=1_000_000_000,
    reprofiles=True,
    tensor_float=True,
    estimator_by_kind=True,
    machines_described=True,
    names_devices=True,
)
