"""Which partitions of one program take part in a collective together, and which of them hold the same value."""

from __future__ import annotations

import numpy as np

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.collectives import Groups, devices_by_axes, iota_devices, written_groups
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.program import Program

_REPLICATED, _TILED = 0, 3
_DIFFERS = (COLLECTIVES - {"all-reduce", "all-gather"}) | frozenset({
    "partition-id", "replica-id", "custom-call", "infeed", "recv", "recv-done", "rng", "rng-get-and-update-state",
    "async-start", "async-update", "async-done", "all-reduce-start", "all-reduce-done", "all-gather-start",
    "all-gather-done", "copy-start", "copy-done", "outfeed", "send", "send-done", "after-all",
})  # fmt: skip
"""Ops that may give each device another value from equal operands."""


def groups_of(program: Program, collective: Message) -> Groups:
    """The groups of a collective, as partition numbers in group order.

    Raises:
        IllegalMoveError: they name replicas, or are of different sizes.
    """
    if program.replicas() != 1 or collective.channel_id <= 0 or not collective.use_global_device_ids:
        raise IllegalMoveError(
            f"{collective.name} ({collective.opcode}): its groups name replicas, not the partitions of one program"
        )
    groups = written_groups(collective) or (tuple(range(program.partitions())),)
    if len({len(group) for group in groups}) != 1 or len(groups[0]) < 2:
        raise IllegalMoveError(
            f"{collective.name} ({collective.opcode}): its groups are not of one size of two devices or more"
        )
    return groups


class SameValues:
    """Which instructions are proven to give the same value on all devices of each group."""

    def __init__(self, program: Program, groups: Groups) -> None:
        self.program, self.groups = program, groups
        self.proven: set[int] = set()
        self._group_of = {device: i for i, group in enumerate(groups) for device in group}
        parameters = sum(i.opcode == "parameter" for i in program.instructions)
        self._shardings = list(program.module.spmd_parameters_shardings)
        if len(self._shardings) != parameters:
            self._shardings = []
        for instruction in program.instructions:
            self.judge(instruction)

    def judge(self, instruction: Message) -> None:
        """Take an instruction in whose operands have been judged."""
        operands_same = self.proven.issuperset(instruction.operand_ids)
        if instruction.opcode == "parameter":
            number = instruction.parameter_number
            same = bool(self._shardings) and _held_alike(self._shardings[number], self.groups)
        elif instruction.opcode in ("all-reduce", "all-gather"):
            same = _made_alike(self.program, instruction, self.groups, self._group_of, operands_same)
        else:
            same = operands_same and _is_deterministic(self.program, instruction)
        if same:
            self.proven.add(instruction.id)


def _is_deterministic(program: Program, instruction: Message) -> bool:
    if instruction.opcode in _DIFFERS or instruction.opcode in COLLECTIVES:
        return False
    return all(
        _is_deterministic(program, inner)
        for called in instruction.called_computation_ids
        for inner in program.computation(called).instructions
    )


def _made_alike(
    program: Program, collective: Message, groups: Groups, group_of: dict[int, int], operands_alike: bool
) -> bool:
    try:
        own = groups_of(program, collective)
    except IllegalMoveError:
        return False
    if all(any(set(group) <= set(other) for other in own) for group in groups):
        return True
    if not operands_alike:
        return False
    seen = {device: [group_of.get(d, -1 - d) for d in group] for group in own for device in group}
    if collective.opcode == "all-reduce":
        seen = {device: sorted(who) for device, who in seen.items()}
    return all(seen.get(device) == seen.get(group[0]) for group in groups for device in group)


def _held_alike(sharding: Message, groups: Groups) -> bool:
    """Whether the devices of each group hold the same shard of a parameter."""
    shards = _shard_of_device(sharding)
    if shards is None:
        return False
    return not shards or all(shards.get(d) == shards.get(group[0]) for group in groups for d in group)


def _shard_of_device(sharding: Message) -> dict[int, int] | None:
    """Which shard every device holds; empty where all hold the whole, None where it is not known."""
    if sharding.HasField("named_sharding"):
        named = sharding.named_sharding
        if named.tuple_shardings or named.unreduced_axes or (named.mesh.device_ids and not named.mesh.axes):
            return None
        references = [axis for dimension in named.dim_shardings for axis in dimension.axes]
        if not references:
            return {}
        columns = devices_by_axes(named.mesh, references).T
        return {int(device): shard for shard, row in enumerate(columns) for device in row}
    if sharding.type == _REPLICATED:
        return {}
    if sharding.type != _TILED or any(kind != _REPLICATED for kind in sharding.last_tile_dims):
        return None
    tiles = list(sharding.tile_assignment_dimensions)
    devices = (
        np.array(sharding.tile_assignment_devices, np.int64)
        if sharding.tile_assignment_devices
        else iota_devices(
            list(sharding.iota_reshape_dims) or [int(np.prod(tiles))], sharding.iota_transpose_perm
        )
    ).reshape(tiles)
    shared = len(sharding.last_tile_dims) or int(sharding.replicate_on_last_tile_dim)
    copies = int(np.prod(tiles[len(tiles) - shared :], dtype=np.int64)) if shared else 1
    return {int(d): shard for shard, row in enumerate(devices.reshape(-1, copies)) for d in row}
