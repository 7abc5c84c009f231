"""Gather weights in the type that is read: converted to fewer bits on each device, then gathered.

Weights are kept in float32 and read in bfloat16. XLA:GPU converts before it gathers (its pass ``collective-quantizer``)
only where one op reads the converted weights; a head is read by the forward and by the backward pass, and so is
whatever is kept from one to the other. A conversion goes element by element, so the numbers stay bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from disco_hlo.hlo.proto import Message
from disco_hlo.structure.program import Program, bits, illegal, physical


def narrowable(program: Program) -> list[Message]:
    """The all-gathers of a computation of which only a conversion to fewer bits is read."""
    return [one for one in program.instructions if _narrower(program, one) is not None]


def narrow(program: Program, gathers: Sequence[Message]) -> None:
    """Convert what all-gathers gather, not what they give. The computation is rewritten in place.

    Raises:
        IllegalMoveError: something reads one as it is.
    """
    for gather in gathers:
        value = _narrower(program, gather)
        if value is None:
            raise illegal(gather, "not only a conversion to fewer bits reads it")
        (shard,) = program.operands(gather)
        converted = program.make("convert", f"{gather.name}.narrow", shard.shape, [shard])
        gathered = program.copy(gather, f"{gather.name}.narrowed", [converted])
        for one in (converted, gathered):
            one.shape.element_type = value.shape.element_type
        program.place([converted, gathered], program.position(gather) + 1)
        program.redirect(value, gathered)
    program.sweep()


def _narrower(program: Program, gather: Message) -> Message | None:
    """The conversion to fewer bits that alone reads an all-gather of one array."""
    readers = program.readers(gather)
    if gather.opcode != "all-gather" or len(gather.operand_ids) != 1 or len(readers) != 1:
        return None
    (value,) = readers
    ordered = gather.control_predecessor_ids or value.control_predecessor_ids or gather.id == program.root
    fits = value.opcode == "convert" and bits(value) < bits(gather)
    return value if fits and not ordered and physical(value.shape) == physical(gather.shape) else None
