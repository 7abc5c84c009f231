"""XLA:CPU."""

from __future__ import annotations

from disco_hlo.backends.base import Backend
from disco_hlo.hlo.opcodes import FUSIBLE

CPU = Backend(
    "cpu",
    operands_and_results=64,
    reductions=5,
    kernels_alone=FUSIBLE | {"dynamic-update-slice"},
    partitions_kernels=True,
    concatenates_by_copy=True,
    gathers_outermost_only=True,
    overlaps_kernels=True,
    hoists=True,
    transposes_by_library=True,
    shares_processor=True,
)
