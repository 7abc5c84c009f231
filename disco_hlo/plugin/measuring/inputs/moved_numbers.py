"""What is known of an array after ops that move its elements, and of an index that several are put together to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from disco_hlo.hlo.proto import DetailedInstruction, Message
from disco_hlo.plugin.measuring.inputs.whole_numbers import NOTHING, Numbers, joined

_LONGEST_INDEX = 8
"""Numbers in an index: as many columns are told apart. What is put together of more is no index."""


def moved(operands: Sequence[Numbers]) -> Numbers:
    """Arrays whose elements come to lie elsewhere, on another device perhaps."""
    found = operands[0].whole
    for other in operands[1:]:
        found = found if other == NOTHING else joined(found, other.whole)
    return replace(found, counts=False)


def sorted_together(operands: Sequence[Numbers]) -> Numbers:
    """Every array of those sorted together has its own numbers, in an order for which all were compared."""
    found = tuple(one.decided_by(*operands) for one in operands)
    return found[0] if len(found) == 1 else Numbers(members=found)


def counted(proto: Message, _: Sequence[Numbers], __: Sequence[Message]) -> Numbers:
    """An iota."""
    return Numbers(low=0, high=proto.shape.dimensions[proto.dimensions[0]] - 1, counts=True)


def chosen(_: Message, operands: Sequence[Numbers], __: Sequence[Message]) -> Numbers:
    """Those of an array's numbers that an index says."""
    return replace(operands[0].whole, counts=False).decided_by(*operands[1:])


def written_into(_: Message, operands: Sequence[Numbers], __: Sequence[Message]) -> Numbers:
    """An array into which a part is written where an index says."""
    return joined(operands[0].whole, operands[1].whole).decided_by(*operands[2:])


def padded(proto: Message, operands: Sequence[Numbers], behind: Sequence[Message]) -> Numbers:
    """An array with one number around it; what puts an index together with a constant is written like that too."""
    numbers, filling = operands
    config = DetailedInstruction.FromString(proto.SerializeToString()).padding_config
    sides = [(side.edge_padding_low, side.edge_padding_high) for side in config.dimensions]
    around = [axis for axis, side in enumerate(sides) if any(side)]
    between = any(side.interior_padding for side in config.dimensions)
    if len(around) != 1 or between or min(sides[around[0]]) < 0:
        return joined(numbers.whole, filling)
    (axis,) = around
    if proto.shape.dimensions[axis] > _LONGEST_INDEX:
        return joined(numbers.whole, filling)
    low, high = sides[axis]
    inside = [numbers.column(place, axis).whole for place in range(behind[0].shape.dimensions[axis])]
    return _of_columns([filling] * low + inside + [filling] * high, axis)


def rearranged(proto: Message, operands: Sequence[Numbers], behind: Sequence[Message]) -> Numbers:
    """An array whose elements are at other places, each perhaps at several, some perhaps at none.

    Columns are found again where the order of elements is the same, in memory or by number.
    """
    numbers, shape = operands[0], behind[0].shape
    if proto.opcode == "broadcast" and numbers.columns:
        return replace(numbers, axis=int(proto.dimensions[numbers.axis]))
    if proto.opcode not in ("bitcast", "reshape"):
        some = proto.opcode == "slice" and proto.shape.dimensions != shape.dimensions
        return replace(numbers.whole, counts=numbers.counts and not some)
    if not numbers.columns:
        return numbers
    in_memory = proto.opcode == "bitcast"
    column = (_strides(shape, in_memory)[numbers.axis], len(numbers.columns))
    places = zip(_strides(proto.shape, in_memory), proto.shape.dimensions, strict=True)
    same = [place for place, found in enumerate(places) if found == column]
    return replace(numbers, axis=same[0]) if same else numbers.whole


def concatenated(proto: Message, operands: Sequence[Numbers], behind: Sequence[Message]) -> Numbers:
    """Arrays one behind the other along a dimension."""
    axis = int(proto.dimensions[0])
    if proto.shape.dimensions[axis] <= _LONGEST_INDEX:
        return _of_columns(
            [
                one.column(place, axis).whole
                for one, given in zip(operands, behind, strict=True)
                for place in range(given.shape.dimensions[axis])
            ],
            axis,
        )
    found = operands[0]
    for other in operands[1:]:
        found = joined(found, other)
    return found


def _of_columns(columns: Sequence[Numbers], axis: int) -> Numbers:
    found = columns[0]
    for other in columns[1:]:
        found = joined(found, other)
    return replace(found.whole, axis=axis, columns=tuple(columns)) if len(columns) > 1 else found


def _strides(shape: Message, in_memory: bool) -> list[int]:
    """How many elements lie between neighbours in each dimension."""
    dims = list(shape.dimensions)
    order = list(shape.layout.minor_to_major) if in_memory else list(reversed(range(len(dims))))
    strides, step = [0] * len(dims), 1
    for dimension in order:
        strides[dimension] = step
        step *= dims[dimension]
    return strides
