"""What a collective is to whoever asks how long it takes: its kind, with the devices that take part, and its bytes.

Every kind has a time over its bytes (:meth:`~disco_hlo.hlo.cost_model.CostModel.collective`). Where nobody measured
one, it takes as long as an all-reduce that sends as much over each link, if both go around a ring.

XLA writes the groups of devices in three ways: as lists, as a reshaped and transposed iota (by version in one of two
fields), and as axes of a device mesh. All are read here as tuples of device numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph, Node, once_per_graph
from disco_hlo.hlo.opcodes import COLLECTIVE
from disco_hlo.hlo.proto import DetailedInstruction, Message

Groups = tuple[tuple[int, ...], ...]
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
    found[list(graph.collectives)] = [collective_bytes(graph, node) for node in graph.collectives]
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


def kind_groups(collective: Message) -> Groups:
    """The groups of a collective, or of what begins one, as :class:`CollectiveKind` has them; none of any other.

    Args:
        collective: of the plain schema.
    """
    known = COLLECTIVE.get(collective.opcode.removesuffix("-start"))
    if known is None:
        return ()
    detailed = DetailedInstruction.FromString(collective.SerializeToString())
    if known.names_pairs:
        return tuple(sorted((pair.source, pair.target) for pair in detailed.source_target_pairs))
    groups = tuple(sorted(tuple(sorted(group)) for group in written_groups(detailed)))
    return () if len(groups) == 1 and not known.leaves_out else groups


# Groups of devices ------------------------------------------------------------------------------


def written_groups(collective: Message) -> Groups:
    """The groups that a collective names, in whatever way; none where it means all devices.

    Args:
        collective: of :data:`~disco_hlo.hlo.proto.DetailedInstruction`'s kind.
    """
    if collective.HasField("mesh_axes_groups"):
        mesh = collective.mesh_axes_groups
        return _tuples(devices_by_axes(mesh.mesh, mesh.axes))
    listed = collective.collective_device_list
    older = listed.HasField("iota_replica_group_list")
    if older or collective.HasField("iota_groups"):
        iota = listed.iota_replica_group_list if older else collective.iota_groups
        shape = (iota.num_replica_groups, iota.num_devices_per_group)
        return _tuples(iota_devices(iota.iota_reshape_dims, iota.iota_transpose_perm).reshape(shape))
    return tuple(tuple(g.replica_ids) for g in (listed.replica_groups or collective.replica_groups))


def _tuples(rows: NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in rows)


def iota_devices(reshape: Sequence[int], transpose: Sequence[int]) -> NDArray[np.int64]:
    """Device numbers 0, 1, ... of these dimensions, transposed."""
    devices = np.arange(int(np.prod(reshape)), dtype=np.int64).reshape(reshape)
    return devices.transpose(list(transpose) or None if transpose else range(len(reshape)))


def devices_by_axes(mesh: Message, references: Sequence[Message]) -> NDArray[np.int64]:
    """Devices as [everything else, the referred axes]; sub-axes are split out of their axis first."""
    sizes = [axis.size for axis in mesh.axes]
    devices = np.array(list(mesh.device_ids) or range(int(np.prod(sizes))), np.int64)
    cuts: list[set[int]] = [{1, size} for size in sizes]
    for reference in references:
        if reference.HasField("sub_axis_info"):
            sub = reference.sub_axis_info
            cuts[reference.mesh_axis_index] |= {sub.pre_size, sub.pre_size * sub.size}
    pieces = [
        (axis, low, high // low)
        for axis, cut in enumerate(cuts)
        for low, high in itertools.pairwise(sorted(cut))
    ]
    wanted: list[int] = []
    for reference in references:
        low, size = 1, sizes[reference.mesh_axis_index]
        if reference.HasField("sub_axis_info"):
            low, size = reference.sub_axis_info.pre_size, reference.sub_axis_info.size
        wanted += [
            i for i, (axis, at, _) in enumerate(pieces)
            if axis == reference.mesh_axis_index and low <= at < low * size
        ]  # fmt: skip
    others = [i for i in range(len(pieces)) if i not in wanted]
    count = int(np.prod([pieces[i][2] for i in wanted], dtype=np.int64))
    return devices.reshape([size for *_, size in pieces]).transpose([*others, *wanted]).reshape(-1, count)
