"""Add up rows in float32 where the program adds them up in 16 bits, and round once.

The gradient of an embedding is such a sum: the rows of equal tokens are added, one after the other, into the row of
their word. In bfloat16 each of a thousand additions is rounded, and XLA:GPU makes each by comparing and swapping, for
which rows of the same word wait in turn: 17.6 ms, where the same sum in float32 takes 0.16
(``docs/benchmarks/llama.md``). XLA may compute in more digits than a program asks for, unless its
``xla_allow_excess_precision`` is off; whoever calls this asks that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from disco_hlo.hlo.proto import FLOAT32, Message
from disco_hlo.structure.chunk import reduction_opcode
from disco_hlo.structure.program import Program, dims, dtype, illegal

_COARSE = ("bf16", "f16")
_SAME_NUMBERS = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})


def coarse_sums(program: Program) -> list[Message]:
    """The scatters of a computation that add up rows in 16 bits, perhaps several into one, beginning with one number
    everywhere: an array that is kept in 16 bits would have to be converted as a whole for a few rows."""
    return [
        one
        for one in program.instructions
        if is_coarse_sum(one) and _is_filled(program, one.operand_ids[0]) and not _why_not(program, one)
    ]


def is_coarse_sum(one: Message) -> bool:
    """Whether an instruction may be such a scatter, by what it says itself."""
    return one.opcode == "scatter" and dtype(one) in _COARSE


def widen(program: Program, sums: Sequence[Message]) -> None:
    """Let scatters add in float32 and round what comes out. The computation is rewritten in place.

    Raises:
        IllegalMoveError: one adds nothing up, or in another type, or a control dependency hangs on it.
    """
    for one in sums:
        if reason := _why_not(program, one):
            raise illegal(one, reason)
        rows, indices, updates = program.operands(one)
        wide = [_converted(program, value, f"{one.name}.wide", FLOAT32) for value in (rows, updates)]
        total = program.copy(one, f"{one.name}.in_float32", [wide[0], indices, wide[1]])
        total.shape.element_type = FLOAT32
        total.called_computation_ids[:] = [_in_float32(program, one)]
        rounded = _converted(program, total, f"{one.name}.rounded", one.shape.element_type)
        program.substitute(one, [*wide, total, rounded])


def _is_filled(program: Program, value: int) -> bool:
    one = program.by_id[value]
    while one.opcode in _SAME_NUMBERS:
        (one,) = program.operands(one)
    return one.opcode == "broadcast" and not dims(program.operands(one)[0])


def _why_not(program: Program, one: Message) -> str:
    if len(one.operand_ids) != 3 or dtype(one) not in _COARSE:
        return "it adds up no array in 16 bits"
    if one.unique_indices:
        return "each row is added to once"
    if not _adds(program, one):
        return "it does something else than add"
    return ""


def _adds(program: Program, one: Message) -> bool:
    """Whether a scatter adds, by itself or, as XLA:CPU writes it, by converting, adding, and converting back."""
    if reduction_opcode(program, one) == "add":
        return True
    inside = program.inside(one.called_computation_ids[0])
    root = inside.by_id[inside.root]
    opcodes = Counter(i.opcode for i in inside.instructions)
    if root.opcode != "convert" or opcodes != {"parameter": 2, "convert": 3, "add": 1}:
        return False
    (total,) = inside.operands(root)
    given = [inside.operands(i)[0] for i in inside.operands(total) if i.opcode == "convert"]
    return total.opcode == "add" and {i.parameter_number for i in given if i.opcode == "parameter"} == {0, 1}


def _in_float32(program: Program, one: Message) -> int:
    """The id of what a scatter calls, in float32."""
    made = program.copy_computation(one.called_computation_ids[0], f"{one.name}.add")
    shapes = [i.shape for i in made.instructions]
    for shape in (*shapes, *made.program_shape.parameters, made.program_shape.result):
        shape.element_type = FLOAT32
    return int(made.id)


def _converted(program: Program, value: Message, name: str, element_type: int) -> Message:
    made = program.make("convert", name, value.shape, [value])
    made.shape.element_type = element_type
    return made
