"""Gather before a loop what all its turns, or all turns of loops in it, gather.

The turns of a loop over microbatches each gather all layers' weights again. They are gathered before it, once a step,
for the memory of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.collectives import Groups
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.keep import MOST_TURNS, index_in_turn, read_by_turns, restore_order
from disco_hlo.structure.loops import Loop, behind_copies, extend, narrow_barriers, through_barrier
from disco_hlo.structure.program import Buffers, dims, dtype, illegal, physical
from disco_hlo.structure.rotation import foreseen_gathers, gathered_value, written
from disco_hlo.structure.sharded import groups_of


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a gather gives in each turn: entry ``index`` of a stacked array, gathered and converted
    (:func:`gathered_value`)."""

    value: Message
    """In the loop's body, as is its index."""
    index: Message
    number: int
    """Of the stacked array in the loop's state."""
    indices: tuple[int, ...]
    """Of all turns."""
    dimension: int
    """Of the stacked array that is gathered."""
    groups: Groups


def gathered(loop: Loop, gather: Message) -> Gathered:
    """What an all-gather of a loop's body gives.

    Raises:
        IllegalMoveError: it gathers anything else than one entry a turn of a stacked array.
    """
    body, elements = loop.body, loop.elements
    value = gathered_value(body, gather)
    one, path = value, []
    while one.opcode in ("convert", "copy", "reshape", "bitcast", "all-gather", "get-tuple-element"):
        before = through_barrier(body, one)
        if before.id == one.id:
            if one.id in elements:
                break
            before = body.operands(one)[0]
            path.append((one, before))
        one = before
    rank = len(dims(one))
    dimension = gather.dimensions[0] + rank - len(dims(gather))
    array = body.operands(one)[0] if one.opcode == "dynamic-slice" else one
    number = elements.get(array.id, -1)
    opcodes, sizes = [made.opcode for made, _ in path], list(one.dynamic_slice_sizes)
    are_plain = all(_keeps_elements(made, before) for made, before in path)
    if not are_plain or opcodes.count("all-gather") > 1 or opcodes.count("convert") > 1 or sizes[:1] != [1]:
        raise _other(gather)
    if dimension == 0 or number not in loop.unchanged():
        raise _other(gather)
    index = body.operands(one)[1]
    turns = range(loop.turns if loop.turns <= MOST_TURNS else 0)
    indices = tuple(i for turn in turns if (i := index_in_turn(loop, index, turn)) is not None)
    if sizes[1:] != list(dims(array))[1:] or len(indices) != loop.turns:
        raise _other(gather)
    return Gathered(value, index, number, indices, dimension, groups_of(body, gather))


def _other(gather: Message) -> IllegalMoveError:
    return illegal(gather, "it gathers anything else than an entry a turn of a stacked array")


def _keeps_elements(one: Message, other: Message) -> bool:
    """Whether an op on a value gathers it, converts it, or at most adds or takes away a first dimension of one
    element."""
    if one.opcode not in ("reshape", "bitcast"):
        return True
    if dtype(one) != dtype(other):
        return False
    more, less = sorted((one, other), key=lambda i: -len(dims(i)))
    same = dims(more) == (1, *dims(less)) and [d - 1 for d in physical(more.shape) if d] == physical(
        less.shape
    )
    return same or (dims(more) == dims(less) and physical(more.shape) == physical(less.shape))


def what_is_gathered(loop: Loop, one: Gathered) -> tuple[object, ...]:
    """Equal for gathers of the same entries, in loops of one caller."""
    array = behind_copies(loop.caller, loop.begins[one.number])
    return array.id, one.dimension, one.groups, dtype(one.value)


def hoist(outer: Loop, gathers: Sequence[tuple[Loop, Message]]) -> None:
    """Gather all entries of a stacked array before an outer loop, for all-gathers of these entries in loops of its
    body. All are rewritten in place.

    Raises:
        IllegalMoveError: one gathers anything else, or the array changes with the turns of ``outer``.
    """
    needed = [gathered(loop, gather) for loop, gather in gathers]
    (loop, gather), first = gathers[0], needed[0]
    for (other, again), one in zip(gathers, needed, strict=True):
        if what_is_gathered(other, one) != what_is_gathered(loop, first):
            raise illegal(again, f"it gathers another array than {gather.name} does")
        if not set(one.indices) <= set(range(dims(other.begins[one.number])[0])):
            raise illegal(again, "it gathers an entry that there is not")
    array = behind_copies(outer.body, loop.begins[first.number])
    number = outer.elements.get(array.id, -1)
    if number not in outer.unchanged():
        raise illegal(gather, "what it gathers changes in the outer loop")
    stack = _written_before(outer, number, gather, first)
    for (other, _), one in zip(gathers, needed, strict=True):
        unordered = Buffers(other.body).unordered()
        read_by_turns(other, one.value, one.index, stack)
        restore_order(other.body, unordered)


def hoist_repeated(loop: Loop, gathers: Sequence[Message]) -> None:
    """Gather before a loop, which is rewritten in place, what every turn of it gathers.

    Raises:
        IllegalMoveError: a turn may gather something else.
    """
    caller, body, repeated = loop.caller, loop.body, {one.id for one in foreseen_gathers(loop, alike=True)}
    for gather in gathers:
        if gather.id not in repeated:
            raise illegal(gather, "what it gathers may change with the turns")
    values = [gathered_value(body, gather) for gather in gathers]
    first = {i: loop.begins[k] for i, k in loop.elements.items()}
    found = written(caller, body, first, values, caller.position(loop.instruction), barriers=False)
    for value, one in zip(values, extend(loop, [found[value.id] for value in values]), strict=True):
        body.redirect(value, one)
    body.sweep()
    narrow_barriers(body)


def _written_before(outer: Loop, number: int, gather: Message, made: Gathered) -> Message:
    """All entries of an element of a loop's state gathered before it; returns them in the loop's body."""
    caller, array = outer.caller, outer.begins[number]
    narrow = caller.make("convert", f"{gather.name}.narrow", array.shape, [array])
    narrow.shape.element_type = made.value.shape.element_type
    steps = [narrow]
    if caller.copies:  # XLA:CPU gathers along the dimension that is outermost in memory
        laid = caller.make("copy", f"{gather.name}.laid", narrow.shape, [narrow])
        inner = [d for d in physical(narrow.shape) if d != made.dimension]
        laid.shape.layout.minor_to_major[:] = [*inner[::-1], made.dimension]
        steps.append(laid)
    whole = caller.copy(gather, f"{gather.name}.hoisted", steps[-1:])
    whole.shape.CopyFrom(steps[-1].shape)
    whole.shape.dimensions[made.dimension] *= len(made.groups[0])
    whole.dimensions[:] = [made.dimension]
    caller.place([*steps, whole], caller.position(outer.instruction))
    return extend(outer, [whole])[0]
