"""Where an early module updates shards of a sum and gathers them, so that one kernel could do all three.

    reduce-scatter -> pointwise work on this device's shard -> all-gather        scattered-update
    the same, and sums of the work over the whole array, as norms are            normed-update

CoCoNet writes it so (figure 6, section 4); XLA writes the update of an optimizer whose moments are split over the
devices so, with an all-reduce of which each device reads its own shard for the reduce-scatter. The work is all that is
pointwise between the two: what reads the sum, and what only that reads. A recipe says it, in the order of the program.
A norm of this array may be in it, as LAMB's are, and all that is made of it; what else a scalar depends on must be
there before: where a norm of several arrays is one, as with clipping, no kernel fits.

optax takes a norm twice, the second time of ones where the first was zero, so that its gradient is a number:

    zero = norm(x) <= 0;  select(zero, 0, norm(select(zero, 1, x)))        select(zero, 0, norm(x))

The right is the same where all that the inner select is made into is read where `zero` does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.walks import reached
from disco_hlo.kernels.tiles import NORMED_RANGE, UPDATE_RANGE, UpdateTiles
from disco_hlo.kernels.times import Size
from disco_hlo.structure.chunk import reduction_opcode
from disco_hlo.structure.program import Program, dims, dtype, evaluate, is_zero, literal_value, waits_for
from disco_hlo.structure.sharded import groups_of

UPDATE, NORMED = "scattered-update", "normed-update"
UPDATES = (UPDATE, NORMED)
POINTWISE = frozenset({
    "add", "divide", "maximum", "minimum", "multiply", "negate", "rsqrt", "sqrt", "subtract",
})  # fmt: skip
_DTYPE = "f32"
# What may be done to single numbers that are made of a norm, and what only renames one.
_OF_NUMBERS = POINTWISE | {"and", "compare", "not", "or", "select"}
_RENAMING = ("bitcast", "broadcast", "copy", "reshape")


class MissedError(Exception):
    """No kernel takes a collective; its text says why."""


def require_met(met: bool, why: str) -> None:
    """Raise :class:`MissedError`, unless `met`."""
    if not met:
        raise MissedError(why)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Pointwise work. Its values are numbered: the sum, arrays, scalars, then what each step gives.

    Attributes:
        whole: of each array whether it is whole, so that this device's shard of it is read.
        scalars: how many.
        steps: opcode and operands, by number; a text is a constant (``float.hex``: 1.0 equals the number 1, and 0.0
            equals -0.0). A "sum" is over all elements on all devices.
        kept: what this device keeps of its shard.
        gathered: what all devices get.
    """

    whole: tuple[bool, ...]
    scalars: int
    steps: tuple[tuple[str, tuple[int | str, ...]], ...]
    kept: tuple[int, ...]
    gathered: int

    @property
    def sums(self) -> tuple[int, ...]:
        """Numbers of its sums."""
        first = 1 + len(self.whole) + self.scalars
        return tuple(first + at for at, (opcode, _) in enumerate(self.steps) if opcode == "sum")


@dataclass(frozen=True, slots=True)
class Halves:
    """What is done before and behind the sums of a recipe, by number.

    Attributes:
        sums, terms: the sums and what each adds up.
        carried: the value of a tile that is kept for the second half.
        again: arrays and kept values that the second half reads.
    """

    sums: tuple[int, ...]
    terms: tuple[int, ...]
    carried: int
    again: tuple[int, ...]


def halves(recipe: Recipe) -> Halves:
    """How a recipe with sums is worked through twice.

    Raises:
        MissedError: twice is not enough, or more than one value lies between.
    """
    arrays = range(1, 1 + len(recipe.whole))
    first = arrays.stop + recipe.scalars
    tiles, later, terms, needed = {0, *arrays}, set[int](), list[int](), set[int]()
    for number, (opcode, operands) in enumerate(recipe.steps, first):
        read = {one for one in operands if isinstance(one, int)}
        if opcode == "sum":
            require_met(not read & later, "a sum over the array is made of another")
            require_met(bool(read) and read <= tiles, "a sum over the array is of one number")
            terms += read
            later.add(number)
            continue
        if read & tiles:
            tiles.add(number)
        if read & later:
            later.add(number)
            needed |= read & tiles - later
    require_met(not later & {*recipe.kept}, "what a device keeps is made of a sum over the array")
    needed |= {recipe.gathered} - later
    again = needed & {*arrays, *recipe.kept}
    between = needed - again or {0}
    require_met(len(between) == 1, f"{len(between)} values lie between sums and result")
    return Halves(recipe.sums, tuple(terms), between.pop(), tuple(sorted(again)))


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
        count = len(self.arrays) + len(self.kept)
        if self.kernel == NORMED:
            count += 2 + len(halves(self.recipe).again)  # what lies between is written and read
        return Size(self.kernel, self.devices, _DTYPE, self.elements, count, 1)


def update_call(program: Program, collective: Message, devices: int) -> UpdateCall:
    """The call that replaces a collective, the update behind it and an all-gather.

    Raises:
        MissedError: there is none.
    """
    sums = _sums(program, collective, devices)
    shape = dims(sums[0])
    require_met(dtype(collective) == _DTYPE, f"{collective.name} is {dtype(collective)}, not {_DTYPE}")
    elements = prod(shape) * devices
    met = any(prod(shape) % one.size == 0 for one in UPDATE_RANGE)
    require_met(met, f"{elements} elements on {devices} devices: no tiles divide them")
    norms = _norms(program, shape, devices)
    work = _work(program, {one.id for one in sums}, shape, norms)
    require_met(bool(work), f"no pointwise work reads the shard of {collective.name}")
    inside = {one.id for one in (*sums, *work)}
    read = [one for one in work if one.id == program.root or _readers_outside(program, one, inside)]
    leaving = _leaving(program, read, shape, {one.id for one in sums})
    gathers = [
        (one, reader)
        for one in leaving
        for reader in _readers_outside(program, one, inside)
        if _gathers_rows(program, reader, devices) and not reader.control_predecessor_ids
    ]
    require_met(bool(gathers), f"nothing made of the shard of {collective.name} is gathered")
    gathered, gather = gathers[0]
    kept = [one for one in leaving if one is not gathered or len(_readers_outside(program, one, inside)) > 1]
    written = _Written(program, sums, work, devices, norms)
    above = program_above(program, [one.id for one in (*written.arrays, *written.scalars)])
    require_met(
        not above & {collective.id, *inside},
        f"what the update of {collective.name} reads depends on the sum itself",
    )
    recipe = written.recipe(gathered, kept)
    if recipe.sums:
        halves(recipe)
    tuned = NORMED_RANGE if recipe.sums else UPDATE_RANGE
    tiles = tuple(one for one in tuned if prod(shape) % one.size == 0)
    return UpdateCall(
        kernel=NORMED if recipe.sums else UPDATE,
        computation=program.entry.id,
        collective=collective.name,
        matmul=gather.name,
        elements=elements,
        devices=devices,
        recipe=recipe,
        arrays=tuple(one.name for one in written.arrays),
        scalars=tuple(one.name for one in written.scalars),
        kept=tuple(one.name for one in kept),
        tiles=tiles,
    )


def program_above(program: Program, ids: list[int]) -> set[int]:
    """These instructions and all that they wait for."""
    return {*reached(ids, lambda one: waits_for(program.by_id[one]))}


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
        require_met(int(collective.dimensions[0]) == 0, "not its rows are scattered")
        return [collective]
    readers = program.readers(collective)
    met = collective.id != program.root and bool(readers)
    met = met and all(own_shard_of(program, one, devices) == 0 for one in readers)
    require_met(met, f"{collective.name} is not read by own shards of rows alone")
    return readers


def _norms(program: Program, shape: tuple[int, ...], devices: int) -> dict[int, Message]:
    """Sums of arrays of a shape over all elements and devices, by id of the all-reduce: the reduction below each."""
    found: dict[int, Message] = {}
    for one in program.instructions:
        if one.opcode != "all-reduce" or len(one.operand_ids) != 1 or prod(dims(one)) != 1:
            continue
        local, alone = program.operands(one)[0], True
        while local.opcode in _RENAMING and prod(dims(local)) == 1:
            alone &= len(program.readers(local)) == 1
            (local,) = program.operands(local)
        if local.opcode != "reduce" or len(local.operand_ids) != 2 or dtype(one) != _DTYPE or not alone:
            continue
        summed, start = program.operands(local)
        if (
            dims(summed) == shape
            and is_zero(start)
            and reduction_opcode(program, local) == reduction_opcode(program, one) == "add"
            and len(program.readers(local)) == 1
            and _is_of_all(program, one, devices)
        ):
            found[one.id] = local
    return found


def _work(
    program: Program, sums: set[int], shape: tuple[int, ...], norms: dict[int, Message]
) -> list[Message]:
    """All pointwise instructions behind the sums, and those whose results only these read, in the program's order; with
    norms, the numbers that are made of them, and truths that these need."""
    fits = {*norms, *(one.id for one in norms.values())}
    numbers = set(fits)
    pointwise = POINTWISE | {"select"} if norms else POINTWISE
    for one in program.instructions:
        is_number = any(o in numbers for o in one.operand_ids) and (
            _is_step_of_numbers(one) or _scalar(program, one) is not None
        )
        if is_number or (one.opcode in pointwise and dims(one) == shape and dtype(one) == _DTYPE):
            fits.add(one.id)
        if is_number:
            numbers.add(one.id)
        if one.control_predecessor_ids:
            fits.discard(one.id)
    found: set[int] = set()
    for one in program.instructions:
        if one.id in fits and any(o in sums or o in found for o in one.operand_ids):
            found.add(one.id)
    for one in reversed(program.instructions):
        readers = program.readers(one)
        if one.id in fits and one.id != program.root and readers and all(r.id in found for r in readers):
            found.add(one.id)
    _add_truths(program, found)
    return [one for one in program.instructions if one.id in found]


def _is_step_of_numbers(one: Message) -> bool:
    """Whether a single number or truth is made of others, or renamed."""
    met = not one.shape.tuple_shapes and prod(dims(one)) == 1 and dtype(one) in (_DTYPE, "pred")
    return met and one.opcode in (*_OF_NUMBERS, *_RENAMING)


def _add_truths(program: Program, found: set[int]) -> None:
    """Add what the truths come from that a step reads: a kernel is given numbers alone."""
    waiting = [program.by_id[one] for one in found]
    while waiting:
        for operand in program.operands(waiting.pop()):
            if dtype(operand) == "pred" and operand.id not in found:
                require_met(
                    _is_step_of_numbers(operand) or _scalar(program, operand) is not None,
                    f"{operand.name} ({operand.opcode}) gives a truth that the update reads",
                )
                found.add(operand.id)
                waiting.append(operand)


def _leaving(program: Program, work: list[Message], shape: tuple[int, ...], sums: set[int]) -> list[Message]:
    """Those of the work that are arrays; refuses numbers that are made of the sum."""
    found = []
    for one in work:
        if one.opcode in (*POINTWISE, "select") and dims(one) == shape and dtype(one) == _DTYPE:
            found.append(one)
        else:
            met = not program_above(program, [one.id]) & sums
            require_met(met, f"{one.name} ({one.opcode}) is read outside of the update")
    return found


def _readers_outside(program: Program, one: Message, inside: set[int]) -> list[Message]:
    return [reader for reader in program.readers(one) if reader.id not in inside]


def _gathers_rows(program: Program, gather: Message, devices: int) -> bool:
    if gather.opcode != "all-gather" or len(gather.operand_ids) != 1 or int(gather.dimensions[0]) != 0:
        return False
    return _is_of_all(program, gather, devices)


def _is_of_all(program: Program, collective: Message, devices: int) -> bool:
    """Whether all devices take part, in order."""
    try:
        return groups_of(program, collective) == (tuple(range(devices)),)
    except IllegalMoveError:
        return False


class _Written:
    """The work as a recipe, and what it reads."""

    def __init__(
        self,
        program: Program,
        sums: list[Message],
        work: list[Message],
        devices: int,
        norms: dict[int, Message],
    ) -> None:
        self.program, self.devices, self.norms = program, devices, norms
        self.arrays: list[Message] = []
        self.scalars: list[Message] = []
        self.whole: list[bool] = []
        self._sums = {one.id for one in sums}
        self._are_of_norms: dict[int, bool] = {}
        self._work = [one for one in work if one.opcode not in (*_RENAMING, "reduce")]
        self._inside = {one.id for one in work}
        for one in self._work:
            if one.opcode == "select" and prod(dims(one)) > 1:
                self._require_guarded(one)
            for operand in self._read(one):
                if operand.id not in self._inside and operand.id not in self._sums:
                    self._take(operand)

    def _read(self, one: Message) -> list[Message]:
        """What a step reads: a sum the array below it, a guarded value what it guards."""
        if one.id in self.norms:
            return self.program.operands(self.norms[one.id])[:1]
        operands = self.program.operands(one)
        return operands[2:] if one.opcode == "select" and prod(dims(one)) > 1 else operands

    def _require_guarded(self, select: Message) -> None:
        """Refuse where it matters what a select of arrays gives where its condition holds."""
        program = self.program
        condition = _scalar(program, program.operands(select)[0])
        met = condition is not None and self._is_of_norms(condition)
        waiting, seen = [select], set[int]()
        while waiting and met:
            value = waiting.pop()
            seen.add(value.id)
            met = value.id != program.root and value.id in self._inside
            for reader in program.readers(value):
                if reader.opcode == "select" and value.id not in reader.operand_ids[:2]:
                    guard = program.operands(reader)[0]
                    guard = _scalar(program, guard) or number_of(program, guard)
                    if condition is not None and guard.id == condition.id:
                        continue
                waiting += [reader] if reader.id not in seen else []
        require_met(met, f"{select.name} ({select.opcode}) is of arrays, and read everywhere")

    def _is_of_norms(self, value: Message) -> bool:
        """Whether a number is made of norms and constants, so that all devices have the same."""
        value = number_of(self.program, value)
        if value.id not in self._are_of_norms:
            operands = self.program.operands(value)
            self._are_of_norms[value.id] = (value.id in self.norms or value.opcode == "constant") or (
                _is_step_of_numbers(value) and all(self._is_of_norms(one) for one in operands)
            )
        return self._are_of_norms[value.id]

    def _take(self, operand: Message) -> None:
        scalar = self._number(operand)
        if scalar is not None:
            if scalar.id in self._inside or _constant(scalar) is not None:
                return
            require_met(dtype(scalar) == _DTYPE, f"{scalar.name} is {dtype(scalar)}, not {_DTYPE}")
            if all(one.id != scalar.id for one in self.scalars):
                self.scalars.append(scalar)
            return
        array, is_whole = self._array(operand)
        if all(one.id != array.id for one in self.arrays):
            self.arrays.append(array)
            self.whole.append(is_whole)

    def _number(self, operand: Message) -> Message | None:
        """The number that an operand is, or is spread from."""
        is_one = prod(dims(operand)) == 1
        return number_of(self.program, operand) if is_one else _scalar(self.program, operand)

    def _array(self, operand: Message) -> tuple[Message, bool]:
        """An array that is read, or the whole one of which it is this device's shard."""
        if own_shard_of(self.program, operand, self.devices) == 0:
            return self.program.operands(operand)[0], True
        return operand, False

    def recipe(self, gathered: Message, kept: list[Message]) -> Recipe:
        """See :class:`Recipe`. A step that was there before is not repeated."""
        first = 1 + len(self.arrays)
        number = {one.id: 1 + at for at, one in enumerate(self.arrays)}
        number |= {one.id: first + at for at, one in enumerate(self.scalars)}
        number |= dict.fromkeys(self._sums, 0)
        steps: dict[tuple[str, tuple[int | str, ...]], int] = {}
        for one in self._work:
            operands = tuple(self._operand(o, number) for o in self._read(one))
            if one.opcode == "select" and len(operands) == 1:
                guarded = operands[0]
                if not isinstance(guarded, int):
                    raise MissedError(f"{one.name} ({one.opcode}) guards a constant")
                number[one.id] = guarded
                continue
            opcode = f"compare.{one.comparison_direction}" if one.opcode == "compare" else one.opcode
            opcode = "sum" if one.id in self.norms else opcode
            number[one.id] = steps.setdefault((opcode, operands), first + len(self.scalars) + len(steps))
        return Recipe(
            tuple(self.whole),
            len(self.scalars),
            tuple(steps),
            tuple(number[one.id] for one in kept),
            number[gathered.id],
        )

    def _operand(self, operand: Message, number: dict[int, int]) -> int | str:
        if operand.id in number:
            return number[operand.id]
        scalar = self._number(operand)
        if scalar is not None:
            value = _constant(scalar)
            return number[scalar.id] if value is None else value.hex()
        return number[self._array(operand)[0].id]


def number_of(program: Program, value: Message) -> Message:
    """The single number that a value is, under what only renames it."""
    while value.opcode in _RENAMING and prod(dims(value)) == 1:
        (source,) = program.operands(value)
        if prod(dims(source)) != 1:
            break
        value = source
    return value


def _scalar(program: Program, value: Message) -> Message | None:
    """The scalar that a broadcast spreads."""
    if value.opcode != "broadcast":
        return None
    (source,) = program.operands(value)
    return number_of(program, source) if not dims(source) else None


def _constant(scalar: Message) -> float | None:
    value = literal_value(scalar) if scalar.opcode == "constant" and dtype(scalar) == _DTYPE else None
    return None if value is None else float(value.item())
