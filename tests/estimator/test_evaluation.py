"""Figures of the report, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from disco_hlo.estimator.evaluation import (
    by_decade,
    by_op_type,
    by_size,
    distribution,
    errors,
    kendall_tau,
    summary,
)


def test_errors_are_relative_to_what_was_measured() -> None:
    found = errors(np.log([110.0, 50.0, 100.0]), np.log([100.0, 100.0, 100.0]))
    np.testing.assert_allclose(found, [0.1, 0.5, 0.0], atol=1e-12)


def test_a_summary_counts_what_lies_within() -> None:
    assert summary(np.array([0.01, 0.06, 0.12, 0.2, 0.61])) == {
        "samples": 5, "mean": 0.2, "median": 0.12, "p90": 0.446, "p99": 0.5936,
        "within_5": 0.2, "within_10": 0.4, "within_14": 0.6, "within_25": 0.8,
    }  # fmt: skip
    assert summary(np.array([])) == {"samples": 0}


def test_decades_are_of_the_measured_time() -> None:
    found = by_decade(np.array([0.1, 0.2, 0.3, 0.4]), np.log([500.0, 2e3, 3e3, 5e7]))
    assert {name: row["mean"] for name, row in found.items()} == {
        "0 us to 1 us": 0.1, "1 us to 10 us": 0.25, "10000 us to inf us": 0.4,
    }  # fmt: skip


def test_calibration_by_op_type_and_size() -> None:
    predicted, truth = np.log(np.full(40, 200.0)), np.log(np.full(40, 100.0))
    found = by_op_type(predicted, truth, [frozenset({"add", "tanh" if i < 5 else "log"}) for i in range(40)])
    assert sorted(found) == ["add", "log"]
    assert found["log"] == {"samples": 35, "mean": 1.0, "median": 1.0, "ratio": 2.0}
    sizes = by_size(predicted, truth, np.array([2] * 20 + [40] * 20))
    assert {name: row["ratio"] for name, row in sizes.items()} == {"2 to 3": 2.0, "32 and more": 2.0}


def test_the_distribution_holds_every_sample_once() -> None:
    found = distribution(np.array([0.0, 0.01, 0.49, 7.0]))
    assert found["right_end"][0] == 0.025
    assert found["pdf"][0] == 0.5
    assert found["cdf"][-2:] == [0.75, 1.0]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=30))
def test_kendall_s_tau_is_scipy_s(pairs: list[tuple[int, int]]) -> None:
    a, b = (np.array(values, float) for values in zip(*pairs, strict=True))
    expected = kendalltau(a, b).statistic if len(set(a)) > 1 and len(set(b)) > 1 else 0.0
    assert kendall_tau(a, b) == pytest.approx(expected, abs=1e-4)
