"""What the rules on made-up inputs share: they follow values through a step's module, into whatever it calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.flatten import flatten
from disco_hlo.hlo.proto import DTYPES, DetailedInstruction, Message

CALLS = frozenset({"async-start", "call", "fusion"})
TUPLE, TRUTH_VALUE = "tuple", "pred"

Value = TypeVar("Value")


@dataclass(frozen=True)
class Body:
    """A computation: its instructions, operands before users."""

    protos: Sequence[Message]
    operands: Sequence[Sequence[int]]
    root: int


class Following(ABC, Generic[Value]):
    """Follows what is known of the entry parameters through a module, op by op."""

    def __init__(self, source: CanonicalModule) -> None:
        self.entry = Body(source.protos, [node.operands for node in source.graph.nodes], source.graph.root)
        """The entry computation, as the canonical graph has it."""
        self._index = source.index
        self._bodies: dict[int, Body] = {}

    @abstractmethod
    def value(self, proto: Message, operands: Sequence[Value], behind: Sequence[Message], /) -> Value:
        """What is known of an op's result; ``behind`` are the instructions whose results are its operands."""

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

    def branches(self, proto: Message, operands: Sequence[Value]) -> list[Value]:
        """What each branch of a conditional returns."""
        pairs = zip(proto.called_computation_ids, operands[1:], strict=True)
        return [self.call(called, [given]) for called, given in pairs]


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
