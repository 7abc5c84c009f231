"""A module of many independent kernels, so that one compile and one trace time hundreds of them.

DisCo, section 5.2: the estimator learns from fused ops that were really run. A pack is an entry
computation that reads flat vectors, runs each kernel once, one after the other, and returns what
they compute. Kernels are written as ``apply`` writes op groups. An input vector is read by several
kernels, but again only after so many other bytes that no cache still holds it.

XLA:CPU runs kernels side by side unless one reads what another wrote, or they stand in a called
computation of at most eight. So on CPU they stand in such computations, and each of these reads a
number that the one before wrote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo import proto as hlo_proto
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Shape, external_reads, is_cloned
from disco_hlo.hlo.proto import Message, shape_of, shape_to_proto
from disco_hlo.plan.writer import (
    FUSION_KINDS,
    ComputationWriter,
    KernelWork,
    is_reshaped,
    task_config,
    triton_config,
)

_KERNELS_PER_CALL = 7
"""With the counter's kernel as many as XLA:CPU runs in order."""

_MOST_HELD = 48
"""Vectors that one kernel may read one element of: within XLA's limit of operands."""


@dataclass(frozen=True, slots=True)
class PackedKernel:
    """One kernel of a pack: what it computes, of which step."""

    source: CanonicalModule = field(repr=False)
    members: tuple[int, ...]
    """Nodes computed inside, ascending."""
    results: tuple[int, ...]
    """Members whose values leave the kernel, ascending."""
    kind: str = "loop"
    """Emitter, as in ``Group.kind``."""
    config: str = ""
    """Emitter settings, as in ``Group.config``."""

    @property
    def moved_bytes(self) -> int:
        """Bytes of all that the kernel reads and returns."""
        graph = self.source.graph
        touched = (*external_reads(graph, self.members), *self.results)
        return sum(graph.nodes[node].shape.size_bytes for node in touched)


@dataclass(frozen=True, slots=True)
class Vector:
    """An input or output of a pack: a vector in memory."""

    dtype: str
    length: int

    @property
    def size_bytes(self) -> int:
        """Bytes of storage."""
        return Shape(self.dtype, (self.length,)).size_bytes


@dataclass(frozen=True, slots=True)
class Pack:
    """A module of kernels and its signature."""

    module: bytes
    """A serialized, scheduled HloModuleProto."""
    inputs: tuple[Vector, ...]
    outputs: tuple[Vector, ...]
    names: tuple[str, ...]
    """Instruction that runs each kernel, in the order given."""


def pack(
    kernels: Sequence[PackedKernel],
    name: str,
    parallelism: int,
    reuse_after_bytes: int,
    held_bytes: int | None = None,
) -> Pack:
    """One module that runs each of ``kernels`` once, in this order.

    Args:
        kernels: at least one, from any steps of one backend.
        name: of the module.
        parallelism: threads of XLA:CPU's pool (see ``apply``).
        reuse_after_bytes: an input vector is read again only after this many bytes of other traffic.
        held_bytes: results take memory together up to this and a kernel's more: then one small kernel reads an
            element of each, and the pack returns what it computes instead. None returns all results.

    Raises:
        IllegalStrategyError: a kernel reads or returns a tuple.
    """
    return _PackWriter(parallelism, reuse_after_bytes, held_bytes).write(kernels, name)


@dataclass(eq=False, slots=True)
class _Input:
    parameter: Message
    vector: Vector
    last_read_at: int = 0
    """Bytes moved by all kernels before the one that read it last."""


class _PackWriter:
    def __init__(self, parallelism: int, reuse_after_bytes: int, held_bytes: int | None) -> None:
        self.parallelism = parallelism
        self.reuse_after_bytes = reuse_after_bytes
        self.held_bytes = held_bytes
        self.written = 0
        self.instruction_names: set[str] = set()
        self.entry = self._writer("main")
        self.called: list[Message] = []
        self.copies: dict[tuple[int, int], int] = {}
        self.inputs: list[_Input] = []
        self.idle: dict[Vector, deque[_Input]] = {}
        self.moved_bytes = 0
        self.names: list[str] = []

    def write(self, kernels: Sequence[PackedKernel], name: str) -> Pack:
        if BACKENDS[kernels[0].source.graph.backend].overlaps_kernels:
            written = self._in_calls(kernels)
        else:
            written = (self._kernel(kernel, self._operands(kernel), self.entry) for kernel in kernels)
        outputs = self._returned(written)
        # jax returns a single array as it is, several in a tuple.
        root = outputs[0] if len(outputs) == 1 else self.entry.tuple("results", outputs)
        entry = self.entry.finish(root, is_fusion=False)
        module = hlo_proto.Module(name=name, entry_computation_name=entry.name, entry_computation_id=entry.id)
        module.host_program_shape.CopyFrom(entry.program_shape)
        module.computations.extend([*self.called, entry])
        for computation in module.computations:
            if not computation.is_fusion_computation:
                ids = [instruction.id for instruction in computation.instructions]
                module.schedule.sequences[computation.id].instruction_ids.extend(ids)
        vectors = tuple(Vector(shape_of(o.shape).dtype, shape_of(o.shape).element_count) for o in outputs)
        return Pack(
            hlo_proto.serialize(module), tuple(i.vector for i in self.inputs), vectors, tuple(self.names)
        )

    def _writer(self, name: str) -> ComputationWriter:
        """A new computation. Names of instructions are unique in the module, not only in it."""
        self.written += 1
        writer = ComputationWriter(self.written, name)
        writer.names = self.instruction_names
        return writer

    # Calls ------------------------------------------------------------------------------------

    def _in_calls(self, kernels: Sequence[PackedKernel]) -> Iterator[list[Message]]:
        counter = self._input(Vector("s32", 1), ()).parameter
        for start in range(0, len(kernels), _KERNELS_PER_CALL):
            *results, counter = self._call(kernels[start : start + _KERNELS_PER_CALL], counter)
            yield results

    def _call(self, kernels: Sequence[PackedKernel], counter: Message) -> list[Message]:
        """Call a computation of its own with these kernels; their results, and the counter it wrote."""
        body = self._writer(f"call{self.written}_computation")
        operands = [counter]
        before = body.parameter(0, counter.shape, "counter")
        results: list[Message] = []
        for kernel in kernels:
            given = self._operands(kernel)
            own = [body.parameter(len(operands) + i, value.shape, "operand") for i, value in enumerate(given)]
            operands += given
            results += self._kernel(kernel, own, body)
        root = body.tuple("results", [*results, self._counted(body, before)])
        self.called.append(body.finish(root, is_fusion=False))
        call = self.entry.add("call", "call", root.shape, operands)
        call.called_computation_ids.append(body.proto.id)
        return [self.entry.element("result", call, i) for i in range(len(results) + 1)]

    def _counted(self, target: ComputationWriter, before: Message) -> Message:
        body = self._writer(f"count{self.written}_computation")
        parameter = body.parameter(0, before.shape, "before")
        self.called.append(
            body.finish(body.add("negated", "negate", before.shape, [parameter]), is_fusion=True)
        )
        kernel = target.add("count", "fusion", before.shape, [before])
        kernel.fusion_kind = "kLoop"
        kernel.called_computation_ids.append(body.proto.id)
        return kernel

    # Inputs and outputs -----------------------------------------------------------------------

    def _operands(self, kernel: PackedKernel) -> list[Message]:
        """What the kernel is called with: entry values, in the order of :func:`_reads`."""
        operands: list[Message] = []
        taken: list[_Input] = []
        for read in _reads(kernel):
            shape = kernel.source.graph.nodes[read].shape
            if shape.dtype == "tuple":
                raise IllegalStrategyError(f"n{read} is {shape}; expected kernels that read arrays")
            taken.append(self._input(Vector(shape.dtype, shape.element_count), taken))
            operand = taken[-1].parameter
            if len(shape.dims) != 1:
                operand = self.entry.add("operand", "bitcast", shape_to_proto(shape), [operand])
            operands.append(operand)
        self.moved_bytes += kernel.moved_bytes
        return operands

    def _input(self, vector: Vector, taken: Sequence[_Input]) -> _Input:
        """The input vector of this kind whose last reader lies far enough back, or a new one."""
        idle = self.idle.setdefault(vector, deque())
        if (
            idle
            and idle[0] not in taken
            and self.moved_bytes - idle[0].last_read_at >= self.reuse_after_bytes
        ):
            found = idle.popleft()
        else:
            shape = shape_to_proto(Shape(vector.dtype, (vector.length,), (0,)))
            found = _Input(self.entry.parameter(len(self.inputs), shape, "input"), vector)
            self.inputs.append(found)
        found.last_read_at = self.moved_bytes
        idle.append(found)
        return found

    def _returned(self, written: Iterable[list[Message]]) -> list[Message]:
        """What the pack returns for all results, as they are written."""
        returned: list[Message] = []
        held: list[Message] = []
        size_bytes = 0
        for results in written:
            for result in map(self._flat, results):
                if self.held_bytes is None or not _is_real(shape_of(result.shape)):
                    returned.append(result)
                    continue
                held.append(result)
                size_bytes += shape_of(result.shape).size_bytes
            if self.held_bytes is not None and (size_bytes > self.held_bytes or len(held) > _MOST_HELD):
                returned += self._touched(held)
                held, size_bytes = [], 0
        return returned + self._touched(held)

    def _touched(self, vectors: Sequence[Message]) -> list[Message]:
        """Kernels that add up the first elements of ``vectors``, so that nobody need keep these."""
        made = []
        for start in range(0, len(vectors), _MOST_HELD):
            some = vectors[start : start + _MOST_HELD]
            body = self._writer(f"touch{self.written}_computation")
            single = shape_to_proto(Shape("f32", (1,), (0,)))
            reads = [body.parameter(i, vector.shape, "vector") for i, vector in enumerate(some)]
            firsts = [body.slice("first", read, 0, 1) for read in reads]
            firsts = [
                first
                if shape_of(first.shape).dtype == "f32"
                else body.add("number", "convert", single, [first])
                for first in firsts
            ]
            total = firsts[0]
            for first in firsts[1:]:
                total = body.add("total", "add", single, [total, first])
            if len(firsts) == 1:
                total = body.add("total", "negate", single, [total])
            self.called.append(body.finish(total, is_fusion=True))
            made.append(self.entry.add("touch", "fusion", single, some))
            made[-1].fusion_kind = "kLoop"
            made[-1].called_computation_ids.append(body.proto.id)
        return made

    def _flat(self, value: Message) -> Message:
        shape = shape_of(value.shape)
        if len(shape.dims) == 1:
            return value
        vector = shape_to_proto(Shape(shape.dtype, (shape.element_count,), (0,)))
        return self.entry.add("flat", "bitcast", vector, [value])

    # Kernels ----------------------------------------------------------------------------------

    def _kernel(
        self, kernel: PackedKernel, operands: Sequence[Message], target: ComputationWriter
    ) -> list[Message]:
        """Write the kernel into ``target``; its results."""
        token, nodes = f"k{len(self.names)}", kernel.source.graph.nodes
        body = self._writer(f"{token}_computation")
        local = {
            read: body.parameter(i, operands[i].shape, f"{token}.param_{i}")
            for i, read in enumerate(_reads(kernel))
        }
        for member in kernel.members:
            for operand in nodes[member].operands:
                if operand not in local:
                    local[operand] = self._member(body, kernel.source, operand, [], token)
            reads = [local[operand] for operand in nodes[member].operands]
            local[member] = self._member(body, kernel.source, member, reads, token)
        outputs = [local[result] for result in kernel.results]
        if any(nodes[result].shape.dtype == "tuple" for result in kernel.results):
            raise IllegalStrategyError(f"{token} returns a tuple; expected kernels that return arrays")
        root = outputs[0] if len(outputs) == 1 else body.tuple(f"{token}.tuple", outputs)
        self.called.append(body.finish(root, is_fusion=True))
        made = target.add(f"{token}_{nodes[kernel.results[0]].opcode}_fusion", "fusion", root.shape, operands)
        made.fusion_kind = FUSION_KINDS[kernel.kind]
        made.called_computation_ids.append(body.proto.id)
        made.backend_config = self._config(kernel)
        self.names.append(made.name)
        if len(outputs) == 1:
            return [made]
        return [target.element(f"{token}_result", made, i) for i in range(len(outputs))]

    def _member(
        self, body: ComputationWriter, source: CanonicalModule, node_id: int, reads: list[Message], token: str
    ) -> Message:
        proto, opcode = source.protos[node_id], source.graph.nodes[node_id].opcode
        if is_reshaped(BACKENDS[source.graph.backend], opcode, reads, proto.shape):
            return body.reshaped(f"{token}.bitcast", reads[0], proto.shape)
        return self._copy(body, source, proto, f"{token}.{opcode}", reads)

    def _config(self, kernel: PackedKernel) -> bytes:
        graph = kernel.source.graph
        if kernel.kind == "triton":
            return triton_config(kernel.config)
        if not BACKENDS[graph.backend].partitions_kernels:
            return b""
        nodes = [graph.nodes[member] for member in kernel.members]
        flops = sum(node.flops for node in nodes)
        transcendentals = sum(node.transcendentals for node in nodes)
        result = graph.nodes[kernel.results[0]].shape
        return task_config(KernelWork(result, flops, transcendentals, kernel.moved_bytes), self.parallelism)

    # Computations -----------------------------------------------------------------------------

    def _copy(
        self,
        target: ComputationWriter,
        source: CanonicalModule,
        proto: Message,
        name: str,
        reads: list[Message],
    ) -> Message:
        """A copy of an instruction that calls copies of what it calls."""
        made = target.copy(proto, name, reads)
        made.ClearField("metadata")
        del made.called_computation_ids[:]
        made.called_computation_ids.extend(self._copied(source, c) for c in proto.called_computation_ids)
        return made

    def _copied(self, source: CanonicalModule, computation_id: int) -> int:
        """Id, in the pack, of a copy of a computation that a member calls (a reducer)."""
        key = (id(source), computation_id)
        if key not in self.copies:
            original = source.index.computation(computation_id)
            writer = self._writer(f"{original.name}.{self.written}")
            written: dict[int, Message] = {}
            for instruction in original.instructions:
                reads = [written[operand] for operand in instruction.operand_ids]
                written[instruction.id] = self._copy(writer, source, instruction, instruction.name, reads)
            root = written[original.root_id]
            self.called.append(writer.finish(root, is_fusion=original.is_fusion_computation))
            self.copies[key] = writer.proto.id
        return self.copies[key]


def _is_real(shape: Shape) -> bool:
    """Whether a first element exists and is a number that converts to another."""
    return shape.element_count > 0 and not shape.dtype.startswith("c")


def _reads(kernel: PackedKernel) -> list[int]:
    """What the kernel reads, in the order of use: some emitters take their parameters by position."""
    nodes, inside = kernel.source.graph.nodes, set(kernel.members)
    reads = dict.fromkeys(operand for member in kernel.members for operand in nodes[member].operands)
    return [read for read in reads if read not in inside and not is_cloned(nodes[read])]
