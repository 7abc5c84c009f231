"""What is known of an array of whole numbers, or of truth values, while a step's parameters are followed through it.

A parameter is followed as long as its numbers stay what they are, or a constant is added to them: moved about, kept
within limits, chosen among others, put together to an index. From there on two things are remembered of it: that
arithmetic was done with it, or that a comparison of it decides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from disco_hlo.hlo.proto import Message
from disco_hlo.plugin.measuring.inputs.bodies import detailed

Parameters = frozenset[int]
"""Numbers of entry parameters."""
_NONE: Parameters = frozenset()
_LONGEST_INDEX = 8
"""Numbers in an index: as many columns are told apart. What is put together of more is no index."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of one array, or the members of a tuple."""

    carried: Parameters = _NONE
    """Parameters whose numbers stand in it as they are. None of them is negative."""
    shifted: frozenset[tuple[int, int]] = frozenset()
    """Parameters to whose numbers one is added, with what that is; it is not 0."""
    mixed: Parameters = _NONE
    """Parameters from whose numbers others were computed that stand in it."""
    decided: Parameters = _NONE
    """Parameters that decide which of its numbers stand where, or whether they do."""
    low: float = math.inf
    """No number that is neither carried nor shifted is smaller."""
    high: float = -math.inf
    """Nor larger. Where there is no such number, :attr:`low` is above."""
    counts: bool = False
    """Every whole number from :attr:`low` to :attr:`high` stands in it, nothing else: an iota."""
    members: tuple[Numbers, ...] = ()
    """Of a tuple."""
    axis: int = -1
    """The dimension along which :attr:`columns` lie; -1: none are known."""
    columns: tuple[Numbers, ...] = ()
    """What is known of the array at each place of :attr:`axis`: an index of several numbers is put together there."""

    @property
    def touched(self) -> Parameters:
        """Parameters on which it depends in any way."""
        return _NONE.union(
            self.carried, self.arithmetic, self.decided, *(member.touched for member in self.members)
        )

    @property
    def arithmetic(self) -> Parameters:
        """Parameters of which computed numbers stand in it, or in a member."""
        added = (number for number, _ in self.shifted)
        return self.mixed.union(added, *(member.arithmetic for member in self.members))

    @property
    def span(self) -> tuple[float, float]:
        """The smallest and the largest number that may stand in it."""
        if self.mixed:
            return -math.inf, math.inf
        least = [added for _, added in self.shifted] + [0] * bool(self.carried)
        return (min(self.low, *least), math.inf) if least else (self.low, self.high)

    @property
    def whole(self) -> Numbers:
        """The same without columns."""
        return replace(self, axis=-1, columns=()) if self.columns else self

    def member(self, number: int) -> Numbers:
        """A member of a tuple; where none are told apart, any."""
        return self.members[number] if self.members else self

    def column(self, number: int, axis: int) -> Numbers:
        """What stands at one place along a dimension."""
        return self.columns[number] if self.axis == axis else self

    def decided_by(self, *others: Numbers) -> Numbers:
        """The same numbers, where others decide too which of them stand where."""
        deciding = _NONE.union(*(other.touched for other in others)) - self.decided
        return replace(self.whole, decided=self.decided | deciding, counts=False) if deciding else self


NOTHING = Numbers()
"""Of an array of floats nothing is known, and nothing asked."""


ANY = Numbers(low=-math.inf, high=math.inf)
"""Numbers that no integer parameter takes part in."""


TRUTH = Numbers(low=0, high=1)


def joined(one: Numbers, other: Numbers) -> Numbers:
    """What is known of an array whose numbers are from either, the larger of two for instance."""
    if one == other:
        return one
    if len(one.members) != len(other.members):
        return computed(one, other)
    return Numbers(
        one.carried | other.carried,
        one.shifted | other.shifted,
        one.mixed | other.mixed,
        one.decided | other.decided,
        min(one.low, other.low),
        max(one.high, other.high),
        members=tuple(joined(*pair) for pair in zip(one.members, other.members, strict=True)),
    )


def widened(before: Numbers, after: Numbers) -> Numbers:
    """Both, where a loop may go on from there: limits that moved once may move on, and what is added may grow."""
    both = joined(before, after).whole
    if both.shifted != before.shifted:
        grown = (number for number, _ in both.shifted - before.shifted)
        both = replace(both, shifted=before.shifted, mixed=both.mixed.union(grown))
    if (both.low, both.high) != (before.low, before.high):
        both = replace(both, low=-math.inf, high=math.inf)
    if not both.members:
        return both
    members = zip(before.members, after.members, strict=True)
    return replace(both, members=tuple(widened(*pair) for pair in members))


def computed(*operands: Numbers) -> Numbers:
    """The result of arithmetic that is not followed."""
    return Numbers(
        mixed=_NONE.union(*(one.arithmetic | _carried(one) for one in operands)),
        decided=_NONE.union(*(one.touched for one in operands)),
        low=-math.inf,
        high=math.inf,
    )


def shifted(numbers: Numbers, by: int) -> Numbers:
    """The same numbers with ``by`` added to each."""
    pairs = {*numbers.shifted, *((number, 0) for number in numbers.carried)}
    moved = {(number, added + by) for number, added in pairs}
    return replace(
        numbers.whole,
        carried=frozenset(number for number, added in moved if not added),
        shifted=frozenset((number, added) for number, added in moved if added),
        low=numbers.low + by,
        high=numbers.high + by,
        counts=False,
    )


def _carried(numbers: Numbers) -> Parameters:
    return _NONE.union(numbers.carried, *(_carried(member) for member in numbers.members))


def elementwise(rule: Callable[..., Numbers], operands: Sequence[Numbers]) -> Numbers:
    """What ``rule`` says of operands whose elements are taken one by one, of each column by itself."""
    axes = {(one.axis, len(one.columns)) for one in operands if one.columns}
    found = rule(*(one.whole for one in operands))
    if len(axes) != 1:
        return found
    ((axis, count),) = axes
    columns = tuple(rule(*(one.column(place, axis) for one in operands)) for place in range(count))
    return replace(found, axis=axis, columns=columns)


def compared(direction: str, one: Numbers, other: Numbers) -> Numbers:
    """Whether ``one`` is ``EQ``, ``NE``, ``LT``, ``LE``, ``GT`` or ``GE`` to ``other``."""
    if direction in ("GT", "GE"):
        return compared({"GT": "LT", "GE": "LE"}[direction], other, one)
    (low, high), (least, most) = one.span, other.span
    never, always = high < least or most < low, low == high == least == most
    if direction == "LT":
        never, always = low >= most, high < least
    elif direction == "LE":
        never, always = low > most, high <= least
    elif direction == "NE":
        never, always = always, never
    if never != always and low <= high and least <= most:
        return Numbers(low=always, high=always)
    return TRUTH.decided_by(one, other)


def selected(which: Numbers, one: Numbers, other: Numbers) -> Numbers:
    """``one`` where ``which`` is true, else ``other``."""
    if which.low == which.high:
        return one if which.low else other
    if _counts_from_the_end(one, other) and one.arithmetic <= which.decided:
        return other.decided_by(which)
    return joined(one, other).decided_by(which)


def _counts_from_the_end(one: Numbers, other: Numbers) -> bool:
    """Whether ``one`` is what becomes of those numbers of ``other`` that are below zero: ``x[i - 1]`` reads the last
    row where ``i`` is 0."""
    for numbers in (one, other):
        if len(numbers.shifted) != 1 or numbers.carried or numbers.low <= numbers.high:
            return False
    ((number, above),), ((same, below),) = one.shifted, other.shifted
    return number == same and below < 0 <= above


def clamped(least: Numbers, one: Numbers, most: Numbers) -> Numbers:
    """``one``, or the limit that it would exceed."""
    return joined(joined(least, one), most)


def conjunction(one: Numbers, other: Numbers) -> Numbers:
    """Both of two truth values."""
    low, high = min(one.low, other.low), min(one.high, other.high)
    return Numbers(low=low, high=high) if low == high else TRUTH.decided_by(one, other)


# --- ops that move elements, and what puts an index together of several numbers -------------------


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
    config = detailed(proto).padding_config
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
    return functools.reduce(joined, operands)


def _of_columns(columns: Sequence[Numbers], axis: int) -> Numbers:
    found = functools.reduce(joined, columns)
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
