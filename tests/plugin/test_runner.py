"""Modules run on made-up inputs: what these are, who shares them, and how steps are timed."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
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
from disco_hlo.plugin.measuring.inputs import arguments, made_up
from disco_hlo.plugin.measuring.inputs.arguments import Inputs
from disco_hlo.plugin.measuring.inputs.made_up import PLAIN, Floats, floats_at, synthetic_values
from disco_hlo.plugin.measuring.runner import Runner, steps_at_once
from disco_hlo.plugin.xla import compiles, executables
from disco_hlo.plugin.xla.executables import Parameter
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.outputs import Outputs, outputs_of
from tests.plugin.handled import handled, seen

SPLIT, WHOLE = PartitionSpec("data"), PartitionSpec()
SGD_SHAPES = [(6, 5), (5, 3), (2, 6), (2, 3)]
"""Per-device shapes of the entry parameters of ``sgd_step`` on four devices."""
GIB = 1 << 30


def mesh_of(devices: list[Any]) -> Mesh:
    return Mesh(np.array(devices), ("data",))


def sgd_step(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        hidden = jnp.tanh(x @ weights[0])
        return jnp.mean((hidden @ weights[1] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


def of_sgd_step(
    look: Callable[[CompileRequest], Any], *, donate: bool, backwards: bool = False
) -> tuple[Any, tuple[list[jax.Array], jax.Array]]:
    """What ``look`` returns of :func:`sgd_step` over four devices, perhaps the last one first, and what that does."""
    devices = jax.devices()[:4]
    mesh = mesh_of(devices[::-1] if backwards else devices)
    split, whole = NamedSharding(mesh, SPLIT), NamedSharding(mesh, WHOLE)
    inputs = [joined(shape, i, sharded=i >= 2) for i, shape in enumerate(SGD_SHAPES)]
    found: list[Any] = []
    result = handled(
        lambda request: found.append(look(request)), sgd_step,
        [jax.device_put(w, whole) for w in inputs[:2]], *(jax.device_put(x, split) for x in inputs[2:]),
        in_shardings=(whole, split, split), out_shardings=whole, donate_argnums=(0,) if donate else (),
    )  # fmt: skip
    return found[0], result


def joined(shape: tuple[int, ...], index: int, sharded: bool, count: int = 4) -> np.ndarray[Any, Any]:
    parameter = Parameter(shape, np.dtype(np.float32), sharded)
    parts = [synthetic_values(parameter, 7, index, place) for place in range(count)]
    return np.concatenate(parts) if sharded else parts[0]


def assert_equal(left: Outputs, right: Outputs) -> None:
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_outputs_are_those_of_jit_on_the_same_inputs(donate: bool, backwards: bool) -> None:
    def look(request: CompileRequest) -> list[Outputs]:
        made = []
        for executable in (
            request.call_default(),
            compiles.compile_module(request, compiles.capture(request)),
        ):
            on_device = Runner(request, executable, seed=7)
            made.append(outputs_of(on_device))
            assert on_device.run() > 0
            made.append(outputs_of(on_device))
        return made

    made, (weights, value) = of_sgd_step(look, donate=donate, backwards=backwards)
    for outputs in made:
        assert_equal(outputs, [[np.asarray(expected)] * 4 for expected in (*weights, value)])


def test_each_device_computes_on_its_own_part() -> None:
    split = NamedSharding(mesh_of(jax.devices()[3::-1]), SPLIT)
    x = jax.device_put(np.zeros((8, 3), np.float32), split)
    [made] = seen(
        lambda request: outputs_of(Runner(request, request.call_default(), seed=7)), lambda x: x * 2, x
    )
    parameter = Parameter((2, 3), np.dtype(np.float32), sharded=True)
    assert_equal([made], [[2 * synthetic_values(parameter, 7, 0, place) for place in range(4)]])
    assert not np.array_equal(made[0], made[1])


def noted(patched: pytest.MonkeyPatch) -> list[str]:
    """What happens from now on: arguments are made, a step is executed, waited for, the clock is read."""
    happened: list[str] = []
    token_of = executables.token_of

    def noting(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            happened.append(name)
            return of(*arguments)

        return call

    def token(result: Any) -> Any:
        return SimpleNamespace(block_until_ready=noting("wait", token_of(result).block_until_ready))

    patched.setattr(executables, "execute", noting("execute", executables.execute))
    patched.setattr(Inputs, "several", noting("arguments", Inputs.several))
    patched.setattr(executables, "token_of", token)
    patched.setattr(runner.time, "perf_counter_ns", noting("clock", time.perf_counter_ns))
    return happened


def given_from_now_on(patched: pytest.MonkeyPatch) -> list[list[np.ndarray]]:
    """The arguments of each execution."""
    given: list[list[np.ndarray]] = []
    execute = executables.execute

    def noting(executable: Any, arguments: Sequence[Any]) -> Any:
        given.append([np.asarray(argument) for argument in arguments])
        return execute(executable, arguments)

    patched.setattr(executables, "execute", noting)
    return given


@pytest.mark.parametrize("donate", [False, True])
def test_steps_in_a_row_are_timed_from_the_end_of_one_ahead_of_them(
    donate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(request: CompileRequest) -> list[str]:
        on_device = Runner(request, request.call_default(), seed=7)
        before = outputs_of(on_device)
        on_device.run_in_a_row(2)  # the first of all; what it takes over is learned before, and handed on
        with monkeypatch.context() as patched:
            happened = noted(patched)
            assert on_device.run_in_a_row(5) > 0
        assert on_device.donated_bytes() == 0
        assert_equal(before, outputs_of(on_device))
        return happened

    happened, _ = of_sgd_step(look, donate=donate)
    # A thread reads the first clock while the next step is dispatched: one has been by then, or two.
    assert happened[:2] == ["arguments", "execute"]
    assert happened[-1] == "clock"
    counts = Counter(happened)
    assert (counts["arguments"], counts["execute"], counts["clock"]) == (1, 6, 2)


def test_awaited_steps_in_a_row_start_when_the_one_before_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(request: CompileRequest) -> list[str]:
        on_device = Runner(request, request.call_default(), seed=7)
        on_device.run_in_a_row(2)
        with monkeypatch.context() as patched:
            happened = noted(patched)
            on_device.run_in_a_row(2, awaited=True)
        return happened

    happened, _ = of_sgd_step(look, donate=True)
    assert happened[:2] == ["arguments", "execute"]
    assert "wait" in happened[2 : happened.index("clock")]  # by a thread that may come late
    begun = [place for place, what in enumerate(happened) if what == "execute"]
    assert len(begun) == 3
    assert all("wait" in happened[one:other] for one, other in itertools.pairwise(begun))
    assert happened[-1] == "clock"


def test_steps_in_a_row_hand_on_what_takes_the_storage_of_their_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a training loop does: the second step takes what the first returned, and where donated arguments are not
    handed on each step gets its own."""

    def look(request: CompileRequest) -> int:
        executable = request.call_default()
        on_device = Runner(request, executable, seed=7)
        returned = outputs_of(on_device)
        on_device.learn_handing_on(3)
        with monkeypatch.context() as patched:
            given = given_from_now_on(patched)
            on_device.run_in_a_row(3)
            patched.setattr(executables, "storage_taken", lambda *_: {})
            alone = Runner(request, executable, seed=7)
            alone.run()
            bytes_of_one_more = alone.donated_bytes()
            alone.run_in_a_row(2)
        taken = executables.storage_taken(executable)
        assert sorted(taken) == [0, 1]
        for index, output in taken.items():
            expected = returned[output][0]  # jax 0.10.2 shows the devices' parts one behind the other
            np.testing.assert_array_equal(given[1][index][: len(expected)], expected)
            assert not np.array_equal(given[2][index], given[1][index])
            np.testing.assert_array_equal(given[-1][index], given[0][index])
        for index in range(2, len(given[0])):
            np.testing.assert_array_equal(given[1][index], given[0][index])
        return bytes_of_one_more

    bytes_of_one_more, _ = of_sgd_step(look, donate=True)
    assert bytes_of_one_more == 180  # the weights, [6, 5] and [5, 3] of float32


@pytest.mark.parametrize("factor", [10.0, 1e30])
def test_a_state_that_grows_without_bound_is_not_handed_on(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VGG19's made-up weights are infinite after three updates, and a GPU multiplies infinities faster."""

    def look(request: CompileRequest) -> list[list[np.ndarray]]:
        on_device = Runner(request, request.call_default(), seed=7)
        assert on_device.donated_bytes() == 0
        on_device.learn_handing_on(3)
        assert on_device.donated_bytes() == 16
        with monkeypatch.context() as patched:
            given = given_from_now_on(patched)
            on_device.run_in_a_row(3)
        return given

    given = seen(look, lambda state: state * factor, np.ones(4, np.float32), donate_argnums=0)
    assert len(given) == 4
    assert len({float(arguments[0][0]) for arguments in given}) == 1


@pytest.mark.parametrize("donate", [False, True])
def test_runners_of_one_step_share_their_inputs(donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = synthetic_values

    def counted(parameter: Parameter, seed: int, index: int, *more: Any, **named: Any) -> Any:
        made.append(index)
        return original(parameter, seed, index, *more, **named)

    monkeypatch.setattr(arguments, "synthetic_values", counted)

    def look(request: CompileRequest) -> None:
        module = compiles.capture(request)
        first = Runner(request, request.call_default(), seed=7)
        expected = outputs_of(first)
        of_first = len(made)
        second = Runner(request, compiles.compile_module(request, module), seed=7, inputs_of=first)
        assert_equal(outputs_of(second), expected)
        second.run()
        assert_equal(outputs_of(first), expected)
        assert len(made) == of_first
        Runner(request, compiles.compile_module(request, module), seed=8, inputs_of=first)
        assert len(made) == of_first + 10  # two that all devices have, and two with a part for each

    of_sgd_step(look, donate=donate)


def test_a_module_is_read_once_and_its_shardings_once_a_step() -> None:
    asked: list[str] = []

    class Counted:
        """An executable that tells when its whole module is asked for."""

        def __init__(self, executable: Any) -> None:
            self._executable = executable

        def __getattr__(self, name: str) -> Any:
            if name in ("hlo_modules", "get_parameter_shardings"):
                asked.append(name)
            return getattr(self._executable, name)

    def look(request: CompileRequest) -> None:
        first = Runner(request, Counted(request.call_default()))
        assert sorted(asked) == ["get_parameter_shardings", "hlo_modules"]
        asked.clear()
        first.run_in_a_row(2)
        assert asked == []
        again = Runner(request, Counted(compiles.compile_module(request, None)), inputs_of=first)
        again.run_in_a_row(2)
        assert asked == ["hlo_modules"]
        assert again.runs_on is first.runs_on

    of_sgd_step(look, donate=True)


def test_every_kind_of_parameter_can_be_made() -> None:
    def look(request: CompileRequest) -> tuple[tuple[Parameter, ...], Outputs]:
        executable = request.call_default()
        return executables.parameters(executable), outputs_of(Runner(request, executable))

    def kinds(values: dict[str, jax.Array], key: jax.Array) -> Any:
        copies = {name: value[::-1] if value.ndim else value + 0 for name, value in values.items()}
        return copies, jax.random.bits(key)

    shapes = {
        bool: (3,), jnp.int4: (6,), jnp.int8: (2, 2), jnp.uint32: (3,), jnp.bfloat16: (2, 3, 4), jnp.float16: (5,),
        jnp.float8_e4m3fn: (4,), jnp.complex64: (2,), jnp.float32: (), jnp.int32: (0, 3),
    }  # fmt: skip
    values = {str(number): jnp.ones(shape, dtype) for number, (dtype, shape) in enumerate(shapes.items())}
    parameters, outputs = seen(look, kinds, values, jax.random.key(0))
    expected = [(value.dtype.name, value.shape) for value in values.values()] + [("uint32", (2,))]
    assert sorted((p.dtype.name, p.shape) for p in parameters) == sorted(expected)
    assert len(outputs) == len(values) + 1


# --- the values -------------------------------------------------------------------------------------


def values_of(
    dtype: Any,
    *shape: int,
    at: tuple[int, int, int] = (1, 2, 0),
    how: Floats = PLAIN,
    sharded: bool = True,
    **more: Any,
) -> Any:
    """Values of a parameter, ``at`` a seed, a number and a device."""
    return synthetic_values(Parameter(shape, np.dtype(dtype), sharded), *at, how, **more)


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.uint32, ml_dtypes.int4])
def test_integers_are_0_or_1_and_equal_on_every_device(dtype: Any) -> None:
    values = values_of(dtype, 50, 4)
    assert (values.dtype, values.shape) == (dtype, (50, 4))
    assert set(values.astype(int).flatten().tolist()) == {0, 1}
    np.testing.assert_array_equal(values, values_of(dtype, 50, 4, at=(1, 2, 3)))


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
    values = values_of(dtype, count, at=(seed, 1, 0), bound=bound)
    assert values.dtype == dtype
    assert all(0 <= value < bound for value in values.tolist())


def test_indices_are_spread_over_all_rows_and_equal_on_every_device() -> None:
    """Small ones most often: half of all are below the root of the number of rows."""
    values, elsewhere = (values_of(np.int32, 300, 200, at=(0, 0, on), bound=10_000) for on in (0, 3))
    assert 0.45 < np.mean(values < 100) < 0.55
    assert values.min() == 0
    assert values.max() > 9_900
    assert np.unique(values).size > 3_000
    np.testing.assert_array_equal(values, elsewhere)


@pytest.mark.parametrize(("bound", "count"), [(3, 100), (50, 50), (50, 49), (1000, 2500), (1 << 31, 40)])
def test_permuted_indices_take_all_rows_as_often_and_not_by_turns(bound: int, count: int) -> None:
    values = values_of(np.int64, count, at=(0, 0, 0), bound=bound, permuted=True)
    assert values.min() >= 0
    assert values.max() < bound
    runs = [values[start : start + bound].tolist() for start in range(0, count, bound)]
    assert all(len(set(run)) == len(run) for run in runs)
    assert all(one != other for one, other in itertools.pairwise(runs))
    assert runs[0] != sorted(runs[0]) or len(runs[0]) < 4


def test_no_two_floats_are_equal_and_nothing_repeats() -> None:
    """Of a pattern that was repeated, one row of 256 looked like the 256th after it."""
    for signed in (False, True):
        values = values_of(np.float32, 1500, 4096, how=Floats(signed))
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
    parameter, floats = Parameter((3, 1 << 21), np.dtype(dtype), sharded=True), Floats(True, nudge, 3)
    values = synthetic_values(parameter, 5, 1, 1, floats).reshape(-1)
    for places in (
        np.arange(10, 20),
        np.arange((1 << 22) - 5, (1 << 22) + 5),
        np.arange(0, values.size, 100_003),
    ):
        np.testing.assert_array_equal(floats_at(places, parameter, 5, 1, 1, floats), values[places])


@pytest.mark.parametrize(
    ("dtype", "floats"),
    [
        (np.float32, Floats()),
        (np.float32, Floats(True, 1e-6, 13)),
        (np.float16, Floats(signed=True)),
        (ml_dtypes.bfloat16, Floats(True, 1e-6, 13)),
    ],
    ids=str,
)
def test_devices_make_the_very_numbers_that_the_host_makes(dtype: Any, floats: Floats) -> None:
    parameter = Parameter((3, (1 << 21) + 5), np.dtype(dtype), sharded=True)
    assert made_up.are_made_on_devices(parameter)
    devices, places = tuple(jax.local_devices()[:2]), (1, 3)
    found = made_up.floats_on_devices(devices, parameter, 5, 1, places, floats)
    for place, made in zip(places, found, strict=True):
        assert made.shape == parameter.shape
        np.testing.assert_array_equal(np.asarray(made), synthetic_values(parameter, 5, 1, place, floats))


def test_arguments_of_one_shape_are_told_apart_by_what_they_add_up_to() -> None:
    parameter = Parameter((1 << 16,), np.dtype(np.float32), sharded=True)
    sums = {math.fsum(synthetic_values(parameter, 0, index, 0)) for index in range(40)}
    assert len(sums) == 40


def test_rows_of_a_power_of_two_do_not_resemble_each_other() -> None:
    values = values_of(np.float32, 256, 4096).astype(np.float64)
    at_random = np.random.default_rng(0).random((256, 4096)) - 0.5
    alike = [np.abs(np.corrcoef(one) - np.eye(256)).mean() for one in (values, at_random)]
    assert alike[0] < 1.1 * alike[1]


def test_each_draw_changes_other_floats_upwards() -> None:
    plain = values_of(np.float32, 4000, how=Floats(signed=True))
    nudged = [values_of(np.float32, 4000, how=Floats(True, 1e-4, draw)) for draw in range(9)]
    for one, other in itertools.combinations([np.abs(values) > np.abs(plain) for values in nudged], 2):
        assert 0.45 < np.mean(one == other) < 0.55


@pytest.mark.parametrize(
    "dtype",
    [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)
@pytest.mark.parametrize("shape", [(), (3,), (100_000,), (128, 4096)])
def test_floats_are_finite_normal_and_positive(dtype: Any, shape: tuple[int, ...]) -> None:
    values = values_of(dtype, *shape)
    assert (values.dtype, values.shape) == (dtype, shape)
    wide = values.astype(np.float64)
    assert np.all(np.isfinite(wide))
    assert np.all(wide >= float(ml_dtypes.finfo(dtype).smallest_normal))


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.complex64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(30,), (128, 4096)])
def test_signed_floats_are_of_both_signs_and_none_is_near_zero(dtype: Any, shape: tuple[int, ...]) -> None:
    values = values_of(dtype, *shape, how=Floats(signed=True), sharded=False)
    assert values.dtype == dtype
    wide = values.astype(np.complex128).real
    assert wide.min() < 0 < wide.max()
    # Their sums grow with the root of their number.
    size = max(max(shape[-2:]) ** -0.5, 4 * float(ml_dtypes.finfo(dtype).smallest_normal))
    assert np.all((np.abs(wide) > 0.45 * size) & (np.abs(wide) < 1.6 * size))
    assert np.all(values.imag != 0) or dtype != np.complex64


def test_floats_that_have_no_sign_stay_positive() -> None:
    assert np.all(values_of(ml_dtypes.float8_e8m0fnu, 64, how=Floats(signed=True)).astype(np.float64) > 0)


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
    plain, nudged = (values_of(dtype, 4, 100, how=Floats(True, by)).astype(np.float64) for by in (0, nudge))
    changed = np.abs(nudged / plain - 1)
    assert np.all(changed > 0)
    assert changed.max() <= 1.01 * most


def test_values_depend_on_seed_parameter_and_for_sharded_floats_on_the_device() -> None:
    def at(*place: int, sharded: bool = False) -> list[float]:
        found: list[float] = values_of(np.float32, 40, at=place, sharded=sharded).tolist()  # type: ignore[arg-type]
        return found

    assert at(1, 2, 0) == at(1, 2, 3)
    assert at(1, 2, 0) not in (at(2, 2, 0), at(1, 3, 0))
    assert at(1, 2, 0, sharded=True) != at(1, 2, 3, sharded=True)


# --- what is not run --------------------------------------------------------------------------------


def test_what_a_module_tells_python_is_told_in_calls_of_the_training_alone() -> None:
    called: list[float] = []

    def look(request: CompileRequest) -> None:
        executable = request.call_default()
        runner = Runner(request, executable)
        runner.run(), runner.run_in_a_row(2), outputs_of(runner)
        jax.effects_barrier()
        assert called == []

    def telling(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: called.append(float(value)), x.sum())
        return x * 2

    seen(look, telling, np.full(4, 25, np.float32))
    jax.effects_barrier()
    assert called == [100.0]


def test_a_module_that_waits_for_python_is_not_run() -> None:
    def asking(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda one: one, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2

    def look(request: CompileRequest) -> None:
        with pytest.raises(UnsupportedError, match="jit_asking waits for Python"):
            Runner(request, request.call_default())

    seen(look, asking, np.full(4, 25, np.float32))


def test_a_parameter_with_a_layout_of_its_own_is_unsupported() -> None:
    from jax.experimental.layout import Format, Layout

    def look(request: CompileRequest) -> None:
        with pytest.raises(
            UnsupportedError, match=r"parameter 0 is f32\[2,3\]\{0,1\}: expected a row-major array"
        ):
            Runner(request, request.call_default())

    column_major = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    x = jax.device_put(np.ones((2, 3), np.float32), column_major)
    seen(look, lambda x: x + 1, x, in_shardings=column_major)


def test_memory_is_that_of_the_buffer_assignment() -> None:
    found = seen(
        lambda request: executables.memory(request.call_default()),
        lambda x: x + 1,
        jnp.ones((16, 16)),
        donate_argnums=0,
    )
    assert (found.arguments_bytes, found.outputs_bytes, found.aliased_bytes) == (1024, 1024, 1024)
    assert found.total_bytes == 1024 + found.temporaries_bytes


def test_a_first_run_that_may_never_end_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[str] = []

    def coming_back(request: CompileRequest) -> contextlib.AbstractContextManager[None]:
        watched.append(request.module_name)
        return contextlib.nullcontext()

    def doubled(x: jax.Array) -> jax.Array:
        return x * 2

    def look(request: CompileRequest) -> None:
        on_device = Runner(request, request.call_default())
        for _ in range(3):
            on_device.run()

    monkeypatch.setattr(runner, "coming_back", coming_back)
    seen(look, doubled, np.zeros(4, np.float32))
    assert watched == ["jit_doubled"]


@pytest.mark.parametrize(
    ("step_ns", "donated_bytes", "free_bytes", "count"),
    [
        (50_000, 0, None, 20),
        (10_000_000, 0, None, 20),
        (50_000_000, 0, None, 6),
        (150_000_000, 0, None, 2),
        (400_000_000, 0, None, 1),
        (10_000_000, 3 * GIB, None, 4),
        (10_000_000, 17 * GIB, None, 1),
        (10_000_000, GIB, 48 * GIB, 5),
        (10_000_000, GIB, 0, 1),
    ],
)
def test_short_steps_are_measured_several_at_once(
    step_ns: int, donated_bytes: int, free_bytes: int | None, count: int
) -> None:
    assert steps_at_once(step_ns, donated_bytes, free_bytes) == count
