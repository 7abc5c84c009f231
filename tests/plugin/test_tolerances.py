"""An element may lie as far from the default's as roundings, by the step's module, move it and its neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.backends import BACKENDS
from disco_hlo.hlo.proto import parse
from disco_hlo.plugin.measuring import tolerances
from disco_hlo.plugin.measuring.tolerances import Allowed, longest_sum, parts_of, rounding_of
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from tests.steps import models
from tests.steps.intercept import intercept

Array = Any
DIGIT = 2.0**-23
"""What the last digit of a number from 1 to 2 in f32 is worth."""
SHAPES = [(11, 1000), (3, 50, 64), (9000,), (5, 3)]
"""In parts of 4096 elements: several and a rest; none left; longer than a part; less than a part."""


def learnt(values: Array, by: Array, before: Array | None = None, shift: Array | None = None) -> Allowed:
    """What is allowed where a rounding of the inputs moves ``values`` by so much."""
    told = None if before is None else [before]
    allowed = Allowed([values], told)
    moved_before = None if before is None else [before if shift is None else before + shift]
    allowed.learn([values + by], told, moved_before)
    return allowed


def unlike(allowed: Allowed, got: Array) -> tuple[int, str]:
    return allowed.unlike([got.reshape(allowed.shape)])


def off(values: Array, place: int, by: float) -> Array:
    other = values.reshape(-1).copy()
    other[place] += by
    return other


@pytest.fixture
def even() -> tuple[Array, Array]:
    """Values near 1, and how a rounding moves them: by 1e-5."""
    random = np.random.default_rng(0)
    values = random.uniform(1, 2, (64, 64)).astype(np.float32)
    return values, random.normal(0, 1e-5, (64, 64)).astype(np.float32)


def test_one_element_may_be_off_as_far_as_roundings_move_its_neighbours(even: tuple[Array, Array]) -> None:
    values, by = even
    by[3, 5] = 0  # that it did not move says nothing
    allowed = learnt(values, by)
    assert unlike(allowed, off(values, 3 * 64 + 5, 1e-4)) == (0, "")
    place, how = unlike(allowed, off(values, 3 * 64 + 5, 2e-4))
    assert place == 3 * 64 + 5
    assert how.startswith("by 0.0002, where roundings make 0.0001")


def test_a_quiet_row_or_column_is_compared_as_such(even: tuple[Array, Array]) -> None:
    values, by = even
    by[8:16], by[:, 8:16] = by[8:16] * 1e-3, by[:, 8:16] * 1e-3
    allowed = learnt(values, by)
    assert unlike(allowed, off(values, 10 * 64 + 10, 3e-6)) != (0, "")
    assert unlike(allowed, off(values, 40 * 64 + 40, 3e-6)) == (0, "")


def test_an_element_that_moves_far_may_be_off_far_and_its_neighbours_may_not(
    even: tuple[Array, Array],
) -> None:
    values, by = even
    by[3, 5] = 1e-3
    allowed = learnt(values, by)
    assert unlike(allowed, off(values, 3 * 64 + 5, 2e-3)) == (0, "")
    assert unlike(allowed, off(values, 3 * 64 + 6, 4e-3)) != (0, "")


def test_an_element_may_be_off_beyond_its_neighbours_as_far_as_the_defaults_own_are(
    even: tuple[Array, Array],
) -> None:
    """One of 32,768,000 weights of a Llama's words was, by a seventh, and so the plan was refused."""
    values, by = even
    allowed = learnt(values, by)
    far = off(values, 3 * 64 + 5, 2e-4)
    assert unlike(allowed, far) != (0, "")
    allowed.look_farther([values + by], None, None)
    assert unlike(allowed, far) != (0, ""), "light tails allow nothing"
    wild = by.copy()
    wild[40, 40] = 1.5e-4
    allowed.look_farther([values + wild], None, None)
    assert unlike(allowed, far) == (0, "")
    place, how = unlike(allowed, off(values, 3 * 64 + 5, 6e-4))
    assert (place, how.startswith("by 0.0006, where roundings make 0.0003")) == (3 * 64 + 5, True)
    assert "of its norm" in unlike(allowed, (values + 6e-5).reshape(-1))[1]
    wild[40, 40] = 1.0
    allowed.look_farther([values + wild], None, None)
    assert unlike(allowed, off(values, 3 * 64 + 5, 2e-3)) != (0, ""), "one hides nothing beside it"


def test_what_moves_all_elements_a_little_is_seen_in_the_norm(even: tuple[Array, Array]) -> None:
    values, by = even
    allowed = learnt(values, by)
    assert unlike(allowed, (values + 3e-5).reshape(-1)) == (0, "")
    assert "of its norm, where roundings make" in unlike(allowed, (values + 6e-5).reshape(-1))[1]


def test_the_last_digits_may_always_differ() -> None:
    values = np.array([1.0, 1.5, 100.0], np.float32)
    allowed = learnt(values, np.zeros(3, np.float32))
    assert unlike(allowed, off(values, 0, 4 * DIGIT)) == (0, "")
    assert unlike(allowed, off(values, 0, 5 * DIGIT)) != (0, "")
    assert unlike(allowed, off(values, 2, 200 * DIGIT)) == (0, "")
    updated = learnt(values - 1, np.zeros(3, np.float32), before=values)
    assert unlike(updated, off(values - 1, 0, 4 * DIGIT)) == (0, ""), "of what was subtracted"


def test_how_far_the_input_moved_that_is_updated_does_not_count() -> None:
    before = np.linspace(1, 2, 100, dtype=np.float32)
    shift = np.full(100, 0.1, np.float32)
    allowed = learnt(before + np.float32(1e-3), shift, before=before, shift=shift)
    assert unlike(allowed, off(before + np.float32(1e-3), 7, 1e-4)) != (0, "")


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, ml_dtypes.int4])
def test_whole_numbers_and_truth_values_are_compared_bit_by_bit(dtype: Any) -> None:
    values = np.array([1, 0, 1, 1]).astype(dtype)
    other = np.array([1, 0, 0, 1]).astype(dtype)
    allowed = Allowed([values], None)
    assert unlike(allowed, values.copy()) == (0, "")
    place, how = unlike(allowed, other)
    assert place == 2
    assert how == f"it is {other[2]} and not {values[2]}"


def test_what_is_not_finite_must_be_the_same() -> None:
    values = np.array([1, np.inf, -np.inf, np.nan], np.float32)
    allowed = learnt(values, np.zeros(4, np.float32))
    assert unlike(allowed, values + np.float32(DIGIT)) == (0, "")
    for place, instead in ((0, np.nan), (1, -np.inf), (2, 1.0), (3, np.inf)):
        other = values.copy()
        other[place] = instead
        found, how = unlike(allowed, other)
        assert found == place
        assert " and not " in how


def test_complex_numbers_are_compared_whole() -> None:
    values = np.array([3 + 4j], np.complex64)
    allowed = learnt(values, np.zeros(1, np.complex64))
    assert unlike(allowed, values.copy()) == (0, "")
    assert unlike(allowed, values.conj())[1].startswith("by 8, where")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64, ml_dtypes.float8_e4m3fn])
def test_types_are_compared_to_their_own_last_digits(dtype: Any) -> None:
    digit = float(ml_dtypes.finfo(dtype).eps)
    values = np.ones(8, dtype)
    allowed = Allowed([values], None)
    allowed.learn([values], None, None)
    assert unlike(allowed, (values.astype(np.float64) * (1 + 3 * digit)).astype(dtype)) == (0, "")
    assert unlike(allowed, (values.astype(np.float64) * (1 + 6 * digit)).astype(dtype)) != (0, "")


# --- large outputs are compared on the devices ------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "updates"),
    [
        *((shape, np.float32, True) for shape in SHAPES),
        (SHAPES[0], np.float16, True),
        (SHAPES[1], ml_dtypes.bfloat16, True),
        (SHAPES[2], ml_dtypes.bfloat16, False),
        (SHAPES[3], np.float32, False),
    ],
    ids=str,
)
def test_devices_and_host_come_to_one_verdict(
    shape: tuple[int, ...], dtype: Any, updates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And say the same of it, for one element and for all of them, off by less and by more than is allowed."""
    monkeypatch.setattr(tolerances, "_ELEMENTS", 1 << 12)
    random = np.random.default_rng(7)
    size = int(np.prod(shape))
    devices = jax.local_devices()[:2]

    def drawn(scale: float) -> list[Array]:
        return [random.normal(0, scale, shape).astype(dtype) for _ in devices]

    before = drawn(1.0)
    values = [(one + random.normal(0, 1e-2, shape)).astype(dtype) for one in before]
    moves = [random.normal(0, 1e-3, shape) * random.choice([0, 1, 30], shape) for _ in range(2)]
    moved = [(one + by).astype(dtype) for one, by in zip(values, moves, strict=True)]
    moved_before = [(one * dtype(1.001)).astype(dtype) for one in before]
    values[0].reshape(-1)[3], moved[0].reshape(-1)[5] = np.inf, np.nan

    def placed(arrays: list[Array]) -> list[Array]:
        return [jax.device_put(one, device) for one, device in zip(arrays, devices, strict=True)]

    told = [before, moved_before] if updates else [None, None]
    host = Allowed(values, told[0], on_devices=False)
    there = Allowed(placed(values), told[0] and placed(told[0]), on_devices=True)
    verdicts = []
    farther = [(one - dtype(5) * (two - one)).astype(dtype) for one, two in zip(values, moved, strict=True)]
    for run in range(3):
        if run:
            now = moved if run == 1 else farther
            for allowed, place_on in ((host, list), (there, placed)):
                take = allowed.learn if run == 1 else allowed.look_farther
                take(place_on(now), *(one and place_on(one) for one in told))
        for by in (0, 1e-6, 1e-4, 4e-3, 1e-2, 0.1, np.inf, np.nan):
            for place in (size - 1, size // 2, 3, slice(None)):
                got = [one.copy() for one in values]
                changed = got[1].reshape(-1)
                changed[place] = (changed[place] + np.asarray(by)).astype(dtype)
                verdicts.append(host.unlike(got))
                assert there.unlike(placed(got)) == verdicts[-1]
    assert there._slack == pytest.approx(host._slack, rel=1e-3)
    assert there.moved_square == pytest.approx(host.moved_square, rel=1e-9)
    assert there.changed_square == pytest.approx(host.changed_square, rel=1e-9)
    assert {bool(words) for _, words in verdicts} == {False, True}


def test_devices_and_host_compare_large_whole_numbers_alike() -> None:
    values = np.arange(1 << 19, dtype=np.int32)
    other = values.copy()
    other[1 << 18] = -1
    host, there = (
        Allowed([one], None, on_devices=on) for one, on in ((values, False), (jnp.array(values), True))
    )
    assert host.unlike([values]) == there.unlike([jnp.array(values)]) == (0, "")
    assert host.unlike([other]) == there.unlike([jnp.array(other)])
    assert host.unlike([other]) == (1 << 18, "it is -1 and not 262144")


@given(st.lists(st.integers(0, 5000), max_size=3).map(tuple) | st.tuples(st.integers(0, 3), st.just(3 << 20)))
def test_spans_are_all_of_an_array_in_whole_rows(shape: tuple[int, ...]) -> None:
    parts = parts_of(shape)
    ends = [one.place(one.count, 0) for one in parts]
    assert [one.start for one in parts] == [0, *ends][: len(parts)]
    assert [0, *ends][-1] == np.prod(shape, dtype=int)
    for one in parts:
        assert 0 < one.rows * one.columns <= 1 << 20
        assert one.columns == shape[-1] if shape and shape[-1] <= 1 << 20 else one.rows == 1


# --- what a step's roundings amount to ---------------------------------------------------------------


def of_step(step: models.Step) -> tuple[list[float], float]:
    """The rounding on CPU and GPU, and the longest sum."""

    def body(request: CompileRequest) -> tuple[list[float], float]:
        module = compiles.capture(request)
        return [rounding_of(module, BACKENDS[name]) for name in ("cpu", "gpu")], longest_sum(parse(module))

    found: tuple[list[float], float] = intercept(*step, body)
    return found


def test_a_step_rounds_in_its_coarsest_type_on_gpu_at_least_as_tensor_cores_do() -> None:
    assert of_step(models.mlp(jnp.bfloat16))[0] == [2.0**-8, 2.0**-8]
    assert of_step(models.mlp(np.float16))[0] == [2.0**-10, 2.0**-10]
    (cpu, gpu), _ = of_step(models.mlp())
    assert 2.0**-23 <= cpu < 2.0**-20
    assert gpu == 2.0**-11


@pytest.mark.parametrize(
    ("function", "terms"),
    [
        (lambda x: x @ x.T, 1024),
        (lambda x: jnp.einsum("ij,kj->ik", x[:64], x), 1024),
        (lambda x: jnp.tanh(x).sum(0), 256),
        (jnp.tanh, 1),
    ],
    ids=["matmul", "fewer rows", "sum", "none"],
)
def test_the_longest_sum_counts(function: Any, terms: int) -> None:
    def step(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(function(x), models.replicated())

    (cpu, _), longest = of_step(
        (jax.jit(step), (jax.device_put(np.ones((256, 1024), np.float32), models.replicated()),))
    )
    assert longest == pytest.approx(terms, rel=0.5)
    assert cpu == max(2.0**-23, 2.0**-23 * 0.5 * longest**0.5)
