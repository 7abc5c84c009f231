"""Constants of small programs: what a literal holds, and what index arithmetic gives on each device.

Partitioned programs find their own shard by arithmetic on ``partition-id`` and tables of offsets. A move
that cancels such a slice against an all-gather must know where it starts on every device, so the few
integer ops that partitioners write are evaluated here, exactly or not at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.proto import Message
from disco_hlo.structure.program import Program, dims, dtype

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
_ARITHMETIC: dict[str, Any] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "maximum": np.maximum,
    "minimum": np.minimum,
}


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


def evaluate(program: Program, instruction: Message, partition: int) -> NDArray[Any] | None:
    """The value of integer index arithmetic on one device; None where it is anything else."""
    return _evaluated(program, instruction, partition, _DEEPEST, {})


def _evaluated(
    program: Program,
    instruction: Message,
    partition: int,
    depth: int,
    known: dict[int, NDArray[Any] | None],
) -> NDArray[Any] | None:
    """``known`` holds values by id: a chain whose links read the one before twice would double with each."""
    opcode = instruction.opcode
    if depth == 0:
        return None
    if opcode == "constant":
        return literal_value(instruction)
    if opcode == "partition-id":
        return np.array(partition, np.uint32)
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
    return None
