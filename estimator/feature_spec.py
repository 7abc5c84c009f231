"""The names and order of all numbers that the estimator sees: its specification, versioned.

Weights carry a copy of :data:`FEATURES` and work with no other; whoever changes what a number means
changes :data:`VERSION`. Times, sizes, counts and ratios are logarithms to base 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from disco_hlo.hlo.opcodes import DATA_MOVEMENT, ELEMENTWISE, REDUCTIONS

VERSION: Final = 1

VOCABULARY: Final = ("other", "read", *sorted(ELEMENTWISE | DATA_MOVEMENT | REDUCTIONS))
"""Op types. ``read`` is a value that comes from memory; ``other`` whatever has no type of its own."""
OTHER: Final = 0
READ: Final = 1

NODE: Final = (
    # The same in every kernel:
    "elements", "bytes", "operand_bytes", "item_bytes", "is_float", "rank", "minor", "second_minor", "alignment",
    "reduced", "reduces_minor", "evaluation_ns", "alone_ns", "alone_ratio", "is_measured",
    # Of a value inside this kernel:
    "is_read", "is_result", "evaluations", "recomputed", "contexts", "strided", "work_share", "work_ns", "bytes_share",
    "alone_share", "readers",
)  # fmt: skip
"""Numbers of a node. ``alone``: its time as a kernel of its own, measured where ``is_measured``.
``contexts``: loop nests it is computed in. ``recomputed``: evaluations per element. ``strided``: share of
the reads that cross the memory's grain. Shares are of the estimate."""
STATIC: Final = NODE.index("is_read")
"""How many of them are the same in every kernel."""

EDGE: Final = (
    "forward", "backward", "itself", "identity", "reduced", "anywhere", "permuted", "broadcast", "along_grain",
    "elements_ratio",
)  # fmt: skip
"""Numbers of an edge: its direction, and how the reader's index becomes the operand's."""

KERNEL: Final = (
    "estimate_ns", "streaming_ns", "work_ns", "strided_ns", "read_bytes", "written_bytes", "result_elements", "members",
    "reads", "results", "flops", "transcendentals", "intensity", "alone_sum", "tiled", "result_rank", "result_minor",
    "result_major",
)  # fmt: skip
"""Numbers of the kernel as a whole. ``alone_sum``: its ops one by one, over the estimate."""

FEATURES: Final[Mapping[str, object]] = {
    "version": VERSION, "vocabulary": list(VOCABULARY), "node": list(NODE), "edge": list(EDGE), "kernel": list(KERNEL),
}  # fmt: skip
"""All of it, as weights carry it."""

PAPER_NODE: Final = ("bytes", "operand_bytes", "alone_ns")
"""What the paper's model is given of a node, beside its type (DisCo, section 4.3.1)."""
