"""Writing HLO: a computation under construction, and what XLA reads of a kernel beside its computation.

On CPU a fusion runs on as many threads as its ``outer_dimension_partitions`` say, and the pass that assigns them has
run before our hook. So kernels that we write get the partitions that the pass would have given them
(parallel_task_assignment.cc, shape_partition.cc).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from disco_hlo.backends import Backend
from disco_hlo.hlo.graph import Shape
from disco_hlo.hlo.proto import Computation, Message, shape_of, shape_to_proto

_STRUCTURAL_FIELDS = ("id", "operand_ids", "control_predecessor_ids")
FUSION_KINDS = {"loop": "kLoop", "input": "kInput", "output": "kOutput", "triton": "kCustom"}
"""How a module names the emitter that ``Group.kind`` names."""
_BYTES_PER_TASK = 256 << 10
"""A memory-bound task should have at least an L2 cache full of output."""
_CYCLES_PER_TASK = 100_000
"""A compute-bound task should have about 100 microseconds of work."""


class ComputationWriter:
    """Appends instructions to a new computation. Instructions are referred to by their messages."""

    def __init__(self, computation_id: int, name: str, prefix: str = "") -> None:
        """``prefix``: what the names of all instructions begin with."""
        self.proto = Computation(id=computation_id, name=name)
        self.prefix = prefix
        self.names: set[str] = set()

    def add(self, name: str, opcode: str, shape: Message, operands: Sequence[Message] = ()) -> Message:
        """Append a new instruction; set further fields on what is returned."""
        instruction = self.proto.instructions.add(name=self._unique(name), opcode=opcode)
        instruction.shape.CopyFrom(shape)
        return self._place(instruction, operands)

    def copy(self, source: Message, name: str, operands: Sequence[Message]) -> Message:
        """Append a copy of an instruction with other operands."""
        instruction = self.proto.instructions.add()
        instruction.CopyFrom(source)
        for field in _STRUCTURAL_FIELDS:
            instruction.ClearField(field)
        instruction.name = self._unique(name)
        return self._place(instruction, operands)

    def parameter(self, number: int, shape: Message, name: str) -> Message:
        """Append a parameter."""
        instruction = self.add(name, "parameter", shape)
        instruction.parameter_number = number
        return instruction

    def tuple(self, name: str, operands: Sequence[Message]) -> Message:
        """Append a tuple of ``operands``."""
        return self.add(name, "tuple", tuple_shape(operand.shape for operand in operands), operands)

    def element(self, name: str, operand: Message, position: int) -> Message:
        """Append a get-tuple-element."""
        instruction = self.add(name, "get-tuple-element", operand.shape.tuple_shapes[position], [operand])
        instruction.tuple_index = position
        return instruction

    def reshaped(self, name: str, operand: Message, shape: Message) -> Message:
        """``operand`` as ``shape``, for use inside a kernel: the same bytes under other dimensions.

        Kernels index logically, and XLA:CPU cannot lower a bitcast between permuted layouts there.
        So the layouts are undone by transposes that move nothing, and only row-major bitcasts remain.
        """
        source, target = shape_of(operand.shape), shape_of(shape)
        if source == target:
            return operand
        flat_source, flat_target = _row_major(source), _row_major(target)
        if flat_source != source:
            operand = self._transposed(name, operand, source, flat_source, source.layout[::-1])
        if flat_source != flat_target:
            operand = self.add(name, "bitcast", shape_to_proto(flat_target), [operand])
        if flat_target != target:
            position = {dimension: i for i, dimension in enumerate(target.layout[::-1])}
            permutation = tuple(position[dimension] for dimension in range(len(target.dims)))
            operand = self._transposed(name, operand, flat_target, target, permutation)
        return operand

    def _transposed(
        self, name: str, operand: Message, source: Shape, target: Shape, permutation: Sequence[int]
    ) -> Message:
        assert tuple(source.dims[i] for i in permutation) == target.dims
        instruction = self.add(name, "transpose", shape_to_proto(target), [operand])
        instruction.dimensions.extend(permutation)
        return instruction

    def slice(self, name: str, operand: Message, start: int, limit: int) -> Message:
        """Append a slice of a vector."""
        vector = Shape(shape_of(operand.shape).dtype, (limit - start,), (0,))
        instruction = self.add(name, "slice", shape_to_proto(vector), [operand])
        instruction.slice_dimensions.add(start=start, limit=limit, stride=1)
        return instruction

    def finish(self, root: Message, *, is_fusion: bool) -> Message:
        """Set root and signature; returns the computation."""
        self.proto.root_id = root.id
        self.proto.is_fusion_computation = is_fusion
        parameters = sorted(
            (i for i in self.proto.instructions if i.opcode == "parameter"), key=lambda i: i.parameter_number
        )
        self.proto.program_shape.parameters.extend(p.shape for p in parameters)
        self.proto.program_shape.parameter_names.extend(p.name for p in parameters)
        self.proto.program_shape.result.CopyFrom(root.shape)
        return self.proto

    def _place(self, instruction: Message, operands: Sequence[Message]) -> Message:
        instruction.id = (self.proto.id << 32) | (len(self.proto.instructions) - 1)
        instruction.operand_ids.extend(operand.id for operand in operands)
        return instruction

    def _unique(self, name: str) -> str:
        name = f"{self.prefix}{name}"
        candidate, number = name, 0
        while candidate in self.names:
            number += 1
            candidate = f"{name}.{number}"
        self.names.add(candidate)
        return candidate


def is_reshaped(backend: Backend, opcode: str, reads: Sequence[Message], shape: Message) -> bool:
    """Whether an op of a kernel is written by :meth:`ComputationWriter.reshaped`: a bitcast that keeps the element
    type, where the backend does not lower any."""
    keeps_type = opcode == "bitcast" and reads[0].shape.element_type == shape.element_type
    return keeps_type and not backend.lowers_bitcasts


def _row_major(shape: Shape) -> Shape:
    """The shape whose dimensions stand in the order in which ``shape`` lies in memory."""
    return Shape(
        shape.dtype, tuple(shape.dims[d] for d in shape.layout[::-1]), tuple(range(len(shape.dims)))[::-1]
    )


def tuple_shape(members: Iterable[Message]) -> Message:
    """The ShapeProto of a tuple."""
    shape = shape_to_proto(Shape("tuple"))
    shape.tuple_shapes.extend(members)
    return shape


def vector_shape(like: Message, length: int) -> Message:
    """The ShapeProto of a vector with the element type of ``like``."""
    return shape_to_proto(Shape(shape_of(like).dtype, (length,), (0,)))


# Settings of kernels ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What the task count of a kernel depends on."""

    result: Shape
    flops: int
    transcendentals: int
    bytes_accessed: int


def task_config(work: KernelWork, parallelism: int) -> bytes:
    """Into how many tasks XLA:CPU splits a kernel on ``parallelism`` threads; empty where it stays whole."""
    counts = outer_partitions(work.result, task_count(work, parallelism))
    return backend_config({"outer_dimension_partitions": [str(count) for count in counts]}) if counts else b""


def task_count(work: KernelWork, parallelism: int) -> int:
    """Tasks XLA:CPU aims at for a kernel on ``parallelism`` threads."""
    if work.flops <= work.bytes_accessed:
        most = min(parallelism, math.ceil(math.sqrt(parallelism)))
        return max(1, min(most, work.result.size_bytes // _BYTES_PER_TASK))
    cycles = work.flops + 2 * work.transcendentals + 10 * work.bytes_accessed
    return max(1, min(parallelism, cycles // _CYCLES_PER_TASK))


def outer_partitions(shape: Shape, tasks: int) -> tuple[int, ...]:
    """Partition counts of the outermost dimensions (major to minor) for about ``tasks`` tasks.

    Empty where the kernel stays whole. Whole outer dimensions are taken until they hold enough
    iterations; the last one taken is then cut so that the product comes close to ``tasks``.
    """
    if tasks <= 1 or not shape.dims:
        return ()
    outer: list[int] = []
    available = 1
    for dimension in reversed(shape.layout):
        outer.append(shape.dims[dimension])
        available *= outer[-1]
        if available >= tasks:
            break
    tasks = min(tasks, available)
    per_dimension = int(tasks ** (1.0 / len(outer)))
    if per_dimension == 0:
        return ()
    counts = [min(extent, per_dimension) for extent in outer]
    if math.prod(counts) < tasks:
        for i, extent in enumerate(outer):
            others = math.prod(counts) // counts[i]
            grown = min(extent, tasks // others)
            if grown > counts[i]:
                counts[i] = grown
                break
    return tuple(counts) if math.prod(counts) > 1 else ()


def triton_config(config: str) -> bytes:
    """The settings of a Triton kernel, from what a ``Group`` keeps of them."""
    return backend_config({"fusion_backend_config": json.loads(config)})


def backend_config(config: Mapping[str, object]) -> bytes:
    """Settings as a module holds them."""
    return json.dumps(config, separators=(",", ":")).encode()
