"""Packs: modules of independent kernels, their signature, and how inputs are shared."""

from __future__ import annotations

from functools import cache

import pytest
from pack import Pack, PackedKernel, Vector, pack

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.proto import Message
from tests.captured import captured


def source() -> CanonicalModule:
    return captured("h200_transformer_default")


@cache
def kernels(count: int = 40) -> tuple[PackedKernel, ...]:
    """Kernels of several ops that XLA formed."""
    found = [
        PackedKernel(source(), origin.nodes, origin.results, "input")
        for origin in source().origins
        if origin.role == "fusion" and len(origin.nodes) > 1 and origin.proto.fusion_kind != "kCustom"
    ]
    return tuple(found[:count])


def entry_of(packed: Pack) -> Message:
    module = proto.parse(packed.module)
    return ModuleIndex(module).computation(module.entry_computation_id)


def test_every_kernel_becomes_one_fusion_in_the_order_given() -> None:
    packed = pack(kernels(), "jit_pack", 1, 0)
    entry = entry_of(packed)
    fusions = [i for i in entry.instructions if i.opcode == "fusion"]
    assert [i.name for i in fusions] == list(packed.names)
    assert len(fusions) == len(kernels())
    assert {i.fusion_kind for i in fusions} == {"kInput"}
    index = ModuleIndex(proto.parse(packed.module))
    for kernel, fusion in zip(kernels(), fusions, strict=True):
        body = index.computation(fusion.called_computation_ids[0])
        opcodes = [source().graph.nodes[m].opcode for m in kernel.members]
        inside = [i.opcode for i in body.instructions]
        assert all(opcode in inside for opcode in opcodes)
        # As apply writes them: bitcasts, where transposes that move nothing took their place.
        assert inside.count("bitcast") == opcodes.count("bitcast")
        assert inside.count("transpose") == opcodes.count("transpose")


def test_the_signature_is_flat_vectors_and_the_module_is_scheduled() -> None:
    packed = pack(kernels(), "jit_pack", 1, 0)
    module, entry = proto.parse(packed.module), entry_of(packed)
    parameters = [i for i in entry.instructions if i.opcode == "parameter"]
    assert [
        Vector(proto.shape_of(p.shape).dtype, proto.shape_of(p.shape).element_count) for p in parameters
    ] == list(packed.inputs)
    (root,) = [i for i in entry.instructions if i.id == entry.root_id]
    shapes = proto.shape_of(root.shape).elements
    assert [Vector(shape.dtype, shape.element_count) for shape in shapes] == list(packed.outputs)
    assert sum(len(kernel.results) for kernel in kernels()) == len(packed.outputs)
    assert module.name == "jit_pack"
    assert module.host_program_shape == entry.program_shape
    assert list(module.schedule.sequences[entry.id].instruction_ids) == [i.id for i in entry.instructions]


def test_names_and_ids_are_unique_and_callees_come_first() -> None:
    module = proto.parse(pack(kernels(), "jit_pack", 1, 0).module)
    names = [i.name for computation in module.computations for i in computation.instructions]
    assert len(names) == len(set(names))
    seen: set[int] = set()
    for computation in module.computations:
        called = {c for i in computation.instructions for c in i.called_computation_ids}
        assert called <= seen
        seen.add(computation.id)
    assert len(seen) == len(module.computations)


def test_a_reducer_that_many_kernels_call_is_copied_once() -> None:
    module = proto.parse(pack([*kernels(), *kernels()], "jit_pack", 1, 0).module)
    reducers = {
        i.called_computation_ids[0]
        for c in module.computations
        for i in c.instructions
        if i.opcode == "reduce"
    }
    calls = sum(i.opcode == "reduce" for c in module.computations for i in c.instructions)
    assert 0 < 2 * len(reducers) <= calls


def test_inputs_are_read_again_only_after_enough_other_traffic() -> None:
    assert len(pack(kernels(), "p", 1, 1 << 62).inputs) == sum(reads_of(kernel) for kernel in kernels())
    some = len(pack(kernels(), "p", 1, 1 << 26).inputs)
    few = len(pack(kernels(), "p", 1, 0).inputs)
    assert few < some < sum(reads_of(kernel) for kernel in kernels())


def reads_of(kernel: PackedKernel) -> int:
    return len(entry_fusions(pack([kernel], "p", 1, 0))[0].operand_ids)


def entry_fusions(packed: Pack) -> list[Message]:
    return [i for i in entry_of(packed).instructions if i.opcode == "fusion"]


def test_a_kernel_never_reads_one_input_in_the_place_of_two() -> None:
    for fusion in entry_fusions(pack(kernels(), "p", 1, 0)):
        assert len(set(fusion.operand_ids)) == len(fusion.operand_ids)


def test_a_pack_of_one_result_returns_it_as_it_is() -> None:
    single = next(kernel for kernel in kernels() if len(kernel.results) == 1)
    entry = entry_of(pack([single], "p", 1, 0))
    (root,) = [i for i in entry.instructions if i.id == entry.root_id]
    assert root.opcode != "tuple"


def test_kernels_that_read_tuples_cannot_stand_in_a_pack() -> None:
    graph = source().graph
    element = next(n for n in graph.nodes if n.opcode == "get-tuple-element")
    with pytest.raises(IllegalStrategyError, match="expected kernels that read arrays"):
        pack([PackedKernel(source(), (element.id,), (element.id,))], "p", 1, 0)


def test_moved_bytes_are_distinct_reads_and_results() -> None:
    kernel = kernels()[0]
    nodes = source().graph.nodes
    reads = {o for m in kernel.members for o in nodes[m].operands} - set(kernel.members)
    wide = [r for r in reads if nodes[r].shape.dims or nodes[r].opcode != "constant"]
    assert kernel.moved_bytes == sum(nodes[n].shape.size_bytes for n in (*wide, *kernel.results))


def test_results_that_need_not_be_kept_are_read_by_small_kernels_instead() -> None:
    packed = pack(kernels(), "jit_pack", 1, 0, held_bytes=1 << 20)
    entry = entry_of(packed)
    touches = [i for i in entry.instructions if i.opcode == "fusion" and i.name not in packed.names]
    made = [i for i in entry.instructions if i.name in packed.names]
    by_id = {i.id: i for i in entry.instructions}
    read = [by_id[operand] for touch in touches for operand in touch.operand_ids]
    while any(i.opcode in ("bitcast", "get-tuple-element") for i in read):
        read = [by_id[i.operand_ids[0]] if i.opcode in ("bitcast", "get-tuple-element") else i for i in read]
    assert {i.name for i in read} == set(packed.names)
    assert len(read) == sum(len(kernel.results) for kernel in kernels())
    assert packed.outputs == (Vector("f32", 1),) * len(touches)
    assert 1 < len(touches) < len(made)


def test_held_results_stay_below_their_limit_and_one_kernel_more() -> None:
    limit = 64 << 20
    packed = pack(kernels(), "jit_pack", 1, 0, held_bytes=limit)
    size = dict(zip(packed.names, [sum(result_bytes(k)) for k in kernels()], strict=True))
    held = 0
    for instruction in entry_of(packed).instructions:
        if instruction.name in size:
            assert held <= limit
            held += size[instruction.name]
        elif instruction.opcode == "fusion":
            held = 0


def result_bytes(kernel: PackedKernel) -> list[int]:
    return [kernel.source.graph.nodes[result].shape.size_bytes for result in kernel.results]
