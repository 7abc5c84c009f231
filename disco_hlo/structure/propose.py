"""Which structural moves a module has, as named schedules: CoCoNet's (figure 4, section 6.1).

A chunk takes along a stretch, which grows from a seed in both directions. Backward it takes in what computes the parts
its members need; forward whatever reads its members in parts. An instruction that would need a member whole, or along
another dimension, stays out: the value is then joined for it, which is legal, but ends the overlap there.
Weight gradients contract the dimension; they close the stretch with partial sums.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.collectives import Groups
from disco_hlo.hlo.opcodes import ALIKE, ELEMENTWISE
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.chunk import Needs, operand_needs
from disco_hlo.structure.moves import Chunk, Move, Reorder, SliceSend, Split, apply_to
from disco_hlo.structure.program import Program, bits, computations, dims
from disco_hlo.structure.propose_loops import loop_schedules
from disco_hlo.structure.sharded import SameValues, groups_of, reorder, split

UNCHANGED = "matmul, all-reduce, fused pointwise"
"""What XLA does by itself."""
PASSING = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
"""Ops between a matmul and its all-reduce that do no work worth speaking of."""
_GIVEN = frozenset({"parameter", "constant"})
_PARTS = (2, 4)
_POINTWISE = ELEMENTWISE | PASSING | {"broadcast", "reduce"}
_ON_SHARDS = ELEMENTWISE | PASSING | {"reduce", "dynamic-slice"}
"""Readers that an all-gather is moved behind: pointwise work, norms, and taking the own shard back."""
_MOST_SEEDS = 8


def schedules(module: bytes, *, copies: bool = True, in_float32: bool = True) -> dict[str, tuple[Move, ...]]:
    """Named schedules of a module; empty where it has none but that of XLA. ``copies`` is as for :class:`Program`,
    ``in_float32`` as for :func:`loop_schedules`.

    * ``matmul, all-reduce, fused pointwise``: no move, what XLA does.
    * ``chunk-2``, ``chunk-4``: the longest stretch that holds most all-reduces, in as many parts;
      ``chunk-2-whole-gradients`` keeps the sums over the chunked dimension (weight gradients) whole.
    * ``chunk-2-matmul``: every matmul before an all-reduce, and the all-reduce, in two parts.
    * ``split``: matmul, reduce-scatter, pointwise work on shards, all-gather.
    * ``overlap``: matmul, all-reduce and pointwise work in two parts; ``split-overlap``: these parts split.
    * ``sharded-update``: where this device's shard of a sum is all that is used, the sum is scattered.
    * ``slice-sends``: what a group holds alike is sent in shards and gathered behind the send; ``split-slice-sends``:
      the same after ``split``, so that sums are scattered, sent, and gathered.
    * those of loops: see :func:`loop_schedules`.
    """
    program = Program(module, copies=copies)
    in_loops = loop_schedules(module, copies=copies, in_float32=in_float32)
    reduces = [i for i in program.instructions if i.opcode == "all-reduce" and len(i.operand_ids) == 1]
    sliced = slice_sends(module, copies=copies)
    if not reduces and not in_loops and not sliced:
        return {}
    asker = Asker(program)
    found: dict[str, tuple[Move, ...]] = {UNCHANGED: (), **in_loops}
    if sliced:
        found["slice-sends"] = sliced
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
    both = slice_sends(module, found["split"], copies=copies) if sliced and "split" in found else ()
    if both:
        found["split-slice-sends"] = both
    update = _sharded_update(module, reduces, copies=copies)
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


def _matmul_stretches(asker: Asker, reduces: list[Message]) -> dict[int, dict[int, int]]:
    """Per all-reduce that sums what a matmul made: both and what lies between, along the first free dimension."""
    found: dict[int, dict[int, int]] = {}
    for reduce in reduces:
        tried = (back_to_matmul(asker, reduce, d, 2) for d in range(len(dims(reduce))))
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
    split = _split_and_push(module, (), names, copies=program.copies)
    if split:
        found["split"] = split
    pointwise = grow(asker, together, 2, only=_POINTWISE, partial_sums=False, producers=False)
    overlap = as_move(program, pointwise, 2)
    found["overlap"] = (overlap,)
    halves = [f"{name}.part{part}" for name in names for part in range(2)]
    both = _split_and_push(module, (overlap,), halves, copies=program.copies)
    if both:
        found["split-overlap"] = both
    return found


def _split_and_push(
    module: bytes, before: tuple[Move, ...], names: list[str], *, copies: bool
) -> tuple[Move, ...]:
    """Split the named all-reduces, and move every all-gather behind the pointwise work that reads it."""
    program = Program(module, copies=copies)
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
    narrows = reader.opcode == "convert" and bits(reader) < bits(program.operands(reader)[0])
    if reader.opcode not in PASSING or narrows:
        return True
    return any(_leads_to_work(program, further) for further in program.readers(reader))


def _position(program: Program, name: str) -> int:
    return next(at for at, i in enumerate(program.instructions) if i.name == name)


def _sharded_update(module: bytes, reduces: list[Message], *, copies: bool) -> tuple[Move, ...]:
    """Scatter the sums of which every device uses its own shard alone."""
    program = Program(module, copies=copies)
    moves: list[Move] = []
    gathers: set[int] = set()
    for reduce in [program.by_id[r.id] for r in reduces]:
        dimension = _dimension_of_shards(program, reduce)
        if dimension is not None:
            _take_split(program, reduce.name, dimension, moves, gathers)
    _push(program, moves, gathers)
    return tuple(moves)


def slice_sends(module: bytes, before: tuple[Move, ...] = (), *, copies: bool = True) -> tuple[Move, ...]:
    """``before``, then every send that can go in shards, in the entry and in loops; nothing where none can."""
    program = Program(module, copies=copies)
    for move in before:
        apply_to(program, move)
    moves = list(before)
    sends = [one.name for _, own in computations(program) for one in own.instructions if _is_send(one)]
    for name in dict.fromkeys(sends):  # two loops may share a body
        # An earlier move may have shifted the loops.
        path, own = next(
            at for at in computations(program) if any(one.name == name for one in at[1].instructions)
        )
        for move in _sliced(own, path, _position(own, name)):
            try:
                apply_to(program, move)
            except IllegalMoveError:
                continue
            moves.append(move)
            break
    return tuple(moves) if len(moves) > len(before) else ()


def _is_send(instruction: Message) -> bool:
    return bool(instruction.opcode == "collective-permute")


def _sliced(own: Program, path: tuple[int, ...], send: int) -> Iterator[SliceSend]:
    """Ways to slice a send: by the groups of the collectives next to it, and each dimension of its array."""
    seen: set[Groups] = set()
    for at, grouped in enumerate(own.instructions):
        if grouped.opcode not in ALIKE:
            continue
        try:
            groups = groups_of(own, grouped)
        except IllegalMoveError:
            continue
        if groups not in seen:
            seen.add(groups)
            for dimension in range(len(dims(own.instructions[send]))):
                yield SliceSend(path, send, at, grouped.opcode, dimension)


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
