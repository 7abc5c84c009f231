"""An element may lie as far from the default's as roundings move it and its neighbours."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.plugin.measuring.tolerances import Allowed, spans_of

Array = Any
DIGIT = 2.0**-23
"""What the last digit of a number from 1 to 2 in f32 is worth."""


def learnt(values: Array, by: Array, before: Array | None = None, shift: Array | None = None) -> Allowed:
    """What is allowed where a rounding of the inputs moves ``values`` by so much."""
    allowed = Allowed(values.reshape(-1), None if before is None else before.reshape(-1), values.shape[-1])
    allowed.learn((values + by).reshape(-1), None if shift is None else shift.reshape(-1))
    return allowed


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
    assert allowed.unlike(off(values, 3 * 64 + 5, 1e-4)) == (0, "")
    place, how = allowed.unlike(off(values, 3 * 64 + 5, 2e-4))
    assert place == 3 * 64 + 5
    assert how.startswith("by 0.0002, where roundings make 0.0001")


def test_a_quiet_row_or_column_is_compared_as_such(even: tuple[Array, Array]) -> None:
    values, by = even
    by[8:16], by[:, 8:16] = by[8:16] * 1e-3, by[:, 8:16] * 1e-3
    allowed = learnt(values, by)
    assert allowed.unlike(off(values, 10 * 64 + 10, 3e-6)) != (0, "")
    assert allowed.unlike(off(values, 40 * 64 + 40, 3e-6)) == (0, "")


def test_an_element_that_moves_far_may_be_off_far_and_its_neighbours_may_not(
    even: tuple[Array, Array],
) -> None:
    values, by = even
    by[3, 5] = 1e-3
    allowed = learnt(values, by)
    assert allowed.unlike(off(values, 3 * 64 + 5, 2e-3)) == (0, "")
    assert allowed.unlike(off(values, 3 * 64 + 6, 4e-3)) != (0, "")


def test_what_moves_all_elements_a_little_is_seen_in_the_norm(even: tuple[Array, Array]) -> None:
    values, by = even
    allowed = learnt(values, by)
    assert allowed.unlike((values + 3e-5).reshape(-1)) == (0, "")
    assert "of its norm, where roundings make" in allowed.unlike((values + 6e-5).reshape(-1))[1]


def test_the_last_digits_may_always_differ() -> None:
    values = np.array([1.0, 1.5, 100.0], np.float32)
    allowed = learnt(values, np.zeros(3, np.float32))
    assert allowed.unlike(off(values, 0, 4 * DIGIT)) == (0, "")
    assert allowed.unlike(off(values, 0, 5 * DIGIT)) != (0, "")
    assert allowed.unlike(off(values, 2, 200 * DIGIT)) == (0, "")
    updated = learnt(values - 1, np.zeros(3, np.float32), before=values)
    assert updated.unlike(off(values - 1, 0, 4 * DIGIT)) == (0, ""), "of what was subtracted"


def test_how_far_the_input_moved_that_is_updated_does_not_count() -> None:
    before = np.linspace(1, 2, 100, dtype=np.float32)
    shift = np.full(100, 0.1, np.float32)
    allowed = learnt(before + np.float32(1e-3), shift, before=before, shift=shift)
    assert allowed.unlike(off(before + np.float32(1e-3), 7, 1e-4)) != (0, "")


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, ml_dtypes.int4])
def test_whole_numbers_and_truth_values_are_compared_bit_by_bit(dtype: Any) -> None:
    values = np.array([1, 0, 1, 1]).astype(dtype)
    other = np.array([1, 0, 0, 1]).astype(dtype)
    allowed = Allowed(values, None, 4)
    assert allowed.unlike(values.copy()) == (0, "")
    place, how = allowed.unlike(other)
    assert place == 2
    assert how == f"it is {other[2]} and not {values[2]}"


def test_what_is_not_finite_must_be_the_same() -> None:
    values = np.array([1, np.inf, -np.inf, np.nan], np.float32)
    allowed = learnt(values, np.zeros(4, np.float32))
    assert allowed.unlike(values + np.float32(DIGIT)) == (0, "")
    for place, instead in ((0, np.nan), (1, -np.inf), (2, 1.0), (3, np.inf)):
        other = values.copy()
        other[place] = instead
        found, how = allowed.unlike(other)
        assert found == place
        assert " and not " in how


def test_complex_numbers_are_compared_whole() -> None:
    values = np.array([3 + 4j], np.complex64)
    allowed = learnt(values, np.zeros(1, np.complex64))
    assert allowed.unlike(values.copy()) == (0, "")
    assert allowed.unlike(values.conj())[1].startswith("by 8, where")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64, ml_dtypes.float8_e4m3fn])
def test_types_are_compared_to_their_own_last_digits(dtype: Any) -> None:
    digit = float(ml_dtypes.finfo(dtype).eps)
    values = np.ones(8, dtype)
    allowed = Allowed(values, None, 8)
    allowed.learn(values, None)
    assert allowed.unlike((values.astype(np.float64) * (1 + 3 * digit)).astype(dtype)) == (0, "")
    assert allowed.unlike((values.astype(np.float64) * (1 + 6 * digit)).astype(dtype)) != (0, "")


@given(st.lists(st.integers(0, 5000), max_size=3).map(tuple) | st.tuples(st.integers(0, 3), st.just(3 << 20)))
def test_spans_are_all_of_an_array_in_whole_rows(shape: tuple[int, ...]) -> None:
    spans = spans_of(shape)
    assert sum(span.stop - span.start for span in spans) == np.prod(shape, dtype=int)
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
    for span in spans:
        assert 0 < span.stop - span.start <= 1 << 20
        assert (span.stop - span.start) % span.columns == 0
