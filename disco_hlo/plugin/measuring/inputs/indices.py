"""Which made-up integers are indices, and of how many rows: token ids, labels, positions.

Of zeros and ones alone a gather reads two rows, which stay in the nearest cache, a scatter adds to two rows, all
threads at once, and neither takes the time that it takes in training. So the rule follows every integer parameter to
what reads it as an index: ``gather``, ``scatter``, ``dynamic-slice``, ``dynamic-update-slice``, the comparison with an
iota that makes a label one-hot. It follows a parameter through ops that leave its numbers what they are or choose
among them, into fusions, calls and loops, and through what JAX writes around an index: a number below zero counts from
the end, one out of range is clamped or its row replaced. A constant may be added (``x[i + 1]``). What a parameter may
hold is what the smallest of its uses has room for.

All others stay 0 or 1. So does an index that may steer a loop or a branch, as one that is compared in a loop's
condition: with a large number a loop that counts might not end. And so does one of which other numbers are computed (a
counter of steps, a random key, pixels), as nobody says what those may be. Comparisons that become masks do no harm.

The answer is a function of the step's canonical graph: equal on all ranks, and for all candidates of a search.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.proto import Message
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.measuring.inputs.bodies import (
    CALLS,
    TRUTH_VALUE,
    TUPLE,
    Following,
    detailed,
    dtype_of,
    holds_whole_numbers,
)
from disco_hlo.plugin.measuring.inputs.whole_numbers import (
    ANY,
    NOTHING,
    TRUTH,
    Numbers,
    chosen,
    clamped,
    compared,
    computed,
    concatenated,
    conjunction,
    counted,
    elementwise,
    joined,
    moved,
    padded,
    rearranged,
    selected,
    shifted,
    sorted_together,
    widened,
    written_into,
)
from disco_hlo.structure.program import literal_value

_MOVED = frozenset({
    "add-dependency", "all-gather", "all-gather-done", "all-gather-start", "all-to-all", "async-done",
    "async-update", "collective-broadcast", "collective-permute", "collective-permute-done",
    "collective-permute-start", "copy-done", "copy-start", "domain", "opt-barrier", "reverse",
})  # fmt: skip
"""Ops whose result has the numbers of their operands, perhaps elsewhere."""
_EITHER: dict[str, Callable[..., Numbers]] = {
    "clamp": clamped,
    "maximum": joined,
    "minimum": joined,
    "select": selected,
}
_LARGEST_INDEX = (1 << 31) - 1
"""A type that holds it holds every index."""
_Rule = Callable[[Message, Sequence[Numbers], Sequence[Message]], Numbers]
"""Of an op and its operands, by what is known of these and by what they are, what is known of the result."""
Use = tuple[Numbers, int]
"""Numbers, and of how many rows they choose one: places at which a slice of that size still fits."""


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
        super().__init__(source)
        self._literals: dict[int, Numbers] = {}
        self._bounds: dict[int, int] = {}
        """Of every parameter whose values have a limit."""
        self._indices: set[int] = set()
        self._left: set[int] = set()
        """Parameters that are left 0 or 1."""
        self._rules: dict[str, _Rule] = {
            "add": self._added,
            "and": self._and,
            "compare": self._compare,
            "concatenate": concatenated,
            "constant": self._constant,
            "convert": self._converted,
            "copy": self._converted,
            "dynamic-slice": chosen,
            "dynamic-update-slice": written_into,
            "gather": chosen,
            "iota": counted,
            "pad": padded,
            "remainder": self._remainder,
            "scatter": self._scattered,
            "subtract": self._added,
            **dict.fromkeys(("bitcast", "broadcast", "reshape", "slice", "transpose"), rearranged),
        }

    def run(self) -> Mapping[int, int]:
        """Bounds of the parameters that are indices."""
        given: dict[int, Numbers] = {}
        for proto in self.entry.protos:
            if proto.opcode == "parameter":
                given[proto.parameter_number] = self._of_entry(proto)
        result = self.result(self.entry, [given[number] for number in sorted(given)])
        self._left |= result.arithmetic
        return {number: self._bounds[number] for number in sorted(self._indices - self._left)}

    def _of_entry(self, proto: Message) -> Numbers:
        if not holds_whole_numbers(proto):
            return NOTHING
        if dtype_of(proto) == TRUTH_VALUE:
            return TRUTH
        number = int(proto.parameter_number)
        self._bounds[number] = _largest(dtype_of(proto)) + 1
        return Numbers(carried=frozenset({number}))

    # --- what is learnt of parameters ------------------------------------------------------------

    def _limit(self, numbers: Numbers, bound: int) -> None:
        for number in numbers.carried:
            self._bounds[number] = max(1, min(self._bounds[number], bound))
        for number, added in numbers.shifted:
            if bound > added:
                self._bounds[number] = min(self._bounds[number], bound - added)
            else:
                self._left |= frozenset({number})

    def _indexes(self, numbers: Numbers, bound: int) -> None:
        """An array is read as indices of so many rows."""
        self._limit(numbers, bound)
        self._indices |= numbers.carried.union(number for number, _ in numbers.shifted)
        self._left |= numbers.mixed

    # --- through ops -----------------------------------------------------------------------------

    def _while(self, proto: Message, operands: Sequence[Numbers]) -> Numbers:
        body, condition = proto.called_computation_ids
        carry = widened(operands[0], operands[0])
        while True:
            self._left |= self.call(condition, [carry]).touched
            after = widened(carry, self.call(body, [carry]))
            if after == carry:
                return carry
            carry = after

    def value(self, proto: Message, operands: Sequence[Numbers], behind: Sequence[Message], /) -> Numbers:
        """Of an op's result."""
        opcode = proto.opcode
        if opcode in CALLS:
            return self.call(proto.called_computation_ids[0], operands)
        if opcode in _MOVED:
            return moved(operands)
        if opcode == "tuple":
            return Numbers(members=tuple(operands))
        if opcode == "get-tuple-element":
            return operands[0].member(int(proto.tuple_index))
        if opcode == "sort":
            return sorted_together(operands)
        if opcode == "while":
            return self._while(proto, operands)
        if opcode == "conditional":
            self._left |= operands[0].touched
            return functools.reduce(joined, self.branches(proto, operands))
        for numbers, rows in index_uses(proto, operands, behind):
            self._indexes(numbers, rows)
        if not holds_whole_numbers(proto):
            return self._no_number(proto, operands)
        if opcode in self._rules:
            return self._rules[opcode](proto, operands, behind)
        if opcode in _EITHER:
            return elementwise(_EITHER[opcode], operands)
        return TRUTH.decided_by(*operands) if dtype_of(proto) == TRUTH_VALUE else computed(*operands)

    def _no_number(self, proto: Message, operands: Sequence[Numbers]) -> Numbers:
        """What becomes of whole numbers that an op makes floats of, or hands to something unknown."""
        if proto.opcode in ("gather", "dynamic-slice", "select"):
            return NOTHING
        reads = operands[:1] if proto.opcode in ("dynamic-update-slice", "scatter") else operands
        self._left |= computed(*reads).mixed
        return ANY.decided_by(*operands) if dtype_of(proto) == TUPLE else NOTHING

    def _constant(self, proto: Message, _: Sequence[Numbers], __: Sequence[Message]) -> Numbers:
        known = self._literals.get(proto.id)
        if known is None:
            values = literal_value(detailed(proto))
            if values is None or not values.size:
                known = TRUTH if dtype_of(proto) == TRUTH_VALUE else ANY
            else:
                counts = values.size > 1 and np.array_equal(values, np.arange(values.size))
                known = Numbers(low=int(values.min()), high=int(values.max()), counts=counts)
            self._literals[proto.id] = known
        return known

    def _converted(self, proto: Message, operands: Sequence[Numbers], behind: Sequence[Message]) -> Numbers:
        if not holds_whole_numbers(behind[0]):
            return ANY
        numbers, name, most = operands[0], dtype_of(proto), _largest(dtype_of(proto))
        self._limit(replace(numbers, carried=frozenset()), _largest(dtype_of(behind[0])) + 1)
        if name == TRUTH_VALUE:
            return self._compare_with("NE", numbers, Numbers(low=0, high=0))
        if most < min(_largest(dtype_of(behind[0])), _LARGEST_INDEX):
            return computed(numbers)
        least = 0 if name.startswith("u") else -most
        if numbers.low <= numbers.high and not least <= numbers.low <= numbers.high <= most:
            return replace(numbers.whole, low=-math.inf, high=math.inf, counts=False)
        return numbers

    def _scattered(self, proto: Message, operands: Sequence[Numbers], _: Sequence[Message]) -> Numbers:
        """One array of whole numbers that others are written into, or combined with what it has."""
        whole, indices, updates = (one.whole for one in operands)
        combiner = self.body(proto.called_computation_ids[0])
        overwritten = combiner.protos[combiner.root].opcode == "parameter"
        return (joined if overwritten else computed)(whole, updates).decided_by(indices)

    def _compare(self, proto: Message, operands: Sequence[Numbers], _: Sequence[Message]) -> Numbers:
        return self._compare_with(detailed(proto).comparison_direction, *operands)

    def _compare_with(self, direction: str, one: Numbers, other: Numbers) -> Numbers:
        for numbers, against in ((one, other), (other, one)):
            if direction in ("EQ", "NE") and against.counts and against.low == 0 and against.high > 0:
                self._indexes(numbers, int(against.high) + 1)
            self._left |= numbers.mixed
        return compared(direction, one, other)

    def _added(self, proto: Message, operands: Sequence[Numbers], _: Sequence[Message]) -> Numbers:
        """A sum or a difference: a parameter is followed where the other is one number that is known."""
        return elementwise(functools.partial(_sum, proto.opcode == "subtract"), operands)

    def _and(self, proto: Message, operands: Sequence[Numbers], _: Sequence[Message]) -> Numbers:
        """Of truth values; of whole numbers a remainder where the low bits are kept."""
        if dtype_of(proto) == TRUTH_VALUE:
            return conjunction(*operands)
        for one, mask in (operands, operands[::-1]):
            if _is_one(mask) and mask.low >= 0 and (bound := int(mask.low) + 1) & (bound - 1) == 0:
                return self._below(one, bound)
        return computed(*operands)

    def _remainder(self, _: Message, operands: Sequence[Numbers], __: Sequence[Message]) -> Numbers:
        one, by = operands
        return self._below(one, int(by.low)) if _is_one(by) and by.low > 0 else computed(one, by)

    def _below(self, numbers: Numbers, divisor: int) -> Numbers:
        """Numbers below what they are divided by stay what they are."""
        if numbers.mixed:
            return computed(numbers)
        self._limit(numbers, divisor)
        if numbers.low > numbers.high:
            return numbers
        return replace(numbers.whole, low=min(numbers.low, -divisor), high=divisor - 1, counts=False)


def _sum(subtracted: bool, one: Numbers, other: Numbers) -> Numbers:
    if _is_one(one) and not subtracted:
        one, other = other, one
    if not _is_one(other) or one.mixed or not (one.carried or one.shifted):
        return computed(one, other)
    return shifted(one, int(-other.low if subtracted else other.low))


def _is_one(numbers: Numbers) -> bool:
    """Whether it holds one number that is known."""
    return not numbers.touched and numbers.low == numbers.high


def _largest(dtype: str) -> int:
    """The largest whole number of a type."""
    bits = int(dtype[1:]) if dtype != TRUTH_VALUE else 1
    return int(2 ** (bits - (dtype[0] == "s"))) - 1


# --- what ops read as an index --------------------------------------------------------------------


def index_uses(proto: Message, operands: Sequence[Numbers], behind: Sequence[Message]) -> Iterator[Use]:
    """What an op reads as an index; ``behind`` are the instructions whose results are its operands."""
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
    op = detailed(proto)
    numbers, taken = op.gather_dimension_numbers, op.gather_slice_sizes
    for column, dimension in enumerate(numbers.start_index_map):
        found = indices.column(column, int(numbers.index_vector_dim))
        yield found, whole[dimension] - taken[dimension] + 1


def _scattered(
    proto: Message, indices: Numbers, whole: Sequence[int], updates: Sequence[int]
) -> Iterator[Use]:
    numbers = detailed(proto).scatter_dimension_numbers
    single = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
    kept = [dimension for dimension in range(len(whole)) if dimension not in single]
    taken = dict(zip(kept, (updates[i] for i in numbers.update_window_dims), strict=True))
    for column, dimension in enumerate(numbers.scatter_dims_to_operand_dims):
        found = indices.column(column, int(numbers.index_vector_dim))
        yield found, whole[dimension] - taken.get(dimension, 1) + 1
