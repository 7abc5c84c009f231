"""Which devices take part in a collective together.

XLA writes the groups of a collective in three ways: as lists, as a reshaped and transposed iota (by version in one of
two fields), and as axes of a device mesh. All are read here as tuples of device numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.proto import Message

Groups = tuple[tuple[int, ...], ...]


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
