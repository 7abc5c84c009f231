"""Loops as moves read and rewrite them: a ``while`` that counts, its state, and copies of its turns.

Not in the papers, whose steps are unrolled: what the layers of a ``lax.scan`` gather and reduce lies in a loop, which
no order crosses. A move crosses it where the loop's next state can hold what the next turn needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.regions import trip_count
from disco_hlo.structure.program import Buffers, Program, dtype, illegal, literal_value

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
    body, condition = caller.inside_loop(instruction)
    waiting = any(instruction.id in i.control_predecessor_ids for i in caller.instructions)
    if waiting or instruction.control_predecessor_ids:
        raise illegal(instruction, "it is ordered by a control dependency")
    tuples = (caller.operands(instruction)[0], body.by_id[body.root])
    takers = [
        *caller.readers(instruction),
        *body.readers(_parameter(body)),
        *condition.readers(_parameter(condition)),
    ]
    if any(one.opcode != "tuple" for one in tuples) or any(
        one.opcode != "get-tuple-element" for one in takers
    ):
        raise illegal(instruction, "its state is not taken apart element by element")
    counter, limit = _compared(condition, instruction)
    start = _number(caller, caller.operands(tuples[0])[counter])
    step = _step(body, counter)
    if start is None or step is None or step <= 0 or limit is None:
        raise illegal(instruction, "how often it turns is not known")
    turns = max(0, -(-(limit - start) // step))
    if trip_count(instruction) not in (None, turns):
        raise illegal(
            instruction, f"it says that it turns {trip_count(instruction)} times, and counts {turns}"
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


def _compared(condition: Program, loop: Message) -> tuple[int, int | None]:
    """Which element of the state must stay below what."""
    root = condition.by_id[condition.root]
    if root.opcode != "compare" or root.comparison_direction != "LT":
        raise illegal(loop, "how often it turns is not known")
    element, limit = (behind_copies(condition, one) for one in condition.operands(root))
    if element.opcode != "get-tuple-element" or element.operand_ids[0] != _parameter(condition).id:
        raise illegal(loop, "how often it turns is not known")
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
    getattr(made.literal, f"{dtype(like)}s").append(value)
    return made


def element(program: Program, state: Message, number: int) -> Message:
    """An element of a tuple, not yet placed."""
    shape = state.shape.tuple_shapes[number]
    made = program.make("get-tuple-element", f"{state.name}.{number}", shape, [state])
    made.tuple_index = number
    return made


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
            forget_state(one)
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
        forget_state(one)
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


def forget_state(one: Message) -> None:
    """Remove notes about a tuple that are true of other elements alone."""
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
