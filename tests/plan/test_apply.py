"""What XLA executes is the strategy, and computes the same numbers: real steps on two CPU devices.

Also where an all-reduce may overwrite its operand, and into how many tasks XLA:CPU splits a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Kind, Shape
from disco_hlo.plan.apply import apply, may_overwrite
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.plan.read import describe_difference, read, verify
from disco_hlo.plan.variants import normal_form, one_bucket, unfused
from disco_hlo.plan.writer import KernelWork, outer_partitions, task_count
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.xla import compiles, executables, jaxlink
from disco_hlo.plugin.xla.executables import memory
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.graphs import Pairs, graph_of
from tests.outputs import outputs_of
from tests.plan.executed import executed_difference
from tests.steps import models
from tests.steps.intercept import captured_step, intercept
from tests.steps.strategies import random_strategy

BFLOAT16 = ml_dtypes.bfloat16
STEPS: dict[str, Callable[[], models.Step]] = {
    "mlp": models.mlp,
    "mlp without donation": lambda: models.mlp(donate=False),
    "mlp bf16": lambda: models.mlp(BFLOAT16),
    "resnet": models.resnet,
    "resnet bf16": lambda: models.resnet(BFLOAT16),
    "transformer": lambda: models.transformer(layers=1),
    "lstm": models.lstm,
    "scanned layers": models.scanned_layers,
    "jax.debug.print": models.printing,
    "shard_map": models.mapped_by_hand,
    "exchanges": models.exchanged,
    "pmap": models.pmapped,
    "pooled": models.pooled,
    "in place": models.in_place,
    "loops that read": models.loops_that_read,
    "cached": models.cached,
    "written activations": models.written_activations,
    "replayed": models.replayed,
    "replayed without donation": lambda: models.replayed(donate=False),
    "writing": partial(models.writing, 0),
    "without elements": models.without_elements,
    "complex numbers": models.spectral,
}
RANDOM, BUCKET, UNFUSED, OWN = "random", "one concatenated bucket", "unfused", "XLA's own"
TRIED = {
    "mlp": (RANDOM, BUCKET, UNFUSED, OWN),
    "mlp without donation": (RANDOM, OWN),
    "mlp bf16": (RANDOM,),
    "resnet": (BUCKET,),
    "resnet bf16": (RANDOM,),
    "transformer": (RANDOM,),
    "jax.debug.print": (RANDOM, BUCKET, OWN),
    "exchanges": (RANDOM, BUCKET, UNFUSED, OWN),
    "pmap": (RANDOM, BUCKET, OWN),
    "loops that read": (RANDOM, BUCKET, OWN),
    "lstm": (RANDOM,),
    "scanned layers": (BUCKET,),
    "in place": (RANDOM, UNFUSED),
    "written activations": (RANDOM, UNFUSED),
    "replayed": (RANDOM, BUCKET, UNFUSED),
    "replayed without donation": (OWN,),
    "writing": (RANDOM, UNFUSED),
}
"""As what a step is executed. Compiling hundreds of kernels takes its time: in most steps one bucket, with XLA's own
kernels, stands for XLA's own plan, and the random strategy, which leaves most ops alone, for the unfused one."""
BOTH_LEGS = ("mlp", "mlp bf16", "jax.debug.print", "shard_map", "pmap", "in place", "complex numbers")
"""On jax 0.10.2 the larger ones take a quarter minute each."""


def strategies(source: CanonicalModule, name: str) -> dict[str, Strategy]:
    """What each step is executed as."""
    xla = read(source)
    found = {
        RANDOM: random_strategy(source, seed=3),
        BUCKET: one_bucket(source.graph, xla.groups),
        UNFUSED: unfused(source.graph),
        OWN: xla,
    }
    return {title: found[title] for title in TRIED.get(name, (RANDOM, BUCKET))}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BOTH_LEGS else pytest.mark.product_only) for name in STEPS],
)
def test_xla_executes_the_strategy_and_computes_the_same_numbers(name: str) -> None:
    step, arguments = STEPS[name]()

    def body(request: CompileRequest) -> None:
        default, module = compiles.compile_seen(request)
        source = canonicalize(module)
        expected = outputs_of(Runner(request, default, seed=1))
        donated = memory(default).aliased_bytes
        for title, strategy in strategies(source, name).items():
            module = apply(strategy, source)
            verify(source, module, strategy)
            executable = compiles.compile_module(request, module)
            executed = canonicalize(executables.read_executable(executable))
            assert describe_difference(source.graph, read(executed), strategy) is None, title
            if jaxlink.keeps_donation():
                assert memory(executable).aliased_bytes == donated, title
                assert executed.graph.fingerprint == source.graph.fingerprint, title
            outputs = outputs_of(Runner(request, executable, seed=1))
            for want, got in zip(expected, outputs, strict=True):
                for one, other in zip(want, got, strict=True):
                    assert_close(one, other, title)

    intercept(step, arguments, body)


@pytest.mark.product_only
def test_a_step_that_computes_again_behind_barriers_keeps_its_numbers() -> None:
    """XLA removes the barriers of jax.checkpoint after the hook; then some kernels repeat what others return."""
    step, arguments = models.llama(layers=1)

    def body(request: CompileRequest) -> None:
        default, captured = compiles.compile_seen(request)
        source = canonicalize(captured)
        assert any(node.opcode == "opt-barrier" for node in source.graph.nodes)
        module = apply(read(source), source)
        verify(source, module, read(source))
        executable = compiles.compile_module(request, module)
        assert executed_difference(module, executables.read_executable(executable)) is None
        expected, found = (outputs_of(Runner(request, one, seed=1)) for one in (default, executable))
        for want, got in zip(expected, found, strict=True):
            for one, other in zip(want, got, strict=True):
                assert_close(one, other, "XLA's own")

    intercept(step, arguments, body)


def assert_close(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any], title: str) -> None:
    """Equal up to what another order of rounding may change."""
    assert expected.dtype == got.dtype
    tolerance = 2e-2 if expected.dtype == BFLOAT16 else 2e-5
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    left, right = np.asarray(expected, wide), np.asarray(got, wide)
    assert np.all(np.isfinite(left)), title
    scale = float(np.max(np.abs(left), initial=0.0)) or 1.0
    np.testing.assert_allclose(right, left, rtol=tolerance, atol=tolerance * scale, err_msg=title)


def test_random_strategies_differ_from_xla_and_hold_duplicates() -> None:
    """The numbers above are worth something only if the random strategies are not trivial."""
    source = captured_step("transformer")
    strategy = random_strategy(source, seed=3)
    assert any(group.duplicates for group in strategy.groups)
    assert sum(len(group.nodes) for group in strategy.groups) > 20
    assert normal_form(source.graph, strategy) != read(source)


def test_partitions_are_those_xla_assigns() -> None:
    """Writing XLA's own plan again gives every kernel the number of tasks that XLA gave it."""
    source = captured_step("mlp_wide")
    written = canonicalize(apply(read(source), source))
    wanted = {
        origin.nodes: origin.proto.backend_config for origin in source.origins if origin.role == "fusion"
    }
    got = {origin.nodes: origin.proto.backend_config for origin in written.origins if origin.role == "fusion"}
    assert any(b"outer_dimension_partitions" in config for config in wanted.values())
    assert got == wanted


def test_what_a_loop_only_reads_may_be_read_and_updated_before_and_after_it() -> None:
    """It had to be read before the loop, whatever waits for the loop: XLA's own kernels waited in a circle."""
    source = captured_step("loops_that_read")
    loops = {node.id: node.opcode for node in source.graph.nodes if node.opcode in ("while", "call")}
    assert sorted(loops.values()) == ["call", "while", "while"]
    assert not {first for first, loop in source.graph.before if loop in loops}
    overwritten = {source.graph.nodes[array].kind for array, loop in source.graph.inplace if loop in loops}
    assert overwritten == {Kind.FUSIBLE}
    assert read(source).order


def test_a_loop_reads_a_donated_parameter_before_it_is_updated() -> None:
    """Loops take arrays in tuples, and were not seen to read them: a plan could update first, and a metric that the
    loop computes was that of the next step."""
    source = captured_step("loops_that_read")
    graph = source.graph
    loops = [node.id for node in graph.nodes if node.opcode in ("while", "call")]
    waiting = {
        (loop, update)
        for loop in loops
        for array, update in graph.inplace
        if array in graph.nodes[graph.nodes[loop].operands[0]].operands and update not in loops
    }
    assert {loop for loop, _ in waiting} == set(loops)
    assert waiting <= set(graph.before)


def test_all_reduces_of_two_types_may_not_travel_together() -> None:
    source = captured_step("mixed_precision")
    mixed = Strategy(buckets=(Bucket(source.graph.collectives),))
    with pytest.raises(IllegalStrategyError, match="of another type"):
        apply(mixed, source)


def test_a_kind_of_kernel_that_there_is_not_is_refused() -> None:
    source = captured_step("mlp")
    first, *others = read(source).groups
    odd = replace(read(source), groups=(replace(first, kind="custom"), *others))
    with pytest.raises(
        IllegalStrategyError, match="g0: kind 'custom' is none of loop, input, output, triton"
    ):
        apply(odd, source)


SUM, UPDATED = "param\nadd 0 0\nall-reduce 1\n", "param\nbroadcast 0\nscatter 1 0\nall-reduce 2\ntuple 3"
OVERWRITTEN: dict[str, tuple[str, int, Pairs, bool]] = {
    "that only its all-reduce reads": (f"{SUM}add 2 0", 2, (), True),
    "of a library call, behind a bitcast": (
        "param\ncustom-call 0 0\nget-tuple-element 1\nbitcast 2\nall-reduce 3\nadd 4 0", 4, (), True,
    ),
    "that another op reads behind a bitcast": (f"{SUM}bitcast 1\nadd 3 2", 2, (), False),
    "that is returned": (f"{SUM}tuple 1 2", 2, (), False),
    "that is a parameter": ("param\nall-reduce 0\nall-reduce 1\ntuple 2", 1, (), False),
    "that is another all-reduce's result": ("param\nall-reduce 0\nall-reduce 1\ntuple 2", 2, (), False),
    "whose sum is returned": (f"{SUM}tuple 2", 2, (), True),
    "whose sum must end up in a donated parameter": (f"{SUM}tuple 2", 2, ((0, 2),), False),
    "that was updated in a buffer of its own": (UPDATED, 3, ((1, 2),), True),
    "that was updated in a parameter": (UPDATED, 3, ((0, 2),), False),
}  # fmt: skip


@pytest.mark.parametrize("gradient", OVERWRITTEN)
def test_a_gradient_is_overwritten_where_nobody_else_has_its_buffer(gradient: str) -> None:
    text, collective, inplace, expected = OVERWRITTEN[gradient]
    assert may_overwrite(graph_of(text, inplace=inplace, backend="gpu"), collective) is expected


def matrix(rows: int, columns: int) -> Shape:
    return Shape("f32", (rows, columns), (1, 0))


def work(shape: Shape, flops: int, bytes_accessed: int) -> KernelWork:
    return KernelWork(shape, flops, 0, bytes_accessed)


@pytest.mark.parametrize(
    ("shape", "threads", "tasks"),
    [
        (matrix(64, 64), 16, 1),  # 16 KiB of output: less than one L2 cache
        (matrix(256, 512), 16, 2),  # 512 KiB: two
        (matrix(4096, 4096), 16, 4),  # memory-bound kernels stop at the root of the threads
        (matrix(4096, 4096), 2, 2),
    ],
)
def test_memory_bound_kernels_go_by_their_output(shape: Shape, threads: int, tasks: int) -> None:
    assert task_count(work(shape, 0, 2 * shape.size_bytes), threads) == tasks


def test_compute_bound_kernels_go_by_their_work() -> None:
    assert task_count(work(matrix(8, 8), 1_000_000, 512), 16) == 10
    assert task_count(work(matrix(8, 8), 10_000_000, 512), 16) == 16


@pytest.mark.parametrize(
    ("shape", "tasks", "counts"),
    [
        (matrix(64, 64), 1, ()),
        (matrix(64, 64), 4, (4,)),
        (matrix(2, 64), 4, (2, 2)),
        (matrix(1, 64), 4, (1, 4)),
        (Shape("f32"), 4, ()),
        (Shape("f32", (64, 8), (0, 1)), 4, (4,)),  # the outermost dimension in memory is the second
    ],
)
def test_partitions_are_cut_from_the_outermost_dimensions(
    shape: Shape, tasks: int, counts: tuple[int, ...]
) -> None:
    assert outer_partitions(shape, tasks) == counts
