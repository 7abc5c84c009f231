"""Reads from a module's bytes which values there are and which buffers they must be in, as XLA assigns them.

The ideas of XLA's ``HloDataflowAnalysis`` (what hands a value on, and what makes a new one) and ``HloAliasAnalysis``
(which values must share a buffer). Part of :mod:`~disco_hlo.plan.check_module`, which shares no code with what writes
modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import Message
from disco_hlo.plan.check_pairs import Body, MalformedError, Pair, leaf_at, leaf_count, pairs
from disco_hlo.plan.check_reads import ELEMENTWISE
from disco_hlo.plan.check_values import NOTHING, Block, Leaves, Step, Values

_HANDS_ON = frozenset(("bitcast", "opt-barrier", "domain", "add-dependency"))
_DONES = frozenset(("all-gather-done", "all-reduce-done", "async-done", "collective-permute-done", "copy-done",
                    "recv-done", "send-done", "async-update"))  # fmt: skip
_MAKES_VALUES = ELEMENTWISE | COLLECTIVES | frozenset((
    "after-all", "all-reduce-start", "batch-norm-grad", "batch-norm-inference", "batch-norm-training", "broadcast",
    "cholesky", "collective-reduce", "concatenate", "constant", "convolution", "custom-call", "dot",
    "dynamic-reshape", "dynamic-slice", "dynamic-update-slice", "fft", "fusion", "gather", "get-dimension-size",
    "infeed", "iota", "outfeed", "pad", "partition-id", "ragged-dot", "recv", "reduce", "reduce-window",
    "replica-id", "reshape", "reverse", "rng", "rng-bit-generator", "rng-get-and-update-state", "scaled-dot",
    "scatter", "select-and-scatter", "set-dimension-size", "shuffle", "slice", "sort", "topk", "transpose",
    "triangular-solve",
))  # fmt: skip
"""Ops that read their operands and write arrays of their own."""


class Reader:
    """Reads a module's computations, call by call, into blocks of steps."""

    def __init__(self, module: Message) -> None:
        self.values = Values()
        self.arguments: list[int] = []
        """Of the entry."""
        self._module = module
        self.bodies = _bodies(module)
        self._sequences = {
            key: sequence.instruction_ids for key, sequence in module.schedule.sequences.items()
        }
        self._before: dict[tuple[int, int], Leaves] = {}
        """What an instruction defined in the first call of its computation."""
        self._twins: list[tuple[int, int]] = []
        """Values that are in one buffer since a computation that is called twice has one set of buffers."""
        self._calling: list[int] = []
        self._left = 20 * sum(len(computation.instructions) for computation in module.computations) + 1000
        self._counts: dict[tuple[int, int], tuple[int, ...]] = {}
        self._readers: dict[str, Callable[[Message, tuple[Leaves, ...], Block], Leaves]] = {
            "tuple": lambda _, operands, __: [value for operand in operands for value in operand],
            "while": self._while,
            "conditional": self._conditional,
            "call": self._call,
            "async-start": self._async_start,
            "all-gather-start": self._forwarding_start,
            "collective-permute-start": self._forwarding_start,
            "send": self._forwarding_start,
            "copy-start": self._copy_start,
        }

    def entry(self) -> Block:
        """The entry computation, with the aliases of donated arguments.

        Raises:
            MalformedError: the module does not say what runs, or uses a value that it does not have.
        """
        module, values = self._module, self.values
        body = self.bodies[module.entry_computation_id]
        parameters = {one.parameter_number: one for one in body.by_id.values() if one.opcode == "parameter"}
        given = {number: values.new_for(one, one.shape) for number, one in parameters.items()}
        arguments = [given.get(number, []) for number in range(max(given, default=-1) + 1)]
        block = self.block(module.entry_computation_id, arguments, "the module")
        donated = set()
        for entry in module.input_output_alias.entries:
            if entry.parameter_number not in given:
                raise MalformedError(
                    f"input_output_alias names parameter {entry.parameter_number}, which is not there"
                )
            parameter = parameters[entry.parameter_number]
            leaf = leaf_at(parameter.shape, tuple(entry.parameter_shape_index), parameter.name)
            out = leaf_at(body.root.shape, tuple(entry.output_shape_index), body.root.name)
            argument = given[entry.parameter_number][leaf]
            donated.add(argument)
            values.share(argument, block.ends_with[out])
        values.settle()
        for one, other in self._twins:
            if values.itself(one) == one and values.itself(other) == other:
                values.share(one, other)
        self.arguments = [one for held in arguments for one in held if one != NOTHING]
        values.read_only.update(one for one in self.arguments if one not in donated)
        return block

    def block(self, computation: int, arguments: Sequence[Leaves], caller: str) -> Block:
        """What a computation does where ``caller`` calls it with these arguments."""
        body = self.bodies.get(computation)
        if body is None:
            raise MalformedError(f"{caller} calls computation {computation}, which is not there")
        if computation in self._calling:
            raise MalformedError(f"{caller} calls {body.name}, which is being called")
        sequence = self._sequence(computation, body)
        self._calling.append(computation)
        block = Block(body.name, body)
        known: dict[int, Leaves] = {}
        for number in sequence:
            instruction = body.by_id[number]
            known[number] = self._values_of(instruction, known, body, arguments, block)
        for step in block.steps:
            earlier = self._before.setdefault((computation, step.instruction.id), step.results)
            self._twins += zip(earlier, step.results, strict=False)
        block.ends_with = known[body.root.id]
        self._calling.pop()
        return block

    def _sequence(self, computation: int, body: Body) -> Sequence[int]:
        sequence: Sequence[int] | None = self._sequences.get(computation)
        if sequence is None:
            raise MalformedError(f"{body.name} has no schedule")
        if len(set(sequence)) != len(sequence):
            raise MalformedError(f"the schedule of {body.name} names an instruction twice")
        if len(sequence) != len(body.by_id) or not all(map(body.by_id.__contains__, sequence)):
            raise MalformedError(
                f"the schedule of {body.name} names {len(sequence)} instructions, "
                f"expected each of its {len(body.by_id)}"
            )
        self._left -= len(sequence)
        if self._left < 0:
            raise MalformedError(f"{body.name} is called too often to be checked")
        return sequence

    def _values_of(
        self,
        instruction: Message,
        known: Mapping[int, Leaves],
        body: Body,
        arguments: Sequence[Leaves],
        block: Block,
    ) -> Leaves:
        opcode = instruction.opcode
        try:
            operands = tuple([known[one] for one in instruction.operand_ids])
            for one in instruction.control_predecessor_ids:
                known[one]
        except KeyError as error:
            raise MalformedError(_too_early(instruction, error.args[0], body)) from None
        if not operands and opcode in _NEEDS_OPERANDS:
            raise MalformedError(f"{instruction.name} in {body.name} reads nothing")
        if opcode == "get-tuple-element":
            return self._member(instruction, operands, body)
        if opcode in _MAKES_VALUES:
            return self._op(instruction, operands, body, block)
        if opcode == "parameter":
            found = _argument(instruction, arguments, body)
        elif opcode in _HANDS_ON:
            found = operands[0]
        elif opcode in _DONES:
            found = self._done(instruction, operands, body, block)
        else:
            reader = self._readers.get(opcode)
            if reader is None:
                raise MalformedError(
                    f"{instruction.name} has the opcode {opcode!r}, whose buffers are not known"
                )
            found = reader(instruction, operands, block)
        if len(found) != leaf_count(instruction.shape):
            raise MalformedError(f"{instruction.name} in {body.name} has another shape than its value")
        return found

    def _member(self, instruction: Message, operands: tuple[Leaves, ...], body: Body) -> Leaves:
        number = instruction.operand_ids[0]
        key = self._calling[-1], number
        ends = self._counts.get(key)
        if ends is None:
            sizes, total = [0], 0
            for member in body.by_id[number].shape.tuple_shapes:
                total += leaf_count(member)
                sizes.append(total)
            ends = self._counts[key] = tuple(sizes)
        place = instruction.tuple_index
        if not 0 <= place < len(ends) - 1 or ends[-1] != len(operands[0]):
            raise MalformedError(f"{instruction.name} reads member {place} of a tuple that does not have it")
        return operands[0][ends[place] : ends[place + 1]]

    def _op(self, instruction: Message, operands: tuple[Leaves, ...], body: Body, block: Block) -> Leaves:
        values = self.values
        results = values.new_for(instruction, instruction.shape)
        found = self._pairs(instruction, body)
        for pair in found:
            self._share_pair(instruction, pair, operands, results)
        if instruction.opcode == "constant":
            values.read_only.update(one for one in results if one != NOTHING)
        block.steps.append(Step(instruction, "op", operands, results, found))
        return results

    def _pairs(self, instruction: Message, body: Body) -> tuple[Pair, ...]:
        read = tuple([body.by_id[one] for one in instruction.operand_ids])
        return pairs(instruction, read, self.bodies)

    def _share_pair(
        self, instruction: Message, pair: Pair, operands: tuple[Leaves, ...], results: Leaves
    ) -> None:
        try:
            self.values.share(operands[pair.operand][pair.operand_leaf], results[pair.result_leaf])
        except IndexError:
            raise MalformedError(f"{instruction.name} writes over an operand that it does not have") from None

    def _done(self, instruction: Message, operands: tuple[Leaves, ...], body: Body, block: Block) -> Leaves:
        """The end of an async op; until then it uses all that it was given."""
        opcode, started = instruction.opcode, operands[0]
        block.steps.append(Step(instruction, "done", operands, ()))
        if opcode in ("all-reduce-done", "async-update"):
            return started
        if opcode == "send-done":
            return self.values.new_for(instruction, instruction.shape)
        shape = body.by_id[instruction.operand_ids[0]].shape
        if leaf_count(shape) != len(started):
            raise MalformedError(f"{instruction.name} is given another shape than it reads")
        member = 0 if opcode in ("copy-done", "recv-done") else 1
        first = leaf_at(shape, (member,), instruction.name)
        handed = started[first : first + leaf_count(shape.tuple_shapes[member])]
        made = leaf_count(instruction.shape) - len(handed)
        if made < 0 or (made and opcode != "recv-done"):
            raise MalformedError(f"{instruction.name} has another shape than its start gives")
        return [*handed, *[NOTHING] * made]

    def _forwarding_start(self, instruction: Message, operands: tuple[Leaves, ...], block: Block) -> Leaves:
        """An async start whose result begins with what it reads."""
        values = self.values
        results = values.new_for(instruction, instruction.shape)
        read = [value for operand in operands for value in operand]
        count = leaf_count(instruction.shape.tuple_shapes[0]) if instruction.shape.tuple_shapes else 0
        found = self._pairs(instruction, self.bodies[self._calling[-1]])
        made = results[count:]
        if len(read) < count:
            raise MalformedError(f"{instruction.name} hands on more than it reads")
        results = [*read[:count], *made]
        for pair in found:
            self._share_pair(instruction, pair, operands, results)
        found = tuple(pair._replace(result_leaf=pair.result_leaf - count) for pair in found)
        block.steps.append(Step(instruction, "op", operands, made, found))
        return results

    def _copy_start(self, instruction: Message, operands: tuple[Leaves, ...], block: Block) -> Leaves:
        copied, *context = self.values.new_for(instruction, instruction.shape)
        if not context or not operands[0]:
            raise MalformedError(f"{instruction.name} has another shape than a copy-start has")
        context = context[1:]
        block.steps.append(Step(instruction, "op", operands, (copied, *context)))
        return [copied, operands[0][0], *context]

    def _async_start(self, instruction: Message, operands: tuple[Leaves, ...], block: Block) -> Leaves:
        inner = self.block(_called(instruction, 1)[0], operands, instruction.name)
        inner.name = block.name
        read = [value for operand in operands for value in operand]
        for step in inner.steps:
            step.caller = instruction
            for value in step.results:
                if value != NOTHING and value in inner.ends_with:
                    leaf = len(read) + list(inner.ends_with).index(value)
                    self.values.definers[value] = (instruction, leaf)
        context = leaf_count(instruction.shape) - len(read) - len(inner.ends_with)
        if context < 0:
            raise MalformedError(f"{instruction.name} has another shape than what it calls gives")
        results = [*read, *inner.ends_with, *[NOTHING] * context]
        found = self._pairs(instruction, self.bodies[self._calling[-1]])
        for pair in found:
            self._share_pair(instruction, pair, operands, results)
        block.steps.append(Step(instruction, "call", operands, (), found, (inner,)))
        return results

    def _call(self, instruction: Message, operands: tuple[Leaves, ...], block: Block) -> Leaves:
        inner = self.block(_called(instruction, 1)[0], operands, instruction.name)
        block.steps.append(Step(instruction, "call", operands, (), (), (inner,)))
        return inner.ends_with

    def _while(self, instruction: Message, operands: tuple[Leaves, ...], block: Block) -> Leaves:
        """A loop: what it carries is what it was given, or what its body returned in the turn before."""
        values, begin = self.values, operands[0]
        body_id, condition_id = _called(instruction, 2)
        body = self.bodies.get(body_id)
        given = next((p for p in body.by_id.values() if p.opcode == "parameter"), None) if body else None
        if given is None or leaf_count(given.shape) != len(begin):
            raise MalformedError(f"{instruction.name} gives its body another shape than that takes")
        carried = values.new_for(given, given.shape)
        blocks = tuple(self.block(one, [carried], instruction.name) for one in (condition_id, body_id))
        end = blocks[1].ends_with
        results = values.new_for(instruction, instruction.shape)
        if not len(end) == len(begin) == len(results):
            raise MalformedError(f"{instruction.name} does not return what it takes")
        values.choose(carried, (begin, end))
        values.choose(results, (begin, end))
        block.steps.append(Step(instruction, "while", (begin,), results, (), blocks, carried))
        return results

    def _conditional(self, instruction: Message, operands: tuple[Leaves, ...], block: Block) -> Leaves:
        """One of several."""
        called = _called(instruction, len(operands) - 1)
        blocks = tuple(
            self.block(one, [given], instruction.name)
            for one, given in zip(called, operands[1:], strict=True)
        )
        results = self.values.new_for(instruction, instruction.shape)
        if not blocks or any(len(one.ends_with) != len(results) for one in blocks):
            raise MalformedError(f"{instruction.name} does not return what its branches give")
        self.values.choose(results, [one.ends_with for one in blocks])
        given = [value for leaves in operands[1:] for value in leaves]
        block.steps.append(Step(instruction, "conditional", operands[:1], results, (), blocks, given))
        return results


_NEEDS_OPERANDS = frozenset((
    *_HANDS_ON, *_DONES, "get-tuple-element", "while", "conditional", "copy-start", "send", "all-gather-start",
    "collective-permute-start",
))  # fmt: skip


def _bodies(module: Message) -> dict[int, Body]:
    """The computations by id.

    Raises:
        MalformedError: two have one id, or one has no root, or two instructions with one id.
    """
    bodies: dict[int, Body] = {}
    for computation in module.computations:
        by_id = {instruction.id: instruction for instruction in computation.instructions}
        root = by_id.get(computation.root_id)
        if root is None or computation.id in bodies or len(by_id) != len(computation.instructions):
            raise MalformedError(f"{computation.name} has no root, or an id twice")
        bodies[computation.id] = Body(computation.name, root, by_id)
    return bodies


def _argument(parameter: Message, arguments: Sequence[Leaves], body: Body) -> Leaves:
    if not 0 <= parameter.parameter_number < len(arguments):
        raise MalformedError(f"{body.name} is not given its parameter {parameter.name}")
    return arguments[parameter.parameter_number]


def _called(instruction: Message, count: int) -> Sequence[int]:
    called: Sequence[int] = instruction.called_computation_ids
    if len(called) != count:
        raise MalformedError(f"{instruction.name} calls {len(called)} computations, expected {count}")
    return called


def _too_early(instruction: Message, number: int, body: Body) -> str:
    missing = body.by_id.get(number)
    if missing is None:
        return f"{instruction.name} in {body.name} reads instruction {number}, which is not there"
    return f"{instruction.name} runs before {missing.name}, which it waits for, in {body.name}"
