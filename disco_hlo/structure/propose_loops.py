"""Named schedules of a step whose layers lie in loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.opcodes import TRANSFERS
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.loops import read_loop
from disco_hlo.structure.moves import Double, GatherOnce, Move, Prefetch, apply_moves
from disco_hlo.structure.prefetch import foreseen_gathers
from disco_hlo.structure.program import Program

_Place = tuple[tuple[int, ...], Program, Message]
"""A loop: its path, its caller, the instruction."""


def loop_schedules(module: bytes, *, copies: bool = True) -> dict[str, tuple[Move, ...]]:
    """Named schedules of a module's loops that communicate; those that it has the pattern for.

    * ``prefetch``: each turn of a loop gathers for the next turn.
    * ``double``: loops run two turns in one; ``prefetch-double``: both.
    * ``gather-once``: the backward loop reads what the forward loop gathered; ``gather-once-prefetch``: and the gathers
      that are left are made a turn ahead.
    """
    builder = _Builder(module, copies)
    once = builder.gathered_once(())
    found = {
        "prefetch": builder.prefetched(()),
        "double": builder.doubled(()),
        "gather-once": once,
    }
    found["prefetch-double"] = found["prefetch"] and builder.doubled(found["prefetch"])
    found["gather-once-prefetch"] = once and builder.prefetched(once)
    return {
        name: moves
        for name, moves in found.items()
        if moves and moves not in (found[part] for part in ("prefetch", "gather-once") if part != name)
    }


class _Builder:
    """Lists of moves, each legal after those before it; one refused is left out."""

    def __init__(self, module: bytes, copies: bool) -> None:
        self.module, self.copies = module, copies
        self.names = [instruction.name for _, _, instruction in _loops(Program(module, copies=copies))]

    def prefetched(self, before: tuple[Move, ...]) -> tuple[Move, ...]:
        """``before``, then every loop's gathers a turn ahead."""

        def of(path: tuple[int, ...], caller: Program, instruction: Message) -> Iterator[Move]:
            loop = read_loop(caller, instruction)
            gathers = tuple(loop.body.position(one) for one in foreseen_gathers(loop))
            if gathers:
                yield Prefetch(path, gathers)

        return self._added(before, of)

    def doubled(self, before: tuple[Move, ...]) -> tuple[Move, ...]:
        """``before``, then every loop in turns of two."""
        return self._added(before, lambda path, _caller, _instruction: iter((Double(path),)))

    def gathered_once(self, before: tuple[Move, ...]) -> tuple[Move, ...]:
        """``before``, then every gather that repeats an earlier loop's read from there."""
        moves = before
        for name in self.names:
            while True:
                grown = self._first_legal(moves, self._repeats(moves, name))
                if grown == moves:
                    break
                moves = grown
        return moves

    def _repeats(self, moves: tuple[Move, ...], name: str) -> Iterator[Move]:
        """Pairs of gathers of an earlier loop and of the loop ``name``."""
        places = list(_loops(self._program(moves)))
        path, caller, instruction = next(place for place in places if place[2].name == name)
        try:
            again = [read_loop(caller, instruction).body.position(g) for g in foreseen_gathers(read_loop(caller, instruction))]
        except IllegalMoveError:
            return
        for other, its_caller, earlier in places:
            if its_caller is not caller or other >= path:
                continue
            try:
                loop = read_loop(its_caller, earlier)
                gathers = [loop.body.position(gather) for gather in foreseen_gathers(loop)]
            except IllegalMoveError:
                continue
            yield from (GatherOnce(other, g, path[-1], a) for a in again for g in gathers)

    def _added(
        self, moves: tuple[Move, ...], of: Callable[[tuple[int, ...], Program, Message], Iterator[Move]]
    ) -> tuple[Move, ...]:
        for name in self.names:
            place = next(place for place in _loops(self._program(moves)) if place[2].name == name)
            try:
                moves = self._first_legal(moves, of(*place))
            except IllegalMoveError:
                continue
        return moves

    def _first_legal(self, moves: tuple[Move, ...], candidates: Iterator[Move]) -> tuple[Move, ...]:
        for move in candidates:
            try:
                apply_moves(self.module, (*moves, move), copies=self.copies)
            except IllegalMoveError:
                continue
            return (*moves, move)
        return moves

    def _program(self, moves: tuple[Move, ...]) -> Program:
        return Program(apply_moves(self.module, moves, copies=self.copies), copies=self.copies)


def _loops(program: Program, path: tuple[int, ...] = ()) -> Iterator[_Place]:
    """The loops that communicate and hold no others, wherever they are."""
    for position, instruction in enumerate(program.instructions):
        if instruction.opcode != "while":
            continue
        body = program.inside(instruction.called_computation_ids[0])
        inner = list(_loops(body, (*path, position)))
        yield from inner
        if not inner and any(one.opcode in TRANSFERS for one in body.instructions):
            yield (*path, position), program, instruction
