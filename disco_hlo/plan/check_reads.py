"""At which elements a kernel reads an operand, compared with the element of the result that it writes.

A kernel whose result lies in the buffer of an operand must have read each element before it is overwritten. It has, for
certain, where it reads the operand only at the linear position that it writes. Positions are followed from the results
back to the parameters. Part of :mod:`~disco_hlo.plan.check_module`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from disco_hlo.backends import Backend
from disco_hlo.hlo.proto import DetailedInstruction, Message
from disco_hlo.plan.check_pairs import TUPLE, Body, fused
from disco_hlo.plan.check_stretches import Stretch, stretch

ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "bitcast-convert", "cbrt", "ceil",
    "clamp", "compare", "complex", "convert", "copy", "cosh", "cosine", "count-leading-zeros", "divide", "erf",
    "exponential", "exponential-minus-one", "floor", "imag", "is-finite", "log", "log-plus-one", "logistic", "map",
    "maximum", "minimum", "mulhi", "multiply", "negate", "not", "or", "popcnt", "power", "real", "reduce-precision",
    "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "sine", "sinh", "sqrt", "stochastic-convert", "subtract", "tan", "tanh", "xor",
))  # fmt: skip
"""Ops that read each operand at the element that they write, where the shapes are the same."""

_GOES_ON = ELEMENTWISE | frozenset((
    "bitcast", "dynamic-slice", "dynamic-update-slice", "fusion", "opt-barrier", "reduce", "reshape", "scatter",
    "tuple",
))  # fmt: skip
"""Ops that XLA may look through on the way from a parameter to a result that takes its buffer."""
_SAME: Final = "same"
_OTHER: Final = "other"
_ELSEWHERE: Final = "elsewhere"
_BEFORE: Final = "before"
_Relation = str | int
"""Where an instruction is read when one element of the result in question is written: at that linear position, along
another result of another size, anywhere, or (a number) at that position of the update of the dynamic-update-slice with
that id; or at any, but certainly before."""


def width(shape: Message) -> int:
    """How many elements an array has."""
    return math.prod(shape.dimensions)


def lies_alike(one: Message, other: Message) -> bool:
    """Whether two arrays have the same dimensions, in the same order in memory."""
    if one.dimensions != other.dimensions:
        return False
    return one.layout.minor_to_major == other.layout.minor_to_major or _physical(one) == _physical(other)


def _physical(shape: Message) -> list[int]:
    """Dimensions from the slowest to the fastest, those of one element left out."""
    order = list(shape.layout.minor_to_major)[::-1] or list(range(len(shape.dimensions)))
    return [place for place in order if place < len(shape.dimensions) and shape.dimensions[place] != 1]


def _in_memory(shape: Message) -> list[int]:
    """The sizes of the dimensions from the slowest to the fastest, without those of one element."""
    return [shape.dimensions[place] for place in _physical(shape)]


def _whole_number(constant: Message) -> int | None:
    """What an instruction is, where that is a constant whole number."""
    if constant.opcode != "constant" or math.prod(constant.shape.dimensions) != 1:
        return None
    literal = DetailedInstruction.FromString(constant.SerializeToString()).literal
    numbers = [*literal.s32s, *literal.s64s, *literal.u32s]
    return int(numbers[0]) if len(numbers) == 1 else None


def _is_row_major(shape: Message) -> bool:
    order = _physical(shape)
    return order == sorted(order)


def _transposes_nothing(out: Message, of: Message, permutation: list[int]) -> bool:
    """Whether a transpose, which puts dimension ``permutation[i]`` in place i, leaves all in its place in memory."""
    if len(permutation) != len(out.dimensions):
        return False
    return [permutation[place] for place in _physical(out)] == _physical(of)


class FusedReads:
    """Where one fused computation reads its parameters."""

    def __init__(self, body: Body, bodies: Mapping[int, Body], backend: Backend) -> None:
        self._body, self._bodies, self._backend = body, bodies, backend
        self._known: dict[int, frozenset[int]] = {}
        self._nested: dict[int, FusedReads] = {}
        self._users: dict[int, list[Message]] | None = None
        root = body.root
        parts = [body.by_id[one] for one in root.operand_ids] if root.opcode == "tuple" else [root]
        self._roots = parts if root.opcode == "tuple" or root.shape.element_type != TUPLE else []

    def elsewhere(self, result: int) -> frozenset[int]:
        """The parameters (their numbers) that are read at other elements than ``result`` is written at."""
        if result not in self._known:
            self._known[result] = self._trace(result)
        return self._known[result]

    def may_be_shared(self, number: int) -> bool:
        """Whether XLA may put a result into the buffer of a parameter that nothing reads any more: only where all that
        is made of it goes on element by element (``CanShareOperandBufferWithUser``, and XLA:GPU's ``MayAlias``)."""
        if self._users is None:
            self._users = {}
            for reader in self._body.by_id.values():
                for operand in reader.operand_ids:
                    self._users.setdefault(operand, []).append(reader)
        pending = [
            one.id
            for one in self._body.by_id.values()
            if one.opcode == "parameter" and one.parameter_number == number
        ]
        seen = set(pending)
        while pending:
            for reader in self._users.get(pending.pop(), ()):
                if reader.opcode not in _GOES_ON:
                    return False
                if reader.id not in seen:
                    seen.add(reader.id)
                    pending.append(reader.id)
        return True

    def _trace(self, result: int) -> frozenset[int]:
        found: set[int] = set()
        pending = self._starts(result)
        seen = set(pending)
        size = width(self._roots[result].shape) if result < len(self._roots) else -1
        while pending:
            node, relation = pending.pop()
            instruction = self._body.by_id[node]
            if instruction.opcode == "parameter":
                if relation != _SAME:
                    found.add(instruction.parameter_number)
                continue
            for place, operand in enumerate(instruction.operand_ids):
                after = (operand, self._operand_relation(instruction, place, relation, size))
                if after[1] != _BEFORE and after not in seen:
                    seen.add(after)
                    pending.append(after)
        return frozenset(found)

    def _starts(self, result: int) -> list[tuple[int, _Relation]]:
        if not self._roots:
            root = self._body.root
            if root.opcode == "scatter":
                count = (len(root.operand_ids) - 1) // 2
                return [
                    (one, _SAME if place == result else _OTHER if place < count else _ELSEWHERE)
                    for place, one in enumerate(root.operand_ids)
                ]
            return [(root.id, _ELSEWHERE)]
        if any(root.shape.element_type == TUPLE for root in self._roots) or result >= len(self._roots):
            return [(root.id, _ELSEWHERE) for root in self._roots]
        written = self._roots[result]
        in_place = [self._is_in_place(root) for root in self._roots]
        # XLA:GPU has one loop for results of which some are no updates, and computes all of each.
        loops = [False] * len(in_place) if self._backend.has_heroes and not all(in_place) else in_place
        starts: list[tuple[int, _Relation]] = []
        for place, root in enumerate(self._roots):
            alike = _in_memory(root.shape) == _in_memory(written.shape)
            together = place == result or (alike and not loops[result] and not loops[place])
            starts.append((root.id, _SAME if together else _OTHER))
        return starts

    def _is_in_place(self, root: Message) -> bool:
        """Whether only some elements of a result are visited, in an order of their own."""
        return self._home(root).opcode in ("dynamic-update-slice", "scatter")

    def _operand_relation(self, reader: Message, place: int, relation: _Relation, size: int) -> _Relation:
        """How operand ``place`` is read; ``size`` is how many elements the result has."""
        if relation == _ELSEWHERE:
            return _ELSEWHERE
        read = self._body.by_id[reader.operand_ids[place]]
        if self._keeps_place(reader, read, place):
            return relation
        if reader.opcode == "dynamic-update-slice" and place == 1 and relation == _SAME:
            return _BEFORE if self._writes_one_element(reader) else int(reader.id)
        if isinstance(relation, int) and place == 0 and self._is_slice_of(reader, self._body.by_id[relation]):
            return _SAME
        if (
            reader.opcode == "reduce"
            and relation == _OTHER
            and self._backend.has_heroes
            and width(read.shape) == size
        ):
            # XLA:GPU's emitter of reductions reads an element, and writes what is written at that element.
            return _SAME
        return _ELSEWHERE

    def _keeps_place(self, reader: Message, read: Message, place: int) -> bool:
        """Whether ``reader`` at a linear position reads ``read`` at that position."""
        opcode, out, of = reader.opcode, reader.shape, read.shape
        if of.element_type == TUPLE or out.element_type == TUPLE:
            return False
        if opcode in ELEMENTWISE:
            return lies_alike(out, of)
        if opcode in ("bitcast", "opt-barrier"):
            return width(out) == width(of)
        if opcode == "reshape":
            return _is_row_major(out) and _is_row_major(of)
        if opcode == "broadcast":
            order = list(reader.dimensions)
            alike = width(out) == width(of) and order == sorted(order)
            return alike and _is_row_major(out) and _is_row_major(of)
        if opcode == "transpose":
            return _transposes_nothing(out, of, list(reader.dimensions))
        if opcode == "dynamic-update-slice":
            return place == 0 and lies_alike(out, of)
        if opcode == "scatter":
            return place == 0 and reader.id == self._home(self._body.root).id and lies_alike(out, of)
        if opcode == "fusion":
            return place not in self._inside(reader).elsewhere(0) and width(out) == width(of)
        return False

    def _inside(self, nested: Message) -> FusedReads:
        if nested.id not in self._nested:
            body = fused(nested, self._bodies)
            self._nested[nested.id] = FusedReads(body, self._bodies, self._backend)
        return self._nested[nested.id]

    def _home(self, root: Message) -> Message:
        while root.opcode == "bitcast":
            root = self._body.by_id[root.operand_ids[0]]
        return root

    def _writes_one_element(self, update: Message) -> bool:
        """Whether a fusion does nothing but change one element of a parameter: whatever it reads, it has read
        before."""
        written, over = self._home(self._body.root), self._body.by_id[update.operand_ids[0]]
        part = self._body.by_id[update.operand_ids[1]]
        return written.id == update.id and width(part.shape) == 1 and self._home(over).opcode == "parameter"

    def _is_slice_of(self, reader: Message, update: Message) -> bool:
        """Whether a slice cuts out what a dynamic-update-slice writes, element after element in memory; or, where a
        fusion does nothing but that update of a parameter, this or nothing of it."""
        if reader.opcode not in ("dynamic-slice", "slice"):
            return False
        by_id = self._body.by_id
        steps = [1] * len(reader.shape.dimensions)
        starts: list[int | Message] = [self._start(one) for one in reader.operand_ids[1:]]
        if reader.opcode == "slice":
            starts = [one.start for one in reader.slice_dimensions]
            steps = [one.stride or 1 for one in reader.slice_dimensions]
        read = stretch(reader.shape, by_id[reader.operand_ids[0]].shape, starts, steps)
        part = by_id[update.operand_ids[1]].shape
        places = [self._start(one) for one in update.operand_ids[2:]]
        written = stretch(part, update.shape, places, [1] * len(places))
        if read is None or written is None or read.runs != written.runs:
            return False
        moves = self._moves(read, written)
        if not moves and read.first == written.first:
            return True
        is_alone = self._home(self._body.root).id == update.id
        over = self._home(by_id[update.operand_ids[0]])
        return is_alone and over.opcode == "parameter" and read.meets_only_itself(written.first, moves)

    def _moves(self, read: Stretch, written: Stretch) -> list[tuple[int, int]]:
        """How far apart, and how many, the places are that either is moved to for itself alone."""
        left = list(written.computed)
        found = []
        for distance, count, start in read.computed:
            for place, (other, room, at) in enumerate(left):
                if (distance, count) == (other, room) and self._are_equal(start.id, at.id):
                    del left[place]
                    break
            else:
                found.append((distance, count))
        return found + [(distance, count) for distance, count, _ in left]

    def _start(self, number: int) -> int | Message:
        """Where a cut begins in a dimension, as a number where that is known."""
        known = _whole_number(self._body.by_id[number])
        return self._body.by_id[number] if known is None else known

    def _are_equal(self, one: int, other: int, depth: int = 8) -> bool:
        """Whether two scalars are the same, by the look of how they are computed."""
        if one == other:
            return True
        a, b = self._body.by_id[one], self._body.by_id[other]
        if a.opcode != b.opcode or a.opcode == "parameter" or not depth:
            return False
        if a.opcode == "constant":
            return bool(a.literal == b.literal)
        simple = a.opcode in ELEMENTWISE and a.comparison_type == b.comparison_type
        return (
            simple
            and a.opcode not in ("compare", "map")
            and a.shape.element_type == b.shape.element_type
            and len(a.operand_ids) == len(b.operand_ids)
            and all(
                self._are_equal(p, q, depth - 1) for p, q in zip(a.operand_ids, b.operand_ids, strict=True)
            )
        )
