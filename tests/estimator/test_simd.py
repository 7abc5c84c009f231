"""Sixteen numbers at a time are what they are one by one."""

import numba
import numpy as np
import pytest

from disco_hlo.estimator import simd as wide

LANES = wide.LANES


@numba.njit
def exps(x, out):
    for at in range(0, x.size, LANES):
        wide.store(out, at, wide.exp(wide.load(x, at)))


@numba.njit
def every_operation(table, row, number, out):
    x, y = wide.load(table, row * table.shape[1]), wide.spread(table, row * table.shape[1] + 1)
    wide.store(out, 0, wide.plus(x, y))
    wide.store(out, LANES, wide.minus(x, y))
    wide.store(out, 2 * LANES, wide.times(x, y))
    wide.store(out, 3 * LANES, wide.times_plus(x, y, wide.filled(number)))
    wide.store(out, 4 * LANES, wide.larger(x, y))
    return wide.total(x), wide.last_of(x)


def test_exp_is_exact_to_float32_rounding() -> None:
    x = np.concatenate([np.linspace(-87, 0, 1 << 16), -np.geomspace(1e-30, 87, 1 << 16)]).astype(np.float32)
    found = np.empty_like(x)
    exps(x, found)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(found / exact - 1).max() < 2e-7
    assert found[x == 0] == pytest.approx(1, abs=0)


def test_exp_of_what_is_too_small_is_small_and_no_zero() -> None:
    x = np.array([-88, -1e3, -1e9, -3e38, -np.inf, *[0.0] * (LANES - 5)], np.float32)
    found = np.empty_like(x)
    exps(x, found)
    assert np.all(found[:5] == found[0])
    assert 0 < found[0] < 2e-38


def test_operations_are_those_of_single_numbers() -> None:
    table = np.random.default_rng(3).normal(size=(4, 2 * LANES)).astype(np.float32)
    out = np.zeros((5, LANES), np.float32)
    total, last = every_operation(table, 2, np.float32(7), out)
    x, y = table[2, :LANES], table[2, 1]
    expected = [x + y, x - y, x * y, x.astype(np.float64) * y + 7, np.maximum(x, y)]
    np.testing.assert_allclose(out, expected, rtol=2e-7, atol=2e-7)
    assert last == x[-1]
    np.testing.assert_allclose(total, x.sum(dtype=np.float64), rtol=1e-6)


def test_the_larger_of_a_number_and_none_is_the_second() -> None:
    table = np.full((1, 2 * LANES), np.nan, np.float32)
    table[0, 1] = 2
    out = np.zeros((5, LANES), np.float32)
    every_operation(table, 0, np.float32(0), out)
    assert out[4].tolist() == [2.0] * LANES
