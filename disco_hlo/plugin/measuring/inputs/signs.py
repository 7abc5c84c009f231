"""Which made-up inputs must stay positive; all others come in both signs, so that what a mask cuts off is seen.

A relu passes everything on where all its inputs are positive, and a program that is wrong only behind its mask then
computes what it should. But some ops have no value, or none that training would meet, below zero: the root of Adam's
second moment, a logarithm, a denominator. So the rule follows the parameters to these. What such an op reads has to be
positive: an op that is never negative whatever it reads (a square, an exponential) is so by itself, any other as long
as all the parameters are that its operands depend on, through fusions, calls and loops, and those stay positive. Where
the rule is too careful a parameter is as it would be without it.

The answer is a function of the step's canonical graph: equal on all ranks, and for all candidates of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import Message
from disco_hlo.plugin.measuring.inputs.bodies import TUPLE, Following, Known, detailed, dtype_of
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
_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Signs(Known):
    """What is known of the signs of an array, or of a tuple's members. Arrays of one such object hold the same."""

    asked: frozenset[int] = _NONE
    """Parameters that must be positive where its numbers must be."""
    sure: bool = False
    """None of its numbers is negative, whatever the parameters are."""
    exponent: frozenset[int] = _NONE
    """As :attr:`asked`, of what it is a power of: of one that is subtracted (``1 - beta**count``) it decides."""
    number: float | None = None
    """The constant that it holds everywhere."""
    members: tuple[Signs, ...] = ()


def positive_parameters(source: CanonicalModule) -> frozenset[int]:
    """Numbers of the entry parameters of ``source`` whose values must be positive."""
    return _Asking(source).run()


class _Asking(Following[Signs]):
    def __init__(self, source: CanonicalModule) -> None:
        super().__init__(source, Signs, joined)
        self._found: frozenset[int] = _NONE

    def run(self) -> frozenset[int]:
        """The parameters that are asked for."""
        self.of_entry(_parameter)
        return self._found

    def computed(self, proto: Message, operands: Sequence[Signs], _: Sequence[Message]) -> Signs:
        """As there."""
        opcode = proto.opcode
        if opcode in ("copy", "opt-barrier") or (opcode == "convert" and _is_float(proto)):
            return operands[0]
        needy = _NEEDS_POSITIVE.get(opcode)
        if opcode == "power" and _whole_exponent(operands) < 0:
            needy = 0
        if needy is not None:
            self._found |= read(operands[needy])
        if not _is_float(proto) and dtype_of(proto) != TUPLE:
            return Signs(sure=True)  # made-up integers do not depend on signs
        sure = self._never_negative(proto, operands)
        asked = _NONE.union(*map(read, operands))
        if opcode == "subtract":
            asked |= operands[1].exponent
        of = operands[-1] if opcode in ("exponential", "power") else None
        kept = operands[0] if opcode in _SPREAD else Signs(number=_constant(proto))
        exponent = kept.exponent if of is None else read(of)
        return Signs(_NONE if sure else asked, sure, exponent, kept.number)

    def _never_negative(self, proto: Message, operands: Sequence[Signs]) -> bool:
        opcode, known = proto.opcode, [one.sure for one in operands]
        if opcode == "constant":
            return _is_constant_above_zero(proto)
        if opcode in _NEVER_NEGATIVE or (opcode in _AS_ITS_OPERANDS and all(known)):
            return True
        if opcode == "multiply":
            return operands[0] is operands[1]
        if opcode in _AS_EITHER:
            return any(known)
        if opcode == "power":
            return known[0] or _whole_exponent(operands) % 2 == 0
        if opcode in _BY_THEIR_BODY:
            combiner = self.body(proto.called_computation_ids[-1])
            by = combiner.protos[combiner.root].opcode
            # What a maximum begins with is below all numbers.
            return (by == "maximum" and any(known)) or (by in ("add", "minimum", "multiply") and all(known))
        return False


def read(signs: Signs) -> frozenset[int]:
    """Parameters that must be positive where all of it must be."""
    return signs.asked.union(*map(read, signs.members))


def joined(one: Signs, other: Signs) -> Signs:
    """What is known of an array that is either; of those that hold the same no more that they do."""
    if len(one.members) != len(other.members):
        return Signs(read(one) | read(other))
    return Signs(
        one.asked | other.asked,
        one.sure and other.sure,
        one.exponent | other.exponent,
        one.number if one.number == other.number else None,
        tuple(map(joined, one.members, other.members)),
    )


def _parameter(proto: Message) -> Signs:
    return Signs(frozenset({int(proto.parameter_number)})) if _is_float(proto) else Signs(sure=True)


def _is_float(proto: Message) -> bool:
    return dtype_of(proto).startswith(_FLOATS)


def _constant(proto: Message) -> float | None:
    """The one number of a constant."""
    values = literal_value(detailed(proto)) if proto.opcode == "constant" else None
    if values is None or values.dtype.kind == "u" or values.size != 1:
        return None
    return float(values.reshape(-1)[0])


def _is_constant_above_zero(proto: Message) -> bool:
    values = literal_value(detailed(proto))
    if values is None:
        return False
    if values.dtype.kind == "u":  # 16-bit floats come as their bits
        return bool((values < 1 << 15).all())
    return bool((values >= 0).all())


def _whole_exponent(operands: Sequence[Signs]) -> int:
    """The whole number at or above 0 that a power is raised to; -1 where it is another, or none is known."""
    value = operands[1].number
    return int(value) if value is not None and value >= 0 and value == int(value) else -1
