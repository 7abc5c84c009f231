"""Turns of a loop written once more: behind it, before it, or two in one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.attributes import backend_config
from disco_hlo.hlo.opcodes import ASYNCHRONOUS, SIDE_EFFECTS
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.loops import Loop, constant, element, through_barrier
from disco_hlo.structure.program import Program

_NOT_REPEATED = SIDE_EFFECTS | ASYNCHRONOUS | {"while", "conditional", "call", "fusion"}


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
    needed: set[int] = set()
    while wanted:
        here = wanted.pop()
        if here in needed or here in given:
            continue
        needed.add(here)
        one = source.by_id[here]
        through = one if barriers else through_barrier(source, one)
        wanted += one.operand_ids if through.id == here else [through.id]
        wanted += one.control_predecessor_ids
    return needed


def check_repeatable(loop: Loop, turns: int) -> None:
    """Refuse a loop of too few turns, or whose turns cannot be written one after another.

    Raises:
        IllegalMoveError: it says why.
    """
    where = f"{loop.instruction.name} ({loop.instruction.opcode})"
    if loop.turns < turns:
        raise IllegalMoveError(f"{where}: it turns {loop.turns} times, expected {turns} or more")
    for one in loop.body.instructions:
        if one.opcode in _NOT_REPEATED or one.custom_call_has_side_effect:
            raise IllegalMoveError(
                f"{where}: its body holds {one.name} ({one.opcode}), which is not repeated"
            )


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
