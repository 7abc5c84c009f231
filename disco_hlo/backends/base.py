"""What the rest of the package must know of a backend of XLA: one record each, and no rule tells them apart by name.

DisCo has one backend. Bounds and flags of kernels mirror XLA's own rules (cpu_instruction_fusion.cc,
cpu_multi_output_fusion.cc; for GPU see ``core/legality_gpu``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend."""

    name: str
    """As in ``Graph.backend``."""

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

    # How kernels and collectives are written
    kernels_alone: frozenset[str] = frozenset()
    """Ops that are emitted as kernels also where nothing is fused with them."""
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

    autotunes: bool = False
    """Whether a compile picks kernels by trying them, so that two compiles of a step may differ."""

    # What times are made of
    hoists: bool = False
    """Whether loop-invariant values inside a kernel move out of its inner loops."""
    transposes_by_library: bool = False
    """Whether a copy to another layout is a library call."""
    shares_processor: bool = False
    """Whether other programs run on the same cores, so that the least of several times is the truest."""
    estimator_by_kind: bool = False
    """Whether an estimator is trained for a kind of devices. One for all kinds corrects a machine's own estimate."""
    machines_described: bool = False
    """Whether descriptions of machines (``data/machines``) are of its devices."""
    names_devices: bool = False
    """Whether JAX says what kind of device it is; of CPUs the profile alone does."""
