"""Chunk: a stretch of the program in parts along one dimension (CoCoNet's *overlap*, section 3.5, and beyond).

CoCoNet chunks a matmul and its collective. Here the stretch is any set of instructions through which a
dimension passes: the batch through a whole layer, all layers, and the backward pass. Every instruction of
the stretch is replaced by ``parts`` copies on the parts of its operands. A value that anything needs whole is
joined: parts along a dimension are concatenated, partial sums (weight gradients contract the batch) are
added. What lies outside the stretch is sliced. Since each copy depends on its own part alone, one part's
collective can travel while another part is computed; which order makes use of that is the plan's matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.buffers import Buffers
from disco_hlo.structure.dimensions import Needs, operand_needs, partial_opcode, shrink
from disco_hlo.structure.program import Program, dims, resized

MOST_PARTS = 64
"""More parts than this are refused: every instruction of the stretch is written that often."""


def chunk(program: Program, members: dict[int, int], parts: int) -> None:
    """Rewrite ``program`` with the instructions ``members`` (id -> dimension, or ``~k``) in ``parts``.

    Raises:
        IllegalMoveError: an instruction cannot be computed in parts that way.
    """
    needs = check(program, members, parts)
    writer = _Writer(program, members, needs, parts)
    for instruction in list(program.instructions):
        if instruction.id in members:
            writer.in_parts(instruction)
        else:
            writer.whole(instruction)
    if program.root in members:
        program.entry.root_id = writer.joined(program.by_id[program.root]).id
    program.replace(writer.placed)


def check(program: Program, members: dict[int, int], parts: int) -> dict[int, Needs]:
    """What each instruction of a stretch needs of its operands.

    Raises:
        IllegalMoveError: the stretch cannot be computed in parts that way.
    """
    if not 2 <= parts <= MOST_PARTS:
        raise IllegalMoveError(f"expected 2 to {MOST_PARTS} parts, got {parts}")
    needs = {i: operand_needs(program, program.by_id[i], d, parts) for i, d in members.items()}
    _check_control(program, members)
    _check_broadcasts(program, needs)
    return needs


def _check_control(program: Program, members: dict[int, int]) -> None:
    for instruction in program.instructions:
        for before in instruction.control_predecessor_ids:
            if before in members:
                name = program.by_id[before].name
                raise IllegalMoveError(f"{name}: {instruction.name} waits for it by a control dependency")


def _check_broadcasts(program: Program, needs: dict[int, Needs]) -> None:
    """A broadcast from outside is made smaller where its part is read, and reads its operand there."""
    buffers = Buffers(program)
    for identifier, wanted in needs.items():
        member = program.by_id[identifier]
        for value, need in zip(program.operands(member), wanted, strict=True):
            if need is not None and value.opcode == "broadcast" and value.id not in needs:
                buffers.check_read(program.operands(value)[0], member)


class _Writer:
    """The new instruction list, and where every part of every value is in it."""

    def __init__(
        self, program: Program, members: dict[int, int], needs: dict[int, Needs], parts: int
    ) -> None:
        self.program, self.members, self.needs, self.parts = program, members, needs, parts
        self.placed: list[Message] = []
        self._parts: dict[int, list[Message]] = {}
        self._joined: dict[int, Message] = {}
        self._cut: dict[tuple[int, int, int], Message] = {}

    def whole(self, instruction: Message) -> None:
        """Place an instruction that stays as it is, reading joined values."""
        for at, operand in enumerate(instruction.operand_ids):
            if operand in self.members:
                instruction.operand_ids[at] = self.joined(self.program.by_id[operand]).id
        self.placed.append(instruction)

    def in_parts(self, instruction: Message) -> None:
        """Place the copies of an instruction of the stretch."""
        dimension, needs = self.members[instruction.id], self.needs[instruction.id]
        operands = self.program.operands(instruction)
        self._parts[instruction.id] = []
        for part in range(self.parts):
            read = [self._operand(o, need, part) for o, need in zip(operands, needs, strict=True)]
            made = self.program.copy(instruction, f"{instruction.name}.part{part}", read)
            shrink(made, dimension, self.parts, needs)
            self._parts[instruction.id].append(self._place(made))

    def joined(self, value: Message) -> Message:
        """The whole value of an instruction of the stretch."""
        if value.id not in self._joined:
            parts, dimension = self._parts[value.id], self.members[value.id]
            if dimension >= 0:
                made = self._place(
                    self.program.make("concatenate", f"{value.name}.joined", value.shape, parts)
                )
                made.dimensions.append(dimension)
            else:
                made = self._added(value, parts)
            made.metadata.CopyFrom(value.metadata)
            self._joined[value.id] = made
        return self._joined[value.id]

    def _added(self, value: Message, parts: Sequence[Message]) -> Message:
        opcode = partial_opcode(self.program, value)
        total = parts[0]
        for part in parts[1:]:
            total = self._place(self.program.make(opcode, f"{value.name}.joined", value.shape, [total, part]))
        return total

    def _operand(self, value: Message, need: int | None, part: int) -> Message:
        if value.id not in self.members:
            return value if need is None else self._piece(value, need, part)
        if need is not None and self.members[value.id] == need:
            return self._parts[value.id][part]
        whole = self.joined(value)
        return whole if need is None else self._piece(whole, need, part)

    def _piece(self, value: Message, dimension: int, part: int) -> Message:
        """A part of a value outside the stretch: a smaller broadcast where it is one, else a slice."""
        even = value.opcode in ("broadcast", "iota") and dimension not in value.dimensions
        key = (value.id, dimension, 0 if even else part)
        if key not in self._cut:
            self._cut[key] = self._smaller(value, dimension) if even else self._sliced(value, dimension, part)
        return self._cut[key]

    def _smaller(self, value: Message, dimension: int) -> Message:
        made = self.program.copy(value, f"{value.name}.piece", self.program.operands(value))
        made.shape.dimensions[dimension] //= self.parts
        return self._place(made)

    def _sliced(self, value: Message, dimension: int, part: int) -> Message:
        size = dims(value)[dimension] // self.parts
        if value.opcode == "broadcast":
            at = list(value.dimensions).index(dimension)
            operand = self._operand(self.program.operands(value)[0], at, part)
            made = self.program.copy(value, f"{value.name}.piece", [operand])
            made.shape.dimensions[dimension] = size
            return self._place(made)
        shape = resized(value.shape, dimension, size)
        made = self._place(self.program.make("slice", f"{value.name}.piece", shape, [value]))
        for d, length in enumerate(dims(value)):
            start = part * size if d == dimension else 0
            limit = start + size if d == dimension else length
            made.slice_dimensions.add(start=start, limit=limit, stride=1)
        return made

    def _place(self, made: Message) -> Message:
        self.placed.append(made)
        return made
