"""Finish later: a loop's turn reduces what the turn before it computed (rotation of a loop).

The backward pass of scanned layers ends each turn with the reduction of that layer's gradients, for which the turn has
nothing left to compute. Here the state holds what is to be reduced; the next turn reduces it and puts the sum where it
belongs. The first turn stands before the loop and the last reductions behind it. So as many run as before, on the same
values, and the unreduced gradients of one turn more lie in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.opcodes import DATA_MOVEMENT, ELEMENTWISE
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.loops import (
    Loop,
    become,
    constant,
    element,
    extend,
    written_over,
)
from disco_hlo.structure.prefetch import foreseen
from disco_hlo.structure.turns import check_repeatable, with_turns, written

_REDUCTIONS = ("all-reduce", "reduce-scatter")
_BETWEEN = ELEMENTWISE | DATA_MOVEMENT | {"bitcast"}
_INTO_STATE = ("add", "dynamic-update-slice")


@dataclass(frozen=True, slots=True)
class _Tail:
    """A reduction and what puts its result into the loop's state."""

    before: Message
    """What is reduced."""
    ops: frozenset[int]
    last: Message
    number: int
    """Of the element of the state that ``last`` becomes."""


def late_reductions(loop: Loop) -> list[Message]:
    """The reductions of a body that the next turn can make."""
    known = foreseen(loop)
    reductions = [one for one in loop.body.instructions if one.opcode in _REDUCTIONS]
    return [one for one in reductions if _tail(loop, known, one) is not None]


def _tail(loop: Loop, known: dict[int, bool], reduction: Message) -> _Tail | None:
    """What comes behind a reduction; None where the turn reads its result."""
    body, elements = loop.body, loop.elements
    if len(reduction.operand_ids) != 1 or reduction.control_predecessor_ids:
        return None
    ops, value = {reduction.id}, reduction
    while len(readers := body.readers(value)) == 1:
        (reader,) = readers
        others = [operand for operand in reader.operand_ids if operand != value.id]
        number = elements.get(reader.operand_ids[0], -1)
        if reader.control_predecessor_ids or reader.opcode not in _BETWEEN | set(_INTO_STATE):
            return None
        ops.add(reader.id)
        if number >= 0 and number not in loop.unchanged() and number != loop.counter:
            is_alone = (
                list(elements.values()).count(number) == 1
                and list(loop.root.operand_ids).count(reader.id) == 1
            )
            becomes = loop.ends[number].id == reader.id and len(body.readers(reader)) == 1
            reads = [o for o in others if o != reader.operand_ids[0]]
            is_read_there = len(body.readers(body.by_id[reader.operand_ids[0]])) == 1
            if (
                reader.opcode in _INTO_STATE
                and is_alone
                and becomes
                and is_read_there
                and known.keys() >= set(reads)
            ):
                return _Tail(body.operands(reduction)[0], frozenset(ops), reader, number)
            return None
        if not known.keys() >= set(others):
            return None
        value = reader
    return None


def finish_later(loop: Loop, reductions: Sequence[Message]) -> Loop:
    """Make reductions a turn later; the first turn is written before the loop.

    Args:
        loop: rewritten in place.
        reductions: of its body.

    Returns:
        The loop, one turn shorter.

    Raises:
        IllegalMoveError: a turn reads the result of one, or cannot be repeated.
    """
    check_repeatable(loop, 3)
    known, body = foreseen(loop), loop.body
    tails = [_checked(loop, known, reduction) for reduction in reductions]
    pending = _first_turn(loop, tails)
    _last_reductions(loop, tails, pending)
    count = loop.ends[loop.counter]
    ago = constant(body, count, -2 * loop.step)
    turn_before = body.make("add", "turn-before", count.shape, [count, ago])
    body.place([ago, turn_before], body.position(loop.root))
    values = {i: turn_before for i, k in loop.elements.items() if k == loop.counter}
    values |= {tail.before.id: one for tail, one in zip(tails, pending, strict=True)}
    again = {i for i, matters in known.items() if matters}.union(*(tail.ops for tail in tails))
    wanted = [tail.last for tail in tails]
    found = written(body, body, values, wanted, body.position(loop.root), only=again, barriers=False)
    operands = [body.operands(tail.last)[0] for tail in tails]
    become(loop, operands, [found[tail.last.id] for tail in tails])
    become(loop, pending, [tail.before for tail in tails])
    body.sweep()
    written_over(loop, pending)
    return with_turns(replace(loop, start=loop.start + loop.step), loop.turns - 1, loop.step)


def _checked(loop: Loop, known: dict[int, bool], reduction: Message) -> _Tail:
    tail = _tail(loop, known, reduction)
    if tail is None:
        raise IllegalMoveError(f"{reduction.name} ({reduction.opcode}): the turn itself reads its result")
    return tail


def _first_turn(loop: Loop, tails: Sequence[_Tail]) -> list[Message]:
    """Write the first turn, without its reductions, before the loop, which then begins with the second; returns the
    elements of the state, in the body, that hold what is to be reduced."""
    caller, left_out = loop.caller, loop.unchanged() | {tail.number for tail in tails} | {loop.counter}
    values = {i: loop.begins[k] for i, k in loop.elements.items()}
    ends = {k: end for k, end in enumerate(loop.ends) if k not in left_out}
    wanted = [*ends.values(), *(tail.before for tail in tails)]
    found = written(caller, loop.body, values, wanted, caller.position(loop.instruction))
    made = [constant(caller, loop.begins[loop.counter], loop.start + loop.step)]
    if caller.copies:  # the loop counts in the buffer that it begins with, and a constant's is everybody's
        made.append(caller.make("copy", "second-turn", made[0].shape, made))
    caller.place(made, caller.position(loop.instruction))
    instead = {loop.counter: made[-1], **{k: found[end.id] for k, end in ends.items()}}
    return extend(loop, [found[tail.before.id] for tail in tails], instead)


def _last_reductions(loop: Loop, tails: Sequence[_Tail], pending: Sequence[Message]) -> None:
    """Write the reductions of the last turn behind the loop."""
    caller, body, results = loop.caller, loop.body, loop.results()
    taken = {k: element(caller, loop.instruction, k) for k in sorted(set(loop.elements.values()))}
    last = loop.start + (loop.turns - 1) * loop.step
    taken[loop.counter] = constant(caller, loop.begins[loop.counter], last)
    values = {i: taken[k] for i, k in loop.elements.items()}
    values |= {tail.before.id: taken[one.tuple_index] for tail, one in zip(tails, pending, strict=True)}
    at = caller.position(loop.instruction) + 1
    caller.place(list(taken.values()), at)
    found = written(caller, body, values, [tail.last for tail in tails], at + len(taken), barriers=False)
    for tail in tails:
        for reader in results.get(tail.number, ()):
            caller.redirect(reader, found[tail.last.id])
    caller.sweep()
