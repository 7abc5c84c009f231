"""Which ops of a flat computation are one and the same, and the numbers of those that are left.

Ops are merged and numbered by what they compute, whatever they are called, so the digest of a computation says what
it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from disco_hlo.hlo.attributes import attribute_digest, cost_digest, is_callback, structural_shape
from disco_hlo.hlo.flatten import FlatComputation, FlatOp, ModuleIndex, flatten
from disco_hlo.hlo.graph import Shape
from disco_hlo.hlo.opcodes import NEVER_MERGED, REDUCTIONS, SIDE_EFFECTS
from disco_hlo.hlo.proto import Message, digest, shape_of
from disco_hlo.hlo.unpack import unpack_concatenated


@dataclass
class Numbering:
    """A flat computation without what is computed twice and what nobody reads."""

    node_of: dict[int, int]
    """Flat op -> node id, for live ops."""
    representative: list[int]
    """Node id -> the flat op that stands for it."""
    root: int


@dataclass(frozen=True, slots=True)
class Structure:
    """All of an op but its operands: ops of one structure that read the same compute the same."""

    shape: Shape
    shape_bytes: bytes
    attributes: str
    """Their digest."""
    all_bytes: bytes
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
            attributes = attribute_digest(proto, self.digests)
            all_bytes, cost_bytes = (
                b"\0".join((proto.opcode.encode(), shape_bytes, one.encode()))
                for one in (attributes, cost_digest(proto, self.digests))
            )
            found = self._known[position] = Structure(shape, shape_bytes, attributes, all_bytes, cost_bytes)
        return found


class ComputationDigests:
    """Digest of a called computation in canonical form, so that fusion inside loop bodies does not count."""

    def __init__(self, index: ModuleIndex) -> None:
        self.index = index
        self.bodies: dict[int, Body] = {}
        """The computations asked for so far, by id."""
        self._known: dict[int, str] = {}
        self._acting: dict[int, bool] = {}

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
        found = self._known[computation_id] = computation_digest(
            body, lambda node: body.structure(node).all_bytes
        )
        return found

    def acts(self, proto: Message) -> bool:
        """Whether an op does more than compute its result, itself or in what it calls: a loop or branch with a callback
        inside runs though nothing reads its result."""
        return has_side_effect(proto) or any(map(self._has_acting, proto.called_computation_ids))

    def _has_acting(self, computation_id: int) -> bool:
        found = self._acting.get(computation_id)
        if found is None:
            found = any(map(self.acts, self.index.computation(computation_id).instructions))
            self._acting[computation_id] = found
        return found


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


def _shape_bytes(shape: Shape) -> bytes:
    if shape.dtype == "tuple":
        return b"(" + b",".join(map(_shape_bytes, shape.elements)) + b")"
    return f"{shape.dtype}{list(shape.dims)}{list(shape.layout)}".encode()


def _is_mergeable(op: FlatOp) -> bool:
    """Pure ops. (A copy that keeps the layout gives a value its own buffer and is none.)"""
    return op.proto.opcode not in NEVER_MERGED and (
        not op.proto.called_computation_ids or op.proto.opcode in REDUCTIONS
    )


def _layout_changes(op: FlatOp, ops: list[FlatOp]) -> bool:
    return op.proto.opcode == "copy" and shape_of(op.proto.shape) != shape_of(ops[op.operands[0]].proto.shape)


def numbered(structures: Structures, apart: Collection[int] = ()) -> Numbering:
    """Merge identical ops, those ``apart`` left out, then number the live ones: parameters first, then in
    post-order from the root."""
    flat = structures.flat
    merged: list[int] = []
    seen: dict[tuple[bytes, tuple[int, ...]], int] = {}
    for position, op in enumerate(flat.ops):
        representative = position
        if position not in apart and (_is_mergeable(op) or _layout_changes(op, flat.ops)):
            key = (structures[position].all_bytes, tuple(merged[o] for o in op.operands))
            representative = seen.setdefault(key, position)
        merged.append(representative)

    parameters = sorted(
        (position for position, op in enumerate(flat.ops) if op.proto.opcode == "parameter"),
        key=lambda position: flat.ops[position].proto.parameter_number,
    )
    effects = [position for position, op in enumerate(flat.ops) if structures.digests.acts(op.proto)]
    ordered: list[int] = []
    number: dict[int, int] = {}
    for start in (*parameters, merged[flat.root], *effects):
        _post_order(start, flat.ops, merged, number, ordered)
    node_of = {position: number[target] for position, target in enumerate(merged) if target in number}
    return Numbering(node_of, ordered, number[merged[flat.root]])


def has_side_effect(proto: Message) -> bool:
    """Whether an op does more than compute its result."""
    return proto.opcode in SIDE_EFFECTS or (
        proto.opcode == "custom-call" and (proto.custom_call_has_side_effect or is_callback(proto))
    )


def _post_order(
    start: int, ops: list[FlatOp], merged: list[int], number: dict[int, int], ordered: list[int]
) -> None:
    stack = [(start, iter(ops[start].operands))]
    if start in number:
        return
    while stack:
        position, operands = stack[-1]
        pending = next((merged[o] for o in operands if merged[o] not in number), None)
        if pending is not None:
            stack.append((pending, iter(ops[pending].operands)))
            continue
        stack.pop()
        if position not in number:
            number[position] = len(ordered)
            ordered.append(position)
