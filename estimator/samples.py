"""Random fused ops to learn from (DisCo, section 5.2).

"To generate a sample, we randomly select an op and fuse it with one of its predecessors, and then
repeatedly fuse this fused op with one predecessor." Beyond the paper: a predecessor that others
read too is either duplicated into the kernel or becomes one more result of it, as a search decides;
some kernels start from one that XLA itself formed; some grow by a reader instead of a predecessor. Every sample is
legal on its backend, and could stand in a plan: nothing it reads depends on what it owns.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disco_hlo.core.legality import emitter_kind, group_refusal
from disco_hlo.core.rows import is_joinable
from disco_hlo.hlo.graph import (
    Graph,
    Kind,
    as_kernel,
    behind_bitcasts,
    external_reads,
    is_cloned,
    kernel_nodes,
    readers,
)

FROM_XLA = 0.3
"""Share that grows from a kernel of XLA's own, where the step has any."""
DUPLICATING = 0.4
"""How often a predecessor with other readers is duplicated instead of owned."""
BY_READER = 0.15
"""How often a step fuses a reader instead of a predecessor."""


@dataclass(frozen=True, slots=True)
class FusedOp:
    """A kernel of one graph."""

    members: tuple[int, ...]
    """Nodes computed inside, ascending."""
    results: tuple[int, ...]
    """Members whose values leave the kernel, ascending."""
    kind: str = "loop"
    """Emitter: ``loop``, ``input`` or ``triton`` (see ``Group.kind``)."""
    config: str = ""
    """Emitter settings of a Triton kernel as canonical JSON."""


def single_ops(graph: Graph) -> list[FusedOp]:
    """Every fusible op as a kernel of its own, one for each cost key, ascending."""
    found: dict[str, FusedOp] = {}
    for node in graph.nodes:
        if node.kind is Kind.FUSIBLE and node.key not in found and is_plain(graph, (node.id,), (node.id,)):
            found[node.key] = FusedOp((node.id,), (node.id,), emitter_kind(graph, (node.id,), (node.id,)))
    return list(found.values())


class Grower:
    """Draws legal fused ops from one graph; the same seed draws the same ones.

    ``own`` are kernels that XLA formed in this step; sizes are drawn log-uniformly from 2 up to ``most_members``.
    """

    def __init__(self, graph: Graph, own: Sequence[FusedOp], most_members: int, seed: int) -> None:
        self.graph = graph
        self.own = [op for op in own if len(op.members) > 1 and is_plain(graph, op.members, op.results)]
        self.most_members = most_members
        self.dice = random.Random(seed)
        self.fusible = [node.id for node in graph.nodes if node.kind is Kind.FUSIBLE]
        self.ancestors = _ancestors(graph)

    def draw(self) -> FusedOp | None:
        """One fused op of at least two ops, or None where this attempt found none."""
        group = self._seed_group()
        size = round(2.0 * float((self.most_members / 2) ** self.dice.random()))
        refused = 0
        while len(group.inside) < size and refused < 12:
            grown = self._grown(group)
            if grown is None or self._refusal(grown):
                refused += 1
                continue
            group = grown
        members, results = group.written(self.graph)
        if len(group.inside) < 2:
            return None
        return FusedOp(members, results, emitter_kind(self.graph, members, results))

    def _seed_group(self) -> _Group:
        if self.own and self.dice.random() < FROM_XLA:
            op = self.dice.choice(self.own)
            ops, results = as_kernel(self.graph, op.members, op.results)
            nodes = frozenset(ops)
            owned = frozenset(m for m in nodes if self._is_private(m, nodes) or m in results)
            group = _Group(owned, nodes - owned)
            if owned and not self._refusal(group):
                return group
        return _Group(frozenset({self.dice.choice(self.fusible)}), frozenset())

    def _is_private(self, node: int, inside: frozenset[int]) -> bool:
        return all(reader in inside for reader in readers(self.graph, node))

    def _grown(self, group: _Group) -> _Group | None:
        if self.dice.random() < BY_READER:
            return self._with_reader(group)
        return self._with_predecessor(group)

    def _with_predecessor(self, group: _Group) -> _Group | None:
        found = sorted(
            p
            for member in group.inside
            for p in map(behind_bitcasts(self.graph).__getitem__, self.graph.nodes[member].operands)
            if p not in group.inside and self.graph.nodes[p].kind is Kind.FUSIBLE
        )
        if not found:
            return None
        chosen = self.dice.choice(found)
        if not self._is_private(chosen, group.inside) and self.dice.random() < DUPLICATING:
            return _Group(group.owned, group.copied | {chosen})
        return _Group(group.owned | {chosen}, group.copied)

    def _with_reader(self, group: _Group) -> _Group | None:
        found = sorted(
            reader
            for member in group.owned
            for reader in readers(self.graph, member)
            if reader not in group.inside and self.graph.nodes[reader].kind is Kind.FUSIBLE
        )
        return _Group(group.owned | {self.dice.choice(found)}, group.copied) if found else None

    def _refusal(self, group: _Group) -> str | None:
        members, results = group.written(self.graph)
        if not is_plain(self.graph, members, results):
            return "it reads or returns a tuple"
        owned = sum(1 << node for node in group.owned)
        if any(self.ancestors[read] & owned for read in external_reads(self.graph, members)):
            return "what it reads waits for what it computes"
        return group_refusal(self.graph, members, results)


@dataclass(frozen=True, slots=True)
class _Group:
    """A kernel in the making, bitcasts left out."""

    owned: frozenset[int]
    copied: frozenset[int]

    @property
    def inside(self) -> frozenset[int]:
        return self.owned | self.copied

    def written(self, graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(members, results): with the bitcasts, and what is read outside."""
        inside = self.inside
        results = [n for n in self.owned if any(reader not in inside for reader in readers(graph, n))]
        return kernel_nodes(graph, inside), tuple(sorted(results))


def is_plain(graph: Graph, members: Iterable[int], results: Iterable[int]) -> bool:
    """Whether the kernel reads and returns arrays only, and overwrites nothing in place."""
    members = set(members)
    if not all(is_joinable(graph.nodes[member]) for member in members):
        return False
    touched = (*external_reads(graph, members), *results)
    return all(graph.nodes[node].shape.dtype != "tuple" for node in touched)


def _ancestors(graph: Graph) -> list[int]:
    """For each node the nodes it depends on, itself included, as a bit set."""
    found: list[int] = []
    for node in graph.nodes:
        bits = 0 if is_cloned(node) else 1 << node.id
        for operand in node.operands:
            bits |= found[operand]
        found.append(bits)
    return found
