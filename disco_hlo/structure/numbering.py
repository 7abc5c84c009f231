"""Which values of a step are equal: value numbering (Cocke and Schwartz, "Programming languages and their compilers",
1970) over one or several computations.

Values are equal where the same ops make them of equal values; optimization barriers, copies and precision that a type
does not have change none. What has effects is equal to nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.collectives import Groups
from disco_hlo.hlo.opcodes import ELEMENTWISE
from disco_hlo.hlo.proto import DetailedInstruction, Message
from disco_hlo.structure.loops import through_barrier
from disco_hlo.structure.program import Program, dims, dtype, reshapes
from disco_hlo.structure.sharded import groups_of

_OF_ONE_INSTRUCTION = (
    "name", "id", "operand_ids", "metadata", "original_value", "statistics_viz", "sharding",
    "called_computation_ids", "channel_id", "control_predecessor_ids",
)  # fmt: skip
_PRECISION = {"bf16": (8, 7), "f16": (5, 10), "f32": (8, 23)}
"""Bits of exponent and mantissa."""
_BY_LAYOUT = frozenset({"bitcast", "custom-call"})
"""Ops whose result depends on how it and their operands lie in memory."""
_ASYNCHRONOUS = ("-start", "-update", "-done")
"""What ends the opcodes of parts of one op: each has one reader of the next kind."""

_Dims = tuple[int, ...]


class Numbers:
    """Numbers of values: two with the same number are equal on every device.

    What is only laid out otherwise is numbered in one order of its ops, whatever order XLA wrote them in: converted,
    gathered, then reshaped.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._dims: dict[int, _Dims] = {}
        self._flat: dict[int, int] = {}
        """Of a reshaped value, what it was before."""
        self._shards: dict[int, tuple[int, Groups, int]] = {}
        """Of a gathered value, what each device has of it, and groups and dimension."""
        self._contents: dict[int, Hashable] = {}

    def of(self, program: Program, given: Mapping[int, Hashable]) -> dict[int, int]:
        """The numbers of a computation's values, by id.

        Args:
            program: the computation.
            given: by id, keys of values that are known otherwise; equal keys, equal values. An int is a number.
        """
        found: dict[int, int] = {}
        for one in program.instructions:
            if one.id in given:
                key = given[one.id]
                found[one.id] = key if isinstance(key, int) else self._number(key, dims(one))
            else:
                found[one.id] = self._of(program, one, found)
        return found

    def _of(self, program: Program, one: Message, found: Mapping[int, int]) -> int:
        same = under(program, one)
        if same.id != one.id:
            return found[same.id]
        operands = [found[operand] for operand in one.operand_ids]
        is_part = one.opcode.endswith(_ASYNCHRONOUS)
        is_odd = is_part or one.opcode == "parameter" or one.control_predecessor_ids
        if is_odd or program.acts(one):
            return self._number(("itself", program.entry.id, one.id), dims(one))
        if one.opcode == "convert":
            return self._converted(operands[0], one.shape.element_type)
        if one.opcode == "reshape" or (one.opcode == "bitcast" and reshapes(program, one)):
            return self._reshaped(operands[0], dims(one))
        if one.opcode == "all-gather" and len(operands) == 1:
            try:
                return self._gathered(operands[0], groups_of(program, one), one.dimensions[0])
            except IllegalMoveError:  # groups in another form
                pass
        is_filled = one.opcode == "broadcast" and not self._dims[operands[0]]
        if is_filled or (one.opcode in ELEMENTWISE and {self._dims[o] for o in operands} == {dims(one)}):
            short = _long(dims(one))
            said = (
                self._what(program, one, short),
                *(self._reshaped(o, short) if self._dims[o] else o for o in operands),
            )
            return self._reshaped(self._number(said, short), dims(one))
        by_layout = (one, *program.operands(one)) if one.opcode in _BY_LAYOUT else ()
        return self._number((self._what(program, one), *operands, *map(_with_layout, by_layout)), dims(one))

    def _number(self, key: Hashable, shape: _Dims) -> int:
        number = self._numbers.setdefault(key, len(self._numbers))
        self._dims[number] = shape
        return number

    def _converted(self, value: int, to: int) -> int:
        if value in self._flat:
            return self._reshaped(self._converted(self._flat[value], to), self._dims[value])
        if value in self._shards:
            shard, groups, dimension = self._shards[value]
            return self._gathered(self._converted(shard, to), groups, dimension)
        return self._number(("convert", value, to), self._dims[value])

    def _reshaped(self, value: int, to: _Dims) -> int:
        flat = self._flat.get(value, value)
        if self._dims[flat] == to:
            return flat
        made = self._number(("reshape", flat, to), to)
        self._flat[made] = flat
        return made

    def _gathered(self, value: int, groups: Groups, dimension: int) -> int:
        shard = self._dims[value]
        whole = (*shard[:dimension], shard[dimension] * len(groups[0]), *shard[dimension + 1 :])
        flat = self._flat.get(value, value)
        long = [d for d, size in enumerate(self._dims[flat]) if size > 1]
        if flat != value and shard[dimension] > 1 and _long(self._dims[flat]) == _long(shard):
            found = self._gathered(flat, groups, long[len(_long(shard[:dimension]))])
            return self._reshaped(found, whole)
        made = self._number(("all-gather", value, groups, dimension), whole)
        self._shards[made] = value, groups, dimension
        return made

    def _what(self, program: Program, one: Message, shape: _Dims | None = None) -> Hashable:
        """All that an instruction says but for its operands and its name; of a result of another shape."""
        said = DetailedInstruction()
        said.CopyFrom(one)
        for field in _OF_ONE_INSTRUCTION:
            said.ClearField(field)
        said.shape.CopyFrom(_bare(one.shape, shape))
        called = tuple(self._content(program, identifier) for identifier in one.called_computation_ids)
        return said.SerializeToString(deterministic=True), one.channel_id > 0, called

    def _content(self, program: Program, identifier: int) -> Hashable:
        """Equal for computations that are written alike, with the same layouts, and have no effects."""
        computation = program.computation(identifier)
        if any(map(program.acts, computation.instructions)):
            return object()
        if identifier not in self._contents:
            place = {one.id: number for number, one in enumerate(computation.instructions)}
            self._contents[identifier] = (
                place[computation.root_id],
                tuple(
                    (self._what(program, one), _with_layout(one), *(place[i] for i in one.operand_ids))
                    for one in computation.instructions
                ),
            )
        return self._contents[identifier]


def _with_layout(one: Message) -> bytes:
    """The shape of a value and how it lies in memory."""
    return bytes(one.shape.SerializeToString(deterministic=True))


def _long(shape: _Dims) -> _Dims:
    return tuple(size for size in shape if size > 1)


def _bare(shape: Message, other: _Dims | None = None) -> Message:
    """A shape without layouts, perhaps with other dimensions."""
    made = type(shape)(
        element_type=shape.element_type, dimensions=shape.dimensions if other is None else other
    )
    made.tuple_shapes.extend(_bare(one) for one in shape.tuple_shapes)
    return made


def under(program: Program, value: Message) -> Message:
    """What a value is the same as: before barriers, copies, and a precision that its type does not exceed."""
    while True:
        before = through_barrier(program, value)
        exponent, mantissa = _PRECISION.get(dtype(value), (64, 64))
        is_precise = value.exponent_bits >= exponent and value.mantissa_bits >= mantissa
        if value.opcode == "copy" or (value.opcode == "reduce-precision" and is_precise):
            before = program.operands(value)[0]
        if before.id == value.id:
            return value
        value = before
