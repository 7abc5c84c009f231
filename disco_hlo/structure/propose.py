"""Which structural moves a module has, one by one and as CoCoNet's schedules by name (figure 4, section 6.1)."""

from __future__ import annotations

from collections.abc import Iterator

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.collectives import Groups
from disco_hlo.hlo.opcodes import COLLECTIVES, ELEMENTWISE
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.chunk import check
from disco_hlo.structure.groups import SameValues, groups_of
from disco_hlo.structure.moves import Chunk, Move, Reorder, Split, apply_to
from disco_hlo.structure.program import Program, bits, dims
from disco_hlo.structure.propose_loops import loop_schedules
from disco_hlo.structure.region import PASSING, Asker, as_move, back_to_matmul, grow
from disco_hlo.structure.sharded import reorder, split

UNCHANGED = "matmul, all-reduce, fused pointwise"
"""What XLA does by itself."""
_PARTS = (2, 4)
_POINTWISE = ELEMENTWISE | PASSING | {"broadcast", "reduce"}
_ON_SHARDS = ELEMENTWISE | PASSING | {"reduce", "dynamic-slice"}
"""Readers that an all-gather is moved behind: pointwise work, norms, and taking the own shard back."""
_MOST_SEEDS = 8


def legal_moves(module: bytes) -> list[Move]:
    """Every split and reorder that is legal; of the chunks, per matmul and all-reduce, dimension and number of
    parts, the one around it alone and the largest stretch around it."""
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
            yield from (Reorder(position, at[r.id], r.opcode) for r in _readers_behind(program, instruction))
        if instruction.opcode not in COLLECTIVES | {"dot"}:
            continue
        for dimension in range(rank):
            for parts in _PARTS:
                yield Chunk((position,), (instruction.opcode,), (dimension,), parts)
                yield from _grown(asker, instruction, dimension, parts)


def _grown(asker: Asker, seed: Message, dimension: int, parts: int) -> Iterator[Chunk]:
    try:
        yield as_move(asker.program, grow(asker, {seed.id: dimension}, parts), parts)
    except IllegalMoveError:
        return


def schedules(module: bytes, *, copies: bool = True) -> dict[str, tuple[Move, ...]]:
    """Named schedules of a module; empty where it has no collective. ``copies`` is as for :class:`Program`.

    * ``matmul, all-reduce, fused pointwise``: no move, what XLA does.
    * ``chunk-2``, ``chunk-4``: the longest stretch that holds most all-reduces, in as many parts;
      ``chunk-2-whole-gradients`` keeps the sums over the chunked dimension (weight gradients) whole.
    * ``chunk-2-matmul``: every matmul before an all-reduce, and the all-reduce, in two parts.
    * ``split``: matmul, reduce-scatter, pointwise work on shards, all-gather.
    * ``overlap``: matmul, all-reduce and pointwise work in two parts; ``split-overlap``: these parts split.
    * ``sharded-update``: where this device's shard of a sum is all that is used, the sum is scattered.
    * those of loops: see :func:`loop_schedules`.
    """
    program = Program(module)
    in_loops = loop_schedules(module, copies=copies)
    reduces = [i for i in program.instructions if i.opcode == "all-reduce" and len(i.operand_ids) == 1]
    if not reduces and not in_loops:
        return {}
    asker = Asker(program)
    found: dict[str, tuple[Move, ...]] = {UNCHANGED: (), **in_loops}
    for parts in _PARTS:
        stretch = _longest(asker, reduces, parts)
        if stretch:
            found[f"chunk-{parts}"] = (as_move(program, stretch, parts),)
            short = {i: d for i, d in stretch.items() if d >= 0}
            if parts == 2 and short != stretch:
                found["chunk-2-whole-gradients"] = (as_move(program, short, parts),)
    matmuls = _matmul_stretches(asker, reduces)
    if matmuls:
        found |= _coconet(module, asker, matmuls)
    update = _sharded_update(module, reduces)
    if update:
        found["sharded-update"] = update
    return found


def _longest(asker: Asker, reduces: list[Message], parts: int) -> dict[int, int]:
    """The stretch with most all-reduces, then most matmuls, around one of the first all-reduces."""
    best: dict[int, int] = {}
    best_score = (0, 0)
    seen: set[tuple[int, int]] = set()
    for seed in reduces[:_MOST_SEEDS]:
        for dimension in range(len(dims(seed))):
            if (seed.id, dimension) in seen:
                continue
            try:
                stretch = grow(asker, {seed.id: dimension}, parts)
            except IllegalMoveError:
                continue
            seen |= set(stretch.items())
            opcodes = [asker.program.by_id[i].opcode for i in stretch]
            score = (opcodes.count("all-reduce"), opcodes.count("dot"))
            if score > best_score:
                best, best_score = stretch, score
    return best


def _matmul_stretches(asker: Asker, reduces: list[Message], parts: int = 2) -> dict[int, dict[int, int]]:
    """Per all-reduce that sums what a matmul made: both and what lies between, along the first free dimension."""
    found: dict[int, dict[int, int]] = {}
    for reduce in reduces:
        tried = (back_to_matmul(asker, reduce, d, parts) for d in range(len(dims(reduce))))
        stretch = next(filter(None, tried), None)
        if stretch:
            found[reduce.id] = stretch
    return found


def _coconet(module: bytes, asker: Asker, matmuls: dict[int, dict[int, int]]) -> dict[str, tuple[Move, ...]]:
    program = asker.program
    found: dict[str, tuple[Move, ...]] = {}
    together = {i: d for stretch in matmuls.values() for i, d in stretch.items()}
    found["chunk-2-matmul"] = (as_move(program, together, 2),)
    names = [program.by_id[i].name for i in matmuls]
    split = _split_and_push(module, (), names)
    if split:
        found["split"] = split
    pointwise = grow(asker, together, 2, only=_POINTWISE, partial_sums=False, producers=False)
    overlap = as_move(program, pointwise, 2)
    found["overlap"] = (overlap,)
    both = _split_and_push(module, (overlap,), [f"{name}.part{part}" for name in names for part in range(2)])
    if both:
        found["split-overlap"] = both
    return found


def _split_and_push(module: bytes, before: tuple[Move, ...], names: list[str]) -> tuple[Move, ...]:
    """Split the named all-reduces, and move every all-gather behind the pointwise work that reads it."""
    program = Program(module)
    for move in before:
        apply_to(program, move)
    moves = list(before)
    gathers: set[int] = set()
    for name in names:
        for dimension in range(len(dims(program.instructions[_position(program, name)]))):
            if _take_split(program, name, dimension, moves, gathers):
                break
    _push(program, moves, gathers)
    return tuple(moves) if gathers else ()


def _take_split(program: Program, name: str, dimension: int, moves: list[Move], gathers: set[int]) -> bool:
    at = _position(program, name)
    try:
        gathers.add(split(program, program.instructions[at], dimension).id)
    except IllegalMoveError:
        return False
    moves.append(Split(at, dimension))
    return True


def _push(program: Program, moves: list[Move], gathers: set[int]) -> None:
    """Move the all-gathers behind their pointwise readers until none is left in front of one."""
    refused: set[tuple[int, int]] = set()
    same: dict[Groups, SameValues] = {}
    while True:
        pair = _next_pair(program, gathers, refused)
        if pair is None:
            return
        gather, reader = pair
        move = Reorder(program.position(gather), program.position(reader), reader.opcode)
        groups = groups_of(program, gather)
        if groups not in same:
            same[groups] = SameValues(program, groups)
        try:
            made = reorder(program, gather, reader, same[groups])
        except IllegalMoveError:
            refused.add((gather.id, reader.id))
            continue
        moves.append(move)
        if made is not None:
            gathers.add(made.id)


def _next_pair(
    program: Program, gathers: set[int], refused: set[tuple[int, int]]
) -> tuple[Message, Message] | None:
    for gather in [program.by_id[i] for i in sorted(gathers) if i in program.by_id]:
        for reader in _readers_behind(program, gather):
            if (gather.id, reader.id) not in refused and _leads_to_work(program, reader):
                return gather, reader
    return None


def _readers_behind(program: Program, gather: Message) -> list[Message]:
    """The readers of an all-gather, and those that take a piece of its transpose."""
    readers = program.readers(gather)
    turned = [r for r in readers if r.opcode == "transpose"]
    return readers + [r for t in turned for r in program.readers(t) if r.opcode == "dynamic-slice"]


def _leads_to_work(program: Program, reader: Message) -> bool:
    """Whether moving behind ``reader`` saves anything: it works, it makes the value narrower, or it only hands
    the value on to what does. Behind the others an all-gather would carry as much, perhaps several times."""
    if reader.opcode not in _ON_SHARDS:
        return False
    if reader.opcode not in PASSING or _narrows(program, reader):
        return True
    return any(_leads_to_work(program, further) for further in program.readers(reader))


def _narrows(program: Program, reader: Message) -> bool:
    return reader.opcode == "convert" and bits(reader) < bits(program.operands(reader)[0])


def _position(program: Program, name: str) -> int:
    return next(at for at, i in enumerate(program.instructions) if i.name == name)


def _sharded_update(module: bytes, reduces: list[Message]) -> tuple[Move, ...]:
    """Scatter the sums of which every device uses its own shard alone."""
    program = Program(module)
    moves: list[Move] = []
    gathers: set[int] = set()
    for reduce in [program.by_id[r.id] for r in reduces]:
        dimension = _dimension_of_shards(program, reduce)
        if dimension is not None:
            _take_split(program, reduce.name, dimension, moves, gathers)
    _push(program, moves, gathers)
    return tuple(moves)


def _dimension_of_shards(program: Program, reduce: Message) -> int | None:
    """The dimension along which pieces are taken of everything that reads the sum; None where it is read whole."""
    found: set[int] = set()
    waiting, seen = [reduce], {reduce.id}
    while waiting:
        value = waiting.pop()
        readers = program.readers(value)
        if value.id == program.root or not readers:
            return None
        for reader in readers:
            # A sum that says where a piece begins is read whole.
            if reader.opcode == "dynamic-slice" and value.id not in reader.operand_ids[1:]:
                found |= {d for d, size in enumerate(dims(reader)) if size != dims(value)[d]}
            elif reader.opcode not in ELEMENTWISE | {"copy"} or dims(reader) != dims(reduce):
                return None
            elif reader.id not in seen:
                seen.add(reader.id)
                waiting.append(reader)
    return found.pop() if len(found) == 1 else None
