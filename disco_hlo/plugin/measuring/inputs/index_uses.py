"""What ops read as an index, and of how many rows: places at which a slice of that size still fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disco_hlo.hlo.proto import DetailedInstruction, Message
from disco_hlo.plugin.measuring.inputs.whole_numbers import Numbers

Use = tuple[Numbers, int]
"""Numbers, and how many rows they choose from."""


def index_uses(proto: Message, operands: Sequence[Numbers], behind: Sequence[Message]) -> Iterator[Use]:
    """What an op reads as an index.

    Args:
        behind: the instructions whose results are its operands.
    """
    if proto.opcode == "gather":
        yield from _gathered(proto, operands[1], behind[0].shape.dimensions)
    elif proto.opcode == "scatter":
        # Several arrays may be scattered to at once, with the same indices.
        indices = operands[len(operands) // 2]
        yield from _scattered(proto, indices, behind[0].shape.dimensions, behind[-1].shape.dimensions)
    elif proto.opcode == "dynamic-slice":
        yield from _started(operands[1:], behind[0].shape.dimensions, proto.shape.dimensions)
    elif proto.opcode == "dynamic-update-slice":
        yield from _started(operands[2:], behind[0].shape.dimensions, behind[1].shape.dimensions)


def _started(starts: Sequence[Numbers], whole: Sequence[int], part: Sequence[int]) -> Iterator[Use]:
    for numbers, size, taken in zip(starts, whole, part, strict=True):
        yield numbers, size - taken + 1


def _gathered(proto: Message, indices: Numbers, whole: Sequence[int]) -> Iterator[Use]:
    detailed = DetailedInstruction.FromString(proto.SerializeToString())
    numbers, taken = detailed.gather_dimension_numbers, detailed.gather_slice_sizes
    for column, dimension in enumerate(numbers.start_index_map):
        found = indices.column(column, int(numbers.index_vector_dim))
        yield found, whole[dimension] - taken[dimension] + 1


def _scattered(
    proto: Message, indices: Numbers, whole: Sequence[int], updates: Sequence[int]
) -> Iterator[Use]:
    numbers = DetailedInstruction.FromString(proto.SerializeToString()).scatter_dimension_numbers
    single = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
    kept = [dimension for dimension in range(len(whole)) if dimension not in single]
    taken = dict(zip(kept, (updates[i] for i in numbers.update_window_dims), strict=True))
    for column, dimension in enumerate(numbers.scatter_dims_to_operand_dims):
        found = indices.column(column, int(numbers.index_vector_dim))
        yield found, whole[dimension] - taken.get(dimension, 1) + 1
