"""What a fingerprint depends on, and what it does not; node numbers; XLA's decisions undone.

Also modules that are small as files and without end once everything that is called is looked at again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from disco_hlo.errors import ModuleError
from disco_hlo.hlo import canonical as canonical_module
from disco_hlo.hlo import digests, proto
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.flatten import unpack_concatenated
from disco_hlo.hlo.graph import Kind
from disco_hlo.hlo.proto import Message
from tests.captured import captured, stored
from tests.hlo.small_modules import RETURNED_AND_UPDATED, small_module
from tests.modules import module_of

DEFAULT, UNFUSED = "h200_transformer_default", "h200_transformer_unfused"
SMALL = "h200_models/rnnlm"
"""1450 nodes, in kernels and buckets of XLA's as well."""


def changed(change: Callable[[Message], object]) -> bytes:
    """The small module after ``change`` was made to it."""
    module = proto.parse(stored(SMALL))
    change(module)
    return proto.serialize(module)


def entry_of(module: Message) -> Message:
    return next(c for c in module.computations if c.id == module.entry_computation_id)


def test_fused_and_unfused_module_are_one_graph() -> None:
    default, unfused = captured(DEFAULT), captured(UNFUSED)
    assert default.graph.backend == "gpu"
    assert len(default.graph) == 5999
    assert default.graph.fingerprint == unfused.graph.fingerprint
    assert [node.key for node in default.graph.nodes] == [node.key for node in unfused.graph.nodes]
    assert len(default.origins) < len(unfused.origins)


def test_combined_all_reduces_are_taken_apart() -> None:
    """27 all-reduce instructions carry the 148 gradients, the loss and the gradient norm's parts."""
    graph = captured(DEFAULT).graph
    starts = [origin for origin in captured(DEFAULT).origins if origin.role == "start"]
    assert len(starts) == 27
    assert len(graph.collectives) == 150
    assert sorted(node for origin in starts for node in origin.nodes) == list(graph.collectives)


def test_nodes_are_numbered_topologically_and_parameters_come_first() -> None:
    graph = captured(DEFAULT).graph
    assert all(operand < node.id for node in graph.nodes for operand in node.operands)
    assert [node.kind for node in graph.nodes[:446]] == [Kind.PARAMETER] * 446


def test_what_an_op_is_is_found_once_though_ops_are_merged_and_numbered_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merged, digested, ops = [], [], []
    for name, calls in (("numbered", merged), ("cost_digest", digested)):
        monkeypatch.setattr(digests, name, noting(calls, getattr(digests, name)))
    monkeypatch.setattr(canonical_module, "numbered", digests.numbered)
    for module in (digests, canonical_module):
        monkeypatch.setattr(module, "unpack_concatenated", noting(ops, unpack_concatenated))
    canonicalize(small_module(RETURNED_AND_UPDATED))
    assert len(merged) == len(ops) + 1
    assert len(digested) <= sum(len(computation.ops) for computation in ops)


def noting(results: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which writes down what it returns."""

    def noted(*arguments: Any) -> Any:
        results.append(function(*arguments))
        return results[-1]

    return noted


def rename(module: Message) -> None:
    module.name = "another"
    for computation in module.computations:
        computation.name = "c" + computation.name
        for instruction in computation.instructions:
            instruction.name = "i" + instruction.name
            instruction.ClearField("metadata")


def renumber(module: Message) -> None:
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.channel_id:
                instruction.channel_id += 1000


def exchange(module: Message) -> None:
    root = next(i for i in entry_of(module).instructions if i.id == entry_of(module).root_id)
    root.operand_ids[0], root.operand_ids[1] = root.operand_ids[1], root.operand_ids[0]


def subtract(module: Message) -> None:
    kernels = (c.instructions for c in module.computations if c.is_fusion_computation)
    next(i for kernel in kernels for i in kernel if i.opcode == "add").opcode = "subtract"


def donate_nothing(module: Message) -> None:
    module.ClearField("input_output_alias")


@pytest.mark.parametrize(
    ("change", "counts"),
    [(rename, False), (renumber, False), (exchange, True), (subtract, True), (donate_nothing, True)],
    ids=["names and metadata", "channel numbers", "an operand", "an opcode inside a kernel", "donation"],
)
def test_what_counts_for_the_fingerprint(change: Callable[[Message], None], counts: bool) -> None:
    fingerprint = canonicalize(changed(change)).graph.fingerprint
    assert (fingerprint != captured(SMALL).graph.fingerprint) == counts


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "naming computation 0"), (b"\x1f\x8bnot a module", "14 bytes that cannot be parsed")],
)
def test_what_is_no_module_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ModuleError, match=message):
        canonicalize(data)


def test_a_backend_config_that_is_nested_too_deep_is_no_operand_that_is_missing() -> None:
    def nest(module: Message) -> None:
        entry_of(module).instructions[-1].backend_config = b'{"known_trip_count":' + b"[" * 100_000

    with pytest.raises(ModuleError, match="such as a backend config, is nested too deep;") as error:
        canonicalize(changed(nest))
    assert "operand" not in str(error.value)


def test_an_operand_that_nobody_defines_is_named() -> None:
    module = proto.parse(stored(SMALL))
    reader = next(i for i in entry_of(module).instructions if i.opcode == "bitcast")
    reader.operand_ids[0] = 7
    with pytest.raises(ModuleError, match=reader.name):
        canonicalize(proto.serialize(module))


def _root_elsewhere(fused: Message) -> None:
    fused.root_id = 10**9


def _no_operands(fused: Message) -> None:
    del next(i for i in fused.instructions if i.operand_ids).operand_ids[:]


@pytest.mark.parametrize("damage", [_root_elsewhere, _no_operands])
def test_a_kernel_that_does_not_hang_together_is_refused(damage: Callable[[Message], None]) -> None:
    """Some such modules were a KeyError or an IndexError, and a traceback where a file held them."""
    data = changed(lambda module: damage(next(c for c in module.computations if c.is_fusion_computation)))
    with pytest.raises(ModuleError):
        canonicalize(data)


LEVELS = 40


def twice(call: str) -> str:
    """Computations of which each calls the next one twice."""
    parts = ["%f0 (p: f32[8]) -> f32[8] {\n %p = f32[8]{0} parameter(0)\n ROOT %n = f32[8]{0} negate(%p)\n}"]
    for level in range(1, LEVELS):
        one, two = (call.format(operand, level - 1) for operand in ("p", "a"))
        parts.append(
            f"%f{level} (p: f32[8]) -> f32[8] {{\n %p = f32[8]{{0}} parameter(0)\n %a = f32[8]{{0}} {one}\n "
            f"ROOT %b = f32[8]{{0}} {two}\n}}"
        )
    return "\n\n".join(parts)


def tuples() -> str:
    """A kernel that makes a tuple of a tuple, twice, of a tuple, twice, and so on."""
    shape, lines = "f32[8]{0}", [" %t0 = f32[8]{0} parameter(0)"]
    for level in range(1, 12):
        shape = f"({shape}, {shape})"
        lines.append(f" %t{level} = {shape} tuple(%t{level - 1}, %t{level - 1})")
    lines.append(' ROOT %whole = f32[8]{0} custom-call(%t11), custom_call_target="whole"')
    return "\n".join(["%f0 (p: f32[8]) -> f32[8] {", *lines, "}"])


def canonical(computations: str, call: str, last: int) -> CanonicalModule:
    entry = "ENTRY %main (x: f32[8]) -> f32[8] {\n %x = f32[8]{0} parameter(0)\n ROOT %y = f32[8]{0} "
    text = f"HloModule jit_step, is_scheduled=true\n\n{computations}\n\n{entry}{call.format('x', last)}\n}}\n"
    return canonicalize(module_of(text))


@pytest.mark.parametrize("computations", [twice("fusion(%{}), kind=kLoop, calls=%f{}"), tuples()])
def test_kernels_that_repeat_each_other_without_end_are_refused(computations: str) -> None:
    last = LEVELS - 1 if f"%f{LEVELS - 1} " in computations else 0
    with pytest.raises(
        ModuleError, match="computation 'main' repeats what it calls until it holds more than"
    ):
        canonical(computations, "fusion(%{}), kind=kLoop, calls=%f{}", last)


def test_what_a_computation_overwrites_is_found_once_however_often_it_is_called() -> None:
    call = "call(%{}), to_apply=%f{}"
    # Once for each of 2^40 calls would not end.
    assert canonical(twice(call), call, LEVELS - 1).graph.inplace == ()


def nested_loops(members: int, depth: int) -> str:
    """Loops of which each runs the next one, which changes all that they carry."""
    shape = f"({', '.join(['f32[8]'] * members)})"
    numbers = range(members)
    made = f"ROOT %t = {shape} tuple({', '.join(f'%m{i}' for i in numbers)})"

    def elements(of: str, names: str) -> list[str]:
        return [f"%{names}{i} = f32[8] get-tuple-element(%{of}), index={i}" for i in numbers]

    parts = [[f"%go (q: {shape}) -> pred[] {{", f"%q = {shape} parameter(0)", "ROOT %c = pred[] constant(1)"]]
    changed = [f"%m{i} = f32[8] negate(%k{i})" for i in numbers]
    parts.append(
        [f"%l0 (p: {shape}) -> {shape} {{", f"%p = {shape} parameter(0)", *elements("p", "k"), *changed, made]
    )
    for level in range(1, depth):
        loop = f"%w = {shape} while(%p), condition=%go, body=%l{level - 1}"
        head = f"%l{level} (p: {shape}) -> {shape} {{"
        parts.append([head, f"%p = {shape} parameter(0)", loop, *elements("w", "m"), made])
    given = [f"%x{i} = f32[8] parameter({i})" for i in numbers]
    start = f"%s = {shape} tuple({', '.join(f'%x{i}' for i in numbers)})"
    loop = f"%w = {shape} while(%s), condition=%go, body=%l{depth - 1}"
    result = "ROOT %y = f32[8] get-tuple-element(%w), index=0"
    entry = f"ENTRY %main ({', '.join(f'x{i}: f32[8]' for i in numbers)}) -> f32[8] {{"
    parts.append([entry, *given, start, loop, result])
    return "\n\n".join(
        ["HloModule jit_step, is_scheduled=true", *("\n ".join(part) + "\n}" for part in parts)]
    )


def test_what_nested_loops_only_read_is_found_once_for_each_loop() -> None:
    # Once for each way through all loops, 24^10, would not end.
    assert len(canonicalize(module_of(nested_loops(members=24, depth=10))).graph.inplace) == 24
