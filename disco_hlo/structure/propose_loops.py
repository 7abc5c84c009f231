"""Which moves of loops a module has, and what it makes twice, as named schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.opcodes import MOVED_COLLECTIVES, PRODUCTS
from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.regions import trip_count
from disco_hlo.structure.choose import Chosen, Place, Prices, choose
from disco_hlo.structure.hoist import gathered, what_is_gathered
from disco_hlo.structure.keep import Named, What, kept_in, kept_in_turns, legal, twice, twice_in_turns
from disco_hlo.structure.loops import Loop, read_loop
from disco_hlo.structure.moves import (
    Double,
    FinishLater,
    Hoist,
    HoistRepeated,
    Keep,
    KeepTurns,
    Move,
    Narrow,
    Prefetch,
    Unroll,
    Widen,
    apply_moves,
)
from disco_hlo.structure.narrow import narrowable
from disco_hlo.structure.program import Program, computations
from disco_hlo.structure.rotation import foreseen_gathers, late_reductions
from disco_hlo.structure.widen import coarse_sums

FLOAT32_SUMS = "float32-sums"
"""The schedule that adds up in float32 what is added up in 16 bits."""
KEPT_IN_PART = "keep-some"
"""The schedule that keeps as much as there is room for."""
KEPT_IN_PART_NAMES = (KEPT_IN_PART, f"{KEPT_IN_PART}-rotate", f"{KEPT_IN_PART}-unroll")
"""That, and the same with loops rotated, and written out."""
_Place = tuple[tuple[int, ...], Program, Message]
"""A loop: its path, its caller, the instruction."""
_Found = TypeVar("_Found")
_Candidates = Callable[[list[_Place], int], Iterable[Move]]
"""Of the loops that there are and one of them, what to try on it."""


def loop_schedules(
    module: bytes, *, copies: bool = True, in_float32: bool = True
) -> dict[str, tuple[Move, ...]]:
    """Named schedules of a module's loops that communicate, and of what it makes twice; those that it has the pattern
    for, those that change most first.

    * ``float32-sums``: rows that are added up in 16 bits are added up in float32, where ``in_float32`` allows it; so in
      all others.
    * ``narrow``: weights are gathered in the type that is read; so in all others.
    * ``prefetch``: each turn of a loop gathers for the next turn.
    * ``finish-later``: each turn makes the reductions of the turn before it; ``rotate``: both.
    * ``double``: loops run two turns in one; ``prefetch-double``: both.
    * ``unroll``: the turns of loops that communicate, or else of those that multiply, and of those beside them with as
      many, are written out.
    * ``hoist``: a loop over microbatches gathers nothing; all its loops gather is gathered before it.
    * ``keep-kernels``: the backward pass reads the results of kernels that it would compute again; ``keep``: and what
      kernels read; with ``-gather-once``, ``-rotate`` or ``-unroll``: that, too.
    * ``gather-once``: the backward pass reads the weights that the forward pass gathered; ``gather-once-prefetch``: and
      the gathers that are left are made a turn ahead; ``gather-once-rotate``: and the reductions a turn later;
      ``gather-once-unroll``: in loops that are written out.
    """
    builder = _Builder(module, copies, in_float32)
    widened, narrowed = builder.widened(), builder.narrowed()
    prefetched = builder.with_each(narrowed, _prefetches)
    once = builder.kept(narrowed, "gathers")
    hoisted = builder.with_each(narrowed, _hoists, as_often_as_there_is=True)
    found = {
        FLOAT32_SUMS: widened,
        "narrow": narrowed,
        "prefetch": prefetched,
        "double": builder.with_each(narrowed, _doubles),
        "gather-once": once,
        "hoist": builder.with_each(hoisted, _hoists_repeated, every_loop=True),
        "finish-later": builder.with_each(narrowed, _finishes),
        "rotate": builder.with_each(prefetched, _finishes),
        "prefetch-double": builder.with_each(prefetched, _doubles),
        "unroll": builder.written_out(narrowed),
    }
    found["gather-once-unroll"] = builder.written_out(once)
    found["gather-once-prefetch"] = builder.with_each(once, _prefetches)
    found["gather-once-rotate"] = builder.with_each(found["gather-once-prefetch"], _finishes)
    levels: dict[str, What] = {"keep-kernels": "kernels", "keep": "operands"}
    for name, what in levels.items():
        found[name] = kept = builder.kept(narrowed, what)
        if kept != narrowed:
            gathered_once = builder.kept(kept, "gathers")
            name += "-gather-once" * (gathered_once != kept)
            rotated = builder.rotated(gathered_once)
            found[name + "-rotate" * (rotated != gathered_once)] = rotated
            found[name + "-unroll"] = builder.written_out(gathered_once)
    first: dict[tuple[Move, ...], str] = {}
    for name, moves in found.items():
        first.setdefault(moves, name)
    return {name: moves for moves, name in reversed(first.items()) if moves}


@dataclass(frozen=True)
class InPart:
    """What a module keeps in so much memory."""

    schedules: dict[str, tuple[Move, ...]]
    """By name; none where nothing is kept."""
    chosen: Chosen


def kept_in_part(
    module: bytes,
    prices_of: Callable[[bytes], Prices],
    room_bytes: int,
    *,
    copies: bool = True,
    in_float32: bool = True,
) -> InPart:
    """Schedules that keep of what a module makes twice as much as there is room for, what saves most time per byte
    first; then also with loops rotated, and written out. Their moves say what: they mean the same wherever they are
    made again.

    Args:
        prices_of: what the ops of a module cost.
        room_bytes: on each device, beside what the module needs as it is.
        copies, in_float32: as for :func:`loop_schedules`.
    """
    builder = _Builder(module, copies, in_float32)
    narrowed = builder.narrowed()
    chosen = choose(builder.places(narrowed), prices_of(builder.applied(narrowed)), room_bytes)
    kept = builder.kept(narrowed, chosen.values)
    if kept == narrowed:
        return InPart({}, Chosen())
    others = builder.rotated(kept), builder.written_out(kept)
    found = {name: moves for name, moves in zip(KEPT_IN_PART_NAMES[1:], others, strict=True) if moves != kept}
    return InPart({KEPT_IN_PART: kept, **found}, chosen)


class _Builder:
    """Lists of moves, each legal after those before it; one refused is left out."""

    def __init__(self, module: bytes, copies: bool, in_float32: bool) -> None:
        self.copies, self.in_float32 = copies, in_float32
        self.every = [one.name for _, _, one in _loops(Program(module, copies=copies), every_loop=True)]
        self._made: dict[tuple[Move, ...], bytes] = {(): module}
        places = _loops(Program(module, copies=copies))
        self.names = [one.name for _, caller, one in places if _communicates(caller, one)]

    def with_each(
        self,
        moves: tuple[Move, ...],
        candidates: _Candidates,
        *,
        as_often_as_there_is: bool = False,
        every_loop: bool = False,
    ) -> tuple[Move, ...]:
        """``moves``, then of each loop the first legal candidate, once or as long as there is one."""
        for name in self.every if every_loop else self.names:
            grown = True
            while grown:
                before = Program(self.applied(moves), copies=self.copies)
                places = list(_loops(before, every_loop=every_loop))
                # An earlier move may have taken the loop away, where it was made again.
                at = [number for number, place in enumerate(places) if place[2].name == name]
                every = (self._legal(moves, move) for number in at for move in candidates(places, number))
                found = next(filter(None, every), None)
                grown = found is not None and as_often_as_there_is
                moves = found or moves
        return moves

    def rotated(self, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        """``moves``, then each loop's gathers a turn ahead and its reductions a turn later."""
        return self.with_each(self.with_each(moves, _prefetches), _finishes)

    def widened(self) -> tuple[Move, ...]:
        """Every sum of rows in float32, in every computation."""
        return self._everywhere((), coarse_sums, Widen) if self.in_float32 else ()

    def narrowed(self) -> tuple[Move, ...]:
        """The same, then every all-gather in the type that is read, in every computation."""
        return self._everywhere(self.widened(), narrowable, Narrow)

    def _everywhere(
        self,
        moves: tuple[Move, ...],
        wanted: Callable[[Program], list[Message]],
        move: Callable[[tuple[int, ...], tuple[int, ...]], Move],
    ) -> tuple[Move, ...]:
        """``moves``, then one for what is ``wanted`` of each computation."""
        # What is made in a computation moves its loops, and so all paths into them.
        every = computations(Program(self.applied(moves), copies=self.copies))
        for path, inside in sorted(every, key=lambda one: -len(one[0])):
            if positions := tuple(inside.position(one) for one in wanted(inside)):
                moves = self._legal(moves, move(path, positions)) or moves
        return moves

    def written_out(self, moves: tuple[Move, ...]) -> tuple[Move, ...]:
        """``moves``, then every loop that communicates written out, or where none does every loop that multiplies, and
        those beside it with as many turns: what its turns hand those of another, as a forward pass does. A loop over
        something else, or around others, stays one."""
        loops = []
        for _, caller, one in _loops(Program(self.applied(moves), copies=self.copies)):
            with suppress(IllegalMoveError):
                place = caller.entry.id, read_loop(caller, one).turns
                loops.append((one.name, place, _communicates(caller, one), _multiplies(caller, one)))
        weighty = {place for _, place, communicates, _ in loops if communicates}
        weighty = weighty or {place for _, place, _, multiplies in loops if multiplies}
        wanted = {name for name, place, *_ in loops if place in weighty}

        def unrolls(places: list[_Place], at: int) -> Iterator[Move]:
            path, _, instruction = places[at]
            if instruction.name in wanted:
                yield Unroll(path)

        return self.with_each(moves, unrolls, every_loop=True)

    def places(self, moves: tuple[Move, ...]) -> list[Place]:
        """Where the module makes something twice after ``moves``: within a computation, and in loops."""
        before = Program(self.applied(moves), copies=self.copies)
        found: list[Place] = []
        for path, inside in computations(before):
            both = twice(inside)
            found.append(Place(both, legal(both, both.pairs(), inside), _executions(before, path)))
        loops = list(_loops(before, every_loop=True))
        for at, (path, _, _) in enumerate(loops):
            for _, first, second, both in _earlier(loops, at, lambda a, b: twice_in_turns(a, b).twice):
                if pairs := legal(both, both.pairs(), first.body):
                    found.append(Place(both, pairs, _executions(before, path[:-1]), second.turns))
                    break
        return found

    def kept(self, moves: tuple[Move, ...], what: What | Named) -> tuple[Move, ...]:
        """``moves``, then everything of a kind, or named, kept that is made twice: in one computation, and in loops."""
        before = Program(self.applied(moves), copies=self.copies)
        # What goes of a computation moves its loops, and so all paths into them.
        for path, inside in sorted(computations(before), key=lambda one: -len(one[0])):
            if pairs := kept_in(inside, what):
                moves = self._legal(moves, Keep(path, *_written(inside, inside, pairs))) or moves
        return self.with_each(moves, _keeps(what), every_loop=True)

    def _legal(self, moves: tuple[Move, ...], move: Move) -> tuple[Move, ...] | None:
        try:
            self.applied((*moves, move))
        except IllegalMoveError:
            return None
        return (*moves, move)

    def applied(self, moves: tuple[Move, ...]) -> bytes:
        """The module after ``moves``."""
        if moves not in self._made:
            before = self.applied(moves[:-1])
            self._made[moves] = apply_moves(before, moves[-1:], copies=self.copies)
        return self._made[moves]


def _gathers(caller: Program, instruction: Message, *, alike: bool = False) -> tuple[int, ...]:
    """Positions as of :func:`foreseen_gathers`; none where the loop is in another form."""
    try:
        loop = read_loop(caller, instruction)
        return tuple(loop.body.position(one) for one in foreseen_gathers(loop, alike=alike))
    except IllegalMoveError:
        return ()


def _prefetches(places: list[_Place], at: int) -> Iterator[Move]:
    """A loop's gathers a turn ahead."""
    path, caller, instruction = places[at]
    if gathers := _gathers(caller, instruction):
        yield Prefetch(path, gathers)


def _finishes(places: list[_Place], at: int) -> Iterator[Move]:
    """A loop's reductions a turn later."""
    path, caller, instruction = places[at]
    try:
        loop = read_loop(caller, instruction)
        found = late_reductions(loop)
    except IllegalMoveError:
        return
    if found:
        positions = tuple(loop.body.position(one) for one in found)
        yield FinishLater(path, positions, tuple(one.opcode for one in found))


def _doubles(places: list[_Place], at: int) -> Iterator[Move]:
    yield Double(places[at][0])


def _hoists_repeated(places: list[_Place], at: int) -> Iterator[Move]:
    """What a loop gathers alike in every turn gathered before it."""
    path, caller, instruction = places[at]
    if gathers := _gathers(caller, instruction, alike=True):
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


def _keeps(what: What | Named) -> _Candidates:
    """What a loop makes again of what an earlier loop of the same caller has made."""

    def candidates(places: list[_Place], at: int) -> Iterator[Move]:
        for other, first, second, pairs in _earlier(places, at, lambda a, b: kept_in_turns(a, b, what)):
            if pairs:
                later = places[at][0][-1]
                yield KeepTurns(other, later, *_written(first.body, second.body, pairs))

    return candidates


def _earlier(
    places: Sequence[_Place], at: int, what: Callable[[Loop, Loop], _Found]
) -> Iterator[tuple[tuple[int, ...], Loop, Loop, _Found]]:
    """``what`` of each earlier loop of the same caller and a loop, with the earlier one's path and both; loops that
    raise IllegalMoveError are left out."""
    path, caller, instruction = places[at]
    for other, its_caller, earlier in places:
        if its_caller is not caller or not other < path:
            continue
        try:
            first, second = read_loop(caller, earlier), read_loop(caller, instruction)
            found = what(first, second)
        except IllegalMoveError:
            continue
        yield other, first, second, found


def _executions(program: Program, path: Sequence[int]) -> int:
    """How often a step runs the computation that a path leads into, as far as its loops say."""
    found = 1
    for position in path:
        instruction = program.instructions[position]
        try:
            found *= read_loop(program, instruction).turns
        except IllegalMoveError:
            found *= trip_count(instruction) or 1
        program = program.inside(instruction.called_computation_ids[0])
    return found


def _written(
    first: Program, second: Program, pairs: Sequence[tuple[Message, Message]]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[str, str], ...]]:
    """Positions and opcodes of pairs of values."""
    here = {one.id: at for at, one in enumerate(first.instructions)}
    there = {one.id: at for at, one in enumerate(second.instructions)}
    positions = tuple((here[value.id], there[again.id]) for value, again in pairs)
    return positions, tuple((value.opcode, again.opcode) for value, again in pairs)


def _communicates(caller: Program, loop: Message) -> bool:
    return _holds(caller, loop, MOVED_COLLECTIVES)


def _multiplies(caller: Program, loop: Message) -> bool:
    return _holds(caller, loop, PRODUCTS)


def _holds(caller: Program, loop: Message, opcodes: frozenset[str]) -> bool:
    body = caller.computation(loop.called_computation_ids[0])
    return any(one.opcode in opcodes for one in body.instructions)


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
