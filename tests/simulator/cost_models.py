"""Cost models made up for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.strategy import Group
from disco_hlo.simulator.costs import LinearPieces


@dataclass(frozen=True)
class TableCosts:
    """A node takes what the table says, a group as long as all it computes, an all-reduce T = x + 5."""

    table_ns: tuple[int, ...]
    """By node id; nodes beyond its end take 10 ns."""
    all_reduce: LinearPieces = field(default_factory=lambda: LinearPieces((0,), (1.0,), (5.0,)))

    def nodes_ns(self, graph: Graph) -> NDArray[np.int64]:
        return np.array([self._node_ns(node) for node in range(len(graph))], np.int64)

    def groups_ns(self, graph: Graph, groups: Sequence[Group]) -> NDArray[np.int64]:
        computed = [(*group.nodes, *group.duplicates) for group in groups]
        return np.array([sum(map(self._node_ns, nodes)) for nodes in computed], np.int64)

    def all_reduce_ns(self, sizes_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.all_reduce(sizes_bytes)

    def _node_ns(self, node: int) -> int:
        return self.table_ns[node] if node < len(self.table_ns) else 10


@dataclass(frozen=True)
class HoldingCosts(TableCosts):
    """And every node holds transfers for its share of this, by turns."""

    shares: tuple[float, ...] = (0.0,)

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        return np.resize(self.shares, len(graph))
