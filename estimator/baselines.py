"""What the network has to beat: a linear model on pooled features.

The graph is thrown away: counts of op types, means and maxima of the node numbers, and the kernel's own
numbers, standardised; ridge regression to log(time / estimate).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disco_hlo.estimator import feature_spec as spec
from disco_hlo.estimator.encoding import Batch

Floats = NDArray[np.float64]


def pooled(batch: Batch) -> Floats:
    """``[kernels, numbers]``: the features of each kernel without its graph."""
    starts, count = batch.node_start[:-1], batch.estimate_ns.size
    owner = np.repeat(np.arange(count), np.diff(batch.node_start))
    types = np.zeros((count, len(spec.VOCABULARY)))
    np.add.at(types, (owner, batch.op), 1)
    sums = np.add.reduceat(batch.node.astype(np.float64), starts, axis=0)
    largest = np.maximum.reduceat(batch.node, starts, axis=0)
    means = sums / np.diff(batch.node_start)[:, None]
    return np.concatenate([np.log2(types + 1), means, largest, batch.kernel], axis=1)


class Ridge:
    """Linear least squares with a penalty of ``strength`` on squared coefficients of standardised inputs."""

    def __init__(self, inputs: Floats, targets: Floats, strength: float = 10.0) -> None:
        self.mean = inputs.mean(axis=0)
        scale = inputs.std(axis=0)
        self.scale = np.where(scale < 1e-6, 1.0, scale)
        standard = (inputs - self.mean) / self.scale
        gram = standard.T @ standard + strength * np.eye(standard.shape[1])
        self.offset = float(targets.mean())
        self.coefficients = np.linalg.solve(gram, standard.T @ (targets - self.offset))

    def predict(self, inputs: Floats) -> Floats:
        """Targets of ``inputs``."""
        found: Floats = (inputs - self.mean) / self.scale @ self.coefficients + self.offset
        return found
