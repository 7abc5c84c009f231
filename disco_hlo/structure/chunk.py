"""Chunk: a stretch of the program in parts along one dimension (CoCoNet's *overlap*, section 3.5, and beyond).

CoCoNet chunks a matmul and its collective. Here the stretch is any set of instructions through which a
dimension passes: the batch through a whole layer, all layers, and the backward pass. Every instruction of
the stretch is replaced by ``parts`` copies on the parts of its operands. A value that anything needs whole is
joined: parts along a dimension are concatenated, partial sums (weight gradients contract the batch) are
added. What lies outside the stretch is sliced. Since each copy depends on its own part alone, one part's
collective can travel while another part is computed; which order makes use of that is the plan's matter.

One question is behind this and every other structural move (CoCoNet, section 3, asks it of pointwise operations only):
which dimension of its operands an instruction needs in parts, where its result is wanted in parts
(:func:`operand_needs`). The part ``p`` of the result along dimension ``d`` is the same instruction on the parts ``p``
of some operands, each along a dimension of its own, and on the whole of the others. An instruction for which that does
not hold stops the move, with the reason.

A dimension ``~k`` (negative) stands for *partial sums over dimension k of operand 0*: the instruction on
the parts of its operands gives values whose sum (or maximum, or minimum) is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.opcodes import ELEMENTWISE
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.program import Buffers, Program, dims, illegal, is_zero, physical, resized

MOST_PARTS = 64
"""More parts than this are refused: every instruction of the stretch is written that often."""
Needs = tuple[int | None, ...]
"""Per operand the dimension along which its part is needed; None where the whole operand is."""
_PARTIAL_OPCODES = ("add", "maximum", "minimum")


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
    for instruction in program.instructions:
        for before in instruction.control_predecessor_ids:
            if before in members:
                name = program.by_id[before].name
                raise IllegalMoveError(f"{name}: {instruction.name} waits for it by a control dependency")
    # A broadcast from outside is made smaller where its part is read, and reads its operand there.
    buffers = Buffers(program)
    for identifier, wanted in needs.items():
        member = program.by_id[identifier]
        for value, need in zip(program.operands(member), wanted, strict=True):
            if need is not None and value.opcode == "broadcast" and value.id not in needs:
                buffers.check_read(program.operands(value)[0], member)
    return needs


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
        opcode = "add" if value.opcode == "dot" else reduction_opcode(self.program, value)
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


@dataclass(frozen=True, slots=True)
class _Asked:
    """Which part of which instruction is asked for."""

    instruction: Message
    operands: list[Message]
    dimension: int
    parts: int


class _Stop(Exception):
    """Why an instruction cannot be computed in parts."""


def operand_needs(program: Program, instruction: Message, dimension: int, parts: int) -> Needs:
    """What an instruction needs of its operands to give its result in ``parts`` along ``dimension``.

    Raises:
        IllegalMoveError: it cannot be computed in parts that way; names it and says why.
    """
    try:
        return _needs(program, instruction, dimension, parts)
    except _Stop as stop:
        raise illegal(instruction, str(stop)) from None


def reduction_opcode(program: Program, instruction: Message) -> str:
    """The one binary op that a reduction or collective applies; empty where it applies anything else."""
    if len(instruction.called_computation_ids) != 1:
        return ""
    body = program.computation(instruction.called_computation_ids[0])
    by_id = {i.id: i for i in body.instructions}
    root = by_id[body.root_id]
    reads = {by_id[i].parameter_number for i in root.operand_ids if by_id[i].opcode == "parameter"}
    plain = len(body.instructions) == 3 and reads == {0, 1}
    return str(root.opcode) if plain else ""


def _needs(program: Program, instruction: Message, dimension: int, parts: int) -> Needs:
    if instruction.shape.tuple_shapes or instruction.shape.element_type in (13, 14, 17):
        raise _Stop("its result is no single array")
    if instruction.control_predecessor_ids:
        raise _Stop("it is ordered by a control dependency")
    if dimension < 0:
        return _partial_needs(program, instruction, ~dimension, parts)
    size = dims(instruction)
    if dimension >= len(size):
        raise _Stop(f"its result {list(size)} has no dimension {dimension}")
    if size[dimension] % parts:
        raise _Stop(f"dimension {dimension} has {size[dimension]} elements, which {parts} does not divide")
    operands = program.operands(instruction)
    if instruction.opcode in ELEMENTWISE:
        if any(dims(o) not in ((), size) for o in operands):
            raise _Stop("its operands have another shape than its result")
        return tuple(dimension if dims(o) else None for o in operands)
    rule = _RULES.get(instruction.opcode)
    if rule is None:
        raise _Stop("no dimension is known to pass through it")
    needs = rule(_Asked(instruction, operands, dimension, parts))
    for operand, need in zip(operands, needs, strict=True):
        if need is not None:
            _check_divides(operand, need, parts)
    return needs


def _check_divides(value: Message, dimension: int, parts: int) -> None:
    size = dims(value)[dimension]
    if size % parts:
        raise _Stop(
            f"dimension {dimension} of {value.name} has {size} elements, which {parts} does not divide"
        )


def _partial_needs(program: Program, instruction: Message, contracted: int, parts: int) -> Needs:
    operands = program.operands(instruction)
    if instruction.opcode == "dot":
        numbers = instruction.dot_dimension_numbers
        lhs = list(numbers.lhs_contracting_dimensions)
        if contracted not in lhs:
            raise _Stop(f"it does not contract dimension {contracted} of its first operand")
        needs: Needs = (contracted, numbers.rhs_contracting_dimensions[lhs.index(contracted)])
    elif instruction.opcode == "reduce":
        if len(operands) != 2 or contracted not in instruction.dimensions:
            raise _Stop(f"it does not reduce dimension {contracted} of one operand")
        opcode = reduction_opcode(program, instruction)
        if opcode not in _PARTIAL_OPCODES:
            raise _Stop("partial results of its reduction cannot be joined")
        if opcode == "add" and not is_zero(operands[1]):
            raise _Stop("its sum does not start from a constant zero, which every part would add again")
        needs = (contracted, None)
    else:
        raise _Stop("it sums over nothing, so it has no partial results")
    _check_divides(operands[0], contracted, parts)
    return needs


# --- one rule per opcode -----------------------------------------------------------------------------


def _broadcast(asked: _Asked) -> Needs:
    mapped = list(asked.instruction.dimensions)
    return (mapped.index(asked.dimension) if asked.dimension in mapped else None,)


def _transpose(asked: _Asked) -> Needs:
    return (asked.instruction.dimensions[asked.dimension],)


def _reshape(asked: _Asked) -> Needs:
    """Row-major position decides: the result's parts must be whole parts of one operand dimension."""
    source, target = asked.operands[0].shape, asked.instruction.shape
    if source.element_type != target.element_type:
        raise _Stop("it reads the bytes as another type")
    is_bitcast = asked.instruction.opcode == "bitcast"
    order_in = physical(source) if is_bitcast else list(range(len(source.dimensions)))
    order_out = physical(target) if is_bitcast else list(range(len(target.dimensions)))
    rank = order_out.index(asked.dimension)
    outside = prod(target.dimensions[d] for d in order_out[:rank])
    reached = 1
    for d in order_in:
        size = source.dimensions[d]
        if reached == outside and size > 1:
            _check_divides(asked.operands[0], d, asked.parts)
            return (d,)
        reached *= size
        if reached > outside:
            break
    raise _Stop(
        f"dimension {asked.dimension} is an inner factor of a merged dimension, so its parts lie scattered"
    )


def _reduce(asked: _Asked) -> Needs:
    if len(asked.operands) != 2:
        raise _Stop("it reduces several arrays at once")
    left = [d for d in range(len(dims(asked.operands[0]))) if d not in asked.instruction.dimensions]
    return (left[asked.dimension], None)


def _reduce_window(asked: _Asked) -> Needs:
    if len(asked.operands) != 2:
        raise _Stop("it reduces several arrays at once")
    window = asked.instruction.window.dimensions[asked.dimension]
    tiles = (window.stride or 1) == window.size and not window.padding_low and not window.padding_high
    if not tiles or window.window_dilation > 1 or window.base_dilation > 1 or window.window_reversal:
        raise _Stop(f"its windows overlap or are padded along dimension {asked.dimension}")
    if dims(asked.operands[0])[asked.dimension] != dims(asked.instruction)[asked.dimension] * window.size:
        raise _Stop(f"its windows leave a rest along dimension {asked.dimension}")
    return (asked.dimension, None)


def _dot(asked: _Asked) -> Needs:
    numbers = asked.instruction.dot_dimension_numbers
    lhs_batch, rhs_batch = list(numbers.lhs_batch_dimensions), list(numbers.rhs_batch_dimensions)
    if asked.dimension < len(lhs_batch):
        return (lhs_batch[asked.dimension], rhs_batch[asked.dimension])
    taken = {*lhs_batch, *numbers.lhs_contracting_dimensions}
    lhs_free = [d for d in range(len(dims(asked.operands[0]))) if d not in taken]
    position = asked.dimension - len(lhs_batch)
    if position < len(lhs_free):
        return (lhs_free[position], None)
    taken = {*rhs_batch, *numbers.rhs_contracting_dimensions}
    rhs_free = [d for d in range(len(dims(asked.operands[1]))) if d not in taken]
    return (None, rhs_free[position - len(lhs_free)])


def _concatenate(asked: _Asked) -> Needs:
    if asked.dimension == asked.instruction.dimensions[0]:
        raise _Stop(f"it joins its operands along dimension {asked.dimension} itself")
    return (asked.dimension,) * len(asked.operands)


def _slice(asked: _Asked) -> Needs:
    if dims(asked.instruction)[asked.dimension] != dims(asked.operands[0])[asked.dimension]:
        raise _Stop(f"it takes a part of dimension {asked.dimension} itself")
    return (asked.dimension,)


def _dynamic_slice(asked: _Asked) -> Needs:
    return (*_slice(asked), *(None for _ in asked.operands[1:]))


def _dynamic_update(asked: _Asked) -> Needs:
    if dims(asked.operands[1])[asked.dimension] != dims(asked.operands[0])[asked.dimension]:
        raise _Stop(f"it writes a part of dimension {asked.dimension} itself")
    return (asked.dimension, asked.dimension, *(None for _ in asked.operands[2:]))


def _pad(asked: _Asked) -> Needs:
    padding = asked.instruction.padding_config.dimensions[asked.dimension]
    if padding.edge_padding_low or padding.edge_padding_high or padding.interior_padding:
        raise _Stop(f"it pads dimension {asked.dimension} itself")
    return (asked.dimension, None)


def _iota(asked: _Asked) -> Needs:
    if asked.dimension == asked.instruction.dimensions[0]:
        raise _Stop(f"it counts along dimension {asked.dimension}, so each part would start from zero")
    return ()


def _along_other_dimensions(asked: _Asked) -> Needs:
    if asked.dimension in asked.instruction.dimensions:
        raise _Stop(f"it works along dimension {asked.dimension} itself")
    if len(asked.operands) != 1:
        raise _Stop("it takes several arrays at once")
    return (asked.dimension,)


def _gather(asked: _Asked) -> Needs:
    numbers = asked.instruction.gather_dimension_numbers
    offsets = list(numbers.offset_dims)
    sliced_away = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if asked.dimension in offsets:
        window = [d for d in range(len(dims(asked.operands[0]))) if d not in sliced_away]
        need = window[offsets.index(asked.dimension)]
        if asked.instruction.gather_slice_sizes[need] != dims(asked.operands[0])[need]:
            raise _Stop(f"it picks from dimension {need} of its operand")
        return (need, None)
    batch = [d for d in range(len(dims(asked.instruction))) if d not in offsets].index(asked.dimension)
    at = batch if batch < numbers.index_vector_dim else batch + 1
    paired = list(numbers.start_indices_batching_dims)
    return (numbers.operand_batching_dims[paired.index(at)] if at in paired else None, at)


_RULES: dict[str, Callable[[_Asked], Needs]] = {
    "all-gather": _along_other_dimensions,
    "all-reduce": _along_other_dimensions,
    "bitcast": _reshape,
    "broadcast": _broadcast,
    "collective-permute": _along_other_dimensions,
    "concatenate": _concatenate,
    "dot": _dot,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reduce": _reduce,
    "reduce-scatter": _along_other_dimensions,
    "reduce-window": _reduce_window,
    "reshape": _reshape,
    "reverse": _along_other_dimensions,
    "slice": _slice,
    "sort": _along_other_dimensions,
    "transpose": _transpose,
}


def shrink(instruction: Message, dimension: int, parts: int, needs: Needs) -> None:
    """Make a copy of an instruction compute one part: its result shape and what its attributes say of sizes.

    ``instruction`` still has the shape of the whole; its operands are the parts already.
    """
    if dimension < 0:
        return
    instruction.shape.dimensions[dimension] //= parts
    size = instruction.shape.dimensions[dimension]
    if instruction.opcode == "slice":
        instruction.slice_dimensions[dimension].limit = size
    elif instruction.opcode == "dynamic-slice":
        instruction.dynamic_slice_sizes[dimension] = size
    elif instruction.opcode == "gather" and needs[0] is not None:
        instruction.gather_slice_sizes[needs[0]] = min(instruction.gather_slice_sizes[needs[0]], size)
