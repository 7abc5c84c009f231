"""The structural moves as values, applied one after another, and as JSON (CoCoNet, section 3).

A move names instructions by their position in the list of their computation, in the module it is applied to, with
the opcode that must be found there: the entry, or for moves of loops the computation that the path leads into. A move
holds nothing else of a module: dropping it from a list gives what the others make of the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from disco_hlo.errors import IllegalMoveError, PlanError
from disco_hlo.hlo.opcodes import ALIKE
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.chunk import MOST_PARTS, chunk
from disco_hlo.structure.hoist import hoist, hoist_repeated
from disco_hlo.structure.keep import keep, keep_turns
from disco_hlo.structure.loops import read_loop
from disco_hlo.structure.narrow import narrow
from disco_hlo.structure.program import Program, illegal
from disco_hlo.structure.rotation import double, finish_later, prefetch
from disco_hlo.structure.sharded import reorder, slice_send, split
from disco_hlo.structure.unroll import unroll
from disco_hlo.structure.widen import widen

Position = Annotated[int, Meta(ge=0, le=1 << 31)]
Opcode = Annotated[str, Meta(min_length=1, max_length=64)]


def _kind(name: str) -> str:
    return re.sub(r"\B(?=[A-Z])", "-", name).lower()


class _Move(Struct, frozen=True, forbid_unknown_fields=True, tag_field="move", tag=_kind):
    """In JSON its kind stands under ``move``: ``finish-later``."""


class Split(_Move, frozen=True):
    """An all-reduce becomes a reduce-scatter and an all-gather (CoCoNet, section 3.2)."""

    all_reduce: Position
    dimension: Annotated[int, Meta(ge=0, le=64)]
    """Dimension along which each device of a group gets its shard."""
    opcode: Opcode = "all-reduce"


class Reorder(_Move, frozen=True):
    """An all-gather moves behind one of its readers, which then works on shards (section 3.3).

    A reader that takes this device's own shard back (``dynamic-slice``) cancels the all-gather.
    """

    all_gather: Position
    reader: Position
    opcode: Opcode
    """Of the reader."""


class Chunk(_Move, frozen=True):
    """A stretch of the program is computed in parts (section 3.5, and over any stretch)."""

    instructions: tuple[Position, ...]
    """The stretch, ascending."""
    opcodes: tuple[Opcode, ...]
    """Of each."""
    dimensions: tuple[Annotated[int, Meta(ge=-64, le=64)], ...]
    """Of each: the dimension of its result that comes in parts; ``~k`` (negative) where the parts are partial
    sums over dimension ``k`` of its first operand."""
    parts: Annotated[int, Meta(ge=2, le=MOST_PARTS)]


Path = Annotated[tuple[Position, ...], Meta(min_length=1, max_length=16)]
"""To a loop: the position of a while in the entry, then in its body, and so on."""


class Prefetch(_Move, frozen=True):
    """A loop's turn gathers what the next turn reads (rotation)."""

    loop: Path
    gathers: Annotated[tuple[Position, ...], Meta(min_length=1)]
    """All-gathers of the loop's body."""


class FinishLater(_Move, frozen=True):
    """A loop's turn makes the reductions of the turn before it (rotation)."""

    loop: Path
    reductions: Annotated[tuple[Position, ...], Meta(min_length=1)]
    """Of the loop's body."""
    opcodes: tuple[Opcode, ...]
    """Of each."""


class Double(_Move, frozen=True):
    """A loop runs two turns in one."""

    loop: Path


class Unroll(_Move, frozen=True):
    """All turns of a loop are written out, and the loop is gone."""

    loop: Path


class Narrow(_Move, frozen=True):
    """What all-gathers gather is converted to fewer bits before, not after."""

    loop: Annotated[tuple[Position, ...], Meta(max_length=16)]
    """Path to the loop in whose body they are; empty for the entry."""
    gathers: Annotated[tuple[Position, ...], Meta(min_length=1)]


class Widen(_Move, frozen=True):
    """Rows that scatters add up in 16 bits are added up in float32, and rounded once."""

    loop: Annotated[tuple[Position, ...], Meta(max_length=16)]
    """Path to the loop in whose body they are; empty for the entry."""
    sums: Annotated[tuple[Position, ...], Meta(min_length=1)]


_Pairs = Annotated[tuple[tuple[Position, Position], ...], Meta(min_length=1)]


class Keep(_Move, frozen=True):
    """What a computation makes again is read where it was made first."""

    loop: Annotated[tuple[Position, ...], Meta(max_length=16)]
    """Path to the loop whose body it is; empty for the entry."""
    pairs: _Pairs
    """Of each value where it is made first, and where again."""
    opcodes: tuple[tuple[Opcode, Opcode], ...]
    """Of both."""


class KeepTurns(_Move, frozen=True):
    """What the turns of a loop make again they read from those of an earlier loop, which keep it."""

    loop: Path
    """The earlier one."""
    later: Position
    """The other loop, in the same computation."""
    pairs: _Pairs
    """Of each value where it is made in the earlier loop's body, and where in the other's."""
    opcodes: tuple[tuple[Opcode, Opcode], ...]
    """Of both."""


class Hoist(_Move, frozen=True):
    """What the loops in a loop gather in every turn of it is gathered before it."""

    loop: Path
    gathers: _Pairs
    """Of each the inner loop, in the body, and the all-gather, in the inner loop's."""


class HoistRepeated(_Move, frozen=True):
    """What every turn of a loop gathers alike is gathered before it."""

    loop: Path
    gathers: Annotated[tuple[Position, ...], Meta(min_length=1)]
    """All-gathers of the loop's body."""


class FusedPair(Struct, frozen=True, forbid_unknown_fields=True):
    """A matmul and a collective that one kernel replaces, or a sum and an all-gather with an update between."""

    kernel: Opcode
    """Its name in ``disco_hlo.kernels.catalog``."""
    loop: Annotated[tuple[Position, ...], Meta(max_length=16)]
    """Path to the loop in whose body they are; empty in the entry."""
    collective: Position
    opcode: Opcode
    """Of the collective."""
    matmul: Position
    """Of an update the all-gather."""
    tiles: dict[str, str | int | bool | None]
    """The kernel's ``MatmulTiles`` or ``UpdateTiles``, by field."""


class Fuse(_Move, frozen=True):
    """Kernels that compute and communicate at once replace matmuls and their collectives (``disco_hlo.kernels``)."""

    pairs: Annotated[tuple[FusedPair, ...], Meta(min_length=1)]


class SliceSend(_Move, frozen=True):
    """Devices that hold an array alike send a shard each, which the receivers gather (CoCoNet, section 6.3)."""

    loop: Annotated[tuple[Position, ...], Meta(max_length=16)]
    """Path to the loop in whose body the send is; empty in the entry."""
    send: Position
    """A collective-permute."""
    grouped: Position
    """A collective of the same computation, between the groups that hold the array alike."""
    opcode: Opcode
    """Of that collective."""
    dimension: Annotated[int, Meta(ge=0, le=64)]
    """Along which the shards lie."""


OfLoops = Prefetch | FinishLater | Double | Unroll | KeepTurns | Hoist | HoistRepeated
Move = Split | Reorder | Chunk | Fuse | SliceSend | Narrow | Widen | Keep | OfLoops
Fuser = Callable[["Program", "Fuse"], None]
"""Replaces the pairs of a move; needs JAX, so it comes from above."""

_Moves = Annotated[tuple[Move, ...], Meta(max_length=1 << 16)]


def apply_moves(
    module: bytes, moves: Sequence[Move], *, copies: bool = True, fuser: Fuser | None = None
) -> bytes:
    """The module after ``moves``, in sequence; every position refers to the module after the earlier moves.

    No move gives the very bytes back.

    Args:
        module: a serialized HloModuleProto without a schedule.
        moves: what to do.
        copies: as for :class:`Program`.
        fuser: puts kernels in; a move that asks for some is refused where there is none.

    Raises:
        IllegalMoveError: a move does not fit; names the move, the instruction and the reason.
        ModuleError: the bytes are no HLO module.
    """
    if not moves:
        return module
    program = Program(module, copies=copies)
    for number, move in enumerate(moves):
        try:
            apply_to(program, move, fuser)
        except IllegalMoveError as error:
            named = f"move {number} ({move.__struct_config__.tag})"
            raise IllegalMoveError(f"{named} is illegal: {error}") from None
    return program.serialize()


def apply_to(program: Program, move: Move, fuser: Fuser | None = None) -> None:
    """Apply one move to a program in place.

    Raises:
        IllegalMoveError: it does not fit; the program may then be rewritten in part.
    """
    if isinstance(move, Split):
        split(program, program.at(move.all_reduce, "all-reduce"), move.dimension)
    elif isinstance(move, Reorder):
        gather = program.at(move.all_gather, "all-gather")
        reorder(program, gather, program.at(move.reader, move.opcode))
    elif isinstance(move, Fuse):
        if fuser is None:
            raise IllegalMoveError("fused kernels run on GPUs alone")
        fuser(program, move)
    elif isinstance(move, OfLoops):
        _apply_to_loop(program, move)
    elif isinstance(move, Chunk):
        chunk(program, _members(program, move), move.parts)
    else:
        computations = _along(program, move.loop)
        _apply_inside(computations[-1], move)
        for computation in computations[1:]:
            computation.flush()


def _apply_inside(inner: Program, move: SliceSend | Keep | Narrow | Widen) -> None:
    if isinstance(move, Keep):
        keep(inner, _pairs(move, inner, inner))
    elif isinstance(move, Narrow):
        narrow(inner, [inner.at(position, "all-gather") for position in move.gathers])
    elif isinstance(move, Widen):
        widen(inner, [inner.at(position, "scatter") for position in move.sums])
    elif move.opcode not in ALIKE:
        raise IllegalMoveError(f"a {move.opcode} leaves no array alike on the devices of a group")
    else:
        send, grouped = inner.at(move.send, "collective-permute"), inner.at(move.grouped, move.opcode)
        slice_send(inner, send, grouped, move.dimension)


def _apply_to_loop(program: Program, move: OfLoops) -> None:
    callers = _along(program, move.loop[:-1])
    caller = callers[-1]
    loops = [read_loop(caller, caller.at(move.loop[-1], "while"))]
    if isinstance(move, Prefetch):
        prefetch(loops[0], [loops[0].body.at(position, "all-gather") for position in move.gathers])
    elif isinstance(move, FinishLater):
        body = loops[0].body
        finish_later(
            loops[0], [body.at(at, opcode) for at, opcode in zip(move.reductions, move.opcodes, strict=True)]
        )
    elif isinstance(move, Double):
        double(loops[0])
    elif isinstance(move, Unroll):
        program.flush()
        unroll(loops.pop())
    elif isinstance(move, HoistRepeated):
        hoist_repeated(loops[0], [loops[0].body.at(position, "all-gather") for position in move.gathers])
    elif isinstance(move, Hoist):
        body = loops[0].body
        inner = {
            at: read_loop(body, body.at(at, "while")) for at in dict.fromkeys(at for at, _ in move.gathers)
        }
        hoist(loops[0], [(inner[at], inner[at].body.at(gather, "all-gather")) for at, gather in move.gathers])
        loops = [*inner.values(), *loops]
    else:
        loops.append(read_loop(caller, caller.at(move.later, "while")))
        if move.later <= move.loop[-1]:
            raise illegal(loops[1].instruction, "it comes before the loop that keeps")
        keep_turns(loops[0], loops[1], _pairs(move, loops[0].body, loops[1].body))
    for loop in loops:
        loop.flush()
    for between in callers[1:]:
        between.flush()


def _along(program: Program, path: Sequence[int]) -> list[Program]:
    """The entry, and the body of each loop on a path."""
    found = [program]
    for position in path:
        found.append(found[-1].inside(found[-1].at(position, "while").called_computation_ids[0]))
    return found


def _pairs(move: Keep | KeepTurns, first: Program, again: Program) -> list[tuple[Message, Message]]:
    if len(move.opcodes) != len(move.pairs):
        raise IllegalMoveError(
            f"expected opcodes of each pair, got {len(move.opcodes)} for {len(move.pairs)}"
        )
    pairs = zip(move.pairs, move.opcodes, strict=True)
    return [(first.at(at, opcode), again.at(other, its)) for (at, other), (opcode, its) in pairs]


def _members(program: Program, move: Chunk) -> dict[int, int]:
    if not len(move.instructions) == len(move.opcodes) == len(move.dimensions) > 0:
        raise IllegalMoveError(
            f"expected one opcode and one dimension per instruction, got {len(move.instructions)} instructions, "
            f"{len(move.opcodes)} opcodes, {len(move.dimensions)} dimensions"
        )
    if list(move.instructions) != sorted(set(move.instructions)):
        raise IllegalMoveError("expected the instructions of the stretch in ascending order, each once")
    return {
        program.at(position, opcode).id: dimension
        for position, opcode, dimension in zip(move.instructions, move.opcodes, move.dimensions, strict=True)
    }


def to_json(moves: Sequence[Move]) -> list[dict[str, Any]]:
    """The moves as plain JSON values, each with its kind under ``move``."""
    return [msgspec.to_builtins(move) for move in moves]


def from_json(data: object) -> tuple[Move, ...]:
    """The moves of :func:`to_json`'s value.

    Raises:
        PlanError: it is anything else; says where and why.
    """
    try:
        return msgspec.convert(data, _Moves)
    except msgspec.ValidationError as error:
        raise PlanError(f"structural moves: {error}") from None
