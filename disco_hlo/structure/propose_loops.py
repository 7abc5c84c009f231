"""Named schedules of a step whose layers lie in loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.opcodes import TRANSFERS
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.finish import late_reductions
from disco_hlo.structure.gather_once import gathered, repeated_gathers, what_is_gathered
from disco_hlo.structure.loops import Loop, read_loop
from disco_hlo.structure.moves import (
    Double,
    FinishLater,
    GatherOnce,
    Hoist,
    HoistRepeated,
    Move,
    Prefetch,
    apply_moves,
)
from disco_hlo.structure.prefetch import foreseen_gathers
from disco_hlo.structure.program import Program

_Place = tuple[tuple[int, ...], Program, Message]
"""A loop: its path, its caller, the instruction."""


def loop_schedules(module: bytes, *, copies: bool = True) -> dict[str, tuple[Move, ...]]:
    """Named schedules of a module's loops that communicate; those that it has the pattern for.

    * ``prefetch``: each turn of a loop gathers for the next turn.
    * ``finish-later``: each turn makes the reductions of the turn before it; ``rotate``: both.
    * ``double``: loops run two turns in one; ``prefetch-double``: both.
    * ``hoist``: a loop over microbatches gathers nothing; all its loops gather is gathered before it.
    * ``gather-once``: the backward loop reads what the forward loop gathered; ``gather-once-prefetch``: and the gathers
      that are left are made a turn ahead; ``gather-once-rotate``: and the reductions a turn later.
    """
    builder = _Builder(module, copies)
    once = builder.gathered_once(())
    found = {
        "prefetch": builder.prefetched(()),
        "double": builder.doubled(()),
        "gather-once": once,
        "hoist": builder.hoisted(()),
        "finish-later": builder.finished_later(()),
    }
    found["rotate"] = found["prefetch"] and builder.finished_later(found["prefetch"])
    found["prefetch-double"] = found["prefetch"] and builder.doubled(found["prefetch"])
    found["gather-once-prefetch"] = once and builder.prefetched(once)
    found["gather-once-rotate"] = once and builder.finished_later(found["gather-once-prefetch"])
    first: dict[tuple[Move, ...], str] = {}
    for name, moves in found.items():
        first.setdefault(moves, name)
    return {name: moves for moves, name in first.items() if moves}


class _Builder:
    """Lists of moves, each legal after those before it; one refused is left out."""

    def __init__(self, module: bytes, copies: bool) -> None:
        self.module, self.copies = module, copies
        self.every = [one.name for _, _, one in _loops(Program(module, copies=copies), every_loop=True)]
        places = _loops(Program(module, copies=copies))
        self.names = [one.name for _, caller, one in places if _communicates(caller, one)]

    def prefetched(self, before: tuple[Move, ...]) -> tuple[Move, ...]:
        """``before``, then every loop's gathers a turn ahead."""
        return self._with_each(before, lambda places, at: _prefetches(*places[at]))

    def finished_later(self, before: tuple[Move, ...]) -> tuple[Move, ...]:
        """``before``, then every loop's reductions a turn later."""
        return self._with_each(before, lambda places, at: _finishes(*places[at]))

    def doubled(self, before: tuple[Move, ...]) -> tuple[Move, ...]:
        """``before``, then every loop in turns of two."""
        return self._with_each(before, lambda places, at: [Double(places[at][0])])

    def gathered_once(self, before: tuple[Move, ...]) -> tuple[Move, ...]:
        """``before``, then every gather that repeats one of an earlier loop's read from there."""
        return self._with_each(before, _repeats, as_often_as_there_is=True)

    def hoisted(self, before: tuple[Move, ...]) -> tuple[Move, ...]:
        """``before``, then what loops in loops gather gathered before the outer ones."""
        moves = self._with_each(before, _hoists, as_often_as_there_is=True)
        return self._with_each(moves, lambda places, at: _hoists_repeated(*places[at]), every_loop=True)

    def _with_each(
        self,
        moves: tuple[Move, ...],
        candidates: Callable[[list[_Place], int], Iterable[Move]],
        *,
        as_often_as_there_is: bool = False,
        every_loop: bool = False,
    ) -> tuple[Move, ...]:
        """``moves``, then of each loop the first legal candidate, once or as long as there is one."""
        for name in self.every if every_loop else self.names:
            grown = True
            while grown:
                before = Program(self._applied(moves), copies=self.copies)
                places = list(_loops(before, every_loop=every_loop))
                at = next(number for number, place in enumerate(places) if place[2].name == name)
                found = next(filter(None, (self._legal(moves, one) for one in candidates(places, at))), None)
                grown = found is not None and as_often_as_there_is
                moves = found or moves
        return moves

    def _legal(self, moves: tuple[Move, ...], move: Move) -> tuple[Move, ...] | None:
        try:
            self._applied((*moves, move))
        except IllegalMoveError:
            return None
        return (*moves, move)

    def _applied(self, moves: tuple[Move, ...]) -> bytes:
        return apply_moves(self.module, moves, copies=self.copies)


def _gathers(
    caller: Program, instruction: Message, of: Callable[[Loop], list[Message]] = foreseen_gathers
) -> tuple[int, ...]:
    """Positions of the gathers that the turn before can make; none where the loop is in another form."""
    try:
        loop = read_loop(caller, instruction)
        return tuple(loop.body.position(one) for one in of(loop))
    except IllegalMoveError:
        return ()


def _prefetches(path: tuple[int, ...], caller: Program, instruction: Message) -> Iterator[Move]:
    if gathers := _gathers(caller, instruction):
        yield Prefetch(path, gathers)


def _finishes(path: tuple[int, ...], caller: Program, instruction: Message) -> Iterator[Move]:
    try:
        loop = read_loop(caller, instruction)
        found = late_reductions(loop)
    except IllegalMoveError:
        return
    if found:
        positions = tuple(loop.body.position(one) for one in found)
        yield FinishLater(path, positions, tuple(one.opcode for one in found))


def _hoists_repeated(path: tuple[int, ...], caller: Program, instruction: Message) -> Iterator[Move]:
    if gathers := _gathers(caller, instruction, repeated_gathers):
        yield HoistRepeated(path, gathers)


def _hoists(places: list[_Place], at: int) -> Iterator[Move]:
    """A loop's gathers and those of the loops beside it, each before the loop around them."""
    path, body, _ = places[at]
    together: dict[object, list[tuple[int, int]]] = {}
    for other, its_caller, instruction in places if len(path) > 1 else ():
        if its_caller is not body:
            continue
        for gather in _gathers(body, instruction):
            try:
                loop = read_loop(body, instruction)
                what = what_is_gathered(loop, gathered(loop, loop.body.instructions[gather]))
            except IllegalMoveError:
                continue
            together.setdefault(what, []).append((other[-1], gather))
    yield from (Hoist(path[:-1], tuple(gathers)) for gathers in together.values())


def _repeats(places: list[_Place], at: int) -> Iterator[Move]:
    """A loop's gathers, with those of earlier loops in the same caller."""
    path, caller, instruction = places[at]
    again = _gathers(caller, instruction)
    for other, its_caller, earlier in places:
        if its_caller is caller and other < path:
            yield from (GatherOnce(other, g, path[-1], a) for a in again for g in _gathers(caller, earlier))


def _communicates(caller: Program, loop: Message) -> bool:
    body = caller.computation(loop.called_computation_ids[0])
    return any(one.opcode in TRANSFERS for one in body.instructions)


def _loops(program: Program, path: tuple[int, ...] = (), *, every_loop: bool = False) -> Iterator[_Place]:
    """The loops that hold no others, wherever they are, or every loop."""
    for position, instruction in enumerate(program.instructions):
        if instruction.opcode != "while":
            continue
        body = program.inside(instruction.called_computation_ids[0])
        inner = list(_loops(body, (*path, position), every_loop=every_loop))
        yield from inner
        if every_loop or not inner:
            yield (*path, position), program, instruction
