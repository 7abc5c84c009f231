"""Loops as moves read and rewrite them: a ``while`` that counts, its state, and copies of its turns.

Not in the papers, whose steps are unrolled: what the layers of a ``lax.scan`` gather and reduce lies in a loop, which
no order crosses. A move crosses it where the loop's next state can hold what the next turn needs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.attributes import backend_config
from disco_hlo.hlo.opcodes import ASYNCHRONOUS, SIDE_EFFECTS
from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.regions import trip_count
from disco_hlo.structure.buffers import Buffers
from disco_hlo.structure.literals import literal_value
from disco_hlo.structure.program import Program, dtype

_NOT_REPEATED = SIDE_EFFECTS | ASYNCHRONOUS | {"while", "conditional", "call", "fusion"}
_OF_ANOTHER_STATE = ("sharding", "original_value", "statistics_viz")


@dataclass(frozen=True)
class Loop:
    """A loop whose turns are known: element ``counter`` of its state begins at ``start`` and grows by ``step``."""

    caller: Program
    instruction: Message
    body: Program
    condition: Program
    counter: int
    start: int
    step: int
    turns: int

    @property
    def begins(self) -> list[Message]:
        """What each element of the state begins with, in the caller."""
        return self.caller.operands(self.caller.operands(self.instruction)[0])

    @property
    def root(self) -> Message:
        """The tuple of the next state, in the body."""
        return self.body.by_id[self.body.root]

    @property
    def ends(self) -> list[Message]:
        """What each element of the state becomes, in the body."""
        return self.body.operands(self.root)

    @property
    def elements(self) -> dict[int, int]:
        """Ids of the instructions of the body that take an element of the state, and which."""
        return {i.id: int(i.tuple_index) for i in self.body.readers(_parameter(self.body))}

    def unchanged(self) -> set[int]:
        """Elements of the state that every turn hands on as they are."""
        elements = self.elements
        return {k for k, end in enumerate(self.ends) if elements.get(behind_copies(self.body, end).id) == k}

    def results(self) -> dict[int, list[Message]]:
        """What takes an element of the final state, in the caller."""
        found: dict[int, list[Message]] = {}
        for reader in self.caller.readers(self.instruction):
            found.setdefault(int(reader.tuple_index), []).append(reader)
        return found

    def flush(self) -> None:
        """Write body and condition into the module."""
        self.body.flush()
        self.condition.flush()


def read_loop(caller: Program, instruction: Message) -> Loop:
    """The loop that a ``while`` of ``caller`` is.

    Raises:
        IllegalMoveError: it is in another form, or shares its computations.
    """
    where = f"{instruction.name} ({instruction.opcode})"
    body, condition = (caller.inside(one) for one in instruction.called_computation_ids)
    calls = [
        called
        for c in caller.module.computations
        for i in c.instructions
        for called in i.called_computation_ids
    ]
    if any(calls.count(one) > 1 for one in instruction.called_computation_ids):
        raise IllegalMoveError(f"{where}: another instruction calls its body or condition too")
    waiting = any(instruction.id in i.control_predecessor_ids for i in caller.instructions)
    if waiting or instruction.control_predecessor_ids:
        raise IllegalMoveError(f"{where}: it is ordered by a control dependency")
    tuples = (caller.operands(instruction)[0], body.by_id[body.root])
    takers = [
        *caller.readers(instruction),
        *body.readers(_parameter(body)),
        *condition.readers(_parameter(condition)),
    ]
    if any(one.opcode != "tuple" for one in tuples) or any(
        one.opcode != "get-tuple-element" for one in takers
    ):
        raise IllegalMoveError(f"{where}: its state is not taken apart element by element")
    counter, limit = _compared(condition, where)
    start = _number(caller, caller.operands(tuples[0])[counter])
    step = _step(body, counter)
    if start is None or step is None or step <= 0 or limit is None:
        raise IllegalMoveError(f"{where}: how often it turns is not known")
    turns = max(0, -(-(limit - start) // step))
    if trip_count(instruction) not in (None, turns):
        raise IllegalMoveError(
            f"{where}: it says that it turns {trip_count(instruction)} times, and counts {turns}"
        )
    return Loop(caller, instruction, body, condition, counter, start, step, turns)


def _parameter(program: Program) -> Message:
    return next(i for i in program.instructions if i.opcode == "parameter")


def behind_copies(program: Program, value: Message) -> Message:
    """What a value is a copy of."""
    while value.opcode == "copy":
        value = program.operands(value)[0]
    return value


def _number(program: Program, value: Message) -> int | None:
    found = literal_value(behind_copies(program, value))
    return None if found is None or found.shape or dtype(value) not in ("s32", "s64") else int(found)


def _compared(condition: Program, where: str) -> tuple[int, int | None]:
    """Which element of the state must stay below what."""
    root = condition.by_id[condition.root]
    if root.opcode != "compare" or root.comparison_direction != "LT":
        raise IllegalMoveError(f"{where}: how often it turns is not known")
    element, limit = (behind_copies(condition, one) for one in condition.operands(root))
    if element.opcode != "get-tuple-element":
        raise IllegalMoveError(f"{where}: how often it turns is not known")
    return int(element.tuple_index), _number(condition, limit)


def _step(body: Program, counter: int) -> int | None:
    """By how much a turn moves an element of the state, where that is a constant."""
    end = behind_copies(body, body.operands(body.by_id[body.root])[counter])
    if end.opcode != "add":
        return None
    now, by = (behind_copies(body, one) for one in body.operands(end))
    is_element = now.opcode == "get-tuple-element" and now.tuple_index == counter
    return _number(body, by) if is_element and now.operand_ids[0] == _parameter(body).id else None


def constant(program: Program, like: Message, value: int) -> Message:
    """An integer scalar of the type of ``like``, not yet placed."""
    made = program.make("constant", "constant", like.shape, [])
    made.literal.shape.CopyFrom(like.shape)
    (made.literal.s32s if dtype(like) == "s32" else made.literal.s64s).append(value)
    return made


def element(program: Program, state: Message, number: int) -> Message:
    """An element of a tuple, not yet placed."""
    shape = state.shape.tuple_shapes[number]
    made = program.make("get-tuple-element", f"{state.name}.{number}", shape, [state])
    made.tuple_index = number
    return made


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


def through_barrier(program: Program, value: Message) -> Message:
    """What an element of an optimization barrier is before it; the value itself where it is none."""
    while value.opcode == "get-tuple-element":
        barrier = program.operands(value)[0]
        before = program.operands(barrier)[0] if barrier.opcode == "opt-barrier" else None
        if before is None or before.opcode != "tuple":
            break
        value = program.operands(before)[value.tuple_index]
    return value


def narrow_barriers(body: Program) -> None:
    """Take what nothing reads behind an optimization barrier out of it."""
    for barrier in [i for i in body.instructions if i.opcode == "opt-barrier"]:
        before, takers = body.operands(barrier)[0], body.readers(barrier)
        kept = sorted({int(taker.tuple_index) for taker in takers})
        is_plain = before.opcode == "tuple" and all(taker.opcode == "get-tuple-element" for taker in takers)
        if not kept or not is_plain or len(kept) == len(before.operand_ids) or len(body.readers(before)) > 1:
            continue
        body.reads(before, [before.operand_ids[number] for number in kept])
        for one in (before, barrier):
            shapes = [type(one.shape).FromString(one.shape.tuple_shapes[n].SerializeToString()) for n in kept]
            del one.shape.tuple_shapes[:]
            one.shape.tuple_shapes.extend(shapes)
            _forget_state(one)
        for taker in takers:
            taker.tuple_index = kept.index(int(taker.tuple_index))
    body.sweep()


def extend(
    loop: Loop, begins: Sequence[Message], instead: Mapping[int, Message] | None = None
) -> list[Message]:
    """Give a loop more state.

    Args:
        loop: rewritten in place.
        begins: what each new element begins with, in the caller, before the loop; every turn hands it on.
        instead: what elements that there are begin with from now on.

    Returns:
        The new elements, in the body.
    """
    caller, body = loop.caller, loop.body
    first, operand = len(loop.begins), caller.operands(loop.instruction)[0]
    before = [(instead or {}).get(k, begin) for k, begin in enumerate(loop.begins)]
    state = caller.make("tuple", operand.name, operand.shape, [*before, *begins])
    parameter = _parameter(body)
    grown = (state, loop.instruction, parameter, loop.root, _parameter(loop.condition))
    shapes = [*(one.program_shape.parameters[0] for one in (body.entry, loop.condition.entry)),
              body.entry.program_shape.result, *(one.shape for one in grown)]  # fmt: skip
    for shape in shapes:
        shape.tuple_shapes.extend(one.shape for one in begins)
    for one in grown:
        _forget_state(one)
    caller.place([state], caller.position(loop.instruction))
    caller.reads(loop.instruction, [state.id])
    caller.sweep()
    made = [element(body, parameter, first + number) for number in range(len(begins))]
    body.place(made, body.position(parameter) + 1)
    body.reads(loop.root, [*loop.root.operand_ids, *(one.id for one in made)])
    return made


def become(loop: Loop, elements: Sequence[Message], ends: Sequence[Message]) -> None:
    """Let elements of a loop's state become ``ends`` with each turn."""
    operands = list(loop.root.operand_ids)
    for one, end in zip(elements, ends, strict=True):
        operands[one.tuple_index] = end.id
    loop.body.reads(loop.root, operands)


def _forget_state(one: Message) -> None:
    for name in _OF_ANOTHER_STATE:
        one.ClearField(name)


def written_over(loop: Loop, carried: Sequence[Message]) -> None:
    """After copy insertion: copy what ``carried`` elements become into them once all that reads them is done."""
    body, root = loop.body, loop.root
    if not body.copies:
        return
    buffers = Buffers(body)
    readers = [[one.id for one in buffers.readers(value) if one.id != root.id] for value in carried]
    operands = list(root.operand_ids)
    for value, before in zip(carried, readers, strict=True):
        number = int(value.tuple_index)
        copy = body.make("copy", f"{value.name}.next", value.shape, [body.by_id[operands[number]]])
        copy.control_predecessor_ids.extend(before)
        body.place([copy], body.position(root))
        operands[number] = copy.id
    body.reads(root, operands)
    body.waited_for()


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
    return Loop(
        loop.caller, loop.instruction, loop.body, loop.condition, loop.counter, loop.start, step, turns
    )


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
