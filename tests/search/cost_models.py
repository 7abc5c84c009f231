"""Cost models made up for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.graph import Graph, Kind, external_reads
from disco_hlo.plan.strategy import Group
from disco_hlo.simulator.costs import LinearPieces


@dataclass(frozen=True)
class TrafficCosts:
    """A kernel takes one ns per byte it reads, and one for each byte that its ops produce.

    It depends on what is in the kernel alone, not on who reads it, so that everybody who asks for a
    group is told the same.
    """

    all_reduce: LinearPieces = field(default_factory=lambda: LinearPieces((0,), (1.0,), (300.0,)))

    def nodes_ns(self, graph: Graph) -> NDArray[np.int64]:
        """Operands and result, in bytes."""
        return np.array(
            [
                self._kernel_ns(graph, {n.id}) if n.kind in (Kind.FUSIBLE, Kind.FIXED) else 0
                for n in graph.nodes
            ],
            np.int64,
        )

    def groups_ns(self, graph: Graph, groups: Sequence[Group]) -> NDArray[np.int64]:
        """External reads and everything produced inside, in bytes."""
        return np.array([self._kernel_ns(graph, {*g.nodes, *g.duplicates}) for g in groups], np.int64)

    def all_reduce_ns(self, sizes_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The line."""
        return self.all_reduce(sizes_bytes)

    @staticmethod
    def _kernel_ns(graph: Graph, inside: set[int]) -> int:
        read = sum(graph.nodes[x].shape.size_bytes for x in external_reads(graph, inside))
        produced = sum(graph.nodes[x].shape.size_bytes for x in inside if graph.nodes[x].opcode != "bitcast")
        return read + produced // 4


@dataclass(frozen=True)
class HashedCosts(TrafficCosts):
    """Times that follow from a kernel's structure alone, and otherwise make no sense at all."""

    @staticmethod
    def _kernel_ns(graph: Graph, inside: set[int]) -> int:
        keys = sorted(graph.nodes[x].key for x in inside if graph.nodes[x].opcode != "bitcast")
        return 50 * len(keys) + blake2b(" ".join(keys).encode(), digest_size=1).digest()[0]


@dataclass(frozen=True)
class ResultCosts(TrafficCosts):
    """Traffic in which every result that leaves a kernel is paid for, so that readers elsewhere matter."""

    def kernels_ns(
        self,
        graph: Graph,
        member_at: NDArray[np.int64],
        members: NDArray[np.int64],
        result_at: NDArray[np.int64],
        results: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Bytes read and written, and a little for each op."""
        times = []
        for i in range(len(member_at) - 1):
            inside = set(members[member_at[i] : member_at[i + 1]].tolist())
            written = sum(
                graph.nodes[x].shape.size_bytes for x in results[result_at[i] : result_at[i + 1]].tolist()
            )
            times.append(self._kernel_ns(graph, inside) + written)
        return np.array(times, np.int64)


@dataclass(frozen=True)
class LookingCosts(ResultCosts):
    """A read takes the longer, the more bytes the op that made the array had read itself."""

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        """What reading each node adds."""
        return np.array(
            [sum(graph.nodes[x].shape.size_bytes for x in n.operands) for n in graph.nodes], np.int64
        )

    def _kernel_ns(self, graph: Graph, inside: set[int]) -> int:  # type: ignore[override]
        read = sum(int(self.read_classes(graph)[x]) for x in external_reads(graph, inside))
        return TrafficCosts._kernel_ns(graph, inside) + read


@dataclass(frozen=True)
class HoldingCosts(ResultCosts):
    """Kernels that hold transfers, each by its key."""

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        """From 0 to 1, a third of them 0."""
        digests = [blake2b(node.key.encode(), digest_size=1).digest()[0] for node in graph.nodes]
        return np.array([max(0, digest - 85) / 170 for digest in digests])


class OneDevice(ResultCosts):
    """Costs of a profile that has no all-reduce sweep."""

    def all_reduce_ns(self, sizes_bytes: Any) -> Any:
        raise ProfileError("holds no all-reduce sweep")
