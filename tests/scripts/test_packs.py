"""Packs compiled and run: right results, one time for every kernel in every run, refusals that say so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import packs
import pytest
from pack import Pack, PackedKernel, Vector, pack
from packs import CompiledPack, Inputs, PackCompiler

from disco_hlo.errors import IllegalStrategyError, UnsupportedError
from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.plugin.xla import compiles, jaxlink
from tests.steps.intercept import intercept


def softened(x: jax.Array, y: jax.Array, table: jax.Array, which: jax.Array) -> tuple[jax.Array, ...]:
    shifted = jnp.exp(x - x.max(axis=-1, keepdims=True))
    scaled = shifted / shifted.sum(axis=-1, keepdims=True)
    return scaled * y, (x.T + 1.0) * 2.0, table[which] + 1.0, jnp.concatenate([x, y]) * 3.0


@cache
def source() -> CanonicalModule:
    shapes = [((4, 8), "float32"), ((4, 8), "float32"), ((9, 8), "float32"), ((5,), "int32")]
    arguments = tuple(jax.ShapeDtypeStruct(*one) for one in shapes)
    return canonicalize(intercept(jax.jit(softened), arguments, compiles.capture, devices=1))


def kernels() -> list[PackedKernel]:
    return [PackedKernel(source(), o.nodes, o.results) for o in source().origins if o.role == "fusion"]


@pytest.fixture
def compiler() -> Iterator[PackCompiler]:
    source()  # takes the compiles over for as long
    with PackCompiler(parallelism=2, reuse_after_bytes=1 << 20) as compiler:
        yield compiler


def evaluated(kernel: PackedKernel, reads: list[np.ndarray]) -> list[np.ndarray]:
    """What a kernel computes, op by op in numpy, with inputs in the order in which a pack reads them."""
    nodes = kernel.source.graph.nodes
    values: dict[int, np.ndarray] = {}
    given = iter(reads)
    for member in kernel.members:
        for operand in nodes[member].operands:
            if operand in values or operand in kernel.members:
                continue
            if nodes[operand].opcode == "constant" and not nodes[operand].shape.dims:
                values[operand] = np.frombuffer(kernel.source.protos[operand].literal[-4:], np.float32)[0]
            else:
                values[operand] = next(given).reshape(nodes[operand].shape.dims)
        values[member] = NUMPY[nodes[member].opcode](
            nodes[member], *[values[o] for o in nodes[member].operands]
        )
    return [values[result] for result in kernel.results]


def broadcast(node, x):
    shape = [1] * len(node.shape.dims)
    for place, dimension in enumerate(node.dimensions):
        shape[dimension] = x.shape[place]
    return np.broadcast_to(np.reshape(x, shape), node.shape.dims)


NUMPY = {
    "add": lambda node, a, b: a + b,
    "subtract": lambda node, a, b: a - b,
    "multiply": lambda node, a, b: a * b,
    "divide": lambda node, a, b: a / b,
    "exponential": lambda node, a: np.exp(a),
    "broadcast": broadcast,
    "bitcast": lambda node, a: np.reshape(a, node.shape.dims),
    "transpose": lambda node, a: np.transpose(a, node.dimensions),
    "concatenate": lambda node, *parts: np.concatenate(parts, node.dimensions[0]),
}


def test_kernels_of_a_pack_compute_what_their_ops_say(compiler: PackCompiler) -> None:
    graph = source().graph
    known = [k for k in kernels() if all(graph.nodes[m].opcode in NUMPY for m in k.members)]
    assert len(known) >= 2
    inputs = Inputs(1 << 20)
    compiled = compiler.compile(known)
    given = [np.asarray(array) for array in inputs.take(compiled.pack.inputs)]
    results = iter([np.asarray(array) for array in compiled.outputs(inputs)])
    for kernel, reads in zip(known, reads_of(known), strict=True):
        for expected in evaluated(kernel, [given[read] for read in reads]):
            np.testing.assert_allclose(next(results), np.ravel(expected), rtol=2e-6)
    assert next(results, None) is None


def reads_of(packed: list[PackedKernel]) -> list[list[int]]:
    """Inputs of the pack that each kernel reads, in order: through the call around it and the bitcast before."""
    module = proto.parse(pack(packed, "p", 2, 1 << 20).module)
    index = ModuleIndex(module)
    entry = index.computation(module.entry_computation_id)
    by_id = {i.id: i for i in entry.instructions}
    found = []
    for call in (i for i in entry.instructions if i.opcode == "call"):
        body = index.computation(call.called_computation_ids[0])
        inside = {i.id: i for i in body.instructions}
        for fusion in (i for i in body.instructions if i.opcode == "fusion" and i.name.startswith("k")):
            operands = [by_id[call.operand_ids[inside[o].parameter_number]] for o in fusion.operand_ids]
            origins = [by_id[o.operand_ids[0]] if o.opcode == "bitcast" else o for o in operands]
            found.append([origin.parameter_number for origin in origins])
    return found


def test_every_kernel_gets_a_time_in_every_run(compiler: PackCompiler) -> None:
    compiled = compiler.compile([*kernels(), *kernels(), *kernels()])
    times = compiled.measure(Inputs(1 << 20), sessions=2, repeats=3, seconds=60.0)
    assert times.shape == (3 * len(kernels()), 6)
    assert (times > 0).all()


def test_results_need_not_be_kept_and_the_device_is_used_alone() -> None:
    entered = []

    @contextmanager
    def alone() -> Iterator[None]:
        entered.append(True)
        yield

    with PackCompiler(2, 1 << 20, held_bytes=256) as compiler:
        compiled = compiler.compile([*kernels(), *kernels()])
    times = compiled.measure(Inputs(1 << 20), sessions=1, repeats=3, seconds=60.0, alone=alone())
    assert (times > 0).all()
    assert entered == [True]
    kept = sum(len(kernel.results) for kernel in kernels()) * 2
    assert 0 < len(compiled.pack.outputs) < kept
    assert all(np.isfinite(np.asarray(output)).all() for output in compiled.outputs(Inputs(1 << 20)))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "s64", "pred"])
def test_long_inputs_are_made_on_the_device_of_the_same_values(dtype: str) -> None:
    first, second = Inputs(1 << 30).take([Vector(dtype, 9_000_001), Vector(dtype, 9_000_001)])
    short = np.asarray(Inputs(1 << 30).take([Vector(dtype, 1 << 16)])[0])
    assert first.shape == (9_000_001,)
    assert first.dtype == short.dtype
    np.testing.assert_array_equal(np.asarray(first), np.resize(short, 9_000_001))
    assert (np.asarray(first) != np.asarray(second)).any()


@pytest.mark.parametrize("dtype", ["s32", "u8", "s64"])
def test_made_up_indices_are_spread_over_rows_near_and_far(dtype: str) -> None:
    values = np.asarray(Inputs(1 << 30).take([Vector(dtype, 40_000)])[0])
    assert values.min() == 0
    assert np.unique(values).size > (200 if dtype == "u8" else 5_000)
    assert np.median(values) < values.max() / 8  # more of the small than of the large, as words are


def test_runs_are_cut_down_to_the_time_there_is(
    compiler: PackCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiler.compile(kernels())
    monkeypatch.setattr(packs.time, "perf_counter", itertools.count(0.0, 0.1).__next__)
    assert compiled.measure(Inputs(1 << 20), 2, 50, seconds=1.05).shape[1] == 10
    with pytest.raises(UnsupportedError, match=r"one run of \d+ kernels takes 0.1 s, too long to repeat"):
        compiled.measure(Inputs(1 << 20), 2, 50, seconds=0.1)


def test_a_carrier_that_jax_compiles_by_itself_is_refused(compiler: PackCompiler) -> None:
    jaxlink.uninstall()
    with pytest.raises(UnsupportedError, match="compiled past us"):
        compiler.compile(kernels())


def test_what_xla_refuses_is_an_error_and_the_carrier_does_not_run_instead(compiler: PackCompiler) -> None:
    """XLA:CPU emits no input fusions."""
    fine = kernels()[0]
    with pytest.raises(IllegalStrategyError, match="a pack of 1 was refused"):
        compiler.compile([PackedKernel(source(), fine.members, fine.results, kind="input")])


def test_compiles_of_the_user_s_go_through_untouched_and_afterwards_jax_compiles_by_itself() -> None:
    before = jaxlink.compiler_module().compile_or_get_cached
    with PackCompiler(1, 0):
        assert jaxlink.compiler_module().compile_or_get_cached is not before
        assert float(jax.jit(lambda x: x + 1)(2.0)) == 3.0
    assert jaxlink.compiler_module().compile_or_get_cached is before


def test_inputs_are_distinct_shared_between_packs_and_freed_when_too_many() -> None:
    inputs = Inputs(most_bytes=3 * 400)
    vector, other = Vector("f32", 100), Vector("s32", 100)
    first = inputs.take([vector, vector, other])
    assert first[0] is not first[1]
    assert (np.asarray(first[2]) >= 0).all()
    assert (np.asarray(first[0]) > 0).all()
    again = inputs.take([other, vector])
    assert again[0] is first[2]
    assert again[1] is first[0]
    inputs.take([Vector("f32", 200), vector])
    assert inputs.take([vector])[0] is first[0]
    assert inputs.take([other])[0] is not first[2]


def test_inputs_change_places_between_runs() -> None:
    vectors = (Vector("f32", 4), Vector("s32", 4), Vector("f32", 4), Vector("f32", 4))
    compiled = CompiledPack(Pack(b"", vectors, (), ()), "p", lambda *inputs: inputs)
    orders = [compiled._run(["a", "i", "b", "c"]) for _ in range(4)]
    assert orders == [["a", "i", "b", "c"], ["b", "i", "c", "a"], ["c", "i", "a", "b"], ["a", "i", "b", "c"]]
