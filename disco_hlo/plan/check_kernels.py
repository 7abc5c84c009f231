"""Whether a kernel or library call may write a result over an operand that it reads.

It may where it has read each element before it is overwritten. It has, for certain, where it reads the operand only at
the linear position that it writes. Positions are followed from the results of a fused computation back to its
parameters; slices and updates are compared by the places in memory that they touch. Part of
:mod:`~disco_hlo.plan.check_module`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from disco_hlo.backends import Backend
from disco_hlo.hlo.opcodes import COLLECTIVE
from disco_hlo.hlo.proto import TUPLE, DetailedInstruction, Message
from disco_hlo.plan.check_reader import ELEMENTWISE, NOTHING, Body, Step, Values, behind, fused, leaves

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


class Kernels:
    """The kernels of a module."""

    def __init__(self, values: Values, bodies: Mapping[int, Body], backend: Backend) -> None:
        self._values, self._bodies, self._backend = values, bodies, backend
        self._reads: dict[int, FusedReads] = {}

    def may_write_over(self, step: Step, places: Sequence[tuple[int, int]], result: int, body: Body) -> bool:
        """Whether XLA may put a result over an array that is read at several places, and that would be wrong.

        It looks at the first place of each name that the array has, and of names that differ by bitcasts at one alone.
        Kernels write over what they read at one place element by element, library calls and collectives over
        particular operands. A sort has copied each operand to its result before it begins.
        """
        opcode = step.instruction.opcode
        if opcode == "sort":
            return False
        fits = [self.reads_what_it_writes(step, place, leaf, result, body) for place, leaf in places]
        if all(fits):
            return False
        if opcode != "fusion":
            return opcode in ELEMENTWISE or any(fits)
        reads = self._fused_reads(step.instruction)
        numbers = step.instruction.operand_ids
        first = {numbers[place]: (place, leaf) for place, leaf in reversed(places)}
        shared = [
            self._has_the_form(step, *at, result, body) and reads.may_be_shared(at[0])
            for at in first.values()
        ]
        homes = {
            (home[0].id, home[1]) if home is not None and home[0].opcode != "bitcast" else None
            for home in (behind(body, body.by_id[name], at[1], "opt-barrier") for name, at in first.items())
        }
        is_seen = len(homes) == 1 and None not in homes
        return all(shared) if is_seen else any(shared)

    def _has_the_form(self, step: Step, place: int, leaf: int, result: int, body: Body) -> bool:
        """Whether XLA may give a kernel's result the buffer of an array of this form: XLA:CPU where type and layout are
        the result's, XLA:GPU also where only the size is."""
        read = list(leaves(body.by_id[step.instruction.operand_ids[place]].shape))[leaf]
        written = self._values.shapes[step.results[result]]
        return self._backend.shares_by_size or bool(
            read.element_type == written.element_type and lies_alike(read, written)
        )

    def _fused_reads(self, fusion: Message) -> FusedReads:
        kernel = fused(fusion, self._bodies)
        key = fusion.called_computation_ids[0]
        if key not in self._reads:
            self._reads[key] = FusedReads(kernel, self._bodies, self._backend)
        return self._reads[key]

    def reads_what_it_writes(self, step: Step, place: int, leaf: int, result: int, body: Body) -> bool:
        """Whether one array that ``step`` reads is read only where, and before, a result is written.

        Args:
            place: of the operand.
            leaf: of the array in it.
            body: where the step stands.
        """
        instruction = step.instruction
        opcode = instruction.opcode
        if sources := self._sorted(step):
            return sources[result] == self._values.itself(step.operands[place][leaf])
        wanted = (place, leaf, result)
        if any(one[:3] == wanted and (one.is_declared or opcode != "fusion") for one in step.pairs):
            return True
        if opcode == "fusion":
            return place not in self._fused_reads(instruction).elsewhere(result)
        if opcode in ELEMENTWISE:
            read = list(leaves(body.by_id[instruction.operand_ids[place]].shape))[leaf]
            return lies_alike(read, self._values.shapes[step.results[result]])
        return _works_in_place(instruction, place, result, self._backend)

    def _sorted(self, step: Step) -> list[int]:
        """Of a sort, alone or in a kernel of its own, the value that each result holds in another order; empty for what
        is no sort. XLA copies each operand to its result, in turn, but for what lies there already; then it sorts."""
        values = [self._values.itself(operand[0]) if operand else NOTHING for operand in step.operands]
        if step.instruction.opcode == "sort":
            return values
        body = fused(step.instruction, self._bodies) if step.instruction.opcode == "fusion" else None
        if body is None or body.root.opcode != "sort":
            return []
        read = [body.by_id[one] for one in body.root.operand_ids]
        if not all(one.opcode in ("parameter", "iota") for one in read):
            return []
        return [values[one.parameter_number] if one.opcode == "parameter" else NOTHING for one in read]


def _works_in_place(instruction: Message, place: int, result: int, backend: Backend) -> bool:
    """Whether a library call or collective may write a result over an operand (XLA's ``MayAlias``)."""
    opcode = instruction.opcode
    if opcode in COLLECTIVE and COLLECTIVE[opcode].in_place:
        return backend.reduces_in_place and place == result
    if opcode == "triangular-solve":
        return place == 1
    if opcode == "custom-call":
        target = instruction.custom_call_target
        if target == "__cublas$lt$matmul":
            return place == 2 and result == 0 and _adds_to_operand(instruction)
        return target == "cusolver$cholesky" and result == 0
    return False


def _adds_to_operand(matmul: Message) -> bool:
    """Whether a cuBLASLt call adds its third operand to the product (beta), and so may write over it."""
    try:
        config = json.loads(matmul.backend_config)
        return bool(config["gemm_backend_config"]["beta"] != 0)
    except (ValueError, KeyError, TypeError):
        return False


# Where a fused computation reads its parameters -------------------------------------------------


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
        # Of these only some elements are visited, in an order of their own.
        in_place = [self._home(root).opcode in ("dynamic-update-slice", "scatter") for root in self._roots]
        # XLA:GPU has one loop for results of which some are no updates, and computes all of each.
        loops = [False] * len(in_place) if self._backend.has_heroes and not all(in_place) else in_place
        starts: list[tuple[int, _Relation]] = []
        for place, root in enumerate(self._roots):
            alike = _in_memory(root.shape) == _in_memory(written.shape)
            together = place == result or (alike and not loops[result] and not loops[place])
            starts.append((root.id, _SAME if together else _OTHER))
        return starts

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


# Places in memory -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stretch:
    """Which elements of an array a part of it is, in the part's order in memory."""

    first: int
    """The position in memory of the first element, as far as it is known."""
    runs: tuple[tuple[int, int], ...]
    """How many elements lie how far apart, from the fastest dimension to the slowest."""
    computed: tuple[tuple[int, int, Message], ...]
    """For each start that is computed: how far apart the places are that it chooses from, how many there are beside
    the first, and what computes it."""

    def meets_only_itself(self, first: int, moves: Sequence[tuple[int, int]]) -> bool:
        """Whether the same stretch elsewhere is this one or has no element of it.

        Args:
            first: where the other one begins, unless it is moved.
            moves: by which multiples, and how often at most, either is moved.
        """
        if len(self.runs) > 1:
            return False
        count, apart = self.runs[0] if self.runs else (1, 1)
        step = math.gcd(self.first - first, *(distance for distance, _ in moves))
        farthest = abs(self.first - first) + sum(distance * times for distance, times in moves)
        nearest = math.lcm(step, apart)  # the least that lets them meet, but for nothing at all
        return nearest >= count * apart or nearest > farthest


def stretch(
    part: Message, whole: Message, starts: Sequence[int | Message], steps: list[int]
) -> Stretch | None:
    """Which elements of ``whole`` a part of it is; None where that is not known."""
    order = list(whole.layout.minor_to_major)
    if order != list(part.layout.minor_to_major) or not len(order) == len(starts) == len(steps):
        return None
    first, distance = 0, 1
    runs: list[tuple[int, int]] = []
    computed: list[tuple[int, int, Message]] = []
    for place in order:
        size, start, room = part.dimensions[place], starts[place], whole.dimensions[place]
        if not isinstance(start, int):
            computed += [(distance, room - size, start)] if room > size else []
        else:
            first += (start if steps[place] != 1 else min(max(start, 0), room - size)) * distance
        apart = steps[place] * distance
        if size > 1 and runs and runs[-1][0] * runs[-1][1] == apart:
            runs[-1] = runs[-1][0] * size, runs[-1][1]
        elif size > 1:
            runs.append((size, apart))
        distance *= room
    return Stretch(first, tuple(runs), tuple(computed))


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


def _is_row_major(shape: Message) -> bool:
    order = _physical(shape)
    return order == sorted(order)


def _transposes_nothing(out: Message, of: Message, permutation: list[int]) -> bool:
    """Whether a transpose, which puts dimension ``permutation[i]`` in place i, leaves all in its place in memory."""
    if len(permutation) != len(out.dimensions):
        return False
    return [permutation[place] for place in _physical(out)] == _physical(of)


def _whole_number(constant: Message) -> int | None:
    """What an instruction is, where that is a constant whole number."""
    if constant.opcode != "constant" or math.prod(constant.shape.dimensions) != 1:
        return None
    literal = DetailedInstruction.FromString(constant.SerializeToString()).literal
    numbers = [*literal.s32s, *literal.s64s, *literal.u32s]
    return int(numbers[0]) if len(numbers) == 1 else None
