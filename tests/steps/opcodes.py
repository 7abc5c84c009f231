"""What a test asks of a compiled module: its ops."""

from __future__ import annotations

from disco_hlo.hlo import proto


def opcodes(module: bytes) -> list[str]:
    """The opcode of every instruction of a serialized module."""
    message = proto.parse(module)
    return [instruction.opcode for c in message.computations for instruction in c.instructions]
