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


class Asker:
    """What the instructions of a program that stays as it is need of their operands; each question is answered once.

    A stretch is grown in many passes, and many are grown in one program.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[tuple[int, int, int], Needs | None] = {}

    def needs(self, instruction: Message, dimension: int, parts: int) -> Needs | None:
        """As :func:`operand_needs`; None where that refuses."""
        key = (instruction.id, dimension, parts)
        if key not in self._known:
            try:
                self._known[key] = operand_needs(self.program, instruction, dimension, parts)
            except IllegalMoveError:
                self._known[key] = None
        return self._known[key]


def grow(
    asker: Asker,
    seeds: dict[int, int],
    parts: int,
    *,
    only: Collection[str] | None = None,
    partial_sums: bool = True,
    producers: bool = True,
) -> dict[int, int]:
    """The largest stretch around ``seeds`` (id -> dimension of the result), as id -> dimension.

    Args:
        asker: of the program; it is not changed.
        seeds: instructions that belong to the stretch.
        parts: into how many parts it shall come.
        only: opcodes that may be taken in; all where None.
        partial_sums: whether contractions over the dimension join in, as partial sums.
        producers: whether what computes the members' operands joins in.

    Raises:
        IllegalMoveError: a seed cannot be computed in parts that way.
    """
    for seed, dimension in seeds.items():
        operand_needs(asker.program, asker.program.by_id[seed], dimension, parts)
    members = dict(seeds)
    while True:
        before = len(members)
        if producers:
            _take_producers(asker, members, parts, only)
        _take_readers(asker, members, parts, only, partial_sums)
        if len(members) == before:
            return members


def back_to_matmul(asker: Asker, reduce: Message, dimension: int, parts: int) -> dict[int, int]:
    """An all-reduce, the matmul whose result it sums, and what lies between; empty where there is none such."""
    members: dict[int, int] = {}
    value, wanted = reduce, dimension
    while value.id == reduce.id or value.opcode in PASSING or value.opcode == "dot":
        needs = asker.needs(value, wanted, parts)
        if needs is None:
            return {}
        members[value.id] = wanted
        if value.opcode == "dot":
            return members
        if needs[0] is None:
            return {}
        value, wanted = asker.program.operands(value)[0], needs[0]
    return {}


def _take_producers(asker: Asker, members: dict[int, int], parts: int, only: Collection[str] | None) -> None:
    program = asker.program
    for instruction in reversed(program.instructions):
        if instruction.id not in members:
            continue
        needs = asker.needs(instruction, members[instruction.id], parts)
        assert needs is not None, "every member can be computed in parts"
        for operand, need in zip(program.operands(instruction), needs, strict=True):
            if need is None or operand.id in members or not _may_join(operand, need, only):
                continue
            wanted = asker.needs(operand, need, parts)
            if wanted is not None and _agrees(members, operand, wanted):
                members[operand.id] = need


def _may_join(operand: Message, need: int, only: Collection[str] | None) -> bool:
    if operand.opcode in _GIVEN or (only is not None and operand.opcode not in only):
        return False
    return operand.opcode not in ("broadcast", "iota") or need in operand.dimensions


def _take_readers(
    asker: Asker,
    members: dict[int, int],
    parts: int,
    only: Collection[str] | None,
    partial_sums: bool,
) -> None:
    for instruction in asker.program.instructions:
        if instruction.id in members or (only is not None and instruction.opcode not in only):
            continue
        if not any(members.get(o, -1) >= 0 for o in instruction.operand_ids):
            continue
        dimension = _joining_dimension(asker, members, instruction, parts, partial_sums)
        if dimension is not None:
            members[instruction.id] = dimension


def _joining_dimension(
    asker: Asker, members: dict[int, int], reader: Message, parts: int, partial_sums: bool
) -> int | None:
    candidates = list(range(len(dims(reader))))
    if partial_sums and reader.opcode == "dot":
        candidates += [~k for k in reader.dot_dimension_numbers.lhs_contracting_dimensions]
    elif partial_sums and reader.opcode == "reduce":
        candidates += [~k for k in reader.dimensions]
    for dimension in candidates:
        needs = asker.needs(reader, dimension, parts)
        if needs is not None and _agrees(members, reader, needs):
            return dimension
    return None


def _agrees(members: dict[int, int], instruction: Message, needs: Needs) -> bool:
    return all(
        members.get(operand, -1) in (-1, need) or members[operand] < 0
        for operand, need in zip(instruction.operand_ids, needs, strict=True)
    )


def as_move(program: Program, members: dict[int, int], parts: int) -> Chunk:
    """The chunk move of a stretch."""
    found = [(at, i) for at, i in enumerate(program.instructions) if i.id in members]
    return Chunk(
        tuple(at for at, _ in found),
        tuple(i.opcode for _, i in found),
        tuple(members[i.id] for _, i in found),
        parts,
    )
