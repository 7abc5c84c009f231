"""What the rules on made-up inputs share: they follow values through a step's module, into whatever it calls."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.flatten import flatten
from disco_hlo.hlo.proto import DTYPES, DetailedInstruction, Message

CALLS = frozenset({"async-start", "call", "fusion"})
TUPLE, TRUTH_VALUE = "tuple", "pred"


class Known:
    """What is known of a value; of a tuple, of its members."""

    members: tuple[Self, ...]

    def member(self, number: int) -> Self:
        """A member of a tuple; where none are told apart, any."""
        return self.members[number] if self.members else self


Value = TypeVar("Value", bound=Known)


@dataclass(frozen=True)
class Body:
    """A computation: its instructions, operands before users."""

    protos: Sequence[Message]
    operands: Sequence[Sequence[int]]
    root: int


class Following(ABC, Generic[Value]):
    """Follows what is known of the entry parameters through a module, op by op."""

    def __init__(
        self, source: CanonicalModule, kind: Callable[..., Value], either: Callable[[Value, Value], Value]
    ) -> None:
        """``kind`` makes what is known of a tuple of its ``members``, ``either`` what is of one of two values."""
        self._kind, self._either = kind, either
        self.entry = Body(source.protos, [node.operands for node in source.graph.nodes], source.graph.root)
        """The entry computation, as the canonical graph has it."""
        self._index = source.index
        self._bodies: dict[int, Body] = {}

    @abstractmethod
    def computed(self, proto: Message, operands: Sequence[Value], behind: Sequence[Message]) -> Value:
        """What is known of the result of an op that :meth:`value` does not follow."""

    def decided(self, proto: Message, decision: Value, result: Value) -> Value:
        """What is known of what a loop's turn or a branch gives, where ``decision`` says whether it runs."""
        del proto, decision
        return result

    def value(self, proto: Message, operands: Sequence[Value], behind: Sequence[Message]) -> Value:
        """What is known of an op's result; ``behind`` are the instructions whose results are its operands."""
        opcode = proto.opcode
        if opcode in CALLS:
            return self.call(proto.called_computation_ids[0], operands)
        if opcode == "tuple":
            return self._kind(members=tuple(operands))
        if opcode == "get-tuple-element":
            return operands[0].member(int(proto.tuple_index))
        if opcode == "conditional":
            pairs = zip(proto.called_computation_ids, operands[1:], strict=True)
            branches = [self.call(called, [given]) for called, given in pairs]
            return self.decided(proto, operands[0], functools.reduce(self._either, branches))
        if opcode != "while":
            return self.computed(proto, operands, behind)
        body, condition = proto.called_computation_ids
        carry = self._either(operands[0], operands[0])  # a turn may change what it holds
        while True:
            decision = self.call(condition, [carry])
            after = self._either(carry, self.decided(proto, decision, self.call(body, [carry])))
            if after == carry:
                return carry
            carry = after

    def of_entry(self, given: Callable[[Message], Value]) -> Value:
        """What the module returns, where ``given`` says what is known of a parameter."""
        parameters = [proto for proto in self.entry.protos if proto.opcode == "parameter"]
        in_order = sorted(parameters, key=lambda proto: int(proto.parameter_number))
        return self.result(self.entry, [given(proto) for proto in in_order])

    def result(self, body: Body, given: Sequence[Value]) -> Value:
        """What a computation returns that is given these."""
        known: list[Value] = []
        for proto, reads in zip(body.protos, body.operands, strict=True):
            if proto.opcode == "parameter":
                known.append(given[proto.parameter_number])
                continue
            behind = [body.protos[read] for read in reads]
            known.append(self.value(proto, [known[read] for read in reads], behind))
        return known[body.root]

    def body(self, computation: int) -> Body:
        """A computation by its number."""
        if computation not in self._bodies:
            flat = flatten(self._index, self._index.computation(computation))
            self._bodies[computation] = Body(
                [op.proto for op in flat.ops], [op.operands for op in flat.ops], flat.root
            )
        return self._bodies[computation]

    def call(self, computation: int, given: Sequence[Value]) -> Value:
        """As :meth:`result`, of a computation by its number."""
        return self.result(self.body(computation), given)


def detailed(proto: Message) -> Message:
    """An instruction with all its attributes."""
    return DetailedInstruction.FromString(proto.SerializeToString())


def dtype_of(proto: Message) -> str:
    """The element type of an instruction's result."""
    return DTYPES.get(proto.shape.element_type, "")


def holds_whole_numbers(proto: Message) -> bool:
    """Whether the result is an array of whole numbers or truth values."""
    name = dtype_of(proto)
    return name == TRUTH_VALUE or (name[:1] in ("s", "u") and name[1:].isdigit())
