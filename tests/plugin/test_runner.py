from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.measuring import runner
from disco_hlo.plugin.measuring.inputs import arguments
from disco_hlo.plugin.measuring.inputs.arguments import Inputs
from disco_hlo.plugin.measuring.inputs.made_up import floats_at, synthetic_values
from disco_hlo.plugin.measuring.runner import Runner
from disco_hlo.plugin.probe import exchange_opcode
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.executables import LoadedExecutable, Parameter
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Handler

CompileWith = Callable[[str, Handler], list[CompileRequest]]

SPLIT, WHOLE = PartitionSpec("data"), PartitionSpec()


def mesh_of(devices: list[Any]) -> Mesh:
    return Mesh(np.array(devices), ("data",))


def sgd_step(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        hidden = jnp.tanh(x @ weights[0])
        return jnp.mean((hidden @ weights[1] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


def run_sgd_step(name: str, donate: bool, backwards: bool = False) -> tuple[list[jax.Array], jax.Array]:
    """:func:`sgd_step` under a name of its own, compiled and run over four devices, perhaps the last one first."""

    def step(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        return sgd_step(weights, x, y)

    step.__name__ = name
    devices = jax.devices()[:4]
    mesh = mesh_of(devices[::-1] if backwards else devices)
    split, whole = NamedSharding(mesh, SPLIT), NamedSharding(mesh, WHOLE)
    compiled = jax.jit(
        step,
        in_shardings=(whole, split, split),
        out_shardings=whole,
        donate_argnums=(0,) if donate else (),
    )
    inputs = [joined(shape, i, sharded=i >= 2) for i, shape in enumerate(SGD_SHAPES)]
    result: tuple[list[jax.Array], jax.Array] = compiled(
        [jax.device_put(w, whole) for w in inputs[:2]], inputs[2], inputs[3]
    )
    return result


SGD_SHAPES = [(6, 5), (5, 3), (2, 6), (2, 3)]
"""Per-device shapes of the entry parameters of ``sgd_step`` on four devices."""


def joined(shape: tuple[int, ...], index: int, sharded: bool, count: int = 4) -> np.ndarray[Any, Any]:
    parameter = Parameter(shape, np.dtype(np.float32), sharded)
    parts = [synthetic_values(parameter, 7, index, place) for place in range(count)]
    return np.concatenate(parts) if sharded else parts[0]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_outputs_are_those_of_jit_on_the_same_inputs(
    donate: bool, backwards: bool, compile_with: CompileWith
) -> None:
    made: list[runner.Outputs] = []

    def handle(request: CompileRequest) -> None:
        for executable in (
            request.call_default(),
            compiles.compile_module(request, compiles.capture(request)),
        ):
            on_device = Runner(request, executable, seed=7)
            made.append(on_device.outputs())
            assert on_device.run() > 0
            made.append(on_device.outputs())

    compile_with("plain_step", handle)
    weights, value = run_sgd_step("plain_step", donate, backwards)
    assert len(made) == 4
    for outputs in made:
        for expected, per_device in zip([*weights, value], outputs, strict=True):
            assert len(per_device) == 4
            for found in per_device:
                np.testing.assert_array_equal(found, np.asarray(expected))


def test_each_device_computes_on_its_own_part(compile_with: CompileWith) -> None:
    made: list[runner.Outputs] = []

    def double(x: jax.Array) -> jax.Array:
        return x * 2

    compile_with(
        "double", lambda request: made.append(Runner(request, request.call_default(), seed=7).outputs())
    )
    split = NamedSharding(mesh_of(jax.devices()[3::-1]), SPLIT)
    jax.jit(double, in_shardings=split)(np.zeros((8, 3), np.float32))
    parameter = Parameter((2, 3), np.dtype(np.float32), sharded=True)
    for place, found in enumerate(made[0][0]):
        np.testing.assert_array_equal(found, 2 * synthetic_values(parameter, 7, 0, place))
    assert not np.array_equal(made[0][0][0], made[0][0][1])


def test_two_modules_are_compared_on_equal_inputs(compile_with: CompileWith) -> None:
    made: list[runner.Outputs] = []

    def handle(request: CompileRequest) -> LoadedExecutable:
        module = exchange_opcode(compiles.capture(request), "negate", "abs")
        rewritten = compiles.compile_module(request, module)
        made.append(Runner(request, rewritten, seed=3).outputs())
        made.append(Runner(request, request.call_default(), seed=3).outputs())
        return rewritten

    def signs(x: jax.Array) -> jax.Array:
        return -x

    compile_with("signs", handle)
    jax.jit(signs)(np.ones(5, np.float32))
    np.testing.assert_array_equal(made[0][0][0], -made[1][0][0])
    assert np.all(made[0][0][0] > 0)


@pytest.mark.parametrize("donate", [False, True])
def test_steps_in_a_row_are_timed_from_the_end_of_one_ahead_of_them(
    donate: bool, compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[runner.Outputs] = []
    happened: list[str] = []
    execute, several, clock = executables.execute, Inputs.several, time.perf_counter_ns

    def noted(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            happened.append(name)
            return of(*arguments)

        return call

    def handle(request: CompileRequest) -> None:
        on_device = Runner(request, request.call_default(), seed=7)
        made.append(on_device.outputs())
        with monkeypatch.context() as patched:
            patched.setattr(executables, "execute", noted("execute", execute))
            patched.setattr(Inputs, "several", noted("arguments", several))
            patched.setattr(runner.time, "perf_counter_ns", noted("clock", clock))
            on_device.run_in_a_row(2)  # the first of all; what it takes over is learned before, and handed on
            del happened[:]
            assert on_device.run_in_a_row(5) > 0
        assert on_device.donated_bytes() == 0
        made.append(on_device.outputs())

    compile_with("row_step", handle)
    run_sgd_step("row_step", donate)
    assert happened == ["arguments", "execute", "execute", "clock"] + ["execute"] * 4 + ["clock"]
    for left, right in zip(made[0], made[1], strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)


def test_steps_in_a_row_hand_on_what_takes_the_storage_of_their_arguments(
    compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a training loop does: the second step takes what the first returned, and where donated arguments are not
    handed on each step gets its own."""
    returned: list[runner.Outputs] = []
    given: list[list[np.ndarray]] = []
    bytes_of_one_more: list[int] = []
    execute = executables.execute

    def noted(executable: Any, arguments: Sequence[Any]) -> Any:
        given.append([np.asarray(argument) for argument in arguments])
        return execute(executable, arguments)

    def handle(request: CompileRequest) -> None:
        executable = request.call_default()
        on_device = Runner(request, executable, seed=7)
        returned.append(on_device.outputs())
        with monkeypatch.context() as patched:
            patched.setattr(executables, "execute", noted)
            on_device.learn_handing_on(3)
            del given[:]
            on_device.run_in_a_row(3)
            patched.setattr(executables, "storage_taken", lambda _: {})
            alone = Runner(request, executable, seed=7)
            alone.run()
            bytes_of_one_more.append(alone.donated_bytes())
            alone.run_in_a_row(2)
        taken = executables.storage_taken(executable)
        assert sorted(taken) == [0, 1]
        for index, output in taken.items():
            np.testing.assert_array_equal(given[1][index], returned[0][output][0])
            assert not np.array_equal(given[2][index], given[1][index])
            np.testing.assert_array_equal(given[-1][index], given[0][index])
        for index in range(2, len(given[0])):
            np.testing.assert_array_equal(given[1][index], given[0][index])

    compile_with("row_step", handle)
    run_sgd_step("row_step", True)
    assert bytes_of_one_more == [180]  # the weights, [6, 5] and [5, 3] of float32


@pytest.mark.parametrize("factor", [10.0, 1e30])
def test_a_state_that_grows_without_bound_is_not_handed_on(
    factor: float, compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VGG19's made-up weights are infinite after three updates, and a GPU multiplies infinities faster."""
    given: list[float] = []
    asked: list[int] = []
    execute = executables.execute

    def noted(executable: Any, arguments: Sequence[Any]) -> Any:
        given.append(float(np.asarray(arguments[0])[0]))
        return execute(executable, arguments)

    def handle(request: CompileRequest) -> None:
        on_device = Runner(request, request.call_default(), seed=7)
        asked.append(on_device.donated_bytes())
        on_device.learn_handing_on(3)
        asked.append(on_device.donated_bytes())
        with monkeypatch.context() as patched:
            patched.setattr(executables, "execute", noted)
            on_device.run_in_a_row(3)

    def grow(state: jax.Array) -> jax.Array:
        return state * factor

    compile_with("grow", handle)
    jax.jit(grow, donate_argnums=0)(np.ones(4, np.float32))
    assert asked == [0, 16]
    assert len(given) == 4
    assert len(set(given)) == 1


@pytest.mark.parametrize("donate", [False, True])
def test_runners_of_one_step_share_their_inputs(
    donate: bool, compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    outputs: list[runner.Outputs] = []
    original = synthetic_values

    def counted(parameter: Parameter, seed: int, index: int, place: int, **more: Any) -> Any:
        made.append(index)
        return original(parameter, seed, index, place, **more)

    monkeypatch.setattr(arguments, "synthetic_values", counted)

    def handle(request: CompileRequest) -> None:
        module = compiles.capture(request)
        first = Runner(request, request.call_default(), seed=7)
        outputs.append(first.outputs())
        of_first = len(made)
        second = Runner(request, compiles.compile_module(request, module), seed=7, inputs_of=first)
        outputs.append(second.outputs())
        second.run()
        outputs.append(first.outputs())
        assert len(made) == of_first
        Runner(request, compiles.compile_module(request, module), seed=8, inputs_of=first)
        assert len(made) == of_first + 16

    compile_with("sharing_step", handle)
    run_sgd_step("sharing_step", donate)
    for left, right in zip(outputs[0], outputs[1], strict=True):
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)
    assert len(outputs) == 3


def test_every_kind_of_parameter_can_be_made(compile_with: CompileWith) -> None:
    made: list[tuple[tuple[Parameter, ...], runner.Outputs]] = []

    def handle(request: CompileRequest) -> None:
        executable = request.call_default()
        made.append((executables.parameters(executable), Runner(request, executable).outputs()))

    def kinds(values: dict[str, jax.Array], key: jax.Array) -> Any:
        copies = {name: value[::-1] if value.ndim else value + 0 for name, value in values.items()}
        return copies, jax.random.bits(key)

    values = {
        "bool": jnp.ones((3,), bool),
        "int4": jnp.ones((6,), jnp.int4),
        "int8": jnp.ones((2, 2), jnp.int8),
        "uint32": jnp.ones((3,), jnp.uint32),
        "bfloat16": jnp.ones((2, 3, 4), jnp.bfloat16),
        "float16": jnp.ones((5,), jnp.float16),
        "float8": jnp.ones((4,), jnp.float8_e4m3fn),
        "complex64": jnp.ones((2,), jnp.complex64),
        "scalar": jnp.float32(1),
        "empty": jnp.ones((0, 3)),
    }
    compile_with("kinds", handle)
    jax.jit(kinds)(values, jax.random.key(0))
    parameters, outputs = made[0]
    found = sorted((p.dtype.name, p.shape) for p in parameters)
    expected = [(value.dtype.name, value.shape) for value in values.values()] + [("uint32", (2,))]
    assert found == sorted(expected)
    assert len(outputs) == len(values) + 1


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.uint32, ml_dtypes.int4])
def test_integers_are_0_or_1_and_equal_on_every_device(dtype: Any) -> None:
    parameter = Parameter((50, 4), np.dtype(dtype), sharded=True)
    values = synthetic_values(parameter, 0, 0, 0)
    assert values.dtype == dtype
    assert values.shape == (50, 4)
    assert set(values.astype(int).flatten().tolist()) == {0, 1}
    np.testing.assert_array_equal(values, synthetic_values(parameter, 0, 0, 3))


@given(
    dtype=st.sampled_from([np.int32, np.int64, np.uint8, np.uint32, np.int16]),
    bound=st.integers(1, 256) | st.integers(1, 1 << 31),
    seed=st.integers(0, 1000),
    count=st.integers(0, 300),
)
@example(dtype=np.uint8, bound=256, seed=0, count=300)
def test_indices_are_not_negative_and_below_their_bound(
    dtype: Any, bound: int, seed: int, count: int
) -> None:
    bound = min(bound, int(np.iinfo(dtype).max) + 1)
    values = synthetic_values(Parameter((count,), np.dtype(dtype), sharded=True), seed, 1, 0, bound=bound)
    assert values.dtype == dtype
    assert all(0 <= value < bound for value in values.tolist())


def test_indices_are_spread_over_all_rows_and_equal_on_every_device() -> None:
    """Small ones most often: half of all are below the root of the number of rows."""
    parameter = Parameter((300, 200), np.dtype(np.int32), sharded=True)
    values = synthetic_values(parameter, 0, 0, 0, bound=10_000)
    assert 0.45 < np.mean(values < 100) < 0.55
    assert values.min() == 0
    assert values.max() > 9_900
    assert np.unique(values).size > 3_000
    np.testing.assert_array_equal(values, synthetic_values(parameter, 0, 0, 3, bound=10_000))


@pytest.mark.parametrize(("bound", "count"), [(3, 100), (50, 50), (50, 49), (1000, 2500), (1 << 31, 40)])
def test_permuted_indices_take_all_rows_as_often_and_not_by_turns(bound: int, count: int) -> None:
    parameter = Parameter((count,), np.dtype(np.int64), sharded=False)
    values = synthetic_values(parameter, 0, 0, 0, bound=bound, permuted=True)
    assert values.min() >= 0
    assert values.max() < bound
    runs = [values[start : start + bound].tolist() for start in range(0, count, bound)]
    assert all(len(set(run)) == len(run) for run in runs)
    assert all(one != other for one, other in itertools.pairwise(runs))
    assert runs[0] != sorted(runs[0]) or len(runs[0]) < 4


def test_no_two_floats_are_equal_and_nothing_repeats() -> None:
    """Of a pattern that was repeated, one row of 256 looked like the 256th after it."""
    parameter = Parameter((1500, 4096), np.dtype(np.float32), sharded=False)
    for signed in (False, True):
        values = synthetic_values(parameter, 1, 2, 0, signed=signed)
        assert np.unique(np.abs(values.reshape(-1)[: 1 << 22])).size == 1 << 22
        flat = values.reshape(-1)
        for distance in (1, 256, 4096, 1 << 16, 1 << 18, 1 << 22):
            assert np.mean(flat[distance:] == flat[:-distance]) < 1e-5
        # Neither rows nor columns are like each other: their sums differ as those of chance do.
        sums = (values.astype(np.float64) * (64 if signed else 4096)).sum(1) / 64
        assert sums.std() == pytest.approx((1 / 12 + signed) ** 0.5, rel=0.1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("nudge", [0.0, 2.0**-8])
def test_floats_at_some_places_are_those_of_the_array(dtype: Any, nudge: float) -> None:
    parameter = Parameter((3, 1 << 21), np.dtype(dtype), sharded=True)
    more = {"signed": True, "nudge": nudge, "change": 3}
    values = synthetic_values(parameter, 5, 1, 1, **more).reshape(-1)
    for places in (
        np.arange(10, 20),
        np.arange((1 << 22) - 5, (1 << 22) + 5),
        np.arange(0, values.size, 100_003),
    ):
        np.testing.assert_array_equal(floats_at(places, parameter, 5, 1, 1, **more), values[places])


def test_each_draw_changes_other_floats_upwards() -> None:
    parameter = Parameter((4000,), np.dtype(np.float32), sharded=False)
    plain = synthetic_values(parameter, 1, 2, 0, signed=True)
    raised = [
        np.abs(synthetic_values(parameter, 1, 2, 0, signed=True, nudge=1e-4, change=n)) > np.abs(plain)
        for n in range(9)
    ]
    for one, other in itertools.combinations(raised, 2):
        assert 0.45 < np.mean(one == other) < 0.55


def test_complex_numbers_are_not_real() -> None:
    parameter = Parameter((40,), np.dtype(np.complex64), sharded=False)
    assert np.all(synthetic_values(parameter, 1, 2, 0, signed=True).imag != 0)


@pytest.mark.parametrize(
    "dtype",
    [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)
@pytest.mark.parametrize("shape", [(), (3,), (100_000,), (128, 4096)])
def test_floats_are_finite_normal_and_positive(dtype: Any, shape: tuple[int, ...]) -> None:
    values = synthetic_values(Parameter(shape, np.dtype(dtype), sharded=False), 1, 2, 0)
    assert values.dtype == dtype
    assert values.shape == shape
    wide = values.astype(np.float64)
    assert np.all(np.isfinite(wide))
    assert np.all(wide >= float(ml_dtypes.finfo(dtype).smallest_normal))


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(3,), (128, 4096)])
def test_signed_floats_are_of_both_signs_and_none_is_near_zero(dtype: Any, shape: tuple[int, ...]) -> None:
    values = synthetic_values(Parameter(shape, np.dtype(dtype), sharded=False), 1, 2, 0, signed=True)
    assert values.dtype == dtype
    wide = values.astype(np.complex128).real
    assert wide.min() < 0 < wide.max()
    # Their sums grow with the root of their number.
    size = max(max(shape[-2:]) ** -0.5, 4 * float(ml_dtypes.finfo(dtype).smallest_normal))
    assert np.all((np.abs(wide) > 0.45 * size) & (np.abs(wide) < 1.6 * size))


def test_floats_that_have_no_sign_stay_positive() -> None:
    parameter = Parameter((64,), np.dtype(ml_dtypes.float8_e8m0fnu), sharded=False)
    assert np.all(synthetic_values(parameter, 1, 2, 0, signed=True).astype(np.float64) > 0)


@pytest.mark.parametrize(
    ("dtype", "nudge", "most"),
    [
        (np.float32, 2.0**-11, 2.0**-11),
        (ml_dtypes.bfloat16, 2.0**-20, 2.0**-6),
        (ml_dtypes.float8_e8m0fnu, 2.0**-8, 1.0),
    ],
)
def test_a_nudge_changes_every_float_by_that_part_or_its_last_digit(
    dtype: Any, nudge: float, most: float
) -> None:
    parameter = Parameter((4, 100), np.dtype(dtype), sharded=False)
    plain, nudged = (
        synthetic_values(parameter, 1, 2, 0, signed=True, nudge=by).astype(np.float64) for by in (0, nudge)
    )
    changed = np.abs(nudged / plain - 1)
    assert np.all(changed > 0)
    assert changed.max() <= 1.01 * most


def test_values_depend_on_seed_parameter_and_for_sharded_floats_on_the_device() -> None:
    whole = Parameter((40,), np.dtype(np.float32), sharded=False)
    split = Parameter((40,), np.dtype(np.float32), sharded=True)
    first = synthetic_values(whole, 1, 2, 0)
    np.testing.assert_array_equal(synthetic_values(whole, 1, 2, 3), first)
    assert not np.array_equal(synthetic_values(whole, 2, 2, 0), first)
    assert not np.array_equal(synthetic_values(whole, 1, 3, 0), first)
    assert not np.array_equal(synthetic_values(split, 1, 2, 3), synthetic_values(split, 1, 2, 0))


def test_a_module_that_calls_python_is_not_run_unless_allowed(compile_with: CompileWith) -> None:
    seen: list[float] = []
    refused: list[str] = []

    def handle(request: CompileRequest) -> None:
        executable = request.call_default()
        with pytest.raises(UnsupportedError) as error:
            Runner(request, executable)
        refused.append(str(error.value))
        Runner(request, executable, allow_callbacks=True).outputs()

    def talking(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append(float(value)), x.sum())
        return x * 2

    compile_with("talking", handle)
    jax.jit(talking)(np.full(4, 25, np.float32))
    jax.effects_barrier()
    assert "jit_talking calls back into Python" in refused[0]
    assert len(seen) == 2
    assert seen[0] != 100.0
    assert seen[1] == 100.0


def test_a_parameter_with_a_layout_of_its_own_is_unsupported(compile_with: CompileWith) -> None:
    from jax.experimental.layout import Format, Layout

    refused: list[str] = []

    def handle(request: CompileRequest) -> None:
        with pytest.raises(UnsupportedError) as error:
            Runner(request, request.call_default())
        refused.append(str(error.value))

    def columns(x: jax.Array) -> jax.Array:
        return x + 1

    compile_with("columns", handle)
    column_major = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    x = jax.device_put(np.ones((2, 3), np.float32), column_major)
    jax.jit(columns, in_shardings=column_major)(x)
    assert "parameter 0 is f32[2,3]{0,1}: expected a row-major array" in refused[0]


def test_memory_is_that_of_the_buffer_assignment(compile_with: CompileWith) -> None:
    found: list[runner.Memory] = []

    def handle(request: CompileRequest) -> None:
        found.append(runner.memory(request.call_default()))

    def grow(x: jax.Array) -> jax.Array:
        return x + 1

    compile_with("grow", handle)
    jax.jit(grow, donate_argnums=0)(jnp.ones((16, 16)))
    assert found[0].arguments_bytes == 1024
    assert found[0].outputs_bytes == 1024
    assert found[0].aliased_bytes == 1024
    assert found[0].total_bytes == 1024 + found[0].temporaries_bytes


def test_a_first_run_that_may_never_end_is_watched(
    compile_with: CompileWith, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[str] = []

    def coming_back(name: str) -> contextlib.AbstractContextManager[None]:
        watched.append(name)
        return contextlib.nullcontext()

    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    def handle(request: CompileRequest) -> None:
        on_device = Runner(request, request.call_default())
        for _ in range(3):
            on_device.run()

    monkeypatch.setattr(runner, "coming_back", coming_back)
    compile_with("doubled", handle)
    jax.jit(doubled).lower(np.zeros(4, np.float32)).compile()
    assert watched == ["jit_doubled"]
