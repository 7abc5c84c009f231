"""The shape of the network, shared by training (torch, DGL) and inference (numba)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from disco_hlo.errors import DiscoError
from disco_hlo.estimator import feature_spec as spec

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
    node_numbers: tuple[str, ...] = spec.NODE
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
                f"a network needs positive sizes and a width that its heads divide, got {self.layers} layers of width "
                f"{self.width} with {self.heads} heads, dense {self.dense}"
            )
        unknown = [name for name in self.pooling if name not in POOLINGS]
        unknown += [name for name in self.node_numbers if name not in spec.NODE]
        twice = len({*self.pooling}) < len(self.pooling) or len({*self.node_numbers}) < len(self.node_numbers)
        if unknown or twice or not self.pooling:
            raise DiscoError(
                f"poolings {self.pooling} and node numbers {self.node_numbers}, expected different ones of {POOLINGS} "
                f"and {spec.NODE}"
            )

    @property
    def columns(self) -> list[int]:
        """Columns of the node numbers that are used."""
        return [spec.NODE.index(name) for name in self.node_numbers]

    @property
    def pooled_width(self) -> int:
        """Numbers that enter the dense layers."""
        return self.width * len(self.pooling) + (len(spec.KERNEL) if self.uses_kernel else 0)


PAPER = Architecture(
    pooling=("sum",),
    node_numbers=spec.PAPER_NODE,
    uses_edges=False,
    uses_kernel=False,
    is_residual=False,
    is_relative=False,
)
"""The paper's network: op type, sizes and measured times in, a time out."""
