"""Which values of a computation share a buffer: the one answer that whatever orders, fuses, unpacks or writes asks for.

XLA inserts its copies before it hands a module over. After that, values must share memory wherever one of these rules
says so (XLA's ``HloDataflowAnalysis``, ``AliasInfo::GetInPlaceInputOutputPairs`` and ``HloAliasAnalysis``):

* bitcasts, tuples and their members, and optimization barriers show the value of their operand;
* dynamic-update-slices and scatters, kernels that end in one, and library calls that say so write into an operand;
* a loop keeps each carried member in one buffer; a branch or call that hands an argument on returns its buffer;
* the operands of an asynchronous instruction are in use until it is done;
* a donated argument and the result that takes its place share a buffer (:func:`disco_hlo.hlo.overwrites.overwrites`
  adds that, since it may also be given up).

All other sharing is decided by XLA after the hook, from the schedule that it is given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.proto import TUPLE, Message

_SHOWS_OPERAND = frozenset({"add-dependency", "bitcast", "domain", "opt-barrier"})
_SHOWS_MEMBERS = frozenset({"get-tuple-element", "tuple"})
SHOWING = _SHOWS_OPERAND | _SHOWS_MEMBERS
"""Ops that do nothing: their result is the value of an operand, in the operand's buffer."""
_STARTS_THAT_SHOW = frozenset({"all-gather-start", "async-start", "collective-permute-start"})
"""Their result is a tuple that begins with the operands."""
_PASSED_ON = {"all-reduce-done": (), "async-update": ()}
_DONE_MEMBER = {"all-gather-done": 1, "async-done": 1, "collective-permute-done": 1, "copy-done": 0}


@dataclass
class Storage:
    """The values of one computation, and the buffers that they lie in. Ops are named by their place in the list."""

    of_op: list[list[int]] = field(default_factory=list)
    """For each op its values: one, or of a tuple one for each array in it, in order."""
    made_by: list[int] = field(default_factory=list)
    """For each value the op that writes it."""
    joined: list[int] = field(default_factory=list)
    """For each value another one of its buffer, or itself."""
    arguments: dict[int, int] = field(default_factory=dict)
    """Of a called computation the value of each argument that no earlier one equals."""

    def buffer(self, value: int) -> int:
        """The buffer of a value: the first value in it."""
        while self.joined[value] != value:
            self.joined[value] = self.joined[self.joined[value]]
            value = self.joined[value]
        return value

    def join(self, one: int, other: int) -> None:
        """Let two values share a buffer."""
        first, second = sorted((self.buffer(one), self.buffer(other)))
        self.joined[second] = first

    def new(self, op: int) -> int:
        """A value that an op writes, in a buffer of its own so far."""
        self.made_by.append(op)
        self.joined.append(len(self.joined))
        return len(self.joined) - 1

    def over(self, op: int, value: int) -> int:
        """A value that an op writes over another one."""
        made = self.new(op)
        self.join(made, value)
        return made


@dataclass(frozen=True, slots=True)
class _Called:
    """What a called computation does to the buffers it is given, all arguments in one list."""

    handed_on: tuple[int | None, ...]
    """For each result the argument whose buffer it is returned in, if any; of equal arguments the first."""
    unchanged: tuple[bool, ...]
    """For each result whether it is that argument's value."""
    overwritten: frozenset[int]
    """Arguments that something inside writes over."""


def leaves_of(shape: Message) -> int:
    """How many arrays a shape holds."""
    return sum(map(leaves_of, shape.tuple_shapes)) if shape.element_type == TUPLE else 1


def leaf_at(shape: Message, path: Sequence[int]) -> int:
    """The number of the array, or of the first array of the tuple, at a path."""
    before = 0
    for place in path:
        before += sum(map(leaves_of, shape.tuple_shapes[:place]))
        shape = shape.tuple_shapes[place]
    return before


def storage_of(
    protos: Sequence[Message],
    operands: Sequence[Sequence[int]],
    index: ModuleIndex,
    alike: Sequence[int] = (),
) -> Storage:
    """The values and buffers of a computation.

    Args:
        protos: its instructions, each after its operands.
        operands: for each the places of its operands in that list; the ids in the messages are not looked at.
        index: the computations that they call.
        alike: of a called computation for each argument the first one that is the same value.
    """
    found = Storage()
    first = _first_arguments(protos) if alike else {}
    for op, (proto, read) in enumerate(zip(protos, operands, strict=True)):
        if alike and proto.opcode == "parameter":
            numbers = alike[first[proto.parameter_number] :][: leaves_of(proto.shape)]
            found.of_op.append([_argument(found, op, number) for number in numbers])
            continue
        given = [found.of_op[place] for place in read]
        shapes = [protos[place].shape for place in read]
        found.of_op.append(_values(found, op, proto, given, shapes, index))
    return found


def _first_arguments(protos: Sequence[Message]) -> dict[int, int]:
    """By the number of each parameter the number of its first array among all arguments."""
    found: dict[int, int] = {}
    count = 0
    for proto in sorted(
        (one for one in protos if one.opcode == "parameter"), key=lambda one: one.parameter_number
    ):
        found[proto.parameter_number] = count
        count += leaves_of(proto.shape)
    return found


def _argument(storage: Storage, op: int, number: int) -> int:
    if number not in storage.arguments:
        storage.arguments[number] = storage.new(op)
    return storage.arguments[number]


def _values(
    storage: Storage,
    op: int,
    proto: Message,
    given: list[list[int]],
    shapes: list[Message],
    index: ModuleIndex,
) -> list[int]:
    opcode = proto.opcode
    if opcode in _SHOWS_OPERAND or opcode in _PASSED_ON:
        return given[0]
    if opcode == "tuple":
        return [value for member in given for value in member]
    if opcode == "get-tuple-element":
        return _member(given[0], shapes[0], proto.tuple_index)
    if opcode in _DONE_MEMBER and len(shapes[0].tuple_shapes) > _DONE_MEMBER[opcode]:
        return _member(given[0], shapes[0], _DONE_MEMBER[opcode])
    if opcode in ("while", "conditional", "call"):
        return _of_caller(storage, op, proto, given, index)
    made: list[int | None] = [None] * leaves_of(proto.shape)
    if opcode in _STARTS_THAT_SHOW and proto.shape.tuple_shapes:
        shown = [value for member in given for value in member]
        made[: len(shown)] = shown[: len(made)]
        if opcode == "async-start":
            first, called = len(shown), [_called(proto.called_computation_ids[0], index, _alike(shown))]
            for result in range(min(len(called[0].handed_on), len(made) - first)):
                made[first + result] = _handed_back(storage, op, [shown], called, result)
    for result, operand, member in in_place(proto, shapes, index):
        made[result] = storage.over(op, given[operand][member])
    return [storage.new(op) if value is None else value for value in made]


def _member(values: list[int], shape: Message, place: int) -> list[int]:
    first = leaf_at(shape, (place,))
    return values[first : first + leaves_of(shape.tuple_shapes[place])]


def in_place(proto: Message, shapes: Sequence[Message], index: ModuleIndex) -> list[tuple[int, int, int]]:
    """What an instruction that calls no scheduled computation writes over: (number of the result's array, operand,
    number of the array in that operand)."""
    opcode = proto.opcode
    if opcode in ("dynamic-update-slice", "set-dimension-size"):
        return [(0, 0, 0)]
    if opcode == "scatter":
        return [(i, i, 0) for i in range((len(proto.operand_ids) - 1) // 2)]
    if opcode == "ragged-all-to-all":
        return [(0, 1, 0)]
    said = [
        (
            leaf_at(proto.shape, pair.output_shape_index),
            pair.operand_index,
            leaf_at(shapes[pair.operand_index], pair.operand_shape_index),
        )
        for pair in proto.output_operand_aliasing
    ]
    if opcode != "fusion":
        return said
    known = {result for result, _, _ in said}
    by_root = [pair for pair in _written_by_root(proto, index) if pair[0] not in known]
    return said + by_root


def _written_by_root(fusion: Message, index: ModuleIndex) -> list[tuple[int, int, int]]:
    """Operands that a kernel writes over since it returns an update of them, or a bitcast of one."""
    body = index.computation(fusion.called_computation_ids[0])
    by_id = {instruction.id: instruction for instruction in body.instructions}
    root = by_id[body.root_id]
    found = []
    for place, returned in enumerate(root.operand_ids if root.opcode == "tuple" else (root.id,)):
        update = _unshaped(by_id[returned], by_id)
        updates = {"dynamic-update-slice": 1, "scatter": (len(update.operand_ids) - 1) // 2}
        for number in range(updates.get(update.opcode, 0)):
            updated = _unshaped(by_id[update.operand_ids[number]], by_id)
            if updated.opcode == "parameter":
                found.append((place + number, updated.parameter_number, 0))
    return found


def _unshaped(instruction: Message, by_id: dict[int, Message]) -> Message:
    while instruction.opcode == "bitcast":
        instruction = by_id[instruction.operand_ids[0]]
    return instruction


def _of_caller(
    storage: Storage, op: int, proto: Message, given: list[list[int]], index: ModuleIndex
) -> list[int]:
    if proto.opcode == "while":
        arguments = [given[0]]
        turn, kept = _every_turn(proto.called_computation_ids[0], given[0], index)
        called = [turn]
    else:
        if proto.opcode == "call":
            arguments = [[value for operand in given for value in operand]]
        else:
            arguments = given[1:]
        called = [
            _called(one, index, _alike(values))
            for one, values in zip(proto.called_computation_ids, arguments, strict=True)
        ]
    for values, branch in zip(arguments, called, strict=True):
        returned = {p for p, same in zip(branch.handed_on, branch.unchanged, strict=True) if not same}
        for argument in branch.overwritten - returned:
            storage.over(op, values[argument])
    if proto.opcode == "while":
        return [v if k in kept else storage.over(op, v) for k, v in enumerate(given[0])]
    return [_handed_back(storage, op, arguments, called, k) for k in range(leaves_of(proto.shape))]


def _handed_back(
    storage: Storage, op: int, arguments: list[list[int]], called: list[_Called], result: int
) -> int:
    """Value of one result of a call or conditional."""
    places = [branch.handed_on[result] for branch in called]
    sources = [None if p is None else values[p] for values, p in zip(arguments, places, strict=True)]
    first = sources[0]
    if first is not None and all(
        source == first and branch.unchanged[result] for source, branch in zip(sources, called, strict=True)
    ):
        return first
    made = storage.new(op)
    for source in sources:
        if source is not None:
            storage.join(made, source)
    return made


def _alike(values: Sequence[int]) -> tuple[int, ...]:
    """For each value the place of the first one that is the same."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(value, place) for place, value in enumerate(values))


def _every_turn(body: int, begin: Sequence[int], index: ModuleIndex) -> tuple[_Called, set[int]]:
    """What a loop's body does, and the places of what it carries that hold what the loop began with in every turn: the
    body hands on what is there, or what is at another such place that began with the same."""
    kept = set(range(len(begin)))
    while True:
        # What changes is equal to nothing; -1 - k is no value.
        alike = _alike([value if k in kept else -1 - k for k, value in enumerate(begin)])
        turn = _called(body, index, alike)
        back = [turn.handed_on[k] if turn.unchanged[k] else None for k in range(len(begin))]
        changed = {k for k in kept if back[k] != alike[k]}
        if not changed:
            return turn, kept
        kept -= changed
        if len(set(alike)) == len(alike):
            return turn, kept


def _called(computation_id: int, index: ModuleIndex, alike: tuple[int, ...]) -> _Called:
    """Found once for each computation and equal arguments: it is asked for each time a computation around it is looked
    at."""
    known: _Called | None = index.storage.get((computation_id, alike))
    if known is None:
        found = _look_inside(index.computation(computation_id), index, alike)
        known = index.storage[computation_id, alike] = found
    return known


def _look_inside(computation: Message, index: ModuleIndex, alike: Sequence[int]) -> _Called:
    protos = list(computation.instructions)
    place = {proto.id: number for number, proto in enumerate(protos)}
    found = storage_of(protos, [[place[i] for i in proto.operand_ids] for proto in protos], index, alike)
    parameters = sorted(
        (proto.parameter_number, number) for number, proto in enumerate(protos) if proto.opcode == "parameter"
    )
    arguments = [value for _, number in parameters for value in found.of_op[number]]
    of_buffer: dict[int, int] = {}
    for number, value in enumerate(arguments):
        of_buffer.setdefault(found.buffer(value), number)
    given: dict[int, int] = {}
    for number, value in enumerate(arguments):
        given.setdefault(value, number)
    returned = found.of_op[place[computation.root_id]]
    written = [value for value in range(len(found.made_by)) if value not in given]
    return _Called(
        tuple(given.get(value, of_buffer.get(found.buffer(value))) for value in returned),
        tuple(value in given for value in returned),
        frozenset(of_buffer[found.buffer(value)] for value in written if found.buffer(value) in of_buffer),
    )


def readers_of(
    storage: Storage, protos: Sequence[Message], operands: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For each value the ops that read it, ascending, under whatever name. Those that do nothing read nothing."""
    readers: list[list[int]] = [[] for _ in storage.made_by]
    for op, read in enumerate(operands):
        if protos[op].opcode not in SHOWING:
            values = {value for operand in read for value in storage.of_op[operand]}
            if protos[op].opcode in _DONE_MEMBER:
                values -= _written_over_by(storage, read[0], values)
            for value in values:
                readers[value].append(op)
    return readers


def _written_over_by(storage: Storage, start: int, values: Collection[int]) -> set[int]:
    """Operands of an asynchronous op that its own result is written over: nothing reads them until it is done."""
    written = {storage.buffer(value) for value in values if storage.made_by[value] == start}
    return {v for v in values if storage.made_by[v] != start and storage.buffer(v) in written}
