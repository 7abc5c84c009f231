"""Captured steps and weights for the estimator's tests."""

from __future__ import annotations

import numpy as np

from disco_hlo.estimator.analytic import DeviceModel
from disco_hlo.estimator.architecture import Architecture
from disco_hlo.estimator.weights import Weights, expected_shapes
from disco_hlo.hlo.canonical import CanonicalModule
from tests.captured import captured

DEVICE = DeviceModel(
    1e12, 1e13, hoists=False, shortest_kernel_ns=900.0, streaming=((1e4, 1000.0), (1e9, 1e6)), strided_ns=0.01
)
SMALL = Architecture(layers=2, heads=2, width=8, dense=(8, 4))


def transformer() -> CanonicalModule:
    """The step of tests/data, as XLA runs it on a GPU."""
    return captured("h200_transformer_default")


def random_weights(architecture: Architecture = SMALL, seed: int = 0, **about: object) -> Weights:
    """Weights of an untrained network, drawn so that every part of it matters."""
    dice = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(architecture).items():
        scale = 1 / np.sqrt(shape[-1]) if len(shape) > 1 else 0.3
        tensors[name] = (scale * dice.normal(size=shape)).astype(np.float32)
        if name.endswith(("_scale", "norm.weight")):
            tensors[name] = np.abs(tensors[name]) + np.float32(0.05)
    tensors["output_range"] = np.array([-3, 3], np.float32)
    return Weights(architecture, DEVICE, tensors, {"device_kind": "Test GPU", **about})
