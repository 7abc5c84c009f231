"""A computation of a module while moves rewrite it: lookups, new instructions, the final sweep."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.opcodes import SIDE_EFFECTS
from disco_hlo.hlo.proto import DTYPES, DetailedInstruction, DetailedModule, Message, parse, serialize

_NOT_COPIED = ("original_value", "statistics_viz", "control_predecessor_ids", "sharding")
_KEPT = SIDE_EFFECTS | frozenset({"parameter", "custom-call", "while", "conditional", "call", "after-all"})


class _Numbers:
    """Names, ids and channels that a module has not given yet."""

    def __init__(self, module: Message) -> None:
        every = [i for c in module.computations for i in c.instructions]
        self._names = {i.name for i in every}
        self._last: dict[int, int] = {}
        for i in every:
            self._last[i.id >> 32] = max(i.id, self._last.get(i.id >> 32, 0))
        self._channel = max((i.channel_id for i in every), default=0)

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
            raise IllegalMoveError(f"{old.name} ({old.opcode}): it is ordered by a control dependency")
        fresh = [made for made in new if made.id not in self._readers]
        self.place(fresh, self.position(old) + 1)
        self.redirect(old, new[-1], keep={made.id for made in fresh})
        self._sweep([old.id])

    def place(self, made: Sequence[Message], at: int) -> None:
        """Put new instructions into the list, the first at position ``at``."""
        self.instructions[at:at] = made
        for one in made:
            self._readers[one.id] = {}
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
        return instruction.id != self.root and instruction.opcode not in _KEPT and not ordered


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


def physical(shape: Message) -> list[int]:
    """Dimension numbers from major to minor; the logical order where the shape has no layout yet."""
    order = list(shape.layout.minor_to_major)[::-1]
    return order if len(order) == len(shape.dimensions) else list(range(len(shape.dimensions)))
