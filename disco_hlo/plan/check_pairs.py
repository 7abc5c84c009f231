"""Which result of an instruction lies in the buffer of which operand: XLA's in-place pairs, from the bytes alone.

The rules of XLA's ``AliasInfo::GetInPlaceInputOutputPairs``. Part of :mod:`~disco_hlo.plan.check_module`, which shares
no code with what writes modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from disco_hlo.errors import PlanError
from disco_hlo.hlo.proto import Message

TUPLE = 13
"""XLA's PrimitiveType of tuples."""


class Pair(NamedTuple):
    """A result in the buffer of an operand; both are counted as array members of their (flattened) tuples."""

    operand: int
    operand_leaf: int
    result_leaf: int
    is_declared: bool = False
    """Whether the instruction itself says so (``output_operand_aliasing``)."""


class Body(NamedTuple):
    """A computation, ready for look-ups."""

    name: str
    root: Message
    by_id: Mapping[int, Message]


class MalformedError(PlanError):
    """The bytes do not say which buffers the module uses: something is missing or contradicts itself."""


def leaf_count(shape: Message) -> int:
    """How many arrays a shape has, itself or as members of its tuples."""
    if shape.element_type != TUPLE:
        return 1
    return sum(map(leaf_count, shape.tuple_shapes))


def leaves(shape: Message) -> Iterator[Message]:
    """The shapes of the arrays in a shape, in order."""
    if shape.element_type != TUPLE:
        yield shape
        return
    for member in shape.tuple_shapes:
        yield from leaves(member)


def leaf_at(shape: Message, index: tuple[int, ...], name: str) -> int:
    """The number of the first array at a shape index (XLA's ``ShapeIndex``).

    Raises:
        MalformedError: the shape has no such index.
    """
    before = 0
    for step in index:
        if shape.element_type != TUPLE or not 0 <= step < len(shape.tuple_shapes):
            raise MalformedError(f"{name} names the index {list(index)} of a shape that does not have it")
        before += sum(leaf_count(member) for member in shape.tuple_shapes[:step])
        shape = shape.tuple_shapes[step]
    return before


def pairs(
    instruction: Message, operands: tuple[Message, ...], bodies: Mapping[int, Body]
) -> tuple[Pair, ...]:
    """The in-place pairs of an instruction.

    Args:
        operands: the instructions that it reads.
        bodies: the computations by id, for those that fusions call.
    """
    opcode = instruction.opcode
    if opcode == "fusion":
        return (*_fusion_pairs(instruction, bodies), *_declared(instruction, operands))
    if opcode in ("custom-call", "async-start"):
        return _declared(instruction, operands)
    if opcode in ("dynamic-update-slice", "set-dimension-size"):
        return (Pair(0, 0, 0),)
    if opcode == "scatter":
        return _one_by_one((len(operands) - 1) // 2)
    if opcode == "all-reduce-start":
        return () if b"nvshmem" in instruction.backend_config.lower() else _one_by_one(len(operands))
    if opcode == "ragged-all-to-all":
        return (Pair(1, 0, 0),)
    if opcode in ("collective-permute", "collective-permute-start") and len(operands) == 4:
        first = 0 if opcode == "collective-permute" else leaf_at(instruction.shape, (1,), instruction.name)
        return tuple(Pair(1, leaf, first + leaf) for leaf in range(leaf_count(operands[1].shape)))
    return ()


def _one_by_one(count: int) -> tuple[Pair, ...]:
    return tuple(Pair(place, 0, place) for place in range(count))


def _declared(instruction: Message, operands: tuple[Message, ...]) -> tuple[Pair, ...]:
    """The pairs that the instruction itself names (``output_operand_aliasing``), array by array."""
    found = []
    for one in instruction.output_operand_aliasing:
        if not 0 <= one.operand_index < len(operands):
            raise MalformedError(
                f"{instruction.name} aliases operand {one.operand_index}, which it does not have"
            )
        read = operands[one.operand_index].shape
        mine = leaf_at(instruction.shape, tuple(one.output_shape_index), instruction.name)
        theirs = leaf_at(read, tuple(one.operand_shape_index), instruction.name)
        for place in one.operand_shape_index:
            read = read.tuple_shapes[place]
        found += [Pair(one.operand_index, theirs + k, mine + k, True) for k in range(leaf_count(read))]
    return tuple(found)


def _fusion_pairs(fusion: Message, bodies: Mapping[int, Body]) -> Iterator[Pair]:
    """A fusion writes in place where an in-place op is behind its root and a parameter behind that op."""
    body = fused(fusion, bodies)
    for leaf in range(leaf_count(fusion.shape)):
        source = behind(body, body.root, leaf)
        if source is None:
            continue
        for pair in _inner_pairs(source[0], body, bodies):
            if pair.result_leaf != source[1]:
                continue
            read = _updated(pair, source[0], body, bodies)
            if read is not None and read[0].opcode == "parameter":
                yield Pair(read[0].parameter_number, read[1], leaf)


def fused(fusion: Message, bodies: Mapping[int, Body]) -> Body:
    """What a fusion computes.

    Raises:
        MalformedError: it calls no computation of the module.
    """
    called = fusion.called_computation_ids
    body = bodies.get(called[0]) if called else None
    if body is None:
        raise MalformedError(f"{fusion.name} calls no computation of the module")
    return body


def _operand(instruction: Message, place: int, body: Body) -> Message:
    read = body.by_id.get(instruction.operand_ids[place]) if place < len(instruction.operand_ids) else None
    if read is None:
        raise MalformedError(f"{instruction.name} in {body.name} has no operand {place}")
    return read


def _inner_pairs(instruction: Message, body: Body, bodies: Mapping[int, Body]) -> tuple[Pair, ...]:
    operands = tuple(_operand(instruction, place, body) for place in range(len(instruction.operand_ids)))
    return pairs(instruction, operands, bodies)


def _updated(
    pair: Pair, writer: Message, body: Body, bodies: Mapping[int, Body]
) -> tuple[Message, int] | None:
    """What an in-place op in a fusion writes over; through a fusion inside that writes in place itself."""
    read = behind(body, _operand(writer, pair.operand, body), pair.operand_leaf)
    if read is None or read[0].opcode != "fusion":
        return read
    for inner in _inner_pairs(read[0], body, bodies):
        if inner.result_leaf == read[1]:
            return behind(body, _operand(read[0], inner.operand, body), inner.operand_leaf)
    return read


def behind(
    body: Body, instruction: Message, leaf: int, through: str = "bitcast"
) -> tuple[Message, int] | None:
    """Where one array of an instruction comes from, through tuples and ops of one kind that hand all on."""
    for _ in range(len(body.by_id) + 1):
        opcode = instruction.opcode
        if opcode == "tuple":
            for place in range(len(instruction.operand_ids)):
                member = _operand(instruction, place, body)
                count = leaf_count(member.shape)
                if leaf < count:
                    instruction = member
                    break
                leaf -= count
            else:
                return None
        elif opcode == "get-tuple-element":
            whole = _operand(instruction, 0, body)
            leaf += leaf_at(whole.shape, (instruction.tuple_index,), instruction.name)
            instruction = whole
        elif opcode == through:
            instruction = _operand(instruction, 0, body)
        else:
            return instruction, leaf
    raise MalformedError(f"{instruction.name} in {body.name} reads itself")
