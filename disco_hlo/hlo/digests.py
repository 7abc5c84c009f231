"""The two digests of a step: its identity, and the key under which its plan is found.

The *identity* (``Graph.fingerprint``) holds all that a step computes. The *key* leaves out the values of scalar
constants: a learning rate or the length of a schedule changes neither which ops there are nor how long they take. Node
numbers follow from the structure, so in two steps of one key they mean the same ops. A scalar that decides what runs,
the bound of a loop or the index of a branch, or where a slice begins, stays in the key.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from disco_hlo.hlo.attributes import attribute_digest
from disco_hlo.hlo.numbering import Body, computation_digest
from disco_hlo.hlo.proto import digest

_FIRST_DECIDING = {
    "conditional": 0, "dynamic-reshape": 1, "dynamic-slice": 1, "dynamic-update-slice": 2, "set-dimension-size": 1,
}  # fmt: skip
"""Of ops whose operands decide what runs, or the shape or place of what is read: the first of these operands."""
_LAST_DECIDING = {"conditional": 1}
_PASSED_ON = ("bitcast", "copy", "opt-barrier")
"""Ops whose result has the members of their operand."""

Place = tuple[int, int]
"""A computation's id, and a node in it."""
Members = tuple[int, ...]
"""Which member of a tuple, from the outside in; empty for the whole value."""


@dataclass(frozen=True)
class Program:
    """The computations of a module that run, with their nodes numbered."""

    entry: int
    bodies: Mapping[int, Body]
    """By id, the entry among them."""
    aliases: Sequence[tuple[int, int]]
    """Donated parameters as (parameter node, output index)."""
    backend: str

    @property
    def identity(self) -> str:
        """Digest of all that the step computes."""
        body = self.bodies[self.entry]
        return self._digest(computation_digest(body, lambda node: body.structure(node).all_bytes))

    @property
    def key(self) -> str:
        """The same without the values of scalar constants that decide nothing."""
        return self._digest(_Keys(self)(self.entry))

    def _digest(self, computation: str) -> str:
        aliases = (struct.pack("<2q", *alias) for alias in self.aliases)
        return digest(self.backend.encode(), computation.encode(), *aliases)

    @cached_property
    def callers(self) -> Mapping[int, Sequence[Place]]:
        """Which ops call a computation."""
        found: dict[int, list[Place]] = defaultdict(list)
        for number, body in self.bodies.items():
            for node in range(len(body)):
                for called in set(body.proto(node).called_computation_ids):
                    found[called].append((number, node))
        return found


class _Keys:
    """Key digests of computations, each found once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.deciding = deciding_constants(program)
        self.known: dict[int, str] = {}

    def __call__(self, number: int) -> str:
        found = self.known.get(number)
        if found is None:
            body = self.program.bodies[number]
            found = self.known[number] = computation_digest(
                body, lambda node: self._bytes(number, body, node)
            )
        return found

    def _bytes(self, number: int, body: Body, node: int) -> bytes:
        proto, structure = body.proto(node), body.structure(node)
        if proto.opcode == "constant" and structure.shape.element_count == 1:
            if (number, node) not in self.deciding:
                return b"constant\0" + structure.shape_bytes
        elif proto.called_computation_ids:
            return b"\0".join(
                (proto.opcode.encode(), structure.shape_bytes, attribute_digest(proto, self).encode())
            )
        return structure.all_bytes


def deciding_constants(program: Program) -> set[Place]:
    """The constants from which it is computed how often a loop runs, which branch does, and where a slice begins."""
    found: set[Place] = set()
    seen: set[tuple[Place, Members]] = set()
    pending = list(_decisions(program))
    while pending:
        one = pending.pop()
        if one in seen or (one[0], ()) in seen:
            continue
        seen.add(one)
        (number, node), members = one
        if program.bodies[number].proto(node).opcode == "constant":
            found.add(one[0])
        pending += _computed_from(program, number, node, members)
    return found


def _decisions(program: Program) -> Iterator[tuple[Place, Members]]:
    for number, body in program.bodies.items():
        for node in range(len(body)):
            proto = body.proto(node)
            if proto.opcode == "while":
                yield _root(program, proto.called_computation_ids[1]), ()
            elif (first := _FIRST_DECIDING.get(proto.opcode)) is not None:
                for operand in body.operands(node)[first : _LAST_DECIDING.get(proto.opcode)]:
                    yield (number, operand), ()


def _computed_from(
    program: Program, number: int, node: int, members: Members
) -> Iterator[tuple[Place, Members]]:
    """What some members of a node's result are computed from; of other ops than those below all that they read."""
    body = program.bodies[number]
    proto, operands = body.proto(node), body.operands(node)
    opcode, called = proto.opcode, proto.called_computation_ids
    if opcode == "parameter":
        for caller, at in program.callers[number]:
            yield from _argument(program, caller, at, number, proto.parameter_number, members)
    elif opcode == "get-tuple-element":
        yield (number, operands[0]), (proto.tuple_index, *members)
    elif opcode == "tuple" and members:
        yield (number, operands[members[0]]), members[1:]
    elif opcode in _PASSED_ON:
        yield (number, operands[0]), members
    elif opcode == "while":
        yield (number, operands[0]), members
        yield _root(program, called[0]), members
    elif opcode in ("call", "conditional", "fusion"):  # what is handed over counts where it is read
        for one in called:
            yield _root(program, one), members
    else:
        for operand in operands:
            yield (number, operand), ()
        for one in called:
            yield _root(program, one), ()


def _argument(
    program: Program, number: int, node: int, called: int, parameter: int, members: Members
) -> Iterator[tuple[Place, Members]]:
    """What an op hands to a parameter of a computation that it calls."""
    body = program.bodies[number]
    proto, operands = body.proto(node), body.operands(node)
    if proto.opcode == "while":
        yield (number, operands[0]), members
        yield _root(program, proto.called_computation_ids[0]), members
    elif proto.opcode == "conditional":
        for branch, one in enumerate(proto.called_computation_ids):
            if one == called:
                yield (number, operands[branch + 1]), members
    elif proto.opcode in ("call", "fusion"):
        yield (number, operands[parameter]), members
    else:
        for operand in operands:
            yield (number, operand), ()


def _root(program: Program, number: int) -> Place:
    return number, program.bodies[number].numbering.root
