"""XLA:GPU, on NVIDIA devices."""

from __future__ import annotations

from disco_hlo.backends.base import Backend

GPU = Backend(
    "gpu",
    operands_and_results=96,
    reductions=8,
    shared_bytes=48 * 1024,  # on every NVIDIA device since Maxwell, without opting in to more
    has_heroes=True,
    also_joined=frozenset({"scatter"}),
    never_generated=frozenset({"stochastic-convert"}),
    kernels_alone=frozenset({"dynamic-update-slice", "scatter"}),
    lowers_bitcasts=True,
    asynchronous=True,
    autotunes=True,
    estimator_by_kind=True,
    machines_described=True,
    names_devices=True,
)
