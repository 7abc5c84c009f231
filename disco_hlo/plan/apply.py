"""Rewrite a module so that XLA executes exactly one strategy (DisCo, section 4.1: the Activator's input).

The entry computation, and each loop body, branch and called computation that the strategy names, is written anew, unit
by unit in the strategy's order, and the module gets that order as its schedule. Instruction names start with the
unit's token (``g3_``, ``b2_``, ``n17_``), behind the region's name where it is not the entry (``loop1_g3_``), so a
profile of the step reads in terms of the plan. Library kernels and everything else that is called stay as XLA compiled
them.

XLA:GPU reduces in place (``AsyncCollectiveCreator`` says so on the start), which saves a buffer per gradient in flight
and keeps NCCL's reads and writes in one place. After the hook nothing inserts a copy any more, so that is written only
where the buffer is certainly no one else's (:func:`may_overwrite`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from disco_hlo.backends import BACKENDS
from disco_hlo.core.legality import emitter_kind
from disco_hlo.cores import own_cores
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo import proto as hlo_proto
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.flatten import emitter_of
from disco_hlo.hlo.graph import (
    Graph,
    Kind,
    as_kernel,
    external_reads,
    is_cloned,
    kernel_nodes,
    once_per_graph,
)
from disco_hlo.hlo.opcodes import COLLECTIVE, FUSIBLE
from disco_hlo.hlo.proto import Message, shape_of
from disco_hlo.hlo.walks import needed_first, reached
from disco_hlo.plan.legal import (
    Kernel,
    check_order,
    check_strategy,
    default_order,
    planned_regions,
    started_late,
)
from disco_hlo.plan.plan import Group, Strategy
from disco_hlo.plan.units import UnitGraph, unit_graph
from disco_hlo.plan.writer import (
    FUSION_KINDS,
    ComputationWriter,
    KernelWork,
    backend_config,
    is_reshaped,
    task_config,
    triton_config,
    tuple_shape,
    vector_shape,
)

_UPDATES = frozenset({"dynamic-update-slice", "scatter"})
"""Ops that update an operand in place."""
_LIBRARY_CALLS = frozenset({"custom-call", "fusion"})
"""Fixed nodes that write their results into buffers of their own, unless graph.inplace says otherwise."""


def apply(strategy: Strategy, source: CanonicalModule) -> bytes:
    """The module of ``source`` rewritten to execute ``strategy``.

    Args:
        strategy: what to execute; the empty strategy (with its buckets of one) is the unfused step, with its loops as
            XLA compiled them.
        source: the module in canonical form.

    Returns:
        A serialized, scheduled HloModuleProto of the same entry signature.

    Raises:
        IllegalStrategyError: the strategy is not legal on this module.
    """
    numbers = _Numbers.of(source.module)
    threads = len(own_cores())  # of XLA:CPU's pool
    planned = planned_regions(source, strategy)
    written: list[Message] = []
    for region in source.regions:
        for number, computation in enumerate(region.sources if region.name in planned else ()):
            prefix = f"{region.name}_" if number == 0 else f"{region.name}_{number + 1}_"
            written += _rewritten(planned[region.name], computation, numbers, threads, prefix)
    written += _rewritten(strategy, source, numbers, threads, "")
    return assembled(source, written)


@once_per_graph
def attested_groups(source: CanonicalModule) -> set[Kernel]:
    """The kernels that XLA itself runs in the source module, on the same buffers.

    Those with other bitcasts inside than ours are left out, but for one behind the only result, which we write outside:
    several results may have one shape by their bitcasts alone.
    """
    graph, found = source.graph, set[Kernel]()
    for origin in source.origins:
        if origin.role == "fusion":
            ops, results = as_kernel(graph, origin.nodes, origin.results)
            same_results = results == origin.results or len(results) == 1
            if same_results and {*origin.nodes}.issuperset(kernel_nodes(graph, ops)):
                found.add((frozenset(ops), results))
    return found


def _rewritten(
    strategy: Strategy, source: CanonicalModule, numbers: _Numbers, parallelism: int, prefix: str
) -> list[Message]:
    """A computation as the strategy says, with the new ones that it calls."""
    graph = source.graph
    units = unit_graph(graph, strategy)
    asynchronous = BACKENDS[graph.backend].asynchronous
    order = strategy.order or default_order(units, asynchronous)
    check_order(units, order, asynchronous)
    check_strategy(graph, strategy, units, attested_groups(source))
    return _Rewriter(strategy, source, units, numbers, parallelism, prefix).write(
        started_late(strategy.buckets, order)
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers that no computation and no collective of a module has yet."""

    computations: Iterator[int]
    channels: Iterator[int]

    @staticmethod
    def of(module: Message) -> _Numbers:
        """Those behind the largest that the module has."""
        instructions = (i for computation in module.computations for i in computation.instructions)
        return _Numbers(
            count(max(computation.id for computation in module.computations) + 1),
            count(max((i.channel_id for i in instructions), default=0) + 1),
        )


@dataclass(slots=True)
class _Packed:
    """Where the result of a bucketed all-reduce lies: a stretch of its bucket's vector."""

    vector: Message
    start: int
    limit: int


@dataclass
class _Rewriter:
    strategy: Strategy
    source: CanonicalModule
    units: UnitGraph
    numbers: _Numbers
    parallelism: int
    prefix: str
    """Of the names of all instructions."""
    entry: ComputationWriter = field(init=False)
    """The computation that is written anew."""
    written: dict[int, Message] = field(default_factory=dict)
    """Its instruction that holds each node's value."""
    packed: dict[int, _Packed] = field(default_factory=dict)
    called: list[Message] = field(default_factory=list)
    """New computations that it calls."""
    in_flight: dict[str, Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.source.graph
        self.backend = BACKENDS[self.graph.backend]
        old = self.source.index.computation(self.source.computation)
        self.entry = ComputationWriter(old.id, old.name, self.prefix)
        kernels = [origin for origin in self.source.origins if origin.role == "fusion"]
        lone = ((as_kernel(self.graph, kernel.nodes, ())[0], kernel) for kernel in kernels)
        self.wrapped = {ops[0]: kernel for ops, kernel in lone if len(ops) == 1}
        self.in_kernels = {node for kernel in kernels for node in kernel.nodes}
        """What XLA runs inside of kernels: some of it (``map``) it cannot run by itself."""

    def _computation(self, name: str) -> ComputationWriter:
        return ComputationWriter(next(self.numbers.computations), f"{self.prefix}{name}", self.prefix)

    def write(self, order: Sequence[str]) -> list[Message]:
        for node in self.graph.nodes:
            if node.kind is Kind.PARAMETER:
                self.written[node.id] = self.entry.copy(
                    self.source.protos[node.id], node.name or f"param.{node.id}", ()
                )
        for token in order:
            self._write_unit(token)
        finished = self.entry.finish(self._value(self.graph.root), is_fusion=False)
        return [*self.called, finished]

    def _write_unit(self, token: str) -> None:
        if token[0] == "g":
            self._write_group(token, self.strategy.groups[int(token[1:])])
        elif token[0] == "n":
            self._write_single(token, int(token[1:]))
        elif token.endswith(".done"):
            self._write_done(token.removesuffix(".done"))
        else:
            self._write_bucket(token.removesuffix(".start"))

    # Values ---------------------------------------------------------------------------------

    def _value(self, node_id: int) -> Message:
        """The entry instruction with a node's value; free nodes, constants, slices are written on demand."""
        found = self.written.get(node_id)
        if found is not None:
            return found
        node = self.graph.nodes[node_id]
        if node_id in self.packed:
            made = self._unpack(node_id)
        elif node.kind is Kind.CONSTANT or node.kind is Kind.FREE:
            operands = [self._value(operand) for operand in node.operands]
            made = self.entry.copy(self.source.protos[node_id], f"n{node_id}_{node.opcode}", operands)
        else:
            raise IllegalStrategyError(f"n{node_id} ({node.opcode}) is read before the order executes it")
        self.written[node_id] = made
        return made

    def _unpack(self, node_id: int) -> Message:
        """Cut a member of a bucket out of the bucket's vector with a kernel of its own."""
        packed = self.packed[node_id]
        body = self._computation(f"n{node_id}_unpack_computation")
        vector = body.parameter(0, packed.vector.shape, f"n{node_id}_unpack.vector")
        root = self._cut(body, vector, node_id, f"n{node_id}_unpack")
        return self._fusion(f"n{node_id}_unpack", Group((node_id,)), body, root, [packed.vector], KernelWork(
            self.graph.nodes[node_id].shape, 0, 0, 2 * self.graph.nodes[node_id].shape.size_bytes
        ))  # fmt: skip

    def _cut(self, body: ComputationWriter, vector: Message, node_id: int, prefix: str) -> Message:
        packed = self.packed[node_id]
        part = body.slice(f"{prefix}.slice", vector, packed.start, packed.limit)
        return body.reshaped(f"{prefix}.bitcast", part, self.source.protos[node_id].shape)

    # Kernels --------------------------------------------------------------------------------

    def _write_single(self, token: str, node_id: int) -> None:
        node, proto = self.graph.nodes[node_id], self.source.protos[node_id]
        needs_kernel = (
            node.opcode in self.backend.kernels_alone
            or (self.backend.fusible_alone and node.opcode in FUSIBLE)
            or (node.kind is Kind.FIXED and node_id in self.in_kernels)
        )
        if (
            node.kind is Kind.FUSIBLE
            or node_id in self.wrapped
            or (needs_kernel and 0 not in node.shape.dims)
        ):
            wrapper = self.wrapped.get(node_id)
            kind = emitter_of(wrapper.proto) if wrapper else ""
            if kind in ("", "triton"):
                kind = emitter_kind(self.graph, (node_id,), (node_id,))
            self._write_group(token, Group((node_id,), kind=kind))
            return
        operands = [self._value(operand) for operand in node.operands]
        self.written[node_id] = self.entry.copy(proto, f"{token}_{node.opcode}", operands)

    def _write_group(self, token: str, group: Group) -> None:
        # An op that is no fusible node may want what it reads, when alone, as it lies in memory.
        is_plain = len(group.ops) > 1 or self.graph.nodes[group.ops[0]].kind is Kind.FUSIBLE
        members = kernel_nodes(self.graph, group.ops) if is_plain else group.ops
        inside = set(members)
        results = [value.node for value in self.units.values_of[self.units.index[token]]]
        main = self.graph.nodes[results[0]].opcode
        body = self._computation(f"{token}_computation")
        # What is updated in place must be an operand of the kernel itself.
        updates = any(self.graph.nodes[member].opcode in _UPDATES for member in members)
        cut_inside = group.kind in ("loop", "input") and not updates
        local, operands = self._kernel_inputs(body, token, inside, cut_inside=cut_inside)
        for member in members:
            reads = [
                self._local(body, token, local, operand) for operand in self.graph.nodes[member].operands
            ]
            local[member] = self._write_member(body, token, member, reads)
        outputs = [local[result] for result in results]
        root = outputs[0] if len(outputs) == 1 else body.tuple(f"{token}.tuple", outputs)
        work = self._work(members, results, inside)
        name = f"{token}_wrapped_{main}" if len(group.ops) == 1 else f"{token}_{main}_fusion"
        kernel = self._fusion(name, group, body, root, operands, work)
        kernel.metadata.CopyFrom(self.source.protos[results[0]].metadata)
        if len(results) == 1:
            self.written[results[0]] = kernel
            return
        for position, result in enumerate(results):
            self.written[result] = self.entry.element(f"{token}_result", kernel, position)

    def _write_member(
        self, body: ComputationWriter, token: str, member: int, reads: list[Message]
    ) -> Message:
        proto, opcode = self.source.protos[member], self.graph.nodes[member].opcode
        if is_reshaped(self.backend, opcode, reads, proto.shape):
            return body.reshaped(f"{token}.bitcast", reads[0], proto.shape)
        return body.copy(proto, f"{token}.{opcode}", reads)

    def _kernel_inputs(
        self, body: ComputationWriter, token: str, inside: set[int], *, cut_inside: bool
    ) -> tuple[dict[int, Message], list[Message]]:
        """Parameters of a kernel. Gradients that lie in a bucket's vector are cut out inside, so that
        no separate kernel copies them."""
        local: dict[int, Message] = {}
        operands: list[Message] = []
        parameter_of: dict[int, Message] = {}
        reads = (operand for member in sorted(inside) for operand in self.graph.nodes[member].operands)
        # In the order of their use: XLA:CPU's scatter emitter takes its parameters by position.
        for read in dict.fromkeys(reads):
            if read in inside or is_cloned(self.graph.nodes[read]):
                continue
            packed = self.packed.get(read) if cut_inside and read not in self.written else None
            operand = packed.vector if packed else self._value(read)
            parameter = parameter_of.get(operand.id)
            if parameter is None:
                parameter = body.parameter(len(operands), operand.shape, f"{token}.param_{len(operands)}")
                parameter_of[operand.id] = parameter
                operands.append(operand)
            local[read] = self._cut(body, parameter, read, f"{token}.n{read}") if packed else parameter
        return local, operands

    def _local(self, body: ComputationWriter, token: str, local: dict[int, Message], node_id: int) -> Message:
        if node_id not in local:
            assert is_cloned(self.graph.nodes[node_id]), node_id
            local[node_id] = body.copy(self.source.protos[node_id], f"{token}.constant", ())
        return local[node_id]

    def _work(self, members: Sequence[int], results: Sequence[int], inside: set[int]) -> KernelWork:
        nodes = [self.graph.nodes[member] for member in members]
        reads = external_reads(self.graph, inside)
        moved = sum(self.graph.nodes[n].shape.size_bytes for n in (*reads, *results))
        return KernelWork(
            self.graph.nodes[results[0]].shape,
            sum(node.flops for node in nodes),
            sum(node.transcendentals for node in nodes),
            moved,
        )

    def _fusion(
        self,
        name: str,
        group: Group,
        body: ComputationWriter,
        root: Message,
        operands: Sequence[Message],
        work: KernelWork,
    ) -> Message:
        self.called.append(body.finish(root, is_fusion=True))
        kernel = self.entry.add(name, "fusion", root.shape, operands)
        kernel.fusion_kind = FUSION_KINDS[group.kind]
        kernel.called_computation_ids.append(body.proto.id)
        kernel.backend_config = self._kernel_config(group, work)
        return kernel

    def _kernel_config(self, group: Group, work: KernelWork) -> bytes:
        if group.kind == "triton":
            return triton_config(group.config)
        if not self.backend.partitions_kernels:
            # As XLA:GPU writes it, and by which a module is known as its.
            return backend_config({"operation_queue_id": "0"})
        return task_config(work, self.parallelism)

    # Buckets --------------------------------------------------------------------------------

    def _write_bucket(self, token: str) -> None:
        bucket = self.strategy.buckets[int(token[1:])]
        members = bucket.collectives
        like = self.source.protos[members[0]]
        if not bucket.is_packed:
            operands = [self._value(self.graph.nodes[member].operands[0]) for member in members]
            results = [self.source.protos[member].shape for member in members]
        else:
            operands = [self._concatenate(token, members)]
            results = [operands[0].shape]
        issued = self._collective(token, like, operands, results)
        if not self.backend.asynchronous:
            self._publish(token, issued)
            return
        self.in_flight[token] = issued
        packed = len(operands) < len(members)
        for i, member in enumerate(members[: len(operands)]):
            in_place = COLLECTIVE[self.graph.nodes[member].opcode].in_place
            if in_place and (packed or may_overwrite(self.graph, member)):
                index = [1] if len(operands) == 1 else [1, i]
                issued.output_operand_aliasing.add(output_shape_index=index, operand_index=i)

    def _write_done(self, token: str) -> None:
        started = self.in_flight.pop(token)
        result = started.shape.tuple_shapes[1]
        opcode = self.graph.nodes[self.strategy.buckets[int(token[1:])].collectives[0]].opcode
        done = self.entry.add(f"{token}_{opcode}-done", "async-done", result, [started])
        done.metadata.CopyFrom(started.metadata)
        self._publish(token, done)

    def _publish(self, token: str, result: Message) -> None:
        bucket = self.strategy.buckets[int(token[1:])]
        members = bucket.collectives
        if len(members) == 1:
            self.written[members[0]] = result
        elif bucket.form == "variadic":
            for position, member in enumerate(members):
                self.written[member] = self.entry.element(f"{token}_result", result, position)
        else:
            start = 0
            for member in members:
                limit = start + self.graph.nodes[member].shape.element_count
                self.packed[member] = _Packed(result, start, limit)
                start = limit

    def _concatenate(self, token: str, members: Sequence[int]) -> Message:
        """The vector that a bucket transfers: one kernel on GPU, one instruction on CPU."""
        if self.backend.concatenates_by_copy:
            return self._joined(token, members)
        body = self._computation(f"{token}_pack_computation")
        gradients = [self.graph.nodes[member].operands[0] for member in members]
        operands = [self._value(self._before_bitcast(gradient)) for gradient in gradients]
        vectors: list[Message] = []
        parameters: dict[int, Message] = {}
        distinct: list[Message] = []
        for member, operand in zip(members, operands, strict=True):
            if operand.id not in parameters:
                parameters[operand.id] = body.parameter(
                    len(distinct), operand.shape, f"{token}_pack.param_{len(distinct)}"
                )
                distinct.append(operand)
            flat = vector_shape(operand.shape, self.graph.nodes[member].shape.element_count)
            vectors.append(body.reshaped(f"{token}_pack.bitcast", parameters[operand.id], flat))
        total = sum(self.graph.nodes[member].shape.element_count for member in members)
        packed_shape = vector_shape(operands[0].shape, total)
        root = body.add(f"{token}_pack.concatenate", "concatenate", packed_shape, vectors)
        root.dimensions.append(0)
        size_bytes = sum(self.graph.nodes[member].shape.size_bytes for member in members)
        work = KernelWork(shape_of(packed_shape), 0, 0, 2 * size_bytes)
        return self._fusion(f"{token}_pack", Group((members[0],)), body, root, distinct, work)

    def _before_bitcast(self, node_id: int) -> int:
        """What a bitcast shows, so that a kernel that reads both has it once."""
        node = self.graph.nodes[node_id]
        if node.opcode != "bitcast" or self.graph.nodes[node.operands[0]].shape.dtype != node.shape.dtype:
            return node_id
        return node.operands[0]

    def _joined(self, token: str, members: Sequence[int]) -> Message:
        vectors = []
        for member in members:
            operand = self._value(self.graph.nodes[member].operands[0])
            flat = vector_shape(operand.shape, self.graph.nodes[member].shape.element_count)
            is_flat = shape_of(operand.shape) == shape_of(flat)
            vectors.append(
                operand if is_flat else self.entry.add(f"{token}_pack.bitcast", "bitcast", flat, [operand])
            )
        total = sum(self.graph.nodes[member].shape.element_count for member in members)
        joined = self.entry.add(
            f"{token}_pack", "concatenate", vector_shape(vectors[0].shape, total), vectors
        )
        joined.dimensions.append(0)
        return joined

    def _collective(
        self, token: str, like: Message, operands: Sequence[Message], results: Sequence[Message]
    ) -> Message:
        """The collective itself: synchronous on CPU, the start of an async pair on GPU."""
        opcode = like.opcode
        result = results[0] if len(results) == 1 else tuple_shape(results)
        if not self.backend.asynchronous:
            reduced = self.entry.copy(like, f"{token}_{opcode}", operands)
            reduced.shape.CopyFrom(result)
            self._renew_channel(reduced)
            return reduced
        body = self._computation(f"{token}_async_computation")
        parameters = [
            body.parameter(i, operand.shape, f"{token}.param_{i}") for i, operand in enumerate(operands)
        ]
        inner = body.copy(like, f"{token}.{opcode}", parameters)
        inner.shape.CopyFrom(result)
        self._renew_channel(inner)
        self.called.append(body.finish(inner, is_fusion=False))
        shape = tuple_shape([tuple_shape(operand.shape for operand in operands), result])
        start = self.entry.add(f"{token}_{opcode}-start", "async-start", shape, operands)
        start.metadata.CopyFrom(like.metadata)
        start.called_computation_ids.append(body.proto.id)
        return start

    def _renew_channel(self, collective: Message) -> None:
        """Collectives taken apart share a channel id; each needs its own. Zero is no channel, and stays."""
        if collective.channel_id > 0:
            collective.channel_id = next(self.numbers.channels)


# Buffers of collectives -------------------------------------------------------------------------


def may_overwrite(graph: Graph, collective: int) -> bool:
    """Whether ``collective`` is the only reader of a buffer that the step made for its gradient alone.

    Not so for a gradient that the step returns, that anything else reads (whatever the order: it may
    change), that lives in a parameter's or constant's storage, or that comes from a loop or another
    collective; nor where the result has to end up in a donated parameter.
    """
    if any(writer == collective for _, writer in graph.inplace):
        return False
    home = graph.shown[graph.nodes[collective].operands[0]]
    return readers_of(graph, home) == {collective} and _is_own_buffer(graph, home)


def readers_of(graph: Graph, home: int) -> set[int]:
    """What reads a value, through bitcasts and tuples too; the root stands for the step's caller."""

    def hands_on(node: int) -> bool:
        return node != graph.root and graph.nodes[node].kind is Kind.FREE

    behind = reached(graph.users[home], lambda node: graph.users[node] if hands_on(node) else ())
    return {node for node in behind if not hands_on(node)} | ({home} & {graph.root})


def _is_own_buffer(graph: Graph, home: int) -> bool:
    node = graph.nodes[home]
    if node.opcode == "get-tuple-element":
        call = node.operands[0]
        taken_apart = all(graph.nodes[user].opcode == "get-tuple-element" for user in graph.users[call])
        return taken_apart and call != graph.root and _is_own_buffer(graph, call)
    updated = [buffer for buffer, writer in graph.inplace if writer == home]
    if updated:
        return all(_is_own_buffer(graph, graph.shown[buffer]) for buffer in updated)
    return node.kind is Kind.FUSIBLE or (node.kind is Kind.FIXED and node.opcode in _LIBRARY_CALLS)


# The whole module -------------------------------------------------------------------------------


def assembled(source: CanonicalModule, written: Sequence[Message]) -> bytes:
    """The module of ``source``, serialized, with these computations: those that it has by the same id, and new ones.

    The order of their instructions is the module's schedule.
    """
    module = hlo_proto.Module()
    module.CopyFrom(source.module)
    new = {computation.id: computation for computation in written}
    by_id = {**source.index.by_id, **new}

    def calls(here: int) -> Iterator[int]:
        return (i for one in reversed(by_id[here].instructions) for i in reversed(one.called_computation_ids))

    # Each after those that it calls, as XLA wants them.
    called = [by_id[here] for here in needed_first([module.entry_computation_id], calls)]
    del module.computations[:]
    module.computations.extend(called)
    module.schedule.sequences.clear()
    for computation in called:
        if computation.id in new:
            scheduled = not computation.is_fusion_computation
            ids = [instruction.id for instruction in computation.instructions] if scheduled else []
        else:
            sequences = source.module.schedule.sequences
            ids = list(sequences[computation.id].instruction_ids) if computation.id in sequences else []
        if ids:
            module.schedule.sequences[computation.id].instruction_ids.extend(ids)
    dropped = set(source.dropped_aliases)
    aliases = [
        alias
        for alias in module.input_output_alias.entries
        if (alias.parameter_number, (*alias.output_shape_index, 0)[0]) not in dropped
    ]
    del module.input_output_alias.entries[:]
    module.input_output_alias.entries.extend(aliases)
    return hlo_proto.serialize(module)
