"""How far a dimension passes through a program: the stretch that a chunk move can take along.

A stretch grows from a seed in both directions. Backward it takes in what computes the parts its members
need; forward whatever reads its members in parts. An instruction that would need a member whole, or along
another dimension, stays out: the value is then joined for it, which is legal, but ends the overlap there.
Weight gradients contract the dimension; they close the stretch with partial sums.
"""

from __future__ import annotations

from collections.abc import Collection

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.dimensions import Needs, operand_needs
from disco_hlo.structure.moves import Chunk
from disco_hlo.structure.program import Program, dims

PASSING = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
"""Ops between a matmul and its all-reduce that do no work worth speaking of."""
_GIVEN = frozenset({"parameter", "constant"})


def grow(
    program: Program,
    seeds: dict[int, int],
    parts: int,
    *,
    only: Collection[str] | None = None,
    partial_sums: bool = True,
    producers: bool = True,
) -> dict[int, int]:
    """The largest stretch around ``seeds`` (id -> dimension of the result), as id -> dimension.

    Args:
        program: the program; it is not changed.
        seeds: instructions that belong to the stretch.
        parts: into how many parts it shall come.
        only: opcodes that may be taken in; all where None.
        partial_sums: whether contractions over the dimension join in, as partial sums.
        producers: whether what computes the members' operands joins in.
    """
    members = dict(seeds)
    while True:
        before = len(members)
        if producers:
            _take_producers(program, members, parts, only)
        _take_readers(program, members, parts, only, partial_sums)
        if len(members) == before:
            return members


def back_to_matmul(program: Program, reduce: Message, dimension: int, parts: int) -> dict[int, int]:
    """An all-reduce, the matmul whose result it sums, and what lies between; empty where there is none such."""
    members: dict[int, int] = {}
    value, wanted = reduce, dimension
    while value.id == reduce.id or value.opcode in PASSING or value.opcode == "dot":
        needs = _needs_or_none(program, value, wanted, parts)
        if needs is None:
            return {}
        members[value.id] = wanted
        if value.opcode == "dot":
            return members
        if needs[0] is None:
            return {}
        value, wanted = program.operands(value)[0], needs[0]
    return {}


def _take_producers(
    program: Program, members: dict[int, int], parts: int, only: Collection[str] | None
) -> None:
    for instruction in reversed(program.instructions):
        if instruction.id not in members:
            continue
        needs = operand_needs(program, instruction, members[instruction.id], parts)
        for operand, need in zip(program.operands(instruction), needs, strict=True):
            if need is None or operand.id in members or not _may_join(operand, need, only):
                continue
            wanted = _needs_or_none(program, operand, need, parts)
            if wanted is not None and _agrees(members, operand, wanted):
                members[operand.id] = need


def _may_join(operand: Message, need: int, only: Collection[str] | None) -> bool:
    if operand.opcode in _GIVEN or (only is not None and operand.opcode not in only):
        return False
    return operand.opcode not in ("broadcast", "iota") or need in operand.dimensions


def _take_readers(
    program: Program,
    members: dict[int, int],
    parts: int,
    only: Collection[str] | None,
    partial_sums: bool,
) -> None:
    for instruction in program.instructions:
        if instruction.id in members or (only is not None and instruction.opcode not in only):
            continue
        if not any(members.get(o, -1) >= 0 for o in instruction.operand_ids):
            continue
        dimension = _joining_dimension(program, members, instruction, parts, partial_sums)
        if dimension is not None:
            members[instruction.id] = dimension


def _joining_dimension(
    program: Program, members: dict[int, int], reader: Message, parts: int, partial_sums: bool
) -> int | None:
    candidates = list(range(len(dims(reader))))
    if partial_sums and reader.opcode == "dot":
        candidates += [~k for k in reader.dot_dimension_numbers.lhs_contracting_dimensions]
    elif partial_sums and reader.opcode == "reduce":
        candidates += [~k for k in reader.dimensions]
    for dimension in candidates:
        needs = _needs_or_none(program, reader, dimension, parts)
        if needs is not None and _agrees(members, reader, needs):
            return dimension
    return None


def _agrees(members: dict[int, int], instruction: Message, needs: Needs) -> bool:
    return all(
        members.get(operand, -1) in (-1, need) or members[operand] < 0
        for operand, need in zip(instruction.operand_ids, needs, strict=True)
    )


def _needs_or_none(program: Program, instruction: Message, dimension: int, parts: int) -> Needs | None:
    try:
        return operand_needs(program, instruction, dimension, parts)
    except IllegalMoveError:
        return None


def as_move(program: Program, members: dict[int, int], parts: int) -> Chunk:
    """The chunk move of a stretch."""
    found = [(at, i) for at, i in enumerate(program.instructions) if i.id in members]
    return Chunk(
        tuple(at for at, _ in found),
        tuple(i.opcode for _, i in found),
        tuple(members[i.id] for _, i in found),
        parts,
    )
