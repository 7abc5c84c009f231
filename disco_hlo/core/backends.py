"""What each backend of XLA lets one kernel hold: one record a backend, and no rule tells them apart by name.

The rules mirror XLA's own (cpu_instruction_fusion.cc, cpu_multi_output_fusion.cc; for GPU see ``legality_gpu``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """Bounds of one kernel, and which rules hold for it."""

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


BACKENDS: dict[str, Backend] = {
    "cpu": Backend(operands_and_results=64, reductions=5),
    "gpu": Backend(
        operands_and_results=96,
        reductions=8,
        shared_bytes=48 * 1024,  # on every NVIDIA device since Maxwell, without opting in to more
        has_heroes=True,
        also_joined=frozenset({"scatter"}),
        never_generated=frozenset({"stochastic-convert"}),
    ),
}
"""By ``Graph.backend``."""
