"""What a computation is, whatever it is called: its ops merged and numbered by structure, and the digests made of that.

A step has two digests. The *identity* (``Graph.fingerprint``) holds all that it computes. The *key*, under which its
plan is found, leaves out the values of scalar constants: a learning rate or the length of a schedule changes neither
which ops there are nor how long they take. Node numbers follow from the structure, so in two steps of one key they mean
the same ops. A scalar that decides what runs, the bound of a loop or the index of a branch, or where a slice begins,
stays in the key.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from disco_hlo.hlo.attributes import (
    PLACE,
    attribute_digest,
    cost_digest,
    is_callback,
    structural_shape,
    whole_digest,
)
from disco_hlo.hlo.flatten import FlatComputation, FlatOp, ModuleIndex, flatten, unpack_concatenated
from disco_hlo.hlo.graph import Shape
from disco_hlo.hlo.opcodes import NEVER_MERGED, REDUCTIONS, SIDE_EFFECTS
from disco_hlo.hlo.proto import Message, digest, shape_of
from disco_hlo.hlo.walks import needed_first

_FIRST_DECIDING = {
    "conditional": 0, "dynamic-reshape": 1, "dynamic-slice": 1, "dynamic-update-slice": 2, "set-dimension-size": 1,
}  # fmt: skip
"""Of ops whose operands decide what runs, or the shape or place of what is read: the first of these operands."""
_LAST_DECIDING = {"conditional": 1}
_PASSED_ON = ("bitcast", "copy", "opt-barrier")
"""Ops whose result has the members of their operand."""
# Structure and numbers --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Structure:
    """All of an op but its operands: ops of one structure that read the same compute the same."""

    shape: Shape
    shape_bytes: bytes
    attributes: str
    """Their digest."""
    all_bytes: bytes
    placeless_bytes: bytes
    """All but the place of a loop's slice, as XLA notes it beside the operands that say it: how far a turn steps."""
    cost_bytes: bytes
    """What of that its time depends on."""


class Structures:
    """The structure of each op of a flat computation, found once: whoever merges, numbers or describes asks again."""

    def __init__(self, flat: FlatComputation, digests: ComputationDigests) -> None:
        self.flat, self.digests = flat, digests
        self._known: list[Structure | None] = [None] * len(flat.ops)

    def __getitem__(self, position: int) -> Structure:
        found = self._known[position]
        if found is None:
            proto = self.flat.ops[position].proto
            shape = structural_shape(proto)
            shape_bytes = _shape_bytes(shape)
            placed = cost = cost_digest(proto, self.digests)
            notes_place = PLACE.encode() in proto.backend_config
            if notes_place or any(map(self.digests.holds_place, proto.called_computation_ids)):
                cost = cost_digest(proto, self.digests.placeless, placed=False)
            attributes = whole_digest(proto, placed)
            all_bytes, placeless_bytes, cost_bytes = (
                b"\0".join((proto.opcode.encode(), shape_bytes, one.encode()))
                for one in (attributes, whole_digest(proto, cost), cost)
            )
            found = Structure(shape, shape_bytes, attributes, all_bytes, placeless_bytes, cost_bytes)
            self._known[position] = found
        return found


def _shape_bytes(shape: Shape) -> bytes:
    if shape.dtype == "tuple":
        return b"(" + b",".join(map(_shape_bytes, shape.elements)) + b")"
    return f"{shape.dtype}{list(shape.dims)}{list(shape.layout)}".encode()


@dataclass
class Numbering:
    """A flat computation without what is computed twice and what nobody reads."""

    node_of: dict[int, int]
    """Flat op -> node id, for live ops."""
    representative: list[int]
    """Node id -> the flat op that stands for it."""
    root: int


def numbered(structures: Structures, apart: Collection[int] = ()) -> Numbering:
    """Merge identical ops, those ``apart`` left out, then number the live ones: parameters first, then in
    post-order from the root."""
    flat = structures.flat
    merged: list[int] = []
    seen: dict[tuple[bytes, tuple[int, ...]], int] = {}
    for position, op in enumerate(flat.ops):
        representative = position
        if position not in apart and _is_mergeable(op, flat.ops):
            key = (structures[position].all_bytes, tuple(merged[o] for o in op.operands))
            representative = seen.setdefault(key, position)
        merged.append(representative)

    parameters = sorted(
        (position for position, op in enumerate(flat.ops) if op.proto.opcode == "parameter"),
        key=lambda position: flat.ops[position].proto.parameter_number,
    )
    effects = [position for position, op in enumerate(flat.ops) if structures.digests.acts(op.proto)]
    starts = (*parameters, merged[flat.root], *effects)
    ordered = list(needed_first(starts, lambda one: (merged[o] for o in flat.ops[one].operands)))
    number = {position: place for place, position in enumerate(ordered)}
    node_of = {position: number[target] for position, target in enumerate(merged) if target in number}
    return Numbering(node_of, ordered, number[merged[flat.root]])


def _is_mergeable(op: FlatOp, ops: list[FlatOp]) -> bool:
    """Pure ops. (A copy that keeps the layout gives a value its own buffer and is none.)"""
    proto = op.proto
    if proto.opcode == "copy":
        return shape_of(proto.shape) != shape_of(ops[op.operands[0]].proto.shape)
    return proto.opcode not in NEVER_MERGED and (
        not proto.called_computation_ids or proto.opcode in REDUCTIONS
    )


def has_side_effect(proto: Message) -> bool:
    """Whether an op does more than compute its result."""
    return proto.opcode in SIDE_EFFECTS or (
        proto.opcode == "custom-call" and (proto.custom_call_has_side_effect or is_callback(proto))
    )


@dataclass(frozen=True, slots=True)
class Body:
    """A computation whose ops are numbered."""

    structures: Structures
    numbering: Numbering

    def __len__(self) -> int:
        return len(self.numbering.representative)

    def proto(self, node: int) -> Message:
        """The instruction behind a node; its operands are those of :meth:`operands`."""
        return self.structures.flat.ops[self.numbering.representative[node]].proto

    def structure(self, node: int) -> Structure:
        """All of a node but its operands."""
        return self.structures[self.numbering.representative[node]]

    def operands(self, node: int) -> list[int]:
        """The nodes that a node reads, in operand order."""
        op = self.structures.flat.ops[self.numbering.representative[node]]
        return [self.numbering.node_of[operand] for operand in op.operands]


def computation_digest(body: Body, bytes_of: Callable[[int], bytes]) -> str:
    """Digest of a computation: of each node what ``bytes_of`` says, and what it reads."""
    lines = [digest(bytes_of(node), repr(body.operands(node)).encode()) for node in range(len(body))]
    return digest(*(line.encode() for line in lines), str(body.numbering.root).encode())


class ComputationDigests:
    """Digest of a called computation in canonical form, so that fusion inside loop bodies does not count."""

    def __init__(self, index: ModuleIndex) -> None:
        self.index = index
        self.bodies: dict[int, Body] = {}
        """The computations asked for so far, by id."""
        self._known: dict[int, str] = {}
        self._placeless: dict[int, str] = {}
        self._doing: dict[tuple[Callable[[Message], bool], int], bool] = {}

    def __call__(self, computation_id: int) -> str:
        """Digest of the computation with this id."""
        found = self._known.get(computation_id)
        if found is None:
            flat = unpack_concatenated(flatten(self.index, self.index.computation(computation_id)))
            structures = Structures(flat, self)
            found = self.know(computation_id, Body(structures, numbered(structures)))
        return found

    def know(self, computation_id: int, body: Body) -> str:
        """Let this be the canonical form of a computation; its digest."""
        self.bodies[computation_id] = body
        self._placeless.pop(computation_id, None)
        found = self._known[computation_id] = computation_digest(
            body, lambda node: body.structure(node).all_bytes
        )
        return found

    def placeless(self, computation_id: int) -> str:
        """Digest of a called computation, of its nodes all but the places of slices."""
        found = self._placeless.get(computation_id)
        if found is None:
            self(computation_id)
            body = self.bodies[computation_id]
            found = computation_digest(body, lambda node: body.structure(node).placeless_bytes)
            self._placeless[computation_id] = found
        return found

    def holds_place(self, computation_id: int) -> bool:
        """Whether the place of a slice is noted in a called computation."""
        return self.placeless(computation_id) != self(computation_id)

    def acts(self, proto: Message) -> bool:
        """Whether an op does more than compute its result, itself or in what it calls: a loop or branch with a callback
        inside runs though nothing reads its result."""
        return self._does(has_side_effect, proto)

    def calls_python(self, proto: Message) -> bool:
        """Whether an op calls Python functions, itself or in what it calls."""
        return self._does(is_callback, proto)

    def _does(self, does: Callable[[Message], bool], proto: Message) -> bool:
        return does(proto) or any(self._has(does, called) for called in proto.called_computation_ids)

    def _has(self, does: Callable[[Message], bool], computation_id: int) -> bool:
        found = self._doing.get((does, computation_id))
        if found is None:
            inside = self.index.computation(computation_id).instructions
            found = self._doing[does, computation_id] = any(self._does(does, one) for one in inside)
        return found


# The digests of a step --------------------------------------------------------------------------


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
