"""What a collective is to whoever asks how long it takes: its kind, and the bytes that it is for.

Every kind has a time over its bytes (:meth:`~disco_hlo.hlo.cost_model.CostModel.collective`). Where nobody measured
one, it takes as long as an all-reduce that sends as much over each link, if both go around a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.device_groups import Groups, written_groups
from disco_hlo.hlo.graph import Graph, Node, once_per_graph
from disco_hlo.hlo.opcodes import COLLECTIVE
from disco_hlo.hlo.proto import DetailedInstruction, Message

_LONGEST_TEXT = 200
"""Characters of a kind's name that are written out; hundreds of devices have a digest."""


@dataclass(frozen=True, slots=True)
class CollectiveKind:
    """Collectives whose time depends on their bytes alone.

    The element type is no part of it: what a link carries are bytes, and XLA reduces bfloat16 on CPU as float32.
    """

    opcode: str
    groups: Groups = ()
    """Numbers of the devices that take part together; of a collective-permute (source, target). Empty: all devices of
    the step are one group."""

    def __str__(self) -> str:
        """Its name in profiles and stores: equal for equal kinds, and for no others."""
        if not self.groups:
            return self.opcode
        text = f"{self.opcode} " + ",".join(f"{{{','.join(map(str, group))}}}" for group in self.groups)
        if len(text) <= _LONGEST_TEXT:
            return text
        return f"{self.opcode} {len(self.groups)} groups {sha256(text.encode()).hexdigest()[:16]}"


ALL_REDUCE = CollectiveKind("all-reduce")
"""The all-reduce between all devices of a step: the line from which others are derived."""


def kind_groups(collective: Message) -> Groups:
    """The groups of a collective as :class:`CollectiveKind` has them, from an instruction of the plain schema."""
    detailed = DetailedInstruction.FromString(collective.SerializeToString())
    known = COLLECTIVE[collective.opcode]
    if known.names_pairs:
        return tuple(sorted((pair.source, pair.target) for pair in detailed.source_target_pairs))
    groups = tuple(sorted(tuple(sorted(group)) for group in written_groups(detailed)))
    return () if len(groups) == 1 and not known.leaves_out else groups


def collective_kind(node: Node) -> CollectiveKind:
    """The kind of a collective."""
    return CollectiveKind(node.opcode, node.groups)


def collective_bytes(graph: Graph, node: int) -> int:
    """Bytes that a collective is for, on each device: all that it reads or all that it leaves, whichever is more."""
    found = graph.nodes[node]
    return max(
        found.shape.size_bytes, sum(graph.nodes[operand].shape.size_bytes for operand in found.operands)
    )


@once_per_graph
def moved_bytes(graph: Graph) -> NDArray[np.int64]:
    """:func:`collective_bytes` of each node that travels as a plan says, ``[len(graph)]``; 0 of all others."""
    found = np.zeros(len(graph), np.int64)
    found[list(graph.all_reduces)] = [collective_bytes(graph, node) for node in graph.all_reduces]
    return found


def ring_share(kind: CollectiveKind) -> float:
    """Bytes of an all-reduce between all devices that sends as much over each link as one byte of this kind, 0 to 1.

    Around a ring of n devices each sends 2 (n-1)/n of an all-reduce's bytes, (n-1)/n of an all-gather's,
    reduce-scatter's or all-to-all's, and all of what it passes on.
    """
    known = COLLECTIVE[kind.opcode]
    everyone = len({device for group in kind.groups for device in group})
    if known.passes_on:
        return 0.5 * everyone / (everyone - 1) if everyone > 1 else 0.5
    if not everyone:
        return known.ring_share
    largest = max(map(len, kind.groups))
    return known.ring_share * (1 - 1 / largest) / (1 - 1 / everyone) if everyone > 1 else 0.0
