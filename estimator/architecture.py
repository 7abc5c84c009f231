"""What the network is given and how large it is: shared by training (torch, DGL) and inference (numba).

The names and order of all numbers that the estimator sees are its specification. Weights carry a copy of
:data:`FEATURES` and work with no other; whoever changes what a number means changes :data:`VERSION`. Times, sizes,
counts and ratios are logarithms to base 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.opcodes import DATA_MOVEMENT, ELEMENTWISE, REDUCTIONS
from disco_hlo.printable import counted

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


POOLINGS = ("sum", "mean", "max", "work", "bytes")
"""Ways to make one embedding of many: ``work`` and ``bytes`` are sums weighted by the node's share of the estimate."""


_Size = Annotated[int, Meta(ge=1, le=1 << 16)]
"""Of a layer, in numbers; ours have 64."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and parts of the network. The defaults are ours; :data:`PAPER` is DisCo's, section 4.3."""

    layers: _Size = 6
    """Graph attention layers."""
    heads: _Size = 4
    width: _Size = 64
    """Numbers of a node between layers, all heads together."""
    dense: tuple[_Size, _Size] = (64, 32)
    """Widths of the first two of the three dense layers."""
    pooling: tuple[str, ...] = ("mean", "max", "work", "bytes")
    node_numbers: tuple[str, ...] = NODE
    """Which numbers of a node the network is given, beside its type."""
    uses_edges: bool = True
    """Edge features enter attention and messages."""
    uses_kernel: bool = True
    """The kernel's own numbers enter the dense layers."""
    is_residual: bool = True
    """Layers add to what comes in, which they normalise first."""
    is_relative: bool = True
    """The output is log(time / estimate), not log(time in ns)."""

    def __post_init__(self) -> None:
        sizes = (self.layers, self.heads, self.width, *self.dense)
        if min(sizes) < 1 or self.width % self.heads:
            raise DiscoError(
                f"a network needs positive sizes and a width that its heads divide, got "
                f"{counted(self.layers, 'layer')} of width {self.width} with {counted(self.heads, 'head')}, "
                f"dense {self.dense}"
            )
        unknown = [name for name in self.pooling if name not in POOLINGS]
        unknown += [name for name in self.node_numbers if name not in NODE]
        twice = len({*self.pooling}) < len(self.pooling) or len({*self.node_numbers}) < len(self.node_numbers)
        if unknown or twice or not self.pooling:
            raise DiscoError(
                f"poolings {self.pooling} and node numbers {self.node_numbers}, expected different ones of {POOLINGS} "
                f"and {NODE}"
            )

    @property
    def columns(self) -> list[int]:
        """Columns of the node numbers that are used."""
        return [NODE.index(name) for name in self.node_numbers]

    @property
    def pooled_width(self) -> int:
        """Numbers that enter the dense layers."""
        return self.width * len(self.pooling) + (len(KERNEL) if self.uses_kernel else 0)


PAPER = Architecture(
    pooling=("sum",),
    node_numbers=PAPER_NODE,
    uses_edges=False,
    uses_kernel=False,
    is_residual=False,
    is_relative=False,
)
"""The paper's network: op type, sizes and measured times in, a time out."""
