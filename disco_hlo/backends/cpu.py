"""XLA:CPU."""

from __future__ import annotations

from disco_hlo.backends.base import Backend, Constants

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
    passes_off="fusion,fusion-wrapper,multi_output_fusion,cpu-all-reduce-combiner,dot-library-rewriter,"
    "simplification after layout assignment",
    hoists=True,
    transposes_by_library=True,
    shares_processor=True,
)
