"""Which values to keep where there is no room for all that is computed twice: by the time that each saves per byte.

What a kept value saves is its own time and that of what only it needed; so it depends on what else is kept, and is
counted anew after each choice. A value that is needed no more once another is kept gives its bytes back. The choice is
greedy, as for a knapsack whose items are small against it (Dantzig, "Discrete-variable extremum problems", 1957).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disco_hlo.hlo.opcodes import DATA_MOVEMENT, ELEMENTWISE, FREE, REDUCTIONS
from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.walks import reached
from disco_hlo.structure.keep import Named, Twice, size_bytes
from disco_hlo.structure.numbering import under

_POINTWISE = ELEMENTWISE | DATA_MOVEMENT
_FUSES = _POINTWISE | FREE | REDUCTIONS
"""Ops into whose kernel XLA takes the pointwise work that they read."""
_COPIES = 4
"""How often the bytes of what an array of all turns keeps are moved: read and written by the copy into the array, and
by the copy out of it."""


@dataclass(frozen=True)
class Prices:
    """What values cost."""

    ns: Mapping[str, Mapping[str, float]]
    """Of each op by itself, by the names of its computation and its instruction. In a computation that is not named an
    op takes as long as its bytes; one that is not named in another takes none."""
    ns_per_byte: float
    """Of memory that is read or written."""


@dataclass(frozen=True)
class Place:
    """What a computation, or a loop's turns, make again."""

    twice: Twice
    pairs: Sequence[tuple[Message, Message]]
    """Those that may be kept."""
    executions: float
    """Of the place in a step."""
    turns: int = 0
    """Of the loops; 0 in one computation."""


@dataclass(frozen=True)
class Chosen:
    """What to keep."""

    values: Named = frozenset()
    """Made again: these read what has made them first."""
    held_bytes: int = 0
    """On each device, at most."""
    saved_ns: float = 0.0
    """In a step."""


class _Offer(NamedTuple):
    """What keeping one more value does. The least is the best: the most time per byte; names decide between equals."""

    needs_room: bool
    byte_saves_ns: float
    """Negative."""
    more_bytes: int
    """Less than the value where others need not be kept any more."""
    name: tuple[str, str]
    saved_ns: float
    value: int
    """Its id."""


def choose(places: Iterable[Place], prices: Prices, room_bytes: int) -> Chosen:
    """What to keep of ``places`` in so many bytes on each device. The same input gives the same choice everywhere."""
    open_places = [_Open(place, prices) for place in places]
    held_bytes, saved_ns = 0, 0.0
    while True:
        fitting = [
            (offer, number)
            for number, one in enumerate(open_places)
            for offer in one.offers.values()
            if held_bytes + offer.more_bytes <= room_bytes
        ]
        if not fitting:
            break
        offer, number = min(fitting)
        open_places[number].keep(offer.value)
        held_bytes += offer.more_bytes
        saved_ns += offer.saved_ns
    return Chosen(frozenset(name for one in open_places for name in one.names()), held_bytes, saved_ns)


class _Open:
    """A place while values are chosen."""

    def __init__(self, place: Place, prices: Prices) -> None:
        both, program = place.twice, place.twice.program
        self._name = program.entry.name
        self._kept: set[int] = set()
        self._may_be_kept = {again.id: again for _, again in place.pairs}
        self._reads: dict[int, list[int]] = {}
        """Of each value that is made again those that it reads."""
        self._needed: Counter[int] = Counter()
        """How many read a value: what is new, and what is still made again."""
        for one in program.instructions:
            same = under(program, one)
            before = {under(program, operand).id: None for operand in program.operands(one)}
            made = [i for i in before if both.first(program.by_id[i]) is not None]
            if same.id == one.id and both.first(one) is not None:
                self._reads[one.id] = made
            elif same.id == one.id:
                self._needed.update(made)
        self._component = _components(self._reads)
        counted, times = prices.ns.get(self._name), max(1, place.turns)
        written = _written(both)
        self._ns: dict[int, float] = {}
        self._held_ns: dict[int, float] = {}
        self._bytes: dict[int, int] = {}
        for i in self._reads:
            value = program.by_id[i]
            if counted is None:
                moved_bytes = sum(map(size_bytes, (value, *program.operands(value))))
                takes_ns = moved_bytes * prices.ns_per_byte
            else:
                takes_ns = counted.get(value.name, 0.0)
            self._ns[i] = place.executions * times * takes_ns if i in written else 0.0
            entry_bytes = size_bytes(value)
            # All turns' entries, and the one that a turn reads.
            self._bytes[i] = (place.turns + 1) * entry_bytes
            self._held_ns[i] = place.executions * place.turns * _COPIES * entry_bytes * prices.ns_per_byte
        waiting = [i for i, count in self._needed.items() if count]
        while waiting:
            for i in self._reads[waiting.pop()]:
                if not self._needed[i]:
                    waiting.append(i)
                self._needed[i] += 1
        self.offers: dict[int, _Offer] = {}
        for component in self._component.values():
            self._offer(component)

    def names(self) -> Iterator[tuple[str, str]]:
        """Of what is kept."""
        return ((self._name, self._may_be_kept[i].name) for i in self._kept)

    def keep(self, value: int) -> None:
        """Take an offer."""
        for i, fewer in self._without(value).items():
            self._needed[i] -= fewer
            if not self._needed[i]:
                self._kept.discard(i)
        self._kept.add(value)
        self._offer(self._component[value])

    def _offer(self, component: Sequence[int]) -> None:
        """Count anew what is offered of values that depend on each other."""
        for i in component:
            self.offers.pop(i, None)
            if i not in self._may_be_kept or i in self._kept or not self._needed[i]:
                continue
            saved_ns, more_bytes = self._ns[i] - self._held_ns[i], self._bytes[i]
            for other, fewer in self._without(i).items():
                if fewer == self._needed[other]:
                    is_kept = other in self._kept
                    saved_ns += self._held_ns[other] if is_kept else self._ns[other]
                    more_bytes -= self._bytes[other] if is_kept else 0
            if saved_ns > 0:
                name = self._name, self._may_be_kept[i].name
                byte_saves_ns = -saved_ns / max(1, more_bytes)
                self.offers[i] = _Offer(more_bytes > 0, byte_saves_ns, more_bytes, name, saved_ns, i)

    def _without(self, value: int) -> Counter[int]:
        """How many fewer read each value once one is kept."""
        fewer: Counter[int] = Counter()
        waiting = [value]
        while waiting:
            for i in self._reads[waiting.pop()]:
                fewer[i] += 1
                if fewer[i] == self._needed[i] and i not in self._kept:
                    waiting.append(i)
        return fewer


def _written(both: Twice) -> set[int]:
    """Ids of what takes time of its own when it is made again: kernels, collectives, and the pointwise results that
    these read. Other pointwise work is done in the kernels that read it."""
    program = both.program
    found: set[int] = set()
    for one in reversed(program.instructions):
        is_kernel = one.opcode not in _FUSES
        passes_on = one.opcode in FREE | DATA_MOVEMENT and one.id in found
        if is_kernel or passes_on:
            found.update(under(program, operand).id for operand in program.operands(one))
        if is_kernel or one.opcode in REDUCTIONS:
            found.add(one.id)
    return {i for i in found if program.by_id[i].opcode not in FREE}


def _components(reads: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Of each value all that it hangs together with, itself included."""
    beside: dict[int, list[int]] = defaultdict(list)
    for reader, before in reads.items():
        for i in before:
            beside[reader].append(i)
            beside[i].append(reader)
    found: dict[int, list[int]] = {}
    for start in reads:
        if start not in found:
            component = [*reached([start], beside.__getitem__)]
            found |= dict.fromkeys(component, component)
    return found
