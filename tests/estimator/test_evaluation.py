"""Figures of the report, by hand: errors, the linear model, plots."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from disco_hlo.estimator.evaluation import (
    Ridge,
    bars_and_curves,
    by_decade,
    distribution,
    errors,
    kendall_tau,
    lines,
    pooled,
    summary,
)
from tests.estimator.test_features import many


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


def test_the_distribution_holds_every_sample_once() -> None:
    found = distribution(np.array([0.0, 0.01, 0.49, 7.0]))
    assert found["right_end"][0] == 0.025
    assert found["pdf"][0] == 0.5
    assert found["cdf"][-2:] == [0.75, 1.0]


def test_samples_that_are_all_alike_have_no_order() -> None:
    assert kendall_tau(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])) == 0.3333
    assert kendall_tau(np.array([1.0, 2.0]), np.array([5.0, 5.0])) == 0.0


def test_ridge_recovers_a_linear_rule() -> None:
    dice = np.random.default_rng(0)
    inputs = dice.normal(size=(500, 4)) * [1, 10, 0.1, 1] + [0, 5, 0, 0]
    inputs[:, 3] = 7  # says nothing
    targets = 2 * inputs[:, 0] - 0.3 * inputs[:, 1] + 5 * inputs[:, 2] + 1
    found = Ridge(inputs, targets, strength=1e-6).predict(inputs)
    np.testing.assert_allclose(found, targets, atol=1e-6)


def test_pooled_features_have_one_row_for_each_kernel_and_forget_the_graph() -> None:
    inputs = pooled(many())
    assert inputs.shape[0] == len(many().estimate_ns)
    assert np.isfinite(inputs).all()
    rewired = many()._replace(neighbour=many().neighbour[::-1].copy())
    np.testing.assert_array_equal(pooled(rewired), inputs)


SVG = "{http://www.w3.org/2000/svg}"


def test_curves_are_drawn_and_named() -> None:
    root = ElementTree.fromstring(lines({"main": [(1, 0.4), (2, 0.2)], "a<b": [(1, 0.3)]}, "epoch", "error"))
    assert len(root.findall(f"{SVG}polyline")) == 2
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {"main", "a<b", "epoch", "error"} <= set(texts)


def test_bars_reach_as_high_as_their_share() -> None:
    root = ElementTree.fromstring(bars_and_curves([0.5, 1.0], [0.25, 0.5], {"CDF": [0.3, 1.0]}))
    heights = [float(bar.get("height")) for bar in root.findall(f"{SVG}rect") if bar.get("x")]
    assert heights[1] == 2 * heights[0]
