"""Reads from a module's bytes which values there are and which buffers they must be in, as XLA assigns them.

The ideas of XLA's ``HloDataflowAnalysis`` (what hands a value on, and what makes a new one), ``HloAliasAnalysis``
(which values must share a buffer) and ``AliasInfo::GetInPlaceInputOutputPairs`` (which result lies in the buffer of
which operand). Part of :mod:`~disco_hlo.plan.check_module`, which shares no code with what writes modules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from disco_hlo.errors import PlanError
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import DTYPES, TUPLE, Message

_TOKEN = 17
_BITS = {
    number: int(match.group()) if (match := re.search(r"\d+", name)) else 8 for number, name in DTYPES.items()
}
"""Bits of an element, by type."""
NOTHING = 0
"""The value of what takes no memory: tokens, arrays without elements."""
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "bitcast-convert", "cbrt", "ceil",
    "clamp", "compare", "complex", "convert", "copy", "cosh", "cosine", "count-leading-zeros", "divide", "erf",
    "exponential", "exponential-minus-one", "floor", "imag", "is-finite", "log", "log-plus-one", "logistic", "map",
    "maximum", "minimum", "mulhi", "multiply", "negate", "not", "or", "popcnt", "power", "real", "reduce-precision",
    "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic",
    "shift-right-logical", "sign", "sine", "sinh", "sqrt", "stochastic-convert", "subtract", "tan", "tanh", "xor",
))  # fmt: skip
"""Ops that read each operand at the element that they write, where the shapes are the same."""
_HANDS_ON = frozenset(("bitcast", "opt-barrier", "domain", "add-dependency"))
_DONES = frozenset(("all-gather-done", "all-reduce-done", "async-done", "collective-permute-done", "copy-done",
                    "recv-done", "send-done", "async-update"))  # fmt: skip
_NEEDS_OPERANDS = frozenset((
    *_HANDS_ON, *_DONES, "get-tuple-element", "while", "conditional", "copy-start", "send", "all-gather-start",
    "collective-permute-start",
))  # fmt: skip
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


class MalformedError(PlanError):
    """The bytes do not say which buffers the module uses: something is missing or contradicts itself."""


class Body(NamedTuple):
    """A computation, ready for look-ups."""

    name: str
    root: Message
    by_id: Mapping[int, Message]


Leaves = Sequence[int]
"""The values of an instruction, one for each array in its shape."""


@dataclass(slots=True)
class Step:
    """One instruction that reads or writes memory, or calls what does."""

    instruction: Message
    kind: str
    """``op``, ``done``, ``while``, ``conditional``, or ``call`` (async starts too)."""
    operands: tuple[Leaves, ...]
    results: Leaves
    """The values that it defines; those that it hands on are none of them."""
    pairs: tuple[Pair, ...] = ()
    blocks: tuple[Block, ...] = ()
    """What it calls: a while its condition and body, in this order."""
    starts: Leaves = ()
    """The values that a while's condition and body begin with and its body writes anew; those that a conditional's
    branches begin with."""
    caller: Message | None = None
    """The async start that wraps the instruction."""

    @property
    def runs(self) -> Message:
        """What the schedule around names: the instruction, or the async start that wraps it."""
        return self.instruction if self.caller is None else self.caller


@dataclass(slots=True)
class Block:
    """One call of a scheduled computation."""

    name: str
    body: Body
    steps: list[Step] = field(default_factory=list)
    ends_with: Leaves = ()
    """The values of the root."""


class Values:
    """Numbered values, and sets of those that must be in one buffer."""

    def __init__(self) -> None:
        self.definers: list[tuple[Message | None, int]] = [(None, 0)]
        self.shapes: list[Message] = [None]
        self.phis: dict[int, list[int]] = {}
        """Values that stand for one of several, of loops and conditionals; for each what it may be."""
        self.read_only: set[int] = set()
        """Constants and arguments that were not donated."""
        self._is: list[int] = [NOTHING]
        self._parent: list[int] = [NOTHING]

    def new(self, instruction: Message, leaf: int, shape: Message) -> int:
        """A value of its own; :data:`NOTHING` where it takes no memory."""
        if shape.element_type == _TOKEN or 0 in shape.dimensions:
            return NOTHING
        self.definers.append((instruction, leaf))
        self.shapes.append(shape)
        self._is.append(len(self._is))
        self._parent.append(len(self._parent))
        return len(self._is) - 1

    def new_for(self, instruction: Message, shape: Message) -> list[int]:
        """A value for every array of a shape."""
        return [self.new(instruction, leaf, one) for leaf, one in enumerate(leaves(shape))]

    def choose(self, phis: Leaves, inputs: Sequence[Leaves]) -> None:
        """Let each of some values be one of several."""
        for phi, *ends in zip(phis, *inputs, strict=True):
            if phi == NOTHING:
                continue
            self.phis[phi] = ends
            for end in ends:
                self.share(phi, end)

    def settle(self) -> None:
        """Find the values that can only be one other value: all that goes round is handed on, or changes places with an
        equal. XLA's ``HloDataflowAnalysis`` leaves out such phis; one that it kept would hold the same numbers."""
        stands_for: dict[int, int | None] = dict.fromkeys(self.phis)
        is_settled = False
        while not is_settled:
            is_settled = True
            for phi, inputs in self.phis.items():
                found = {stands_for.get(one, one) for one in inputs} - {None}
                before, new = stands_for[phi], phi if len(found) > 1 else next(iter(found), None)
                if before in (new, phi):
                    continue
                if before is not None:  # what others have of it by way of this one is found anew
                    stands_for |= {one: None for one, value in stands_for.items() if one != value == before}
                stands_for[phi], is_settled = new, False
        for phi, value in stands_for.items():
            if value is not None:
                self._is[phi] = value

    def itself(self, value: int) -> int:
        """The value that a value was found to be."""
        while self._is[value] != value:
            value = self._is[value]
        return value

    def buffer(self, value: int) -> int:
        """The number of a value's buffer."""
        parent = self._parent
        while parent[value] != value:
            parent[value] = parent[parent[value]]
            value = parent[value]
        return value

    def share(self, one: int, other: int) -> None:
        """Two values must be in one buffer."""
        if NOTHING in (one, other):
            return
        a, b = self.buffer(one), self.buffer(other)
        self._parent[max(a, b)] = min(a, b)

    def size(self, value: int) -> int:
        """Bits of an array, as far as they decide whether another one fits into its buffer."""
        shape = self.shapes[value]
        elements: int = math.prod(shape.dimensions)
        return elements * _BITS.get(shape.element_type, 0)

    def name(self, value: int) -> str:
        """A value as a reader of the module finds it."""
        instruction, leaf = self.definers[value]
        assert instruction is not None
        is_tuple = instruction.shape.element_type == TUPLE
        return f"{instruction.name}{{{leaf}}}" if is_tuple else str(instruction.name)


# Computations, call by call ---------------------------------------------------------------------


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


# In-place pairs ---------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A result in the buffer of an operand; both are counted as array members of their (flattened) tuples."""

    operand: int
    operand_leaf: int
    result_leaf: int
    is_declared: bool = False
    """Whether the instruction itself says so (``output_operand_aliasing``)."""


def pairs(
    instruction: Message, operands: tuple[Message, ...], bodies: Mapping[int, Body]
) -> tuple[Pair, ...]:
    """The in-place pairs of an instruction.

    Args:
        operands: the instructions that it reads.
        bodies: the computations by id, for those that fusions call.
    """
    opcode = instruction.opcode
    if opcode == "fusion":
        return (*_fusion_pairs(instruction, bodies), *_declared(instruction, operands))
    if opcode in ("custom-call", "async-start"):
        return _declared(instruction, operands)
    if opcode in ("dynamic-update-slice", "set-dimension-size"):
        return (Pair(0, 0, 0),)
    if opcode == "scatter":
        return _one_by_one((len(operands) - 1) // 2)
    if opcode == "all-reduce-start":
        return () if b"nvshmem" in instruction.backend_config.lower() else _one_by_one(len(operands))
    if opcode == "ragged-all-to-all":
        return (Pair(1, 0, 0),)
    if opcode in ("collective-permute", "collective-permute-start") and len(operands) == 4:
        first = 0 if opcode == "collective-permute" else leaf_at(instruction.shape, (1,), instruction.name)
        return tuple(Pair(1, leaf, first + leaf) for leaf in range(leaf_count(operands[1].shape)))
    return ()


def _one_by_one(count: int) -> tuple[Pair, ...]:
    return tuple(Pair(place, 0, place) for place in range(count))


def _declared(instruction: Message, operands: tuple[Message, ...]) -> tuple[Pair, ...]:
    """The pairs that the instruction itself names (``output_operand_aliasing``), array by array."""
    found = []
    for one in instruction.output_operand_aliasing:
        if not 0 <= one.operand_index < len(operands):
            raise MalformedError(
                f"{instruction.name} aliases operand {one.operand_index}, which it does not have"
            )
        read = operands[one.operand_index].shape
        mine = leaf_at(instruction.shape, tuple(one.output_shape_index), instruction.name)
        theirs = leaf_at(read, tuple(one.operand_shape_index), instruction.name)
        for place in one.operand_shape_index:
            read = read.tuple_shapes[place]
        found += [Pair(one.operand_index, theirs + k, mine + k, True) for k in range(leaf_count(read))]
    return tuple(found)


def _fusion_pairs(fusion: Message, bodies: Mapping[int, Body]) -> Iterator[Pair]:
    """A fusion writes in place where an in-place op is behind its root and a parameter behind that op."""
    body = fused(fusion, bodies)
    for leaf in range(leaf_count(fusion.shape)):
        source = behind(body, body.root, leaf)
        if source is None:
            continue
        for pair in _inner_pairs(source[0], body, bodies):
            if pair.result_leaf != source[1]:
                continue
            read = _updated(pair, source[0], body, bodies)
            if read is not None and read[0].opcode == "parameter":
                yield Pair(read[0].parameter_number, read[1], leaf)


def _inner_pairs(instruction: Message, body: Body, bodies: Mapping[int, Body]) -> tuple[Pair, ...]:
    operands = tuple(_operand(instruction, place, body) for place in range(len(instruction.operand_ids)))
    return pairs(instruction, operands, bodies)


def _updated(
    pair: Pair, writer: Message, body: Body, bodies: Mapping[int, Body]
) -> tuple[Message, int] | None:
    """What an in-place op in a fusion writes over; through a fusion inside that writes in place itself."""
    read = behind(body, _operand(writer, pair.operand, body), pair.operand_leaf)
    if read is None or read[0].opcode != "fusion":
        return read
    for inner in _inner_pairs(read[0], body, bodies):
        if inner.result_leaf == read[1]:
            return behind(body, _operand(read[0], inner.operand, body), inner.operand_leaf)
    return read


# Shapes and operands ----------------------------------------------------------------------------


def leaf_count(shape: Message) -> int:
    """How many arrays a shape has, itself or as members of its tuples."""
    if shape.element_type != TUPLE:
        return 1
    return sum(map(leaf_count, shape.tuple_shapes))


def leaves(shape: Message) -> Iterator[Message]:
    """The shapes of the arrays in a shape, in order."""
    if shape.element_type != TUPLE:
        yield shape
        return
    for member in shape.tuple_shapes:
        yield from leaves(member)


def leaf_at(shape: Message, index: tuple[int, ...], name: str) -> int:
    """The number of the first array at a shape index (XLA's ``ShapeIndex``).

    Raises:
        MalformedError: the shape has no such index.
    """
    before = 0
    for step in index:
        if shape.element_type != TUPLE or not 0 <= step < len(shape.tuple_shapes):
            raise MalformedError(f"{name} names the index {list(index)} of a shape that does not have it")
        before += sum(leaf_count(member) for member in shape.tuple_shapes[:step])
        shape = shape.tuple_shapes[step]
    return before


def fused(fusion: Message, bodies: Mapping[int, Body]) -> Body:
    """What a fusion computes.

    Raises:
        MalformedError: it calls no computation of the module.
    """
    called = fusion.called_computation_ids
    body = bodies.get(called[0]) if called else None
    if body is None:
        raise MalformedError(f"{fusion.name} calls no computation of the module")
    return body


def behind(
    body: Body, instruction: Message, leaf: int, through: str = "bitcast"
) -> tuple[Message, int] | None:
    """Where one array of an instruction comes from, through tuples and ops of one kind that hand all on."""
    for _ in range(len(body.by_id) + 1):
        opcode = instruction.opcode
        if opcode == "tuple":
            for place in range(len(instruction.operand_ids)):
                member = _operand(instruction, place, body)
                count = leaf_count(member.shape)
                if leaf < count:
                    instruction = member
                    break
                leaf -= count
            else:
                return None
        elif opcode == "get-tuple-element":
            whole = _operand(instruction, 0, body)
            leaf += leaf_at(whole.shape, (instruction.tuple_index,), instruction.name)
            instruction = whole
        elif opcode == through:
            instruction = _operand(instruction, 0, body)
        else:
            return instruction, leaf
    raise MalformedError(f"{instruction.name} in {body.name} reads itself")


def _operand(instruction: Message, place: int, body: Body) -> Message:
    read = body.by_id.get(instruction.operand_ids[place]) if place < len(instruction.operand_ids) else None
    if read is None:
        raise MalformedError(f"{instruction.name} in {body.name} has no operand {place}")
    return read
