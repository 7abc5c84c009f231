"""A computation of a module while moves rewrite it: lookups, new instructions, the final sweep.

Two things that a move asks of it: what a small integer value is on each device, and whether a value may be read later
than the program did.

Partitioned programs find their own shard by arithmetic on ``partition-id`` and tables of offsets. A move
that cancels such a slice against an all-gather must know where it starts on every device, so the few
integer ops that partitioners write are evaluated here, exactly or not at all.

On XLA:CPU the moves come after copy insertion: a loop overwrites the value it begins with, and the new value of a
donated argument takes the argument's buffer, because everything that reads the old value comes before. Another reader
keeps that only where the overwriting depends on it (:class:`Buffers`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from graphlib import CycleError
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.opcodes import SIDE_EFFECTS
from disco_hlo.hlo.proto import DTYPES, DetailedInstruction, DetailedModule, Message, parse, serialize
from disco_hlo.hlo.storage import Storage, leaf_at, readers_of, storage_of
from disco_hlo.hlo.walks import needed_first, reached

_NOT_COPIED = ("original_value", "statistics_viz", "control_predecessor_ids", "sharding")
_ACTING = SIDE_EFFECTS | frozenset({"after-all"})
_FIELDS: dict[str, tuple[str, type[Any]]] = {
    "pred": ("preds", np.bool_),
    "s8": ("s8s", np.int8),
    "s16": ("s16s", np.int16),
    "u8": ("u8s", np.uint8),
    "u16": ("u16s", np.uint16),
    "s32": ("s32s", np.int32),
    "s64": ("s64s", np.int64),
    "u32": ("u32s", np.uint32),
    "f32": ("f32s", np.float32),
    "f64": ("f64s", np.float64),
    "bf16": ("bf16s", np.uint16),
    "f16": ("f16s", np.uint16),
}
_LARGEST = 1 << 16
"""Elements of the largest constant looked into."""
_DEEPEST = 32
"""Ops one behind the other that are followed."""
_COMPARED: dict[str, Any] = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
}  # fmt: skip
_ARITHMETIC: dict[str, Any] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "maximum": np.maximum,
    "minimum": np.minimum,
}


class _Numbers:
    """Names, ids and channels that a module has not given yet."""

    def __init__(self, module: Message) -> None:
        every = [i for c in module.computations for i in c.instructions]
        self._names = {i.name for i in every}
        self._last: dict[int, int] = {}
        for i in every:
            self._last[i.id >> 32] = max(i.id, self._last.get(i.id >> 32, 0))
        self._channel = max((i.channel_id for i in every), default=0)
        self._computations = {c.name: c.id for c in module.computations}

    def name(self, wanted: str) -> str:
        """``wanted``, with a number where that name is taken."""
        found, number = wanted, 0
        while found in self._names:
            number += 1
            found = f"{wanted}.{number}"
        self._names.add(found)
        return found

    def id(self, space: int) -> int:
        """An id like those of a computation, whose high half is ``space``."""
        self._last[space] = self._last.get(space, space << 32) + 1
        return self._last[space]

    def channel(self) -> int:
        """A channel of its own."""
        self._channel += 1
        return self._channel

    def computation(self, wanted: str) -> tuple[str, int]:
        """``wanted``, with a number where a computation has that name, and an id of its own."""
        found, number = wanted, 0
        while found in self._computations:
            number += 1
            found = f"{wanted}.{number}"
        self._computations[found] = max(self._computations.values()) + 1
        return found, self._computations[found]


class Program:
    """A parsed module and the instructions of one of its computations, in order.

    Instructions are messages; operands are named by id.
    """

    def __init__(self, module: bytes, *, copies: bool = True) -> None:
        """The entry computation.

        Args:
            module: a serialized HloModuleProto without a schedule.
            copies: whether XLA's copy insertion is done, as on XLA:CPU: a move then makes the copies that it needs.

        Raises:
            IllegalMoveError: the module is scheduled.
            ModuleError: the bytes are no HLO module.
        """
        self.module = parse(module, DetailedModule)
        if self.module.schedule.sequences:
            raise IllegalMoveError(
                f"module {self.module.name} is scheduled; structural moves belong before the scheduler"
            )
        self.copies = copies
        self._numbers = _Numbers(self.module)
        self._read(self.module.entry_computation_id)

    def inside(self, computation: int) -> Program:
        """Another computation of the same module; :meth:`flush` writes it back."""
        made = object.__new__(Program)
        made.module, made.copies, made._numbers = self.module, self.copies, self._numbers
        made._read(computation)
        return made

    def inside_loop(self, loop: Message) -> tuple[Program, Program]:
        """Body and condition of a ``while``, to be rewritten.

        Raises:
            IllegalMoveError: another instruction calls one of them too, so that it would be rewritten there as well.
        """
        calls = [
            called
            for c in self.module.computations
            for i in c.instructions
            for called in i.called_computation_ids
        ]
        if any(calls.count(one) > 1 for one in loop.called_computation_ids):
            raise illegal(loop, "another instruction calls its body or condition too")
        body, condition = loop.called_computation_ids
        return self.inside(body), self.inside(condition)

    def _read(self, computation: int) -> None:
        self.entry = self.computation(computation)
        self.instructions: list[Message] = list(self.entry.instructions)
        self.by_id: dict[int, Message] = {i.id: i for i in self.instructions}
        self._readers = _readers_of(self.instructions)
        self.waited_for()
        self._id_space = max(self.by_id) >> 32

    def waited_for(self) -> None:
        """Take note of the control dependencies, after some were made."""
        self._waited_for = {before for i in self.instructions for before in i.control_predecessor_ids}

    def flush(self) -> None:
        """Write the instructions, as they stand, into the module."""
        kept = [DetailedInstruction.FromString(i.SerializeToString()) for i in self.instructions]
        del self.entry.instructions[:]
        self.entry.instructions.extend(kept)

    def serialize(self) -> bytes:
        """The module with the instructions as they stand."""
        self.flush()
        return serialize(self.module)

    @property
    def root(self) -> int:
        """Id of the root."""
        return int(self.entry.root_id)

    def at(self, position: int, opcode: str) -> Message:
        """The instruction at a position of the list, which must have this opcode.

        Raises:
            IllegalMoveError: there is none, or it is another.
        """
        if not 0 <= position < len(self.instructions):
            raise IllegalMoveError(
                f"there is no instruction {position}; the entry of {self.module.name} has {len(self.instructions)}"
            )
        found = self.instructions[position]
        if found.opcode != opcode:
            raise IllegalMoveError(
                f"instruction {position} is {found.name} ({found.opcode}), expected {opcode}: the move was made for "
                f"another module"
            )
        return found

    def operands(self, instruction: Message) -> list[Message]:
        """The instructions that ``instruction`` reads."""
        return [self.by_id[i] for i in instruction.operand_ids]

    def readers(self, instruction: Message) -> list[Message]:
        """The instructions that read a value, each once."""
        return [self.by_id[i] for i in self._readers[instruction.id]]

    def computation(self, identifier: int) -> Message:
        """A computation of the module by id."""
        return next(c for c in self.module.computations if c.id == identifier)

    def copy_computation(self, identifier: int, name: str) -> Message:
        """A copy of a computation that calls no other, before all that may call it."""
        source = self.computation(identifier)
        made = type(source)()
        made.CopyFrom(source)
        made.name, made.id = self._numbers.computation(name)
        ids = {one.id: made.id << 32 | number for number, one in enumerate(made.instructions)}
        for one in made.instructions:
            one.id, one.name = ids[one.id], self._numbers.name(f"{name}.{one.name}")
            one.operand_ids[:] = [ids[operand] for operand in one.operand_ids]
        made.root_id = ids[source.root_id]
        self.module.computations.insert(0, made)
        return self.module.computations[0]

    def partitions(self) -> int:
        """How many devices run the module, where it says so; else 0."""
        return int(self.module.device_assignment.computation_count)

    def replicas(self) -> int:
        """How many replicas the module has; 1 where it does not say."""
        return int(self.module.device_assignment.replica_count) or 1

    def copy(self, source: Message, name: str, operands: Sequence[Message]) -> Message:
        """A copy with other operands and a name of its own, not yet placed."""
        made = DetailedInstruction()
        made.CopyFrom(source)
        for field in _NOT_COPIED:
            made.ClearField(field)
        if b"outer_dimension_partitions" in made.backend_config:
            made.ClearField("backend_config")  # the thread partition of another shape
        if made.channel_id > 0:
            made.channel_id = self._numbers.channel()
        return self._identify(made, name, operands)

    def make(self, opcode: str, name: str, shape: Message, operands: Sequence[Message]) -> Message:
        """A new instruction, not yet placed; set further fields on what is returned."""
        made = DetailedInstruction(opcode=opcode)
        made.shape.CopyFrom(shape)
        return self._identify(made, name, operands)

    def _identify(self, made: Message, name: str, operands: Sequence[Message]) -> Message:
        made.id = self._numbers.id(self._id_space)
        made.name = self._numbers.name(name)
        del made.operand_ids[:]
        made.operand_ids.extend(o.id for o in operands)
        self.by_id[made.id] = made
        return made

    def replace(self, instructions: Iterable[Message]) -> None:
        """Make ``instructions`` the entry, without those that nothing reads any more."""
        unread = {i for i, readers in self._readers.items() if not readers}
        self.instructions = list(instructions)
        self.by_id = {i.id: i for i in self.instructions}
        self._readers = _readers_of(self.instructions)
        self._sweep([i for i, readers in self._readers.items() if not readers and i not in unread])

    def substitute(self, old: Message, new: Sequence[Message]) -> None:
        """Put ``new`` where ``old`` is; the last of them takes its readers. What nothing reads any more goes.

        Raises:
            IllegalMoveError: a control dependency hangs on ``old``.
        """
        if old.control_predecessor_ids or old.id in self._waited_for:
            raise illegal(old, "it is ordered by a control dependency")
        fresh = [made for made in new if made.id not in self._readers]
        self.place(fresh, self.position(old) + 1)
        self.redirect(old, new[-1], keep={made.id for made in fresh})
        self._sweep([old.id])

    def in_order(self) -> None:
        """Put every instruction behind what it waits for, and otherwise where it is.

        Raises:
            IllegalMoveError: one waits for itself.
        """
        try:
            placed = needed_first(
                (one.id for one in self.instructions), lambda i: reversed(waits_for(self.by_id[i]))
            )
        except CycleError as error:
            one = self.by_id[error.args[1]]
            raise illegal(one, "it would wait for itself") from None
        self.instructions = [self.by_id[i] for i in placed]

    def place(self, made: Sequence[Message], at: int) -> None:
        """Put new instructions into the list, the first at position ``at``."""
        self.instructions[at:at] = made
        for one in made:
            self._readers[one.id] = {}
            self._waited_for.update(one.control_predecessor_ids)
            for operand in one.operand_ids:
                self._readers[operand][one.id] = None

    def redirect(self, old: Message, new: Message, keep: Collection[int] = ()) -> None:
        """Let all that reads ``old``, but for the ids ``keep``, read ``new``, which may be the root after it."""
        for reader in [self.by_id[i] for i in self._readers[old.id] if i not in keep]:
            self.reads(reader, [new.id if operand == old.id else operand for operand in reader.operand_ids])
        if self.root == old.id:
            self.entry.root_id = new.id

    def reads(self, reader: Message, operands: Sequence[int]) -> None:
        """Give an instruction other operands, by id."""
        for operand in set(reader.operand_ids):
            del self._readers[operand][reader.id]
        reader.operand_ids[:] = operands
        for operand in operands:
            self._readers[operand][reader.id] = None

    def sweep(self) -> None:
        """Remove what nothing reads."""
        self._sweep([i for i, readers in self._readers.items() if not readers])

    def position(self, instruction: Message) -> int:
        """Where an instruction stands in the list."""
        return next(at for at, i in enumerate(self.instructions) if i.id == instruction.id)

    def acts(self, instruction: Message) -> bool:
        """Whether an instruction, or one that it calls, does more than give a value."""
        inside = (self.computation(called) for called in instruction.called_computation_ids)
        acts = instruction.opcode in _ACTING or instruction.custom_call_has_side_effect
        return bool(acts) or any(self.acts(one) for computation in inside for one in computation.instructions)

    def _sweep(self, suspects: list[int]) -> None:
        """Remove the suspects that nothing reads, and what only they read."""
        removed: set[int] = set()
        while suspects:
            instruction = self.by_id[suspects.pop()]
            if instruction.id in removed or self._readers[instruction.id] or not self._may_go(instruction):
                continue
            removed.add(instruction.id)
            for operand in set(instruction.operand_ids):
                del self._readers[operand][instruction.id]
                suspects.append(operand)
        for gone in removed:
            del self._readers[gone], self.by_id[gone]
        self.instructions = [i for i in self.instructions if i.id not in removed]

    def _may_go(self, instruction: Message) -> bool:
        ordered = bool(instruction.control_predecessor_ids) or instruction.id in self._waited_for
        is_given = instruction.id == self.root or instruction.opcode == "parameter"
        return not (is_given or ordered or self.acts(instruction))


def computations(program: Program, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Program]]:
    """The entry and the bodies of its loops, with the paths to these."""
    yield path, program
    for position, one in enumerate(program.instructions):
        if one.opcode == "while":
            yield from computations(program.inside(one.called_computation_ids[0]), (*path, position))


def illegal(instruction: Message, reason: str) -> IllegalMoveError:
    """What is raised where an instruction does not allow a move."""
    return IllegalMoveError(f"{instruction.name} ({instruction.opcode}): {reason}")


def waits_for(instruction: Message) -> list[int]:
    """Ids of what must be done before an instruction."""
    return [*instruction.operand_ids, *instruction.control_predecessor_ids]


def _readers_of(instructions: Sequence[Message]) -> dict[int, dict[int, None]]:
    readers: dict[int, dict[int, None]] = {i.id: {} for i in instructions}
    for instruction in instructions:
        for operand in instruction.operand_ids:
            readers[operand][instruction.id] = None
    return readers


def dims(instruction: Message) -> tuple[int, ...]:
    """Dimensions of the result."""
    return tuple(instruction.shape.dimensions)


def dtype(instruction: Message) -> str:
    """Element type of the result."""
    return DTYPES.get(instruction.shape.element_type, "unknown")


def bits(instruction: Message) -> int:
    """Bits per element of the result, as its type name says."""
    digits = "".join(c for c in dtype(instruction).split("e")[0] if c.isdigit())
    return int(digits) if digits else 8


def resized(shape: Message, dimension: int, size: int) -> Message:
    """A copy of a shape with another size of one dimension, same layout."""
    made = type(shape)()
    made.CopyFrom(shape)
    made.dimensions[dimension] = size
    return made


def scalar(shape: Message, element_type: int) -> Message:
    """The shape of one element."""
    made = type(shape)(element_type=element_type)
    made.layout.SetInParent()
    return made


def physical(shape: Message) -> list[int]:
    """Dimension numbers from major to minor; the logical order where the shape has no layout yet."""
    order = list(shape.layout.minor_to_major)[::-1]
    return order if len(order) == len(shape.dimensions) else list(range(len(shape.dimensions)))


def reshapes(program: Program, bitcast: Message) -> bool:
    """Whether a bitcast gives the same elements in the same order, in other dimensions."""
    before = program.operands(bitcast)[0]
    orders = [physical(one.shape) for one in (before, bitcast)]
    are_alike = before.shape.element_type == bitcast.shape.element_type
    return are_alike and all(order == sorted(order) for order in orders)


def literal_value(constant: Message) -> NDArray[Any] | None:
    """The array a constant holds; 16-bit floats as their bits. None where it is large or of another type."""
    field = _FIELDS.get(dtype(constant))
    if constant.opcode != "constant" or field is None or np.prod(dims(constant), dtype=np.int64) > _LARGEST:
        return None
    name, kind = field
    raw = getattr(constant.literal, name)
    values = np.frombuffer(raw, kind) if isinstance(raw, bytes) else np.array(list(raw), kind)
    if values.size != np.prod(dims(constant), dtype=np.int64):
        return None
    return values.reshape(dims(constant))


def is_zero(instruction: Message) -> bool:
    """Whether this is a constant of (positive) zeros."""
    value = literal_value(instruction)
    return value is not None and not value.any()


def evaluate(
    program: Program,
    instruction: Message,
    partition: int | None = None,
    known: Mapping[int, NDArray[Any] | None] | None = None,
) -> NDArray[Any] | None:
    """The value of integer index arithmetic; None where it is anything else.

    Args:
        partition: of the device that computes it; None where it must be the same on all.
        known: by id, values that are given.
    """
    return _evaluated(program, instruction, partition, _DEEPEST, dict(known or {}))


def _evaluated(
    program: Program,
    instruction: Message,
    partition: int | None,
    depth: int,
    known: dict[int, NDArray[Any] | None],
) -> NDArray[Any] | None:
    """``known`` also takes what is found: a chain whose links read the one before twice would double with each."""
    opcode = instruction.opcode
    if instruction.id in known or depth == 0:
        return known.get(instruction.id)
    if opcode == "constant":
        return literal_value(instruction) if dtype(instruction)[0] in "psu" else None
    if opcode == "bitcast" and not reshapes(program, instruction):
        return None
    if opcode == "partition-id":
        return None if partition is None else np.array(partition, np.uint32)
    operands: list[NDArray[Any]] = []
    for operand in program.operands(instruction):
        if operand.id not in known:
            known[operand.id] = _evaluated(program, operand, partition, depth - 1, known)
        value = known[operand.id]
        if value is None:
            return None
        operands.append(value)
    return computed_value(instruction, operands) if operands else None


def computed_value(instruction: Message, operands: list[NDArray[Any]]) -> NDArray[Any] | None:
    """What one op of index arithmetic makes of its operands; None where it is anything else."""
    opcode, first = instruction.opcode, operands[0]
    if opcode in ("reshape", "bitcast", "copy"):
        return first.reshape(dims(instruction)) if first.size == np.prod(dims(instruction)) else None
    if opcode == "convert" and dtype(instruction) in ("s32", "s64", "u32", "pred"):
        return first.astype(_FIELDS[dtype(instruction)][1])
    if opcode == "dynamic-slice":
        sizes = list(instruction.dynamic_slice_sizes)
        wanted = zip(operands[1:], first.shape, sizes, strict=True)
        starts = [int(np.clip(int(start), 0, size - taken)) for start, size, taken in wanted]
        return first[tuple(slice(s, s + k) for s, k in zip(starts, sizes, strict=True))]
    if opcode == "slice":
        return first[tuple(slice(d.start, d.limit, d.stride or 1) for d in instruction.slice_dimensions)]
    if opcode in _ARITHMETIC and np.issubdtype(first.dtype, np.integer):
        return np.asarray(_ARITHMETIC[opcode](*operands))
    if opcode in ("divide", "remainder") and np.issubdtype(first.dtype, np.integer):
        # XLA rounds towards zero, numpy down.
        if (first < 0).any() or (operands[1] <= 0).any():
            return None
        return np.asarray((np.floor_divide if opcode == "divide" else np.remainder)(*operands))
    if opcode == "compare" and first.dtype.kind in "biu":
        return np.asarray(_COMPARED[instruction.comparison_direction](*operands))
    return None


class Buffers:
    """Answers for one program after copy insertion; asked before it is rewritten."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def _place(self) -> dict[int, int]:
        return {i.id: place for place, i in enumerate(self.program.instructions)}

    @cached_property
    def _operands(self) -> list[list[int]]:
        place = self._place
        return [[place[i] for i in one.operand_ids] for one in self.program.instructions]

    @cached_property
    def _storage(self) -> Storage:
        """Values and buffers, each donated argument in one with the result that takes its place, and each element of a
        loop's state with what it becomes."""
        program, place = self.program, self._place
        found = storage_of(program.instructions, self._operands, ModuleIndex(program.module))
        parameters = {i.parameter_number: i for i in program.instructions if i.opcode == "parameter"}
        root = program.by_id[program.root]
        if program.entry.id != program.module.entry_computation_id:
            before, after = (found.of_op[place[one.id]] for one in (parameters[0], root))
            for state, becomes in zip(before, after, strict=True):
                found.join(state, becomes)
            return found
        for entry in program.module.input_output_alias.entries:
            given = parameters.get(entry.parameter_number)
            results = found.of_op[place[root.id]]
            result = leaf_at(root.shape, entry.output_shape_index)
            if given is not None and result < len(results):
                found.join(found.of_op[place[given.id]][0], results[result])
        return found

    @cached_property
    def _together(self) -> dict[int, list[int]]:
        """The values of each buffer."""
        found: dict[int, list[int]] = {}
        for value in range(len(self._storage.made_by)):
            found.setdefault(self._storage.buffer(value), []).append(value)
        return found

    @cached_property
    def _readers(self) -> list[list[int]]:
        return readers_of(self._storage, self.program.instructions, self._operands)

    def readers(self, value: Message) -> list[Message]:
        """The instructions that read an array, under whatever name, each once."""
        found = {op for one in self._storage.of_op[self._place[value.id]] for op in self._readers[one]}
        return [self.program.instructions[op] for op in sorted(found)]

    def is_only_read(self, value: Message) -> bool:
        """Whether nothing writes over an array, and the program does not return it."""
        storage = self._storage
        returned = storage.of_op[self._place[self.program.root]]
        values = storage.of_op[self._place[value.id]]
        return all(len(self._together[storage.buffer(one)]) == 1 and one not in returned for one in values)

    def check_read(self, value: Message, reader: Message) -> None:
        """Refuse a move by which ``value`` is read where ``reader`` stands. Before copy insertion none is refused.

        Raises:
            IllegalMoveError: it may have been overwritten by then; names both.
        """
        if not self.program.copies:
            return
        storage = self._storage
        for one in storage.of_op[self._place[value.id]]:
            for other in self._together[storage.buffer(one)]:
                writer = storage.made_by[other]
                by = self.program.instructions[writer]
                if writer > storage.made_by[one] and not self._depends(by, reader):
                    raise illegal(
                        reader, f"{by.name} ({by.opcode}) may overwrite {value.name} before it is read there"
                    )

    def unordered(self) -> set[tuple[int, int]]:
        """Ids of what reads an array, and of what writes over it without waiting for that. None before copy
        insertion."""
        found: set[tuple[int, int]] = set()
        shared = [values for values in self._together.values() if len(values) > 1]
        if not self.program.copies or not shared:
            return found
        instructions, before = self.program.instructions, list[int]()
        """By place, the places of what must be done before, as bits."""
        for one in instructions:
            places = {self._place[i] for i in waits_for(one)}
            before.append(reduce(or_, (before[place] | 1 << place for place in places), 0))
        made_by = self._storage.made_by
        for one, other in ((one, other) for values in shared for one in values for other in values):
            if made_by[other] > made_by[one]:
                found.update(
                    (instructions[reader].id, instructions[made_by[other]].id)
                    for reader in self._readers[one]
                    if reader != made_by[other] and not before[made_by[other]] >> reader & 1
                )
        return found

    def _depends(self, instruction: Message, earlier: Message) -> bool:
        """Whether ``earlier`` must be done before ``instruction``. What stands before ``earlier`` does not wait for it:
        of an update at the end of a step, read a few instructions before, those few are looked at."""
        place, by_id = self._place, self.program.by_id
        behind = reached(
            [instruction.id],
            lambda i: (x for x in waits_for(by_id[i]) if place[x] >= place[earlier.id]),
        )
        return instruction.id != earlier.id and earlier.id in behind
