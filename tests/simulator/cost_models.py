"""Cost models made up for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Graph
from tests.cost_models import MadeUpCosts


@dataclass(frozen=True)
class TableCosts(MadeUpCosts):
    """A node takes what the table says, a group as long as all it computes, an all-reduce T = x + 5."""

    line: LinearPieces = field(default_factory=lambda: LinearPieces.of((0, 1.0, 5.0)), kw_only=True)
    table_ns: tuple[int, ...]
    """By node id; nodes beyond its end take 10 ns."""

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        return np.array([self._node_ns(node) for node in range(len(graph))], np.int64)

    def kernel_ns(self, graph: Graph, inside: set[int], results: Sequence[int]) -> int:
        return sum(map(self._node_ns, inside))

    def _node_ns(self, node: int) -> int:
        return self.table_ns[node] if node < len(self.table_ns) else 10


@dataclass(frozen=True)
class LoopCosts(TableCosts):
    """And these nodes run collectives of their own, the first of them so long after their beginning."""

    first_ns: dict[int, int] = field(default_factory=dict)

    def first_collective_ns(self, graph: Graph) -> dict[int, int]:
        del graph
        return self.first_ns


@dataclass(frozen=True)
class HoldingCosts(TableCosts):
    """And every node holds transfers for its share of this, by turns."""

    shares: tuple[float, ...] = (0.0,)

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        return np.resize(self.shares, len(graph))
