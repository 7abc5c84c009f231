"""Split and reorder: an all-reduce as reduce-scatter and all-gather, and the all-gather past its readers.

CoCoNet, sections 3.2 and 3.3. After the split every device holds a shard of the sum; an instruction through
which the sharded dimension passes is computed on the shard, and the all-gather moves behind it. The other
operands of that instruction are cut to this device's shard, so they must be equal on all devices of the
group (:class:`SameValues`): each device's shard of the result stands for the part that all of them would have computed.

Section 6.3: of a value that a group holds alike, each device sends its shard to the next stage, which gathers them.
"""

from __future__ import annotations

from math import prod

import numpy as np

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.collectives import Groups, devices_by_axes, iota_devices, written_groups
from disco_hlo.hlo.opcodes import ALIKE, COLLECTIVE, COLLECTIVES
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.chunk import Needs, operand_needs, reduction_opcode, shrink
from disco_hlo.structure.program import (
    Buffers,
    Program,
    dims,
    dtype,
    evaluate,
    illegal,
    physical,
    resized,
    scalar,
)

_CUT_THROUGH = frozenset({"bitcast", "broadcast", "convert", "iota", "reshape", "transpose"})
"""Ops computed again on the shard rather than cut, since that is cheaper or meets an all-gather further up."""
_S32, _U32 = 4, 8
_REPLICATED, _TILED = 0, 3
_DIFFERS = COLLECTIVES | frozenset({
    "partition-id", "replica-id", "custom-call", "infeed", "recv", "rng", "rng-get-and-update-state", "async-update",
    "outfeed", "send", "after-all",
})  # fmt: skip
"""Ops that may give each device another value from equal operands; so may the halves of what is asynchronous."""


def split(program: Program, all_reduce: Message, dimension: int) -> Message:
    """Rewrite an all-reduce as reduce-scatter and all-gather along ``dimension``; returns the all-gather.

    Raises:
        IllegalMoveError: it is no sum over one array, or its groups do not divide the dimension.
    """
    if len(all_reduce.operand_ids) != 1:
        raise illegal(all_reduce, "it carries several arrays")
    if reduction_opcode(program, all_reduce) != "add":
        raise illegal(all_reduce, "only a sum can be scattered")
    size = len(groups_of(program, all_reduce)[0])
    shape = dims(all_reduce)
    if not 0 <= dimension < len(shape):
        raise illegal(all_reduce, f"its result {list(shape)} has no dimension {dimension}")
    if shape[dimension] % size:
        raise illegal(
            all_reduce,
            f"dimension {dimension} has {shape[dimension]} elements, which {size} devices do not divide",
        )
    operand = program.operands(all_reduce)[0]
    if _is_outermost(all_reduce.shape, dimension):
        made = [_scattered(program, all_reduce, operand, dimension)]
        made.append(_gathered(program, all_reduce, made[-1], all_reduce.shape, dimension))
        gather = made[-1]
    else:
        order = [dimension, *(d for d in range(len(shape)) if d != dimension)]
        turned = transposed(program, operand, order, f"{all_reduce.name}.turned")
        scatter = _scattered(program, all_reduce, turned, 0)
        gather = _gathered(program, all_reduce, scatter, turned.shape, 0)
        back = transposed(
            program, gather, [order.index(d) for d in range(len(shape))], f"{all_reduce.name}.back"
        )
        back.shape.CopyFrom(all_reduce.shape)
        made = [turned, scatter, gather, back]
    program.substitute(all_reduce, made)
    return gather


def _scattered(program: Program, all_reduce: Message, operand: Message, dimension: int) -> Message:
    scatter = program.copy(all_reduce, f"{all_reduce.name}.scattered", [operand])
    scatter.opcode = "reduce-scatter"
    scatter.dimensions.append(dimension)
    scatter.shape.CopyFrom(operand.shape)
    scatter.shape.dimensions[dimension] //= len(groups_of(program, all_reduce)[0])
    return scatter


def _gathered(
    program: Program, collective: Message, operand: Message, shape: Message, dimension: int
) -> Message:
    gather = program.copy(collective, f"{collective.name}.gathered", [operand])
    gather.opcode = "all-gather"
    gather.shape.CopyFrom(shape)
    gather.dimensions[:] = [dimension]
    del gather.called_computation_ids[:]
    return gather


def scatter(program: Program, all_reduce: Message) -> Message | None:
    """Write a sum of which each device takes its own shard, and nobody more, as the reduce-scatter that XLA makes of it
    later; None where it is no such sum."""
    readers = program.readers(all_reduce)
    if len(readers) != 1 or readers[0].opcode != "dynamic-slice" or len(all_reduce.operand_ids) != 1:
        return None
    (piece,) = readers
    if piece.operand_ids[0] != all_reduce.id:  # it says where the piece begins
        return None
    whole, part = dims(all_reduce), dims(piece)
    cut = [d for d, size in enumerate(part) if size != whole[d]]
    try:
        groups = groups_of(program, all_reduce)
    except IllegalMoveError:
        return None
    in_shards = len(cut) == 1 and part[cut[0]] * len(groups[0]) == whole[cut[0]]
    own = in_shards and _starts_at_own_shard(program, piece, cut[0], groups)
    if not own or reduction_opcode(program, all_reduce) != "add":
        return None
    scattered = _scattered(program, all_reduce, program.operands(all_reduce)[0], cut[0])
    scattered.shape.CopyFrom(piece.shape)
    program.substitute(piece, [scattered])
    return scattered


def slice_send(program: Program, send: Message, grouped: Message, dimension: int) -> None:
    """Send shards along ``dimension`` in place of a whole array, and gather them behind the send.

    The senders of a group hold the same array, so device i of the group that receives gets shard i from its
    counterpart. A group that receives nothing gathers the zeros that a device gets to which nobody sends.

    Args:
        send: a collective-permute.
        grouped: an all-reduce or all-gather between the groups that hold the array alike.

    Raises:
        IllegalMoveError: the array is not proven equal on the devices of a group, a group does not send in order to a
            group, or shards are no contiguous pieces of one size.
    """
    if len(send.operand_ids) != 1 or send.channel_id <= 0:
        raise illegal(send, "it is no send of one array between the partitions of one program")
    groups = groups_of(program, grouped)
    if not joins_groups(send, groups):
        raise illegal(send, f"its pairs do not join groups of {grouped.name} device by device, in order")
    shape, size = dims(send), len(groups[0])
    if not 0 <= dimension < len(shape) or shape[dimension] % size or not _is_outermost(send.shape, dimension):
        raise illegal(
            send,
            f"{size} devices have no contiguous shards of one size along dimension {dimension} of "
            f"{list(shape)}",
        )
    cutter = _Cutter(program, SameValues(program, groups))
    shard = cutter.shard(program.operands(send)[0], dimension, send)
    sliced = program.copy(send, f"{send.name}.sliced", [shard])
    sliced.shape.CopyFrom(resized(send.shape, dimension, shape[dimension] // size))
    cutter.place(send, [sliced, _gathered(program, grouped, sliced, send.shape, dimension)])


def reorder(
    program: Program, all_gather: Message, reader: Message, same: SameValues | None = None
) -> Message | None:
    """Move an all-gather behind one of its readers, which is then computed on shards; a reader that takes this device's
    shard back cancels it. Where the caller keeps from move to move which values the devices share, that is ``same``.

    Returns:
        The all-gather behind the reader; None where there is none: the reader took the own shard back, or summed
        over the gathered dimension, which becomes an all-reduce of the sums.

    Raises:
        IllegalMoveError: the gathered dimension does not pass through the reader, or another operand is not
            proven equal on the devices of the group.
    """
    groups = groups_of(program, all_gather)
    taken = _own_shard(program, all_gather, reader, groups)
    if taken is not None:
        program.substitute(reader, [taken])
        return None
    if all_gather.id not in reader.operand_ids:
        raise illegal(reader, f"it does not read {all_gather.name}")
    if reader.opcode in COLLECTIVES:
        raise illegal(reader, "it mixes the values of several devices")
    if same is None or same.groups != groups:
        same = SameValues(program, groups)
    cutter = _Cutter(program, same)
    if _sums_shards(program, all_gather, reader):
        _add_up(program, all_gather, reader, cutter)
        return None
    dimension, needs = _gathered_dimension(program, all_gather, reader, len(groups[0]))
    if not _is_outermost(reader.shape, dimension):
        raise illegal(
            reader,
            f"dimension {dimension} of {list(dims(reader))} is not the outermost in memory, so shards along "
            f"it are no contiguous pieces",
        )
    sharded = program.copy(reader, f"{reader.name}.sharded", cutter.operands(reader, needs, reader))
    shrink(sharded, dimension, len(groups[0]), needs)
    gather = program.copy(all_gather, f"{reader.name}.gathered", [sharded])
    gather.shape.CopyFrom(reader.shape)
    gather.dimensions[0] = dimension
    cutter.place(reader, [sharded, gather])
    return gather


def _is_outermost(shape: Message, dimension: int) -> bool:
    """XLA:CPU writes shards one after another whatever the dimension; XLA:GPU would transpose around others."""
    order = physical(shape)
    outer: int = prod(shape.dimensions[d] for d in order[: order.index(dimension)])
    return outer == 1


def _sums_shards(program: Program, all_gather: Message, reader: Message) -> bool:
    if reader.opcode != "reduce" or all_gather.dimensions[0] not in reader.dimensions:
        return False
    return reader.operand_ids[0] == all_gather.id and reduction_opcode(program, reader) == "add"


def _add_up(program: Program, all_gather: Message, reader: Message, cutter: _Cutter) -> None:
    """A sum over the gathered dimension: each device sums its shard, and the small results are all-reduced."""
    size = len(cutter.groups[0])
    needs = operand_needs(program, reader, ~all_gather.dimensions[0], size)
    summed = program.copy(reader, f"{reader.name}.sharded", cutter.operands(reader, needs, reader))
    total = program.copy(all_gather, f"{reader.name}.summed", [summed])
    total.opcode = "all-reduce"
    total.shape.CopyFrom(reader.shape)
    del total.dimensions[:]
    total.called_computation_ids.extend(reader.called_computation_ids)
    cutter.place(reader, [summed, total])


def _gathered_dimension(
    program: Program, all_gather: Message, reader: Message, size: int
) -> tuple[int, Needs]:
    """The dimension of the reader's result that the gathered one becomes, and what the reader then needs."""
    gathered = all_gather.dimensions[0]
    reason = f"{reader.name} ({reader.opcode}): its result has no dimension"
    for dimension in range(len(dims(reader))):
        try:
            needs = operand_needs(program, reader, dimension, size)
        except IllegalMoveError as error:
            reason = str(error)
            continue
        read = {need for o, need in zip(reader.operand_ids, needs, strict=True) if o == all_gather.id}
        if read == {gathered}:
            return dimension, needs
        reason = f"{reader.name} ({reader.opcode}): it works along dimension {gathered} that {all_gather.name} joins"
    raise IllegalMoveError(reason)


def _own_shard(program: Program, all_gather: Message, reader: Message, groups: Groups) -> Message | None:
    """What a dynamic-slice gives that takes on every device the shard that the device put in, of the gathered
    value or of its transpose; None where it takes anything else."""
    if reader.opcode != "dynamic-slice":
        return None
    shard, source = program.operands(all_gather)[0], program.operands(reader)[0]
    if source.id == all_gather.id:
        order = list(range(len(dims(source))))
    elif source.opcode == "transpose" and list(source.operand_ids) == [all_gather.id]:
        order = list(source.dimensions)
    else:
        return None
    dimension = order.index(all_gather.dimensions[0])
    if [dims(shard)[d] for d in order] != list(dims(reader)):
        return None
    if not _starts_at_own_shard(program, reader, dimension, groups):
        return None
    if source.id == all_gather.id:
        return _in_its_own_buffer(program, shard, reader)
    Buffers(program).check_read(shard, reader)
    made = transposed(program, shard, order, f"{reader.name}.shard")
    made.shape.CopyFrom(reader.shape)
    return made


def _in_its_own_buffer(program: Program, shard: Message, reader: Message) -> Message:
    """What takes the place of a slice, whose buffer was nobody else's: a copy of the shard, unless all that reads the
    slice only reads. XLA:CPU inserts its copies before the moves, and a loop overwrites what it begins with."""
    if not program.copies:
        return shard
    buffers = Buffers(program)
    if not buffers.is_only_read(reader):
        buffers.check_read(shard, reader)
        return program.make("copy", f"{reader.name}.shard", reader.shape, [shard])
    for late in buffers.readers(reader):
        buffers.check_read(shard, late)
    return shard


def _starts_at_own_shard(program: Program, reader: Message, dimension: int, groups: Groups) -> bool:
    """The other dimensions are taken whole, so a start there is clamped to zero whatever it says."""
    start = program.operands(reader)[1 + dimension]
    for group in groups:
        for position, device in enumerate(group):
            found = evaluate(program, start, device)
            if found is None or int(found) != position * dims(reader)[dimension]:
                return False
    return True


def transposed(program: Program, value: Message, order: list[int], name: str) -> Message:
    """A row-major transpose, not yet placed."""
    made = program.make("transpose", name, value.shape, [value])
    made.dimensions.extend(order)
    made.shape.dimensions[:] = [dims(value)[d] for d in order]
    made.shape.layout.minor_to_major[:] = list(range(len(order)))[::-1]
    return made


class _Cutter:
    """Cuts values to the shard of the device that runs the program."""

    def __init__(self, program: Program, same: SameValues) -> None:
        self.program, self.groups = program, same.groups
        self.placed: list[Message] = []
        self._same = same

    def place(self, old: Message, made: list[Message]) -> None:
        """Put ``made``, and what was cut for it, where ``old`` is.

        Raises:
            IllegalMoveError: something that ``old`` did not read may be overwritten by then.
        """
        buffers, ours = Buffers(self.program), {i.id for i in (*self.placed, *made)}
        for identifier in dict.fromkeys(o for i in (*self.placed, *made) for o in i.operand_ids):
            if identifier not in ours and identifier not in old.operand_ids:
                buffers.check_read(self.program.by_id[identifier], old)
        self.program.substitute(old, [*self.placed, *made])
        for instruction in (*self.placed, *made):
            self._same.judge(instruction)

    def operands(self, value: Message, needs: Needs, reader: Message) -> list[Message]:
        """What a shard of a value is computed from."""
        return [
            self.whole(o, reader) if need is None else self.shard(o, need, reader)
            for o, need in zip(self.program.operands(value), needs, strict=True)
        ]

    def whole(self, value: Message, reader: Message) -> Message:
        """A value read whole: it must be the same on all devices of the group."""
        if value.id not in self._same.proven:
            raise illegal(reader, f"{value.name} is not proven equal on the devices of a group")
        return value

    def shard(self, value: Message, dimension: int, reader: Message) -> Message:
        """This device's shard of a value along ``dimension``."""
        gathered = value.opcode == "all-gather" and list(value.dimensions) == [dimension]
        if gathered and groups_of(self.program, value) == self.groups:
            return self.program.operands(value)[0]
        if value.opcode in _CUT_THROUGH:
            try:
                return self._recomputed(value, dimension, reader)
            except _CannotCutThrough:
                pass
        return self._sliced(self.whole(value, reader), dimension)

    def _recomputed(self, value: Message, dimension: int, reader: Message) -> Message:
        count = len(self.groups[0])
        try:
            needs = operand_needs(self.program, value, dimension, count)
        except IllegalMoveError:
            raise _CannotCutThrough from None
        made = self.program.copy(value, f"{value.name}.shard", self.operands(value, needs, reader))
        shrink(made, dimension, count, needs)
        self.placed.append(made)
        return made

    def _sliced(self, value: Message, dimension: int) -> Message:
        size = dims(value)[dimension] // len(self.groups[0])
        start, zero = self._start(size), self._constant([0], is_scalar=True)
        shape = resized(value.shape, dimension, size)
        starts = [start if d == dimension else zero for d in range(len(dims(value)))]
        made = self._make("dynamic-slice", f"{value.name}.shard", shape, [value, *starts])
        made.dynamic_slice_sizes.extend(made.shape.dimensions)
        return made

    def _start(self, size: int) -> Message:
        """Where this device's shard begins, as an s32 scalar: a table indexed by the partition number."""
        starts = [0] * (1 + max(device for group in self.groups for device in group))
        for group in self.groups:
            for position, device in enumerate(group):
                starts[device] = position * size
        table = self._constant(starts, is_scalar=False)
        one = resized(table.shape, 0, 1)
        partition = self._make("partition-id", "partition-id", scalar(table.shape, _U32), [])
        entry = self._make("dynamic-slice", "shard-start", one, [table, partition])
        entry.dynamic_slice_sizes.append(1)
        return self._make("reshape", "shard-start", scalar(table.shape, _S32), [entry])

    def _constant(self, values: list[int], *, is_scalar: bool) -> Message:
        shape = scalar(self.program.instructions[0].shape, _S32)
        if not is_scalar:
            shape.dimensions.append(len(values))
            shape.layout.minor_to_major.append(0)
        made = self._make("constant", "shard-starts", shape, [])
        made.literal.shape.CopyFrom(shape)
        made.literal.s32s.extend(values)
        return made

    def _make(self, opcode: str, name: str, shape: Message, operands: list[Message]) -> Message:
        made = self.program.make(opcode, name, shape, operands)
        self.placed.append(made)
        return made


class _CannotCutThrough(Exception):
    """The op must be cut as a value."""


def groups_of(program: Program, collective: Message) -> Groups:
    """The groups of a collective, as partition numbers in group order.

    Raises:
        IllegalMoveError: they name replicas, or are of different sizes.
    """
    of_all = collective.use_global_device_ids or COLLECTIVE[collective.opcode].of_partitions
    if program.replicas() != 1 or collective.channel_id <= 0 or not of_all:
        raise illegal(collective, "its groups name replicas, not the partitions of one program")
    groups = written_groups(collective) or (tuple(range(program.partitions())),)
    if len({len(group) for group in groups}) != 1 or len(groups[0]) < 2:
        raise illegal(collective, "its groups are not of one size of two devices or more")
    return groups


class SameValues:
    """Which instructions are proven to give the same value on all devices of each group.

    A member of a loop's state is the same in each turn if it is the same before the first, and what a turn makes of it
    is wherever it was before.
    """

    def __init__(self, program: Program, groups: Groups) -> None:
        self.program, self.groups = program, groups
        self.proven: set[int] = set()
        parameters = sum(i.opcode == "parameter" for i in program.instructions)
        self._shardings = list(program.module.spmd_parameters_shardings)
        in_entry = program.entry.id == program.module.entry_computation_id
        if len(self._shardings) != parameters or not in_entry:
            self._shardings = []
        self._state = set[int]() if in_entry else self._state_before()
        while not self._judge_all():
            pass

    def judge(self, instruction: Message) -> None:
        """Take an instruction in whose operands have been judged."""
        if self._is_same(instruction):
            self.proven.add(instruction.id)

    def _judge_all(self) -> bool:
        """Judge by the members of the loop's state that may be the same, and leave out those that a turn makes differ;
        whether there was none."""
        self.proven = set()
        for instruction in self.program.instructions:
            self.judge(instruction)
        kept = self._state & self._members(self.program.by_id[self.program.root], self.proven)
        is_settled, self._state = kept == self._state, kept
        return is_settled

    def _is_same(self, instruction: Message) -> bool:
        program, opcode = self.program, instruction.opcode
        operands_same = self.proven.issuperset(instruction.operand_ids)
        if opcode == "parameter":
            number = instruction.parameter_number
            return bool(self._shardings) and _held_alike(self._shardings[number], self.groups)
        if opcode == "get-tuple-element" and program.operands(instruction)[0].opcode == "parameter":
            return operands_same or instruction.tuple_index in self._state
        if opcode in ALIKE:
            return _made_alike(program, instruction, self.groups, operands_same)
        if opcode == "collective-permute":  # who gets nothing has zeros
            of_partitions = program.replicas() == 1 and instruction.channel_id > 0
            return operands_same and of_partitions and joins_groups(instruction, self.groups)
        if operands_same and _is_deterministic(program, instruction):
            return True
        return not dims(instruction) and dtype(instruction) in _INDICES and self._computed_alike(instruction)

    def _computed_alike(self, scalar_: Message) -> bool:
        for group in self.groups:
            values = [evaluate(self.program, scalar_, device) for device in group]
            if any(value is None or value != values[0] for value in values):
                return False
        return True

    def _state_before(self) -> set[int]:
        """Members of the state that are the same before the first turn of every loop that runs this computation."""
        found: set[int] | None = None
        for caller in self.program.module.computations:
            for one in caller.instructions:
                if self.program.entry.id not in one.called_computation_ids:
                    continue
                if one.opcode != "while":
                    return set()
                outside = self.program.inside(caller.id)
                same = SameValues(outside, self.groups)
                members = self._members(outside.operands(one)[0], same.proven)
                found = members if found is None else found & members
        return found or set()

    @staticmethod
    def _members(tuple_: Message, proven: set[int]) -> set[int]:
        if tuple_.opcode != "tuple":
            return set()
        return {at for at, member in enumerate(tuple_.operand_ids) if member in proven}


_INDICES = frozenset({"pred", "s32", "s64", "u32"})


def _is_deterministic(program: Program, instruction: Message) -> bool:
    opcode = instruction.opcode
    if opcode in _DIFFERS or opcode.endswith(("-start", "-done")):
        return False
    return all(
        _is_deterministic(program, inner)
        for called in instruction.called_computation_ids
        for inner in program.computation(called).instructions
    )


def _made_alike(program: Program, collective: Message, groups: Groups, operands_alike: bool) -> bool:
    try:
        own = groups_of(program, collective)
    except IllegalMoveError:
        return False
    if all(any(set(group) <= set(other) for other in own) for group in groups):
        return True
    if not operands_alike:
        return False
    group_of = {device: i for i, group in enumerate(groups) for device in group}
    seen = {device: [group_of.get(d, -1 - d) for d in group] for group in own for device in group}
    if COLLECTIVE[collective.opcode].reduces:
        seen = {device: sorted(who) for device, who in seen.items()}
    return all(seen.get(device) == seen.get(group[0]) for group in groups for device in group)


def joins_groups(send: Message, groups: Groups) -> bool:
    """Whether every group sends to a group, device by device in order, or nowhere."""
    target = {pair.source: pair.target for pair in send.source_target_pairs}
    sent = [tuple(target.pop(device, -1) for device in group) for group in groups]
    return not target and all(to in groups or set(to) == {-1} for to in sent)


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
