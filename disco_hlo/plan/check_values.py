"""Values, and which of them must share a buffer; what a computation does with them, step by step.

Records of :mod:`~disco_hlo.plan.check_reader`, which makes them, and part of :mod:`~disco_hlo.plan.check_module`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from disco_hlo.hlo.proto import DTYPES, Message
from disco_hlo.plan.check_pairs import TUPLE, Body, Pair, leaves

Leaves = Sequence[int]
"""The values of an instruction, one for each array in its shape."""
NOTHING = 0
"""The value of what takes no memory: tokens, arrays without elements."""

_TOKEN = 17
_BITS = {
    number: int(match.group()) if (match := re.search(r"\d+", name)) else 8 for number, name in DTYPES.items()
}
"""Bits of an element, by type."""


@dataclass(slots=True)
class Step:
    """One instruction that reads or writes memory, or calls what does."""

    instruction: Message
    kind: str
    """``op``, ``done``, ``while``, ``conditional``, or ``call`` (async starts too)."""
    operands: tuple[Leaves, ...]
    results: Leaves
    """The values that it defines; those that it hands on are none of them."""
    pairs: tuple[Pair, ...] = ()
    blocks: tuple[Block, ...] = ()
    """What it calls: a while its condition and body, in this order."""
    starts: Leaves = ()
    """The values that a while's condition and body begin with and its body writes anew; those that a conditional's
    branches begin with."""
    caller: Message | None = None
    """The async start that wraps the instruction."""

    @property
    def runs(self) -> Message:
        """What the schedule around names: the instruction, or the async start that wraps it."""
        return self.instruction if self.caller is None else self.caller


@dataclass(slots=True)
class Block:
    """One call of a scheduled computation."""

    name: str
    body: Body
    steps: list[Step] = field(default_factory=list)
    ends_with: Leaves = ()
    """The values of the root."""


class Values:
    """Numbered values, and sets of those that must be in one buffer."""

    def __init__(self) -> None:
        self.definers: list[tuple[Message | None, int]] = [(None, 0)]
        self.shapes: list[Message] = [None]
        self.phis: dict[int, list[int]] = {}
        """Values that stand for one of several, of loops and conditionals; for each what it may be."""
        self.read_only: set[int] = set()
        """Constants and arguments that were not donated."""
        self._is: list[int] = [NOTHING]
        self._parent: list[int] = [NOTHING]

    def new(self, instruction: Message, leaf: int, shape: Message) -> int:
        """A value of its own; :data:`NOTHING` where it takes no memory."""
        if shape.element_type == _TOKEN or 0 in shape.dimensions:
            return NOTHING
        self.definers.append((instruction, leaf))
        self.shapes.append(shape)
        self._is.append(len(self._is))
        self._parent.append(len(self._parent))
        return len(self._is) - 1

    def new_for(self, instruction: Message, shape: Message) -> list[int]:
        """A value for every array of a shape."""
        return [self.new(instruction, leaf, one) for leaf, one in enumerate(leaves(shape))]

    def choose(self, phis: Leaves, inputs: Sequence[Leaves]) -> None:
        """Let each of some values be one of several."""
        for phi, *ends in zip(phis, *inputs, strict=True):
            if phi == NOTHING:
                continue
            self.phis[phi] = ends
            for end in ends:
                self.share(phi, end)

    def settle(self) -> None:
        """Find the values that can only be one other value: all that goes round is handed on, or changes places with an
        equal. XLA's ``HloDataflowAnalysis`` leaves out such phis; one that it kept would hold the same numbers."""
        stands_for: dict[int, int | None] = dict.fromkeys(self.phis)
        is_settled = False
        while not is_settled:
            is_settled = True
            for phi, inputs in self.phis.items():
                found = {stands_for.get(one, one) for one in inputs} - {None}
                new = phi if len(found) > 1 else next(iter(found), None)
                if stands_for[phi] not in (new, phi):
                    stands_for[phi], is_settled = new, False
        for phi, value in stands_for.items():
            if value is not None:
                self._is[phi] = value

    def itself(self, value: int) -> int:
        """The value that a value was found to be."""
        while self._is[value] != value:
            value = self._is[value]
        return value

    def buffer(self, value: int) -> int:
        """The number of a value's buffer."""
        parent = self._parent
        while parent[value] != value:
            parent[value] = parent[parent[value]]
            value = parent[value]
        return value

    def share(self, one: int, other: int) -> None:
        """Two values must be in one buffer."""
        if NOTHING in (one, other):
            return
        a, b = self.buffer(one), self.buffer(other)
        self._parent[max(a, b)] = min(a, b)

    def size(self, value: int) -> int:
        """Bits of an array, as far as they decide whether another one fits into its buffer."""
        shape = self.shapes[value]
        elements: int = math.prod(shape.dimensions)
        return elements * _BITS.get(shape.element_type, 0)

    def name(self, value: int) -> str:
        """A value as a reader of the module finds it."""
        instruction, leaf = self.definers[value]
        assert instruction is not None
        is_tuple = instruction.shape.element_type == TUPLE
        return f"{instruction.name}{{{leaf}}}" if is_tuple else str(instruction.name)
