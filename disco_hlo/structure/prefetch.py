"""Prefetch: a loop's turn gathers what the next turn reads (rotation of a loop).

A loop over layers slices the stacked weights by its counter and gathers the slice where it is used, and no order of its
body begins a gather before its turn. Here the state holds what was gathered: a turn reads that, and gathers for the
turn after it. What the first turn reads is gathered before the loop; the last turn stands behind the loop and gathers
nothing. So as many gathers run as before, the numbers are the same bit by bit, and one turn's arrays more lie in
memory. XLA's own pipeliner leaves gathers behind an optimization barrier (``jax.checkpoint``) where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.opcodes import DATA_MOVEMENT, ELEMENTWISE
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.loops import (
    Loop,
    become,
    extend,
    narrow_barriers,
    through_barrier,
    written_over,
)
from disco_hlo.structure.program import Program, bits
from disco_hlo.structure.turns import check_repeatable, peel, written

_FORESEEN = ELEMENTWISE | DATA_MOVEMENT | {"all-gather", "bitcast", "constant", "partition-id"}


def foreseen(loop: Loop) -> dict[int, bool]:
    """What of a body follows from the counter and from state that stays as it is: ids, with whether the counter
    matters."""
    elements, unchanged = loop.elements, loop.unchanged()
    found: dict[int, bool] = {}
    for one in loop.body.instructions:
        if one.id in elements:
            if elements[one.id] == loop.counter or elements[one.id] in unchanged:
                found[one.id] = elements[one.id] == loop.counter
            continue
        through = through_barrier(loop.body, one)
        if through.id != one.id:
            operands = [through.id]
        elif one.opcode in _FORESEEN and not one.control_predecessor_ids and not one.shape.tuple_shapes:
            operands = list(one.operand_ids)
        else:
            continue
        if all(operand in found for operand in operands):
            found[one.id] = any(found[operand] for operand in operands)
    return found


def foreseen_gathers(loop: Loop) -> list[Message]:
    """The all-gathers of a body whose next turn's can be made in this turn."""
    known = foreseen(loop)
    return [one for one in loop.body.instructions if one.opcode == "all-gather" and known.get(one.id)]


def gathered_value(body: Program, gather: Message) -> Message:
    """What is kept of an all-gather: a conversion to fewer bits where only that reads it, else itself."""
    readers = body.readers(gather)
    alone = len(readers) == 1 and readers[0].opcode == "convert" and bits(readers[0]) < bits(gather)
    return readers[0] if alone and not readers[0].control_predecessor_ids else gather


def prefetch(loop: Loop, gathers: Sequence[Message]) -> Loop:
    """Gather for the next turn; the last turn is written behind the loop.

    Args:
        loop: rewritten in place.
        gathers: all-gathers of its body.

    Returns:
        The loop, one turn shorter.

    Raises:
        IllegalMoveError: a gather does not follow from the counter, or a turn cannot be repeated.
    """
    check_repeatable(loop, 2)
    known, body, caller = foreseen(loop), loop.body, loop.caller
    for gather in gathers:
        if not known.get(gather.id):
            raise IllegalMoveError(
                f"{gather.name} ({gather.opcode}): what the next turn gathers does not follow from the loop's counter"
            )
    values = [gathered_value(body, gather) for gather in gathers]
    for value in values:
        if value.id in loop.root.operand_ids:
            raise IllegalMoveError(f"{value.name} ({value.opcode}): it is part of the loop's state already")
    first = {i: loop.begins[k] for i, k in loop.elements.items()}
    before = written(caller, body, first, values, caller.position(loop.instruction), barriers=False)
    count = loop.ends[loop.counter]
    later = {i: count for i, k in loop.elements.items() if k == loop.counter}
    depending = {i for i, matters in known.items() if matters}
    after = written(body, body, later, values, body.position(loop.root), only=depending, barriers=False)
    carried = extend(loop, [before[value.id] for value in values])
    become(loop, carried, [after[value.id] for value in values])
    for value, element in zip(values, carried, strict=True):
        body.redirect(value, element)
    body.sweep()
    narrow_barriers(body)
    written_over(loop, carried)
    return peel(loop)
