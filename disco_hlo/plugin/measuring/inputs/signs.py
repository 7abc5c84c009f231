"""Which made-up inputs must stay positive; all others come in both signs, so that what a mask cuts off is seen.

A relu passes everything on where all its inputs are positive, and a program that is wrong only behind its mask then
computes what it should. But some ops have no value, or none that training would meet, below zero: the root of Adam's
second moment, a logarithm, a denominator. So the rule asks back from these. What they read has to be positive; an op
that is never negative whatever it reads (a square, an exponential) answers for itself, any other hands the question on
to everything it reads, into fusions, calls and loops and out of them, and the parameters where it arrives stay
positive. Where the rule is too careful a parameter is as it would be without it.

The answer is a function of the step's canonical graph: equal on all ranks, and for all candidates of a search.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import Message
from disco_hlo.plugin.measuring.inputs.bodies import TUPLE, Body, body_of, detailed, dtype_of, entry_of
from disco_hlo.structure.program import literal_value

_NEEDS_POSITIVE: dict[str, int] = {
    "acos": 0, "acosh": 0, "asin": 0, "atanh": 0, "divide": 1, "log": 0, "log-plus-one": 0, "remainder": 1,
    "rsqrt": 0, "sqrt": 0,
}  # fmt: skip
"""Which operand. (``power`` depends on its exponent.)"""
_NEVER_NEGATIVE = frozenset({"abs", "cosh", "exponential", "logistic", "rsqrt", "sqrt"})
_AS_ITS_OPERANDS = COLLECTIVES | frozenset({
    "add", "bitcast", "broadcast", "cbrt", "ceil", "concatenate", "convert", "convolution", "copy", "divide", "dot",
    "dynamic-slice", "dynamic-update-slice", "exponential-minus-one", "floor", "gather", "log-plus-one", "minimum",
    "multiply", "pad", "reduce-precision", "remainder", "reshape", "reverse", "round-nearest-afz",
    "round-nearest-even", "select", "sign", "slice", "tanh", "transpose",
})  # fmt: skip
"""Never negative where none of their operands is."""
_AS_EITHER = frozenset({"clamp", "maximum"})
"""Never negative where one operand is not: the larger of two, or what is kept above a bound."""
_BY_THEIR_BODY = frozenset({"reduce", "reduce-window", "scatter", "select-and-scatter"})
"""Never negative where what they combine is not, and the op they combine by."""
_SAME = frozenset({"convert", "copy"})
"""Ops that leave every number where it is."""
_SPREAD = _SAME | {"bitcast", "broadcast", "reshape"}
_FLOATS = ("f", "bf", "c")


_Value = tuple[int, int, int | None]
"""(computation, instruction, member of a tuple; None where it is an array, or any member may be meant)."""


def positive_parameters(source: CanonicalModule) -> frozenset[int]:
    """Numbers of the entry parameters of ``source`` whose values must be positive."""
    return _Asking(source).run()


class _Asking:
    def __init__(self, source: CanonicalModule) -> None:
        self._index: ModuleIndex = source.index
        self._entry = int(source.module.entry_computation_id)
        self._bodies: dict[int, Body] = {}
        self._sure: dict[int, list[bool]] = {}
        """By computation, which of its values are never negative, whatever it is given."""
        self._callers: dict[int, list[tuple[int, int]]] = {}
        self._take_in(self._entry, entry_of(source))

    def run(self) -> frozenset[int]:
        """The parameters that are asked for."""
        found: set[int] = set()
        pending = list(self._first_asked())
        seen = set(pending)
        while pending:
            where, position, member = pending.pop()
            body = self._bodies[where]
            proto = body.protos[position]
            if self._sure[where][position] or self._is_square(where, position):
                continue
            if proto.opcode == "parameter" and where == self._entry:
                found.add(int(proto.parameter_number))
                continue
            fresh = set(self._behind(where, position, member)) - seen
            seen |= fresh
            pending += fresh
        return frozenset(found)

    def _take_in(self, computation: int, body: Body) -> None:
        """Learn of a computation and of those it calls, the callees first."""
        self._bodies[computation] = body
        sure = self._sure[computation] = []
        for position, (proto, operands) in enumerate(zip(body.protos, body.operands, strict=True)):
            for called in proto.called_computation_ids:
                self._callers.setdefault(called, []).append((computation, position))
                if called not in self._bodies:
                    self._take_in(called, body_of(self._index, called))
            sure.append(self._never_negative(body, sure, proto, operands))

    # --- what is never negative -------------------------------------------------------------------

    def _never_negative(
        self, body: Body, sure: Sequence[bool], proto: Message, operands: Sequence[int]
    ) -> bool:
        opcode = proto.opcode
        if not _is_float(proto):
            # Made-up integers do not depend on signs. Of a tuple nobody asks as a whole.
            return dtype_of(proto) != TUPLE
        known = [sure[operand] for operand in operands if _is_float(body.protos[operand])]
        if opcode in _NEVER_NEGATIVE or (opcode in _AS_ITS_OPERANDS and all(known)):
            return True
        if opcode == "constant":
            return _is_constant_above_zero(proto)
        if opcode == "multiply":
            return operands[0] == operands[1]
        if opcode in _AS_EITHER:
            return any(known)
        if opcode == "power":
            return known[0] or _whole_exponent(body, operands) % 2 == 0
        if opcode in _BY_THEIR_BODY:
            return self._combines_above_zero(proto, known)
        if opcode == "get-tuple-element":
            return self._is_member_sure(body.protos[operands[0]], int(proto.tuple_index))
        if opcode in ("fusion", "call"):
            called = proto.called_computation_ids[0]
            return self._sure[called][self._bodies[called].root]
        return False

    def _combines_above_zero(self, proto: Message, known: Sequence[bool]) -> bool:
        combiner = self._bodies[proto.called_computation_ids[-1]]
        by = combiner.protos[combiner.root].opcode
        # What a maximum begins with is below all numbers.
        return (by == "maximum" and any(known)) or (by in ("add", "minimum", "multiply") and all(known))

    def _is_member_sure(self, proto: Message, member: int) -> bool:
        if proto.opcode not in ("fusion", "call"):
            return False
        number = proto.called_computation_ids[0]
        called = self._bodies[number]
        if called.protos[called.root].opcode != TUPLE:
            return False
        return self._sure[number][called.operands[called.root][member]]

    def _is_square(self, where: int, position: int) -> bool:
        """Whether a product is of one value with itself, which may reach it by two ways."""
        body = self._bodies[where]
        if body.protos[position].opcode != "multiply":
            return False
        first, second = (self._origin(where, operand, _SAME) for operand in body.operands[position])
        return first == second

    def _origin(self, where: int, position: int, through: Collection[str]) -> tuple[int, int]:
        """Where a value comes from: behind such ops, and outside of the fusion that is given it."""
        body = self._bodies[where]
        proto = body.protos[position]
        if proto.opcode in through:
            return self._origin(where, body.operands[position][0], through)
        callers = self._callers.get(where, ())
        if proto.opcode == "parameter" and len(callers) == 1:
            outside, call = callers[0]
            if self._bodies[outside].protos[call].opcode in ("fusion", "call"):
                given = self._bodies[outside].operands[call][proto.parameter_number]
                return self._origin(outside, given, through)
        return where, position

    # --- who is asked -----------------------------------------------------------------------------

    def _first_asked(self) -> Iterator[_Value]:
        for where, body in self._bodies.items():
            for proto, operands in zip(body.protos, body.operands, strict=True):
                needy = _NEEDS_POSITIVE.get(proto.opcode)
                if proto.opcode == "power" and _whole_exponent(body, operands) < 0:
                    needy = 0
                if needy is not None:
                    yield where, operands[needy], None

    def _behind(self, where: int, position: int, member: int | None) -> Iterator[_Value]:
        """What decides about the value that is asked for."""
        body = self._bodies[where]
        proto, operands = body.protos[position], body.operands[position]
        opcode = proto.opcode
        if opcode == "parameter":
            yield from self._given(where, int(proto.parameter_number), member)
        elif opcode == "get-tuple-element":
            # A member of a member: all of it is asked.
            yield where, operands[0], int(proto.tuple_index) if member is None else None
        elif opcode == TUPLE and member is not None:
            yield where, operands[member], None
        elif opcode in ("fusion", "call", "conditional", "while"):
            for called in proto.called_computation_ids:
                yield called, self._bodies[called].root, member
            if opcode == "while":
                yield where, operands[0], member
        elif opcode == "opt-barrier":
            yield where, operands[0], member
        elif opcode == "subtract":
            yield from ((where, operand, None) for operand in operands)
            yield from self._exponent(where, operands[1])
        else:
            yield from ((where, operand, None) for operand in operands)

    def _exponent(self, where: int, position: int) -> Iterator[_Value]:
        """Of a power that is subtracted (``1 - beta**count``) the exponent decides, though it is never negative."""
        where, position = self._origin(where, position, _SPREAD)
        body = self._bodies[where]
        if body.protos[position].opcode in ("exponential", "power"):
            yield where, body.operands[position][-1], None

    def _given(self, computation: int, number: int, member: int | None) -> Iterator[_Value]:
        """What a computation is given as a parameter, wherever it is called."""
        for where, position in self._callers.get(computation, ()):
            body = self._bodies[where]
            proto, operands = body.protos[position], body.operands[position]
            if proto.opcode == "while":
                yield where, position, member
            elif proto.opcode == "conditional":
                branches = [
                    i for i, called in enumerate(proto.called_computation_ids) if called == computation
                ]
                yield from ((where, operands[1 + branch], member) for branch in branches)
            elif proto.opcode in ("fusion", "call"):
                yield where, operands[number], member
            else:  # a reduction's combiner, an asynchronous call, a custom call
                yield from ((where, operand, None) for operand in operands)


def _is_float(proto: Message) -> bool:
    return dtype_of(proto).startswith(_FLOATS)


def _is_constant_above_zero(proto: Message) -> bool:
    values = literal_value(detailed(proto))
    if values is None:
        return False
    if values.dtype.kind == "u":  # 16-bit floats come as their bits
        return bool((values < 1 << 15).all())
    return bool((values >= 0).all())


def _whole_exponent(body: Body, operands: Sequence[int]) -> int:
    """The whole number at or above 0 that a power is raised to; -1 where it is another, or none is known."""
    exponent = operands[1]
    while body.protos[exponent].opcode in ("broadcast", "convert"):
        exponent = body.operands[exponent][0]
    values = literal_value(detailed(body.protos[exponent]))
    if values is None or values.dtype.kind == "u" or values.size != 1:
        return -1
    value = float(values.reshape(-1)[0])
    return int(value) if value >= 0 and value == int(value) else -1
