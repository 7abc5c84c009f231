"""Every move of the kinds that unrolled steps have, one by one: what tests choose from at random."""

from collections.abc import Iterator

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import Message
from disco_hlo.structure import propose
from disco_hlo.structure.chunk import check
from disco_hlo.structure.moves import Chunk, Move, Reorder, Split, apply_to
from disco_hlo.structure.program import Program, dims
from disco_hlo.structure.propose import Asker, as_move, grow


def legal_moves(module: bytes) -> list[Move]:
    """Every split, reorder and sliced send that is legal; of the chunks, per matmul and all-reduce, dimension and
    number of parts, the one around it alone and the largest stretch around it."""
    program = Program(module)
    found: dict[Move, None] = {}
    for move in _candidates(program):
        if move not in found and _is_legal(module, program, move):
            found[move] = None
    return list(found)


def _is_legal(module: bytes, program: Program, move: Move) -> bool:
    try:
        if isinstance(move, Chunk):
            at = (program.instructions[position].id for position in move.instructions)
            check(program, dict(zip(at, move.dimensions, strict=True)), move.parts)
        else:
            apply_to(Program(module), move)
    except IllegalMoveError:
        return False
    return True


def _candidates(program: Program) -> Iterator[Move]:
    asker = Asker(program)
    at = {i.id: position for position, i in enumerate(program.instructions)}
    for position, instruction in enumerate(program.instructions):
        rank = len(dims(instruction))
        if instruction.opcode == "all-reduce":
            yield from (Split(position, dimension) for dimension in range(rank))
        elif instruction.opcode == "all-gather":
            yield from (
                Reorder(position, at[r.id], r.opcode) for r in propose._readers_behind(program, instruction)
            )
        elif propose._is_send(instruction):
            yield from propose._sliced(program, (), position)
        if instruction.opcode not in COLLECTIVES | {"dot"}:
            continue
        for dimension in range(rank):
            for parts in propose._PARTS:
                yield Chunk((position,), (instruction.opcode,), (dimension,), parts)
                yield from _grown(asker, instruction, dimension, parts)


def _grown(asker: Asker, seed: Message, dimension: int, parts: int) -> Iterator[Chunk]:
    try:
        yield as_move(asker.program, grow(asker, {seed.id: dimension}, parts), parts)
    except IllegalMoveError:
        return
