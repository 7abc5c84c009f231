"""Cost models made up for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Graph, external_reads
from tests.cost_models import MadeUpCosts


@dataclass(frozen=True)
class TrafficCosts(MadeUpCosts):
    """A kernel takes one ns per byte it reads, and one for each byte that its ops produce."""

    line: LinearPieces = field(default_factory=lambda: LinearPieces.of((0, 1.0, 300.0)))

    def kernel_ns(self, graph: Graph, inside: set[int], results: Sequence[int]) -> int:
        """External reads and everything produced inside, in bytes, whoever reads it."""
        read = sum(graph.nodes[x].shape.size_bytes for x in external_reads(graph, inside))
        produced = sum(graph.nodes[x].shape.size_bytes for x in inside if graph.nodes[x].opcode != "bitcast")
        return read + produced // 4


@dataclass(frozen=True)
class HashedCosts(TrafficCosts):
    """Times that follow from a kernel's structure alone, and otherwise make no sense at all."""

    def kernel_ns(self, graph: Graph, inside: set[int], results: Sequence[int]) -> int:
        """By the keys of its ops."""
        keys = sorted(graph.nodes[x].key for x in inside if graph.nodes[x].opcode != "bitcast")
        return 50 * len(keys) + blake2b(" ".join(keys).encode(), digest_size=1).digest()[0]


@dataclass(frozen=True)
class ResultCosts(TrafficCosts):
    """Traffic in which every result that leaves a kernel is paid for, so that readers elsewhere matter."""

    def kernel_ns(self, graph: Graph, inside: set[int], results: Sequence[int]) -> int:
        """Bytes read and written, and a little for each op."""
        written = sum(graph.nodes[x].shape.size_bytes for x in results)
        return super().kernel_ns(graph, inside, results) + written


@dataclass(frozen=True)
class LookingCosts(ResultCosts):
    """A read takes the longer, the more bytes the op that made the array had read itself."""

    def read_classes(self, graph: Graph) -> NDArray[np.int64]:
        """What reading each node adds."""
        return np.array(
            [sum(graph.nodes[x].shape.size_bytes for x in n.operands) for n in graph.nodes], np.int64
        )

    def kernel_ns(self, graph: Graph, inside: set[int], results: Sequence[int]) -> int:
        """Of traffic and of what it reads."""
        read = sum(int(self.read_classes(graph)[x]) for x in external_reads(graph, inside))
        return super().kernel_ns(graph, inside, results) + read


@dataclass(frozen=True)
class HoldingCosts(ResultCosts):
    """Kernels that hold transfers, each by its key; scatters run some of their own."""

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        """From 0 to 1, a third of them 0."""
        digests = [blake2b(node.key.encode(), digest_size=1).digest()[0] for node in graph.nodes]
        return np.array([max(0, digest - 85) / 170 for digest in digests])

    def first_collective_ns(self, graph: Graph) -> dict[int, int]:
        """At once, or later."""
        return {node.id: 40 * (node.id % 3) for node in graph.nodes if node.opcode == "scatter"}


class HoldingDots(TrafficCosts):
    """Each product holds transfers for half of its time."""

    def hold_shares(self, graph: Graph) -> NDArray[np.float64]:
        return np.array([0.5 * (node.opcode == "dot") for node in graph.nodes])


class OneDevice(ResultCosts):
    """Costs of a profile that has no all-reduce sweep."""

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        raise ProfileError("holds no all-reduce sweep")
