"""Keep what is computed again: the backward pass of a recomputing step reads what the forward pass has made.

Recomputation (``jax.checkpoint``; Chen et al., "Training deep nets with sublinear memory cost", 2016) trades time for
memory, and is chosen by hand for the largest model that somebody runs. Where a device has memory left, the trade is
taken back: of values that are computed twice, the second is replaced by the first, and what only it needed goes. An
unrolled step holds both in one computation; of scanned layers one loop makes them and a later loop makes them again, so
the first writes them into an array of all turns, which the second slices.

What is equal, :class:`~disco_hlo.structure.numbering.Numbers` says.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

import numpy as np

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.opcodes import DATA_MOVEMENT, ELEMENTWISE, FREE, PRODUCTS
from disco_hlo.hlo.proto import DTYPES, Message, shape_of
from disco_hlo.structure.loops import Loop, become, constant, element, extend, narrow_barriers
from disco_hlo.structure.numbering import Numbers, under
from disco_hlo.structure.program import (
    Buffers,
    Program,
    dims,
    dtype,
    evaluate,
    illegal,
    is_zero,
    physical,
    resized,
    scalar,
)
from disco_hlo.structure.rotation import foreseen

What = Literal["gathers", "kernels", "operands"]
"""What is kept: weights that are gathered again; or results of whatever reduces, sends or is a kernel of a library; or
the pointwise results, too, that such kernels read."""
Named = AbstractSet[tuple[str, str]]
"""Values by the names of their computation and their instruction."""

_AS_SMALL = frozenset({"bitcast", "broadcast", "convert", "copy", "reshape", "transpose"})
"""Ops whose operand is kept instead where it is no larger."""
_LAID_OUT = _AS_SMALL | {"all-gather", "dynamic-slice", "slice"}
_ARRAYS = frozenset(DTYPES.values()) - {"tuple", "token", "opaque"}
MOST_TURNS = 4096
"""Of a loop whose turns are looked at one by one."""


@dataclass(frozen=True)
class Twice:
    """What a computation makes again that itself or an earlier one has made."""

    program: Program
    """That makes it again."""
    numbers: Mapping[int, int]
    made: Mapping[int, Message]
    """By number, what has made a value first."""
    there: Collection[int] = ()
    """Ids of values of ``program`` that need no computing."""

    def first(self, value: Message) -> Message | None:
        """What has made a value before; None where nothing has."""
        found = self.made.get(self.numbers[value.id])
        return None if found is None or found.id == value.id or value.id in self.there else found

    def kept(self, what: What | Named) -> list[tuple[Message, Message]]:
        """Pairs of a value and the same value made again, so that what is still made again is of another kind; or those
        of the values ``what`` names."""
        program = self.program
        if not isinstance(what, str):
            return [pair for pair in self.pairs() if (program.entry.name, pair[1].name) in what]
        new = [one for one in program.instructions if self.first(under(program, one)) is None]
        kernels = [one for one in new if one.opcode in PRODUCTS]
        read = {i for one in kernels for operand in program.operands(one) for i in self._as_small(operand)}
        waiting = [operand for one in new for operand in program.operands(one)]
        found: dict[int, tuple[Message, Message]] = {}
        seen: set[int] = set()
        while waiting:
            value = under(program, waiting.pop())
            before = None if value.id in seen else self.first(value)
            seen.add(value.id)
            if before is None:
                continue
            if self._is_kept(value, what, read):
                found[value.id] = before, value
            else:
                waiting += program.operands(value)
        place = {one.id: at for at, one in enumerate(program.instructions)}
        return [found[i] for i in sorted(found, key=place.__getitem__)]

    def pairs(self) -> list[tuple[Message, Message]]:
        """Every value that is computed twice, scalars and what data is moved to left out: first, and again."""
        again = [one for one in self.program.instructions if under(self.program, one).id == one.id]
        found = [(self.first(one), one) for one in again if one.opcode not in DATA_MOVEMENT | FREE]
        return [(first, one) for first, one in found if first is not None and not _is_scalar(one)]

    def _is_kept(self, value: Message, what: What, read: Collection[int]) -> bool:
        is_cheap = value.opcode in ELEMENTWISE | DATA_MOVEMENT | FREE
        before = [self.program.by_id[i] for i in self._as_small(value)[1:]]
        if value.opcode in FREE or _is_scalar(value) or any(self.first(one) is not None for one in before):
            return False
        if self._is_given(value):
            return what == "gathers" and "all-gather" in self._laid_out(value)[0]
        if not is_cheap:
            return what != "gathers"
        return what == "operands" and value.id in read and value.opcode not in ("slice", "dynamic-slice")

    def _as_small(self, value: Message) -> list[int]:
        """Ids of a value and of what it is made of by moving data alone, each no larger than the one before it."""
        found = [value.id]
        while value.opcode in _AS_SMALL:
            before = under(self.program, self.program.operands(value)[0])
            if not dims(before) or size_bytes(before) > size_bytes(value):
                break
            value = before
            found.append(value.id)
        return found

    def _is_given(self, value: Message) -> bool:
        """Whether a value is one that the step or the loop is given, as weights are: gathered, converted, laid out."""
        source = self._laid_out(value)[1]
        if source.opcode == "get-tuple-element":
            source = self.program.operands(source)[0]
        return bool(source.opcode == "parameter")

    def _laid_out(self, value: Message) -> tuple[set[str], Message]:
        """Opcodes of what gathers, converts and lays out a value, and what that is done to."""
        opcodes: set[str] = set()
        while value.opcode in _LAID_OUT and value.id not in self.there:
            opcodes.add(value.opcode)
            value = under(self.program, self.program.operands(value)[0])
        return opcodes, value


def size_bytes(value: Message) -> int:
    """Bytes of a value on each device, of a tuple of all its arrays."""
    return shape_of(value.shape).size_bytes


def _is_scalar(value: Message) -> bool:
    return not value.operand_ids or not (dims(value) or value.shape.tuple_shapes)


def twice(program: Program) -> Twice:
    """What a computation makes twice."""
    numbers = Numbers().of(program, {})
    made: dict[int, Message] = {}
    for one in program.instructions:
        made.setdefault(numbers[one.id], one)
    return Twice(program, numbers, made)


@dataclass(frozen=True)
class TwiceInTurns:
    """What the turns of a loop make again that those of an earlier loop of the same caller have made."""

    twice: Twice
    """Of the second loop's body; what has made a value first is in the first's."""
    written: Message
    """Which entry of an array of all turns a turn writes: an integer scalar of the first body."""
    read: Message
    """Of the second body: which entry holds what the turn makes again."""


def twice_in_turns(first: Loop, second: Loop) -> TwiceInTurns:
    """What the second loop makes again.

    Raises:
        IllegalMoveError: they turn differently often, or no turn of one can be told to belong to one of the other.
    """
    turns = range(first.turns if first.turns <= MOST_TURNS else 0)
    if second.turns != len(turns) or not turns:
        raise illegal(
            second.instruction, f"it turns {second.turns} times, {first.instruction.name} {first.turns}"
        )
    numbers = Numbers()
    outside = numbers.of(first.caller, {})
    ours = _given(first, first, turns, outside)
    of_first = numbers.of(first.body, ours)
    made: dict[int, Message] = {}
    for one in first.body.instructions:
        if one.id not in ours:
            made.setdefault(of_first[one.id], one)
    stacks = _stacks(first, ours)
    found: TwiceInTurns | None = None
    most = 0
    for order in (turns[::-1], turns):
        given = _given(second, first, order, outside)
        index = _entry(first, ours, second, given)
        read = _stacks_read(first, ours, stacks, second, given)
        of_second = numbers.of(second.body, given | {i: of_first[update.id] for i, update in read.items()})
        alike = Twice(second.body, of_second, made, given.keys() | read.keys())
        repeated = sum(alike.first(one) is not None for one in second.body.instructions)
        if index is not None and repeated > most:
            most, found = repeated, TwiceInTurns(alike, *index)
    if found is None:
        raise illegal(
            second.instruction, f"no turn of it makes what one of {first.instruction.name} has made"
        )
    return found


def _given(loop: Loop, first: Loop, order: Sequence[int], outside: Mapping[int, int]) -> dict[int, Hashable]:
    """Keys of what a body does not compute of the turn's own values, by id: state that stays as it is, other state, and
    index arithmetic, whose key is what it gives in all turns, in this order."""
    unchanged, known = loop.unchanged(), foreseen(loop)
    given: dict[int, Hashable] = {}
    for i, number in loop.elements.items():
        if number in unchanged:
            given[i] = outside[_origin(loop.caller, loop.begins[number], first).id]
        else:
            given[i] = "state", loop.instruction.id, number
    for one in loop.body.instructions:
        if known.get(one.id) and not dims(one) and dtype(one) in ("s32", "s64", "u32"):
            values = tuple(index_in_turn(loop, one, turn) for turn in order)
            if None not in values:
                given[one.id] = "index", values
    return given


def index_in_turn(loop: Loop, value: Message, turn: int) -> int | None:
    """A scalar of index arithmetic in a turn; None where it is anything else."""
    counted = np.array(loop.start + turn * loop.step, dtype(loop.ends[loop.counter]).replace("s", "int"))
    known = {i: counted for i, number in loop.elements.items() if number == loop.counter}
    found = evaluate(loop.body, value, known=known)
    return None if found is None or found.size != 1 else int(found)


def _origin(caller: Program, value: Message, first: Loop) -> Message:
    """What a value is, before a loop that hands it on as it is."""
    value = under(caller, value)
    is_result = value.opcode == "get-tuple-element" and value.operand_ids[0] == first.instruction.id
    is_unchanged = is_result and value.tuple_index in first.unchanged()
    return under(caller, first.begins[value.tuple_index]) if is_unchanged else value


def _entry(
    first: Loop, ours: Mapping[int, Hashable], second: Loop, given: Mapping[int, Hashable]
) -> tuple[Message, Message] | None:
    """Index scalars of both bodies that are equal in turns that belong together, and different in all others. After
    copy insertion the counter itself may be counted on before an entry is written or read."""
    here, there = (
        {
            given[one.id]: one
            for one in reversed(loop.body.instructions)
            if one.id in given and (not loop.body.copies or buffers.is_only_read(one))
        }
        for loop, given, buffers in (
            (first, ours, Buffers(first.body)),
            (second, given, Buffers(second.body)),
        )
    )
    for key, one in here.items():
        if sorted(_entries(ours, one)) == list(range(first.turns)) and key in there:
            return one, there[key]
    return None


def _entries(given: Mapping[int, Hashable], index: Message) -> tuple[int, ...]:
    """What index arithmetic gives in all turns; nothing of anything else."""
    key = given.get(index.id)
    return key[1] if isinstance(key, tuple) and key[0] == "index" else ()


def _stacks(loop: Loop, ours: Mapping[int, Hashable]) -> dict[int, Message]:
    """By number of the loop's state, the update of which each turn writes an entry of its own into an array."""
    found: dict[int, Message] = {}
    for number, end in enumerate(loop.ends):
        end = under(loop.body, end)
        if end.opcode != "dynamic-update-slice":
            continue
        array, update, *starts = loop.body.operands(end)
        is_entry = dims(update) == (1, *dims(array)[1:]) and all(is_zero(one) for one in starts[1:])
        entries = _entries(ours, starts[0])
        is_its_own = loop.elements.get(under(loop.body, array).id) == number
        is_each_once = len(set(entries)) == loop.turns and set(entries) <= set(range(dims(array)[0]))
        if is_entry and is_its_own and is_each_once:
            found[number] = end
    return found


def _stacks_read(
    first: Loop,
    ours: Mapping[int, Hashable],
    stacks: Mapping[int, Message],
    second: Loop,
    given: Mapping[int, Hashable],
) -> dict[int, Message]:
    """By id of what reads an entry in the second loop's body, the update that has written it in the first's."""
    found: dict[int, Message] = {}
    body, elements, unchanged = second.body, second.elements, second.unchanged()
    for one in body.instructions:
        if one.opcode != "dynamic-slice" or list(one.dynamic_slice_sizes)[:1] != [1]:
            continue
        array, *starts = body.operands(one)
        number = elements.get(under(body, array).id, -1)
        begin = under(second.caller, second.begins[number]) if number in unchanged else None
        if (
            begin is None
            or begin.opcode != "get-tuple-element"
            or begin.operand_ids[0] != first.instruction.id
        ):
            continue
        written = stacks.get(begin.tuple_index)
        is_entry = dims(one) == (1, *dims(array)[1:]) and all(is_zero(start) for start in starts[1:])
        if written is not None and is_entry:
            index = first.body.operands(written)[2]
            if ours[index.id] == given.get(starts[0].id):
                found[one.id] = first.body.operands(written)[1]
    return found


def kept_in(program: Program, what: What | Named) -> list[tuple[Message, Message]]:
    """Pairs that :func:`keep` may keep."""
    both = twice(program)
    return legal(both, both.kept(what), program)


def legal(
    both: Twice, pairs: Sequence[tuple[Message, Message]], first: Program
) -> list[tuple[Message, Message]]:
    """Those pairs that may be kept.

    Args:
        first: the computation in which values are made first.
    """
    buffers = Buffers(first)
    return [pair for pair in pairs if not _refusal(both, pair, buffers)]


def keep(program: Program, pairs: Sequence[tuple[Message, Message]]) -> None:
    """Read in the place of the second value of each pair the first; the computation is rewritten in place.

    Raises:
        IllegalMoveError: they may differ, or the first may be overwritten before it is read.
    """
    both, buffers = twice(program), Buffers(program)
    for pair in pairs:
        if reason := _refusal(both, pair, buffers):
            raise IllegalMoveError(reason)
    unordered = buffers.unordered()
    for value, again in pairs:
        program.redirect(again, value)
    program.sweep()
    restore_order(program, unordered)


def restore_order(program: Program, before: Collection[tuple[int, int]]) -> None:
    """Let what writes over an array wait for what reads it, where it no longer does so for a value made again.

    Args:
        before: :meth:`Buffers.unordered` as it was.
    """
    for reader, writer in sorted(Buffers(program).unordered() - set(before)):
        program.by_id[writer].control_predecessor_ids.append(reader)
    program.waited_for()


def kept_in_turns(first: Loop, second: Loop, what: What | Named) -> list[tuple[Message, Message]]:
    """Pairs that :func:`keep_turns` may keep.

    Raises:
        IllegalMoveError: as :func:`twice_in_turns`.
    """
    both = twice_in_turns(first, second).twice
    return legal(both, both.kept(what), first.body)


def keep_turns(first: Loop, second: Loop, pairs: Sequence[tuple[Message, Message]]) -> None:
    """Let each turn of a later loop of the same caller read, in the place of the second value of each pair, the first,
    which the turn of ``first`` that belongs to it has made. Both are rewritten in place.

    Raises:
        IllegalMoveError: they may differ, or the first may be overwritten before it is kept.
    """
    both, buffers = twice_in_turns(first, second), Buffers(first.body)
    unordered = Buffers(second.body).unordered()
    for pair in pairs:
        if reason := _refusal(both.twice, pair, buffers):
            raise IllegalMoveError(reason)
    stacks: dict[int, Message] = {}
    for value, again in [arrays for pair in pairs for arrays in _arrays(first.body, second.body, *pair)]:
        if again.id not in second.body.by_id:  # only what nothing reads did
            continue
        if value.id not in stacks:
            stacks[value.id] = written_by_turns(first, value, both.written, first.turns)
        read_by_turns(second, again, both.read, stacks[value.id])
    restore_order(second.body, unordered)


def _refusal(both: Twice, pair: tuple[Message, Message], buffers: Buffers) -> str:
    """Why the second value of a pair cannot be read in the place of the first; empty where it can."""
    value, again = pair
    before = both.first(again)
    if before is None or before.id != value.id:
        return f"{again.name} ({again.opcode}): it may be another value than {value.name}"
    if not _lie_alike(value.shape, again.shape):
        return f"{again.name} ({again.opcode}): {value.name} lies otherwise in memory"
    copies = buffers.program.copies
    if buffers.program is not both.program:
        readers = both.program.readers(again) if again.shape.tuple_shapes else []
        are_arrays = all(one.opcode == "get-tuple-element" and dtype(one) in _ARRAYS for one in readers)
        if not are_arrays:
            return f"{again.name} ({again.opcode}): something else than its arrays is read"
        is_kept = not copies or buffers.is_only_read(value)
        return "" if is_kept else f"{value.name} ({value.opcode}): it may be overwritten before it is kept"
    if copies and not buffers.is_only_read(again):
        return f"{again.name} ({again.opcode}): it needs a buffer of its own"
    try:
        for reader in buffers.readers(again) if copies else ():
            buffers.check_read(value, reader)
    except IllegalMoveError as error:
        return str(error)
    return ""


def _lie_alike(one: Message, other: Message) -> bool:
    parts = zip(one.tuple_shapes, other.tuple_shapes, strict=True)
    return physical(one) == physical(other) and all(_lie_alike(a, b) for a, b in parts)


def _arrays(
    first: Program, second: Program, value: Message, again: Message
) -> Iterator[tuple[Message, Message]]:
    """The arrays of a value and of the same value made again, as far as something reads them."""
    if not again.shape.tuple_shapes:
        yield value, again
        return
    taken = {int(one.tuple_index): one for one in first.readers(value) if one.opcode == "get-tuple-element"}
    for reader in second.readers(again):
        number = int(reader.tuple_index)
        if number not in taken:
            taken[number] = element(first, value, number)
            first.place([taken[number]], first.position(value) + 1)
        yield taken[number], reader


def written_by_turns(loop: Loop, value: Message, index: Message, entries: int) -> Message:
    """Write the values of all turns into one array, each as entry ``index``; returns it in the caller, behind the
    loop."""
    caller, body, entry = loop.caller, loop.body, _with_first(value.shape, 1)
    zero = constant(caller, index, 0)
    converted = caller.make("convert", "nothing", scalar(value.shape, value.shape.element_type), [zero])
    empty = caller.make("broadcast", "nothing", _with_first(value.shape, entries), [converted])
    caller.place([zero, converted, empty], caller.position(loop.instruction))
    (stack,) = extend(loop, [empty])
    new = body.make("reshape", f"{value.name}.entry", entry, [value])
    start = constant(body, index, 0)
    rest = [start] * (len(entry.dimensions) - 1)
    update = body.make("dynamic-update-slice", f"{value.name}.kept", empty.shape, [stack, new, index, *rest])
    body.place([new, start, update], body.position(loop.root))
    become(loop, [stack], [update])
    kept = element(caller, loop.instruction, stack.tuple_index)
    caller.place([kept], caller.position(loop.instruction) + 1)
    return kept


def read_by_turns(loop: Loop, value: Message, index: Message, stack: Message) -> None:
    """Read a value of each turn from an array of all, which is there before the loop, as entry ``index``. The value may
    have the first dimension still, of one element."""
    body = loop.body
    (array,) = extend(loop, [stack])
    entry = resized(stack.shape, 0, 1)
    start = constant(body, index, 0)
    rest = [start] * (len(entry.dimensions) - 1)
    taken = body.make("dynamic-slice", f"{value.name}.kept", entry, [array, index, *rest])
    taken.dynamic_slice_sizes.extend(entry.dimensions)
    shape = entry if len(dims(value)) == len(entry.dimensions) else _without_first(entry)
    read = body.make("reshape", f"{value.name}.read", shape, [taken])
    ours = body.make("copy", f"{value.name}.read", value.shape, [read])
    is_laid_out = physical(shape) == physical(value.shape)
    body.place([start, taken, read, *([] if is_laid_out else [ours])], body.position(index) + 1)
    body.redirect(value, read if is_laid_out else ours)
    body.sweep()
    narrow_barriers(body)
    body.in_order()  # the index may stand behind what reads the value


def _with_first(shape: Message, size: int) -> Message:
    """A shape with one more, outermost, first dimension."""
    made = type(shape)(element_type=shape.element_type, dimensions=[size, *shape.dimensions])
    made.layout.minor_to_major.extend([*(d + 1 for d in physical(shape)[::-1]), 0])
    return made


def _without_first(shape: Message) -> Message:
    made = type(shape)(element_type=shape.element_type, dimensions=shape.dimensions[1:])
    made.layout.minor_to_major.extend(d - 1 for d in physical(shape)[::-1] if d)
    return made
