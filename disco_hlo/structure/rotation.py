"""Rotation: collectives of a loop made a turn earlier or later, and turns written once more.

A loop over layers slices the stacked weights by its counter and gathers the slice where it is used, and ends each turn
of the backward pass with the reduction of that layer's gradients. No order of its body begins a gather before its turn,
and behind the reduction the turn has nothing left to compute. So a move crosses the turn: the loop's state holds what
the next turn needs. As many collectives run as before, on the same values; one turn's arrays more lie in memory.

* :func:`prefetch`: a turn reads what the turn before it gathered, and gathers for the next. What the first turn reads
  is gathered before the loop; the last turn stands behind the loop and gathers nothing. XLA's own pipeliner leaves
  gathers behind an optimization barrier (``jax.checkpoint``) where they are.
* :func:`finish_later`: a turn reduces what the turn before it computed, and puts the sum where it belongs. The first
  turn stands before the loop and the last reductions behind it.
* :func:`double`: a loop runs two turns in one, and the order of one may use the other.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from disco_hlo.hlo.attributes import backend_config
from disco_hlo.hlo.opcodes import ASYNCHRONOUS, DATA_MOVEMENT, ELEMENTWISE, SIDE_EFFECTS
from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.walks import reached
from disco_hlo.structure.loops import (
    Loop,
    become,
    constant,
    element,
    extend,
    narrow_barriers,
    through_barrier,
    written_over,
)
from disco_hlo.structure.program import Program, bits, illegal

_GROUP = b"_scheduling_group_id"
_NOT_REPEATED = SIDE_EFFECTS | ASYNCHRONOUS | {"while", "conditional", "call", "fusion"}
_FORESEEN = ELEMENTWISE | DATA_MOVEMENT | {"all-gather", "bitcast", "constant", "partition-id"}
_REDUCTIONS = ("all-reduce", "reduce-scatter")
_BETWEEN = ELEMENTWISE | DATA_MOVEMENT | {"bitcast"}
_INTO_STATE = ("add", "dynamic-update-slice")


def prefetch(loop: Loop, gathers: Sequence[Message]) -> None:
    """Gather for the next turn; the last turn is written behind the loop, which is rewritten in place.

    Raises:
        IllegalMoveError: a gather does not follow from the counter, or a turn cannot be repeated.
    """
    check_repeatable(loop, 2)
    known, body, caller = foreseen(loop), loop.body, loop.caller
    for gather in gathers:
        if not known.get(gather.id):
            raise illegal(gather, "what the next turn gathers does not follow from the loop's counter")
    values = [gathered_value(body, gather) for gather in gathers]
    for value in values:
        if value.id in loop.root.operand_ids:
            raise illegal(value, "it is part of the loop's state already")
    first = {i: loop.begins[k] for i, k in loop.elements.items()}
    before = written(caller, body, first, values, caller.position(loop.instruction), barriers=False)
    count = loop.ends[loop.counter]
    later = {i: count for i, k in loop.elements.items() if k == loop.counter}
    depending = {i for i, matters in known.items() if matters}
    after = written(body, body, later, values, body.position(loop.root), only=depending, barriers=False)
    carried = extend(loop, [before[value.id] for value in values])
    become(loop, carried, [after[value.id] for value in values])
    for value, one in zip(values, carried, strict=True):
        body.redirect(value, one)
    body.sweep()
    narrow_barriers(body)
    written_over(loop, carried)
    peel(loop)


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


def foreseen_gathers(loop: Loop, *, alike: bool = False) -> list[Message]:
    """The all-gathers of a body whose next turn's can be made in this turn; or those that are ``alike`` in all."""
    known, gathers = foreseen(loop), [one for one in loop.body.instructions if one.opcode == "all-gather"]
    return [one for one in gathers if known.get(one.id) is (not alike)]


def gathered_value(body: Program, gather: Message) -> Message:
    """What is kept of an all-gather: a conversion to fewer bits where only that reads it, else itself."""
    readers = body.readers(gather)
    alone = len(readers) == 1 and readers[0].opcode == "convert" and bits(readers[0]) < bits(gather)
    return readers[0] if alone and not readers[0].control_predecessor_ids else gather


def finish_later(loop: Loop, reductions: Sequence[Message]) -> None:
    """Make reductions of a body a turn later; the first turn is written before the loop, which is rewritten in place.

    Raises:
        IllegalMoveError: a turn reads the result of one, or cannot be repeated.
    """
    check_repeatable(loop, 3)
    known, body = foreseen(loop), loop.body
    tails = []
    for reduction in reductions:
        tail = _tail(loop, known, reduction)
        if tail is None:
            raise illegal(reduction, "the turn itself reads its result")
        tails.append(tail)
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
    with_turns(replace(loop, start=loop.start + loop.step), loop.turns - 1, loop.step)


def late_reductions(loop: Loop) -> list[Message]:
    """The reductions of a body that the next turn can make."""
    known = foreseen(loop)
    reductions = [one for one in loop.body.instructions if one.opcode in _REDUCTIONS]
    return [one for one in reductions if _tail(loop, known, one) is not None]


@dataclass(frozen=True, slots=True)
class _Tail:
    """A reduction and what puts its result into the loop's state."""

    before: Message
    """What is reduced."""
    ops: frozenset[int]
    last: Message
    number: int
    """Of the element of the state that ``last`` becomes."""


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


def double(loop: Loop) -> Loop:
    """Run two turns in one; of an odd number, the last is written behind the loop.

    Raises:
        IllegalMoveError: a turn cannot be repeated, or there are too few.
    """
    check_repeatable(loop, 4)
    if loop.turns % 2:
        loop = peel(loop)
    body, root, ends = loop.body, loop.root, loop.ends
    values = {i: ends[k] for i, k in loop.elements.items()}
    found = written(body, body, values, ends, body.position(root))
    later = [found[end.id].id for end in ends]
    if not body.copies:  # XLA counts the turns later
        now = body.by_id[_takers(loop)[0]]
        by = constant(body, now, 2 * loop.step)
        counted = body.make("add", "counter", now.shape, [now, by])
        body.place([by, counted], body.position(root))
        later[loop.counter] = counted.id
    body.reads(root, later)
    body.sweep()
    body.waited_for()
    return with_turns(loop, loop.turns // 2, 2 * loop.step)


def peel(loop: Loop) -> Loop:
    """Write the last turn behind the loop; returns the loop, one turn shorter.

    Raises:
        IllegalMoveError: the turn cannot be repeated, or is the only one.
    """
    check_repeatable(loop, 2)
    caller, body, last = loop.caller, loop.body, loop.start + (loop.turns - 1) * loop.step
    results = loop.results()
    at = caller.position(loop.instruction) + 1
    taken = {k: element(caller, loop.instruction, k) for k in sorted(set(loop.elements.values()))}
    taken[loop.counter] = constant(caller, body.by_id[next(iter(_takers(loop)))], last)
    caller.place(list(taken.values()), at)
    ends = {k: loop.ends[k] for k in results}
    values = {i: taken[k] for i, k in loop.elements.items()}
    found = written(caller, body, values, list(ends.values()), at + len(taken))
    for k, readers in results.items():
        for reader in readers:
            caller.redirect(reader, found[ends[k].id])
    caller.sweep()
    _end_at(loop, last)
    return with_turns(loop, loop.turns - 1, loop.step)


def written(
    program: Program,
    source: Program,
    values: Mapping[int, Message],
    wanted: Sequence[Message],
    at: int,
    *,
    only: Collection[int] | None = None,
    barriers: bool = True,
) -> dict[int, Message]:
    """Write what ``wanted`` of ``source`` need once more into ``program``, from position ``at``.

    Args:
        program: where it is written.
        source: a loop's body.
        values: by id in ``source``, what is there already.
        wanted: instructions of ``source``.
        at: position in ``program``.
        only: ids of what is written again; the rest is taken as it is, which ``program`` then must hold.
        barriers: whether optimization barriers are kept.

    Returns:
        By id in ``source``, the instruction in ``program``.
    """
    found = dict(values)
    needed = _needed(source, found, [one.id for one in wanted], barriers)
    made: list[Message] = []
    for one in source.instructions:
        if one.id not in needed or one.id in found:
            continue
        through = one if barriers else through_barrier(source, one)
        if only is not None and one.id not in only:
            found[one.id] = one
        elif through.id != one.id:
            found[one.id] = found[through.id]
        else:
            copy = program.copy(one, f"{one.name}.turn", [found[o] for o in one.operand_ids])
            copy.backend_config = one.backend_config
            copy.control_predecessor_ids.extend(
                found[b].id for b in one.control_predecessor_ids if b in found
            )
            found[one.id] = copy
            made.append(copy)
    program.place(made, at)
    return found


def _needed(source: Program, given: Mapping[int, Message], wanted: list[int], barriers: bool) -> set[int]:
    def before(here: int) -> list[int]:
        one = source.by_id[here]
        through = one if barriers else through_barrier(source, one)
        operands = one.operand_ids if through.id == here else [through.id]
        return [i for i in (*operands, *one.control_predecessor_ids) if i not in given]

    return {*reached((i for i in wanted if i not in given), before)}


def check_repeatable(loop: Loop, turns: int) -> None:
    """Refuse a loop of too few turns, or whose turns cannot be written one after another.

    Raises:
        IllegalMoveError: it says why.
    """
    if loop.turns < turns:
        raise illegal(loop.instruction, f"it turns {loop.turns} times, expected {turns} or more")
    for one in loop.body.instructions:
        if one.opcode in _NOT_REPEATED or one.custom_call_has_side_effect:
            raise illegal(
                loop.instruction, f"its body holds {one.name} ({one.opcode}), which is not repeated"
            )
        if _GROUP in one.frontend_attributes:
            raise illegal(loop.instruction, f"its body holds {one.name}, of a scheduling group")


def _takers(loop: Loop) -> list[int]:
    return [i for i, k in loop.elements.items() if k == loop.counter]


def _end_at(loop: Loop, limit: int) -> None:
    condition, root = loop.condition, loop.condition.by_id[loop.condition.root]
    now, old = condition.operands(root)
    made = constant(condition, old, limit)
    condition.place([made], condition.position(root))
    condition.reads(root, [now.id, made.id])
    condition.sweep()


def with_turns(loop: Loop, turns: int, step: int) -> Loop:
    """The loop as it is now; XLA's own notes about it are made true."""
    config = backend_config(loop.instruction)
    if "known_trip_count" in config:
        config["known_trip_count"] = {"n": str(turns)}
        if "known_init_step" in config:
            config["known_init_step"] = {"init": str(loop.start), "step": str(step)}
        loop.instruction.backend_config = json.dumps(config, separators=(",", ":")).encode()
    return replace(loop, step=step, turns=turns)
