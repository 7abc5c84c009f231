"""The linear model on pooled features."""

import numpy as np

from disco_hlo.estimator.evaluation import Ridge, pooled
from tests.estimator.test_features import MANY


def test_ridge_recovers_a_linear_rule() -> None:
    dice = np.random.default_rng(0)
    inputs = dice.normal(size=(500, 4)) * [1, 10, 0.1, 1] + [0, 5, 0, 0]
    inputs[:, 3] = 7  # says nothing
    targets = 2 * inputs[:, 0] - 0.3 * inputs[:, 1] + 5 * inputs[:, 2] + 1
    found = Ridge(inputs, targets, strength=1e-6).predict(inputs)
    np.testing.assert_allclose(found, targets, atol=1e-6)


def test_pooled_features_have_one_row_for_each_kernel_and_forget_the_graph() -> None:
    inputs = pooled(MANY)
    assert inputs.shape[0] == len(MANY.estimate_ns)
    assert np.isfinite(inputs).all()
    rewired = MANY._replace(neighbour=MANY.neighbour[::-1].copy())
    np.testing.assert_array_equal(pooled(rewired), inputs)
