"""Where an early module updates shards of a sum and gathers them, so that one kernel could do all three.

    reduce-scatter -> pointwise work on this device's shard -> all-gather        scattered-update

CoCoNet writes it so (figure 6, section 4.3); XLA writes the update of an optimizer whose moments are split over the
devices so, with an all-reduce of which each device reads its own shard for the reduce-scatter. The work is all that is
pointwise between the two: what reads the sum, and what only that reads. A recipe says it, in the order of the program.
What a scalar in it depends on must be there before: where the sum's own norm is one, as with clipping, no kernel fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.proto import Message
from disco_hlo.kernels.missed import require_met
from disco_hlo.kernels.tiles import UPDATE_RANGE, UpdateTiles
from disco_hlo.kernels.times import Size
from disco_hlo.structure.program import Program, dims, dtype, evaluate, literal_value
from disco_hlo.structure.sharded import groups_of

UPDATE = "scattered-update"
POINTWISE = frozenset({
    "add", "divide", "maximum", "minimum", "multiply", "negate", "rsqrt", "sqrt", "subtract",
})  # fmt: skip
_DTYPE = "f32"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Pointwise work. Its values are numbered: the sum, arrays, scalars, then what each step gives.

    Attributes:
        whole: of each array whether it is whole, so that this device's shard of it is read.
        scalars: how many.
        steps: opcode and operands, by number; a float is a constant.
        kept: what this device keeps of its shard.
        gathered: what all devices get.
    """

    whole: tuple[bool, ...]
    scalars: int
    steps: tuple[tuple[str, tuple[int | float, ...]], ...]
    kept: tuple[int, ...]
    gathered: int


@dataclass(frozen=True, slots=True)
class UpdateCall:
    """A sum, an update and an all-gather that a kernel could replace.

    Attributes:
        kernel: its name.
        computation: id of the computation that all are in.
        collective: name of the reduce-scatter or all-reduce.
        matmul: name of the all-gather: what is replaced with the collective.
        elements: of the whole sum.
        devices: how many take part: all, in order.
        recipe: the work.
        arrays, scalars, kept: names of what it reads and of what this device keeps.
        tiles: the points of the tuning range that fit.
    """

    kernel: str
    computation: int
    collective: str
    matmul: str
    elements: int
    devices: int
    recipe: Recipe
    arrays: tuple[str, ...]
    scalars: tuple[str, ...]
    kept: tuple[str, ...]
    tiles: tuple[UpdateTiles, ...]

    @property
    def size(self) -> Size:
        """By which its time is known: k arrays of shards are read or written."""
        return Size(self.kernel, self.devices, _DTYPE, self.elements, len(self.arrays) + len(self.kept), 1)


def update_call(program: Program, collective: Message, devices: int) -> UpdateCall:
    """The call that replaces a collective, the update behind it and an all-gather.

    Raises:
        MissedError: there is none.
    """
    sums = _sums(program, collective, devices)
    shape = dims(sums[0])
    require_met(
        dtype(collective) == _DTYPE, "dtype", f"{collective.name} is {dtype(collective)}, not {_DTYPE}"
    )
    work = _work(program, {one.id for one in sums}, shape)
    require_met(bool(work), "no-update", f"no pointwise work reads the shard of {collective.name}")
    inside = {one.id for one in (*sums, *work)}
    leaving = [one for one in work if one.id == program.root or _readers_outside(program, one, inside)]
    gathers = [
        (one, reader)
        for one in leaving
        for reader in _readers_outside(program, one, inside)
        if _gathers_rows(program, reader, devices) and not reader.control_predecessor_ids
    ]
    require_met(bool(gathers), "not-gathered", f"nothing made of the shard of {collective.name} is gathered")
    gathered, gather = gathers[0]
    kept = [one for one in leaving if one is not gathered or len(_readers_outside(program, one, inside)) > 1]
    written = _Written(program, sums, work, devices)
    above = program_above(program, [one.id for one in (*written.arrays, *written.scalars)])
    require_met(
        not above & {collective.id, *inside},
        "needs-the-sum",
        f"what the update of {collective.name} reads depends on the sum itself",
    )
    elements = prod(shape) * devices
    tiles = tuple(one for one in UPDATE_RANGE if prod(shape) % one.size == 0)
    require_met(bool(tiles), "no-tiles", f"{elements} elements on {devices} devices: no tiles divide them")
    return UpdateCall(
        kernel=UPDATE,
        computation=program.entry.id,
        collective=collective.name,
        matmul=gather.name,
        elements=elements,
        devices=devices,
        recipe=written.recipe(gathered, kept),
        arrays=tuple(one.name for one in written.arrays),
        scalars=tuple(one.name for one in written.scalars),
        kept=tuple(one.name for one in kept),
        tiles=tiles,
    )


def program_above(program: Program, ids: list[int]) -> set[int]:
    """These instructions and all that they wait for."""
    seen: set[int] = set()
    waiting = list(ids)
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            instruction = program.by_id[one]
            waiting += [*instruction.operand_ids, *instruction.control_predecessor_ids]
    return seen


def own_shard_of(program: Program, piece: Message, devices: int) -> int | None:
    """The dimension of which an instruction takes each device its own shard; None where it does not."""
    if piece.opcode != "dynamic-slice":
        return None
    source, *starts = program.operands(piece)
    cut = [d for d, size in enumerate(dims(piece)) if size != dims(source)[d]]
    if len(cut) != 1 or dims(piece)[cut[0]] * devices != dims(source)[cut[0]]:
        return None
    found = [evaluate(program, starts[cut[0]], device) for device in range(devices)]
    expected = [device * dims(piece)[cut[0]] for device in range(devices)]
    return cut[0] if [None if f is None else int(f) for f in found] == expected else None


def _sums(program: Program, collective: Message, devices: int) -> list[Message]:
    """Values that are this device's shard of the sum."""
    if collective.opcode == "reduce-scatter":
        require_met(int(collective.dimensions[0]) == 0, "inner-dimension", "not its rows are scattered")
        return [collective]
    readers = program.readers(collective)
    met = collective.id != program.root and bool(readers)
    met = met and all(own_shard_of(program, one, devices) == 0 for one in readers)
    require_met(met, "read-whole", f"{collective.name} is not read by own shards of rows alone")
    return readers


def _work(program: Program, sums: set[int], shape: tuple[int, ...]) -> list[Message]:
    """All pointwise instructions behind the sums, and those whose results only these read, in the program's order."""
    found: set[int] = set()
    fits = {
        one.id
        for one in program.instructions
        if one.opcode in POINTWISE
        and dims(one) == shape
        and dtype(one) == _DTYPE
        and not one.control_predecessor_ids
    }
    for one in program.instructions:
        if one.id in fits and any(o in sums or o in found for o in one.operand_ids):
            found.add(one.id)
    for one in reversed(program.instructions):
        readers = program.readers(one)
        if one.id in fits and one.id != program.root and readers and all(r.id in found for r in readers):
            found.add(one.id)
    return [one for one in program.instructions if one.id in found]


def _readers_outside(program: Program, one: Message, inside: set[int]) -> list[Message]:
    return [reader for reader in program.readers(one) if reader.id not in inside]


def _gathers_rows(program: Program, gather: Message, devices: int) -> bool:
    if gather.opcode != "all-gather" or len(gather.operand_ids) != 1 or int(gather.dimensions[0]) != 0:
        return False
    try:
        return groups_of(program, gather) == (tuple(range(devices)),)
    except IllegalMoveError:
        return False


class _Written:
    """The work as a recipe, and what it reads."""

    def __init__(self, program: Program, sums: list[Message], work: list[Message], devices: int) -> None:
        self.program, self.devices = program, devices
        self.arrays: list[Message] = []
        self.scalars: list[Message] = []
        self.whole: list[bool] = []
        self._sums = {one.id for one in sums}
        self._work = work
        inside = {one.id for one in work}
        for one in work:
            for operand in program.operands(one):
                if operand.id not in inside and operand.id not in self._sums:
                    self._take(operand)

    def _take(self, operand: Message) -> None:
        scalar = _scalar(self.program, operand)
        if scalar is not None:
            if _constant(scalar) is None and all(one.id != scalar.id for one in self.scalars):
                self.scalars.append(scalar)
            return
        array, is_whole = self._array(operand)
        if all(one.id != array.id for one in self.arrays):
            self.arrays.append(array)
            self.whole.append(is_whole)

    def _array(self, operand: Message) -> tuple[Message, bool]:
        """An array that is read, or the whole one of which it is this device's shard."""
        if own_shard_of(self.program, operand, self.devices) == 0:
            return self.program.operands(operand)[0], True
        return operand, False

    def recipe(self, gathered: Message, kept: list[Message]) -> Recipe:
        """See :class:`Recipe`."""
        first = 1 + len(self.arrays)
        number = {one.id: 1 + at for at, one in enumerate(self.arrays)}
        number |= {one.id: first + at for at, one in enumerate(self.scalars)}
        number |= dict.fromkeys(self._sums, 0)
        steps: list[tuple[str, tuple[int | float, ...]]] = []
        for one in self._work:
            steps.append((one.opcode, tuple(self._operand(o, number) for o in self.program.operands(one))))
            number[one.id] = first + len(self.scalars) + len(steps) - 1
        return Recipe(
            tuple(self.whole),
            len(self.scalars),
            tuple(steps),
            tuple(number[one.id] for one in kept),
            number[gathered.id],
        )

    def _operand(self, operand: Message, number: dict[int, int]) -> int | float:
        if operand.id in number:
            return number[operand.id]
        scalar = _scalar(self.program, operand)
        if scalar is not None:
            value = _constant(scalar)
            return number[scalar.id] if value is None else value
        return number[self._array(operand)[0].id]


def _scalar(program: Program, value: Message) -> Message | None:
    """The scalar that a broadcast spreads."""
    if value.opcode != "broadcast":
        return None
    (source,) = program.operands(value)
    return source if not dims(source) else None


def _constant(scalar: Message) -> float | None:
    value = literal_value(scalar) if scalar.opcode == "constant" else None
    return None if value is None else float(value)
