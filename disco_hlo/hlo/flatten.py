"""First half of canonical form: a computation as one flat list of ops, as if XLA had fused and combined nothing.

Every inlinable fusion is replaced by its body, tuples of fusion results by the values in them, variadic collectives by
one collective per operand, barriers of tuples by one of each array, async pairs by the op inside. What came from which
instruction is kept: that is XLA's own plan, and ``plan.read`` turns it into a strategy.

Then all-reduces over a concatenation are taken apart (:func:`unpack_concatenated`). XLA's ``all-reduce-contiguous``
pass (GPU) and our own ``concat`` buckets write a bucket as ``slice(all-reduce(concatenate(bitcast(g0), ...)))``. Where
every reader of such an all-reduce slices out exactly one part, the parts are separate all-reduces again. Bitcasts of
bitcasts are folded on the way, transposes that move no byte become bitcasts, and an all-reduce moves in front of the
bitcast of its operand, so that it does not matter where XLA reshaped a gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.attributes import custom_fusion_kind, is_inlinable_fusion
from disco_hlo.hlo.graph import Shape
from disco_hlo.hlo.opcodes import COLLECTIVE, MOVED_COLLECTIVES
from disco_hlo.hlo.proto import TUPLE, Instruction, Message, ShapeProto, shape_of

_MOST_REPEATED = 4
"""XLA calls each fusion's computation once. One that calls another twice, which calls a third twice, and so on, is a
few kilobytes that no memory holds once they are flat."""
_DONES = ("all-reduce-done", "all-gather-done", "async-done")
CALLER = -1
"""Who reads the root, in edges."""
Value = int | list["Value"]
"""A flat op's index, or the members of a tuple."""


@dataclass(slots=True)
class FlatOp:
    """One op of the flat list; ``operands`` index the list."""

    proto: Message
    operands: list[int]
    source: int
    """Index of the :class:`SourceInstruction` it was written in."""
    spare: int | None = None
    """Of a dynamic-update-slice that XLA computes element by element, into a buffer of its own: a copy of the array
    that it would overwrite if it ran by itself. Nothing reads the copy until somebody makes it operand 0."""


@dataclass(slots=True)
class SourceInstruction:
    """One instruction of the original computation, and where its ops went."""

    proto: Message
    role: str
    """``fusion``, ``start`` and ``done`` of an asynchronous collective, or ``op``."""
    ops: list[int] = field(default_factory=list)
    """Indices of the flat ops it computes; for ``done``, those of its ``start``."""
    cuts: list[int] = field(default_factory=list)
    """Of the all-reduces that it cuts out of packed ones."""


@dataclass(slots=True)
class FlatComputation:
    """A computation after inlining; ``sources`` in schedule order where there is a schedule."""

    ops: list[FlatOp]
    root: int
    sources: list[SourceInstruction]
    control: list[tuple[int, int]]
    """Control dependencies as pairs of source indices (before, after)."""


class ModuleIndex:
    """Computations of a module by id, with the questions asked of them again and again."""

    def __init__(self, module: Message) -> None:
        self.module = module
        self.by_id: dict[int, Message] = {computation.id: computation for computation in module.computations}
        self._contains_dot: dict[int, bool] = {}
        self.storage: dict[tuple[int, tuple[int, ...]], Any] = {}
        """What ``storage`` found of called computations so far."""
        self.most_ops: int = _MOST_REPEATED * sum(
            1 + len(instruction.operand_ids)
            for computation in module.computations
            for instruction in computation.instructions
        )
        """What a computation may come to once it is flat."""

    def computation(self, computation_id: int) -> Message:
        """The computation with this id.

        Raises:
            ModuleError: there is none.
        """
        found = self.by_id.get(computation_id)
        if found is None:
            raise ModuleError(
                f"module {self.module.name!r}: computation {computation_id} is called but missing"
            )
        return found

    def contains_dot(self, computation_id: int) -> bool:
        """Whether the computation holds a dot, directly or in a computation it calls."""
        known = self._contains_dot.get(computation_id)
        if known is None:
            known = any(
                instruction.opcode == "dot" or any(map(self.contains_dot, instruction.called_computation_ids))
                for instruction in self.computation(computation_id).instructions
            )
            self._contains_dot[computation_id] = known
        return known


def flatten(index: ModuleIndex, computation: Message) -> FlatComputation:
    """Inline the fusions of ``computation``.

    Raises:
        ModuleError: operands that do not exist or come later, a tuple used as an array, or fusions that repeat
            each other without end.
    """
    return _Flattener(index, computation).run()


def scheduled_instructions(index: ModuleIndex, computation: Message) -> list[Message]:
    """Instructions in schedule order, or in the proto's (valid dependency) order without a schedule."""
    sequence = (
        index.module.schedule.sequences.get(computation.id)
        if computation.id in index.module.schedule.sequences
        else None
    )
    if sequence is None:
        return list(computation.instructions)
    by_id = {instruction.id: instruction for instruction in computation.instructions}
    return [by_id[i] for i in sequence.instruction_ids]


def emitter_of(instruction: Message) -> str:
    """The strategy's name for a fusion's emitter: ``loop``, ``input``, ``output`` or ``triton``."""
    if custom_fusion_kind(instruction) == "__triton":
        return "triton"
    return {"kLoop": "loop", "kInput": "input", "kOutput": "output"}[instruction.fusion_kind]


class _Flattener:
    def __init__(self, index: ModuleIndex, computation: Message) -> None:
        self.index = index
        self.computation = computation
        self.ops: list[FlatOp] = []
        self.sources: list[SourceInstruction] = []
        self.started: dict[int, int] = {}
        self.left = index.most_ops

    def run(self) -> FlatComputation:
        instructions = scheduled_instructions(self.index, self.computation)
        values: dict[int, Value] = {}
        source_of: dict[int, int] = {}
        for instruction in instructions:
            source_of[instruction.id] = len(self.sources)
            self.sources.append(SourceInstruction(instruction, "op"))
            values[instruction.id] = self._value(instruction, values, entry=True)
        control = [
            (source_of[before], source_of[instruction.id])
            for instruction in instructions
            for before in instruction.control_predecessor_ids
            if before in source_of
        ]
        root = values.get(self.computation.root_id)
        if root is None:
            raise ModuleError(f"computation {self.computation.name!r} has no root {self.computation.root_id}")
        if isinstance(root, list):  # a kernel's results, returned as they are
            gathered = Instruction(name=f"{self.computation.name}.results", opcode="tuple")
            self.sources.append(SourceInstruction(gathered, "op"))
        return FlatComputation(self.ops, self._as_op(root, self.computation.name), self.sources, control)

    def _operands(self, instruction: Message, values: dict[int, Value]) -> list[Value]:
        missing = [i for i in instruction.operand_ids if i not in values]
        if missing:
            raise ModuleError(
                f"instruction {instruction.name!r} reads {missing}, which no earlier instruction defines"
            )
        return [values[i] for i in instruction.operand_ids]

    def _as_op(self, value: Value, name: str) -> int:
        if isinstance(value, int):
            return value
        members = [self._as_op(member, name) for member in value]
        shape = ShapeProto(element_type=TUPLE, tuple_shapes=[self.ops[one].proto.shape for one in members])
        return self._emit(Instruction(name=f"{name}.tuple", opcode="tuple", shape=shape), members)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ModuleError(
                f"computation {self.computation.name!r} repeats what it calls until it holds more than "
                f"{self.index.most_ops} ops; expected no more than a few times as many as the module has"
            )

    def _emit(self, proto: Message, operands: list[int]) -> int:
        self._count()
        self.ops.append(FlatOp(proto, operands, len(self.sources) - 1))
        self.sources[-1].ops.append(len(self.ops) - 1)
        return len(self.ops) - 1

    def _value(self, instruction: Message, values: dict[int, Value], *, entry: bool) -> Value:
        operands = self._operands(instruction, values)
        opcode = instruction.opcode
        if is_inlinable_fusion(instruction, self.index.contains_dot):
            if entry:
                self.sources[-1].role = "fusion"
            return self._inline(instruction, operands)
        if opcode == "get-tuple-element":
            return self._element(instruction, operands[0])
        if opcode == "tuple" and not entry:
            return operands
        inner = self._asynchronous(instruction)
        if inner is not None:
            self.sources[-1].role = "start"
            self.started[instruction.id] = len(self.sources) - 1
            return self._collective(inner, operands)
        if opcode in _DONES and instruction.operand_ids[0] in self.started:
            self.sources[-1].role = "done"
            self.sources[-1].ops = self.sources[self.started[instruction.operand_ids[0]]].ops
            return operands[0]
        if is_moved_collective(instruction, len(operands)):
            return self._collective(instruction, operands)
        if opcode == "opt-barrier":
            return self._barrier(instruction, operands[0])
        return self._emit(instruction, [self._as_op(operand, instruction.name) for operand in operands])

    def _inline(self, fusion: Message, operands: list[Value]) -> Value:
        body = self.index.computation(fusion.called_computation_ids[0])
        values: dict[int, Value] = {}
        for instruction in body.instructions:
            self._count()
            if instruction.opcode == "parameter":
                values[instruction.id] = operands[instruction.parameter_number]
                continue
            if instruction.opcode == "dynamic-update-slice" and not _is_in_place(instruction, body):
                values[instruction.id] = self._update_elsewhere(instruction, values)
            else:
                values[instruction.id] = self._value(instruction, values, entry=False)
        return values[body.root_id]

    def _update_elsewhere(self, update: Message, values: dict[int, Value]) -> int:
        operands = [self._as_op(operand, update.name) for operand in self._operands(update, values)]
        copy = Instruction(name=f"{update.name}.copy", opcode="copy")
        copy.shape.CopyFrom(self.ops[operands[0]].proto.shape)
        spare = self._emit(copy, operands[:1])
        written = self._emit(update, operands)
        self.ops[written].spare = spare
        return written

    def _barrier(self, barrier: Message, value: Value) -> Value:
        """A barrier of each array by itself: no value has to wait for the others."""
        if isinstance(value, int) and self.ops[value].proto.opcode != "tuple":
            one = Instruction(name=f"{barrier.name}.{value}", opcode="opt-barrier")
            one.shape.CopyFrom(self.ops[value].proto.shape)
            one.metadata.CopyFrom(barrier.metadata)
            return self._emit(one, [value])
        members = value if isinstance(value, list) else self.ops[value].operands
        return [self._barrier(barrier, member) for member in members]

    def _element(self, instruction: Message, operand: Value) -> Value:
        if isinstance(operand, list):
            return operand[int(instruction.tuple_index)]
        producer = self.ops[operand]
        if producer.proto.opcode == "tuple":
            return producer.operands[int(instruction.tuple_index)]
        return self._emit(instruction, [operand])

    def _asynchronous(self, instruction: Message) -> Message | None:
        """The collective that an instruction starts; None where it starts none that a bucket could hold."""
        if instruction.opcode in ("all-reduce-start", "all-gather-start"):
            inner = Instruction()
            inner.CopyFrom(instruction)
            inner.opcode = instruction.opcode.removesuffix("-start")
            if inner.opcode == "all-gather":
                inner.shape.CopyFrom(instruction.shape.tuple_shapes[1])
            return inner
        if instruction.opcode != "async-start":
            return None
        *parameters, inner = self.index.computation(instruction.called_computation_ids[0]).instructions
        by_number = sorted(parameters, key=lambda one: int(one.parameter_number))
        is_plain = is_moved_collective(inner, len(parameters)) and all(
            one.opcode == "parameter" for one in parameters
        )
        if not is_plain or [one.id for one in by_number] != list(inner.operand_ids):
            return None
        named = Instruction()
        named.CopyFrom(inner)
        if not inner.metadata.op_name:
            named.metadata.CopyFrom(instruction.metadata)
        return named

    def _collective(self, proto: Message, operands: list[Value]) -> Value:
        """A collective as one of each of its arrays."""
        shapes = proto.shape.tuple_shapes if len(operands) > 1 else [proto.shape]
        single: list[Value] = []
        for operand, shape in zip(operands, shapes, strict=True):
            member = self._as_op(operand, proto.name)
            one = Instruction()
            one.CopyFrom(proto)
            one.shape.CopyFrom(shape)
            del one.operand_shapes_with_layout[:]
            single.append(self._emit(one, [member]))
        return single[0] if len(single) == 1 else single


def is_moved_collective(instruction: Message, arrays: int) -> bool:
    """Whether an instruction of so many arrays is a collective that a plan moves: of several only where each could be
    one of its own."""
    if instruction.opcode not in MOVED_COLLECTIVES:
        return False
    return COLLECTIVE[instruction.opcode].shares or (arrays == 1 and not instruction.shape.tuple_shapes)


def _is_in_place(update: Message, body: Message) -> bool:
    """Whether a kernel writes a dynamic-update-slice over its own operand: where it returns it, and the updated array
    is an operand, or a bitcast of one (``AliasInfo::GetFusionInstructionInPlaceInputOutputPairs``)."""
    by_id = {instruction.id: instruction for instruction in body.instructions}
    root = by_id[body.root_id]
    returned = root.operand_ids if root.opcode == "tuple" else (root.id,)
    updated = by_id[update.operand_ids[0]]
    if updated.opcode == "bitcast":
        updated = by_id[updated.operand_ids[0]]
    return update.id in returned and updated.opcode == "parameter"


# Copies -----------------------------------------------------------------------------------------


def with_copies(flat: FlatComputation, edges: Collection[tuple[int, int]]) -> FlatComputation:
    """The computation with a copy of what some ops read, given as (op, number of the operand): it gives the value a
    buffer of its own."""
    new: list[FlatOp] = []
    place: list[int] = []
    for position, op in enumerate(flat.ops):
        operands = [place[operand] for operand in op.operands]
        for number in range(len(operands)):
            if (position, number) in edges:
                new.append(_copied(new, operands[number], op))
                operands[number] = len(new) - 1
        new.append(FlatOp(op.proto, operands, op.source, None if op.spare is None else place[op.spare]))
        place.append(len(new) - 1)
    root = place[flat.root]
    if (CALLER, 0) in edges:
        new.append(_copied(new, root, flat.ops[flat.root]))
        root = len(new) - 1
    by_source: list[list[int]] = [[] for _ in flat.sources]
    for position, op in enumerate(new):
        by_source[op.source].append(position)
    sources = []
    for number, source in enumerate(flat.sources):
        moved = [place[op] for op in source.ops]
        added = [op for op in by_source[number] if op not in set(moved)] if source.role != "done" else []
        cuts = [place[op] for op in source.cuts]
        sources.append(SourceInstruction(source.proto, source.role, sorted(moved + added), cuts))
    return FlatComputation(new, root, sources, flat.control)


def _copied(ops: list[FlatOp], value: int, reader: FlatOp) -> FlatOp:
    copy = Instruction(name=f"{reader.proto.name}.copy", opcode="copy")
    copy.shape.CopyFrom(ops[value].proto.shape)
    return FlatOp(copy, [value], reader.source)


# Buckets ----------------------------------------------------------------------------------------


_CONCATENATED = frozenset(opcode for opcode, collective in COLLECTIVE.items() if collective.concatenates)


@dataclass(slots=True)
class _Packed:
    """An all-reduce over parts, and where each part ended up in the new list."""

    offsets: list[int]
    reduced: list[int]


def unpack_concatenated(flat: FlatComputation) -> FlatComputation:
    """Rewrite the flat list; sources keep pointing at the ops that replace theirs."""
    return _Unpacker(flat).run()


class _Unpacker:
    def __init__(self, flat: FlatComputation) -> None:
        self.flat = flat
        self.users: list[list[int]] = [[] for _ in flat.ops]
        for position, op in enumerate(flat.ops):
            for operand in op.operands:
                self.users[operand].append(position)
        self.ops: list[FlatOp] = []
        self.new: dict[int, int] = {}
        self.packed: dict[int, _Packed] = {}
        self.produced: dict[int, list[int]] = {}

    def run(self) -> FlatComputation:
        for position, op in enumerate(self.flat.ops):
            first = len(self.ops)
            self._rewrite(position, op)
            self.produced[position] = list(range(first, len(self.ops)))
        for source in self.flat.sources:
            if source.role != "done":
                source.ops[:] = [new for old in source.ops for new in self.produced[old]]
        return FlatComputation(self.ops, self.new[self.flat.root], self.flat.sources, self.flat.control)

    def _emit(self, proto: Message, operands: list[int], source: int) -> int:
        self.ops.append(FlatOp(proto, operands, source))
        return len(self.ops) - 1

    def _rewrite(self, position: int, op: FlatOp) -> None:
        opcode = op.proto.opcode
        if opcode in _CONCATENATED and (offsets := self._part_offsets(position, op)):
            parts = self.flat.ops[op.operands[0]].operands
            reduced = [self._single(op, self._unshaped(self.new[part])) for part in parts]
            self.packed[position] = _Packed(offsets, reduced)
        elif opcode in _CONCATENATED:
            base = self._unshaped(self.new[op.operands[0]])
            self.new[position] = self._reshaped(self._single(op, base), op.proto, op.source)
        elif opcode == "slice" and op.operands[0] in self.packed:
            packed = self.packed[op.operands[0]]
            part = packed.reduced[packed.offsets.index(op.proto.slice_dimensions[0].start)]
            self.flat.sources[op.source].cuts.append(part)
            self.new[position] = self._reshaped(part, op.proto, op.source)
        elif opcode == "bitcast" or (opcode == "transpose" and self._moves_nothing(op)):
            self.new[position] = self._reshaped(self.new[op.operands[0]], op.proto, op.source)
        else:
            self.new[position] = self._emit(
                op.proto, [self.new[operand] for operand in op.operands], op.source
            )
            if op.spare is not None:
                self.ops[self.new[position]].spare = self.new[op.spare]

    def _part_offsets(self, position: int, op: FlatOp) -> list[int] | None:
        """Start of each part, or None where this is not a packed all-reduce read part by part."""
        concatenate = self.flat.ops[op.operands[0]]
        if concatenate.proto.opcode != "concatenate" or len(op.proto.shape.dimensions) != 1:
            return None
        sizes = [self.flat.ops[part].proto.shape.dimensions[0] for part in concatenate.operands]
        limits = list(accumulate(sizes))
        offsets = [limit - size for limit, size in zip(limits, sizes, strict=True)]
        parts = set(zip(offsets, limits, strict=True))
        readers = self.users[position]
        if (
            position == self.flat.root
            or not readers
            or not all(self._slices_one_part(reader, parts) for reader in readers)
        ):
            return None
        return offsets

    def _slices_one_part(self, reader: int, parts: set[tuple[int, int]]) -> bool:
        proto = self.flat.ops[reader].proto
        if proto.opcode != "slice" or len(proto.slice_dimensions) != 1:
            return False
        cut = proto.slice_dimensions[0]
        return cut.stride in (0, 1) and (cut.start, cut.limit) in parts

    def _single(self, op: FlatOp, operand: int) -> int:
        proto = Instruction()
        proto.CopyFrom(op.proto)
        proto.shape.CopyFrom(self.ops[operand].proto.shape)
        return self._emit(proto, [operand], op.source)

    def _unshaped(self, value: int) -> int:
        while (op := self.ops[value]).proto.opcode == "bitcast":
            if op.proto.shape.element_type != self.ops[op.operands[0]].proto.shape.element_type:
                break
            value = op.operands[0]
        return value

    def _moves_nothing(self, op: FlatOp) -> bool:
        """Whether a transpose only renames dimensions: its result's layout undoes its permutation."""
        result, operand = shape_of(op.proto.shape), self._shape(self.new[op.operands[0]])
        permuted = tuple(op.proto.dimensions[dimension] for dimension in result.layout)
        return bool(result.layout) and permuted == operand.layout

    def _shape(self, value: int) -> Shape:
        return shape_of(self.ops[value].proto.shape)

    def _reshaped(self, value: int, like: Message, source: int) -> int:
        """``value`` as the shape of ``like``: itself, or one bitcast of the innermost operand."""
        while self.ops[value].proto.opcode == "bitcast":
            value = self.ops[value].operands[0]
        if shape_of(like.shape) == self._shape(value):
            return value
        proto = Instruction(name=like.name, opcode="bitcast")
        proto.shape.CopyFrom(like.shape)
        proto.metadata.CopyFrom(like.metadata)
        return self._emit(proto, [value], source)
