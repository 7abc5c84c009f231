"""Which made-up integers are indices, and of how many rows: token ids, labels, positions.

Of zeros and ones alone a gather reads two rows, which stay in the nearest cache, a scatter adds to two rows, all
threads at once, and neither takes the time that it takes in training. So the rule follows every integer parameter to
what reads it as an index: ``gather``, ``scatter``, ``dynamic-slice``, ``dynamic-update-slice``, the comparison with an
iota that makes a label one-hot. It follows a parameter through ops that leave its numbers what they are or choose
among them, into fusions, calls and loops, and through what JAX writes around an index: a number below zero counts from
the end, one out of range is clamped or its row replaced. What a parameter may hold is what the smallest of its uses has
room for.

All others stay 0 or 1. So does an index that may steer a loop or a branch, as one that is compared in a loop's
condition: with a large number a loop that counts might not end. And so does one of which other numbers are computed
(``x[i + 1]``, a counter of steps, a random key, pixels), as nobody says what those may be. Comparisons that become
masks do no harm.

The answer is a function of the step's canonical graph: equal on all ranks, and for all candidates of a search.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.opcodes import COLLECTIVE
from disco_hlo.hlo.proto import Message
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.inputs.bodies import (
    TRUTH_VALUE,
    TUPLE,
    Following,
    Known,
    detailed,
    dtype_of,
    holds_whole_numbers,
)
from disco_hlo.structure.program import literal_value

_MOVED = frozenset({
    "add-dependency", "async-done", "async-update", "copy-done", "copy-start", "domain", "opt-barrier", "reverse",
    "slice", *(f"{name}{half}" for name, one in COLLECTIVE.items() if one.travels and not one.reduces
               for half in ("", "-start", "-done")),
})  # fmt: skip
"""Ops whose result has the numbers of their operands, perhaps elsewhere."""
_REARRANGED = frozenset({"bitcast", "broadcast", "copy", "reshape", "transpose"})
"""And every number as often as any other."""
_EITHER = frozenset({"clamp", "maximum", "minimum"})
"""Ops whose result has at each place a number of an operand."""
_LARGEST_INDEX = (1 << 31) - 1
"""A type that holds it holds every index."""
_LONGEST_INDEX = 8
"""Numbers in an index: as many columns are told apart. What is put together of more is no index."""
_NONE: frozenset[int] = frozenset()
Use = tuple["Numbers", int]
"""Numbers, and of how many rows they choose one: places at which a slice of that size still fits."""


@dataclass(frozen=True)
class Numbers(Known):
    """What is known of an array of whole numbers or truth values, or of the members of a tuple."""

    carried: frozenset[int] = _NONE
    """Entry parameters whose numbers stand in it as they are. None of them is negative."""
    mixed: frozenset[int] = _NONE
    """Those from whose numbers others were computed that stand in it."""
    decided: frozenset[int] = _NONE
    """Those that decide which of its numbers stand where, or whether they do."""
    negative: frozenset[int] = _NONE
    """Of truth values: those of which it says where they are below zero."""
    counts: int = 0
    """It is an iota of so many numbers; 1: zeros."""
    members: tuple[Numbers, ...] = ()
    columns: tuple[Numbers, ...] = ()
    """Of an index that was put together, what stands in each of its columns."""

    @property
    def arithmetic(self) -> frozenset[int]:
        """Parameters of which computed numbers stand in it, or in a member."""
        return self.mixed.union(*(member.arithmetic for member in self.members))

    @property
    def touched(self) -> frozenset[int]:
        """Parameters on which it depends in any way."""
        members = (member.touched for member in self.members)
        return self.carried.union(self.mixed, self.decided, *members)

    def split(self, count: int) -> tuple[Numbers, ...]:
        """What is known of each of so many columns."""
        return self.columns if len(self.columns) == count else (replace(self, columns=()),) * count

    def decided_by(self, *others: Numbers) -> Numbers:
        """The same numbers, where others decide too which of them stand where."""
        deciding = self.decided.union(*(other.touched for other in others))
        return replace(self, decided=deciding, counts=0)


NOTHING = Numbers()
"""Of an array of floats nothing is known, and nothing asked."""


def index_bounds(source: CanonicalModule) -> Mapping[int, int]:
    """By the number of an entry parameter of ``source`` that is read as an index, below what its values must stay.

    Other integers are to be 0 or 1; so are all where the graph has something that the rule cannot read.
    """
    try:
        return _Following(source).run()
    except Exception as error:
        LOGGER.debug("made-up integers are 0 or 1, as the step's indices cannot be followed: %r", error)
        return {}


class _Following(Following[Numbers]):
    def __init__(self, source: CanonicalModule) -> None:
        super().__init__(source, Numbers, either)
        self._bounds: dict[int, int] = {}
        """Of every parameter whose values have a limit."""
        self._indices: set[int] = set()
        self._left: set[int] = set()
        """Parameters that are left 0 or 1."""

    def run(self) -> Mapping[int, int]:
        """Bounds of the parameters that are indices."""
        result = self.of_entry(self._parameter)
        self._left |= result.arithmetic
        return {number: self._bounds[number] for number in sorted(self._indices - self._left)}

    def _parameter(self, proto: Message) -> Numbers:
        if not holds_whole_numbers(proto) or dtype_of(proto) == TRUTH_VALUE:
            return NOTHING
        number = int(proto.parameter_number)
        self._bounds[number] = _largest(dtype_of(proto)) + 1
        return Numbers(carried=frozenset({number}))

    def _indexes(self, numbers: Numbers, bound: int) -> None:
        """An array is read as indices of so many rows."""
        for number in numbers.carried:
            self._bounds[number] = max(1, min(self._bounds[number], bound))
        self._indices |= numbers.carried
        self._left |= numbers.mixed

    def decided(self, proto: Message, decision: Numbers, result: Numbers) -> Numbers:
        """As there. What decides stays 0 or 1."""
        del proto
        self._left |= decision.touched
        return result

    def computed(self, proto: Message, operands: Sequence[Numbers], behind: Sequence[Message]) -> Numbers:
        """As there."""
        opcode = proto.opcode
        if opcode == "sort":
            found = tuple(one.decided_by(*operands) for one in operands)
            return found[0] if len(found) == 1 else Numbers(members=found)
        if opcode in _MOVED:
            return replace(functools.reduce(either, operands), counts=0, columns=())
        for numbers, rows in index_uses(proto, operands, behind):
            self._indexes(numbers, rows)
        return (self._whole if holds_whole_numbers(proto) else self._no_number)(proto, operands, behind)

    def _whole(self, proto: Message, operands: Sequence[Numbers], behind: Sequence[Message]) -> Numbers:
        opcode = proto.opcode
        if opcode in _REARRANGED:
            return operands[0]
        if opcode == "convert":
            narrows = _largest(dtype_of(proto)) < min(_largest(dtype_of(behind[0])), _LARGEST_INDEX)
            return computed(operands[0]) if narrows else operands[0]
        if opcode in ("constant", "iota"):
            return Numbers(counts=_counts(proto))
        if opcode == "compare":
            return self._compare(detailed(proto).comparison_direction, *operands)
        if opcode == "select" and operands[1].mixed and operands[1].mixed <= operands[0].negative:
            return operands[2].decided_by(operands[0])  # none is
        if opcode == "select":
            return elementwise(*operands[1:]).decided_by(operands[0])
        if opcode in _EITHER:
            return replace(elementwise(*operands), counts=0)
        if opcode in ("dynamic-slice", "dynamic-update-slice", "gather", "scatter"):
            return self._at_indices(proto, operands)
        if opcode in ("concatenate", "pad"):
            return _joined(proto, operands, behind)
        if dtype_of(proto) == TRUTH_VALUE:
            return NOTHING.decided_by(*operands)
        return computed(*operands)

    def _at_indices(self, proto: Message, operands: Sequence[Numbers]) -> Numbers:
        """An array that is read or written where an index says."""
        if proto.opcode == "dynamic-update-slice":
            return either(*operands[:2]).decided_by(*operands[2:])
        if proto.opcode == "scatter":
            combiner = self.body(proto.called_computation_ids[0])
            overwrites = combiner.protos[combiner.root].opcode == "parameter"
            return (either if overwrites else computed)(operands[0], operands[2]).decided_by(operands[1])
        return operands[0].decided_by(*operands[1:])

    def _no_number(self, proto: Message, operands: Sequence[Numbers], _: Sequence[Message]) -> Numbers:
        """What becomes of whole numbers that an op makes floats of, or hands to something unknown."""
        if proto.opcode in ("gather", "dynamic-slice", "select"):
            return NOTHING
        reads = operands[:1] if proto.opcode in ("dynamic-update-slice", "scatter") else operands
        self._left |= computed(*reads).mixed
        return NOTHING.decided_by(*operands) if dtype_of(proto) == TUPLE else NOTHING

    def _compare(self, direction: str, one: Numbers, other: Numbers) -> Numbers:
        for numbers, against in ((one, other), (other, one)):
            if direction in ("EQ", "NE") and against.counts > 1:
                self._indexes(numbers, against.counts)
            self._left |= numbers.mixed
        found = NOTHING.decided_by(one, other)
        return replace(found, negative=one.carried) if direction == "LT" and other.counts == 1 else found


def either(*several: Numbers) -> Numbers:
    """What is known of an array whose numbers are from one of these, the larger of two for instance."""
    first = several[0]
    if all(one == first for one in several):
        return first
    lengths = {len(one.members) for one in several}
    if lengths not in ({0}, {len(first.members)}):
        return computed(*several)
    return Numbers(
        _NONE.union(*(one.carried for one in several)),
        _NONE.union(*(one.mixed for one in several)),
        _NONE.union(*(one.decided for one in several)),
        members=tuple(either(*own) for own in zip(*(one.members for one in several), strict=True)),
    )


def elementwise(*operands: Numbers) -> Numbers:
    """:func:`either` at each place, of each column by itself."""
    found, counts = either(*operands), {len(one.columns) for one in operands if one.columns}
    if len(counts) != 1:
        return found
    columns = zip(*(one.split(max(counts)) for one in operands), strict=True)
    return replace(found, columns=tuple(either(*own) for own in columns))


def computed(*operands: Numbers) -> Numbers:
    """The result of arithmetic that is not followed."""
    touched = _NONE.union(*(one.touched for one in operands))
    return Numbers(mixed=_NONE.union(*map(_read, operands)), decided=touched)


def _read(numbers: Numbers) -> frozenset[int]:
    return numbers.carried.union(numbers.mixed, *map(_read, numbers.members))


def _joined(proto: Message, operands: Sequence[Numbers], behind: Sequence[Message]) -> Numbers:
    """Arrays side by side, or one with a number around it; each column by itself where they become an index."""
    joined = replace(functools.reduce(either, operands), counts=0, columns=())
    before, after = list(behind[0].shape.dimensions), list(proto.shape.dimensions)
    grown = [axis for axis, (few, many) in enumerate(zip(before, after, strict=True)) if few != many]
    if len(grown) != 1 or after[grown[0]] > _LONGEST_INDEX:
        return joined
    [axis] = grown
    if proto.opcode == "concatenate":
        parts = [one.split(of.shape.dimensions[axis]) for one, of in zip(operands, behind, strict=True)]
    else:
        side = detailed(proto).padding_config.dimensions[axis]
        low, high = side.edge_padding_low, side.edge_padding_high
        if min(low, high) < 0 or low + before[axis] + high != after[axis]:
            return joined
        parts = [operands[1].split(low), operands[0].split(before[axis]), operands[1].split(high)]
    return replace(joined, columns=tuple(column for part in parts for column in part))


def _counts(proto: Message) -> int:
    """Of how many numbers a constant or an iota is one; 0 where it is none."""
    if proto.opcode == "iota":
        return int(proto.shape.dimensions[proto.dimensions[0]])
    values = literal_value(detailed(proto))
    if values is None or not np.array_equal(values.reshape(-1), np.arange(values.size)):
        return 0
    return values.size


def _largest(dtype: str) -> int:
    """The largest whole number of a type."""
    bits = int(dtype[1:]) if dtype != TRUTH_VALUE else 1
    return int(2 ** (bits - (dtype[0] == "s"))) - 1


# --- what ops read as an index --------------------------------------------------------------------


def index_uses(proto: Message, operands: Sequence[Numbers], behind: Sequence[Message]) -> Iterator[Use]:
    """What an op reads as an index; ``behind`` are the instructions whose results are its operands."""
    whole: Sequence[int] = behind[0].shape.dimensions if behind else ()
    starts: Sequence[Numbers]
    if proto.opcode == "gather":
        op = detailed(proto)
        dimensions, taken = op.gather_dimension_numbers.start_index_map, list(op.gather_slice_sizes)
        starts = operands[1].split(len(dimensions))
    elif proto.opcode == "scatter":
        # Several arrays may be scattered to at once, with the same indices.
        numbers = detailed(proto).scatter_dimension_numbers
        dimensions = numbers.scatter_dims_to_operand_dims
        starts = operands[len(operands) // 2].split(len(dimensions))
        single = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
        updates = iter([behind[-1].shape.dimensions[i] for i in numbers.update_window_dims])
        taken = [1 if dimension in single else next(updates) for dimension in range(len(whole))]
    elif proto.opcode in ("dynamic-slice", "dynamic-update-slice"):
        is_read = proto.opcode == "dynamic-slice"
        dimensions, starts = range(len(whole)), operands[1 if is_read else 2 :]
        taken = list((proto if is_read else behind[1]).shape.dimensions)
    else:
        return
    for dimension, found in zip(dimensions, starts, strict=True):
        yield found, whole[dimension] - taken[dimension] + 1
