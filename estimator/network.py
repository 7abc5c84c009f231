"""Weights made ready for ``inference``: what is linear folded together, axes filled up with zeros.

A *row* is what ``width`` numbers say of a node, every head's part filled up to a multiple of ``LANES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import ProfileError
from disco_hlo.estimator import feature_spec as spec
from disco_hlo.estimator.architecture import POOLINGS
from disco_hlo.estimator.simd import LANES
from disco_hlo.estimator.weights import Weights

Array = NDArray[np.float32]


class Network(NamedTuple):
    """Weights as the compiled functions read them: matrices as [in, out], what is linear folded together, and
    as many zeros behind each axis that is computed with as make it a multiple of ``LANES``."""

    op: Array
    """``[types, row]``: embedding and bias of the node input."""
    node: Array
    """``[NODE, row]``: zeros for numbers that the network is not given."""
    message: Array
    """``[layers, row, row + 2 heads]``: what a node says; its scores as source and as target."""
    edge_score: Array
    """``[EDGE, layers * heads]``"""
    edge_score_bias: Array
    """``[layers * heads]``"""
    edge_message: Array
    """``[layers, heads, EDGE, row / heads]``"""
    bias: Array
    """``[layers, row]``"""
    live: Array
    """``[row]``: 1 for a number of a node, 0 for what fills up."""
    pooling: NDArray[np.int64]
    """Indices into ``POOLINGS``."""
    dense1: Array
    """``[poolings * row + KERNEL, first]``"""
    dense1_bias: Array
    dense2: Array
    """``[first, second]``"""
    dense2_bias: Array
    dense3: Array
    """``[second]``"""
    output: float
    """Bias of the last layer plus mean of the targets."""
    lowest: float
    highest: float
    """Bounds of the output: a little beyond what training saw."""


def network(weights: Weights) -> Network:
    """Weights made ready. :class:`ProfileError` for an architecture that only training knows."""
    architecture = weights.architecture
    parts = (
        architecture.uses_edges,
        architecture.uses_kernel,
        architecture.is_residual,
        architecture.is_relative,
    )
    if not all(parts):
        raise ProfileError(
            "these weights are of a network made for comparison; it has no compiled form, train the default one"
        )
    t = {name: np.asarray(tensor, np.float64) for name, tensor in weights.tensors.items()}
    heads, width = architecture.heads, architecture.width
    layers = [_layer(t, f"layers.{i}.") for i in range(architecture.layers)]
    stacked = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
    node = np.zeros((len(spec.NODE), width))
    node[architecture.columns] = t["node_input.weight"].T * t["node_scale"][:, None]
    op = t["op_embedding.weight"] + t["node_input.bias"] - t["node_mean"] @ node[architecture.columns]
    message = _by_head(stacked["message"], heads, 2)
    pooled = width * len(architecture.pooling)
    of_nodes = t["dense1.weight"].T[:pooled].reshape(len(architecture.pooling), width, -1)
    of_kernel = t["dense1.weight"].T[pooled:] * t["kernel_scale"][:, None]
    dense1 = [*_by_head(of_nodes, heads, 1), of_kernel]
    made = {
        "op": _by_head(op, heads, 1),
        "node": _by_head(node, heads, 1),
        "message": _by_head(np.concatenate([message, _full(stacked["score"], 2)], axis=2), heads, 1),
        "edge_score": _full(np.concatenate(list(stacked["edge_score"]), axis=1), 1),
        "edge_score_bias": _full(stacked["edge_score_bias"].reshape(-1), 0),
        "edge_message": _full(stacked["edge_message"], 3),
        "bias": _by_head(stacked["bias"], heads, 1),
        "live": _by_head(np.ones(width), heads, 0),
        "dense1": _full(np.concatenate(dense1), 1),
        "dense1_bias": _full(t["dense1.bias"] - t["kernel_mean"] @ of_kernel, 0),
        "dense2": _full(_full(t["dense2.weight"].T, 0), 1),
        "dense2_bias": _full(t["dense2.bias"], 0),
        "dense3": _full(t["dense3.weight"][0], 0),
    }
    return Network(
        **{name: np.ascontiguousarray(values, np.float32) for name, values in made.items()},
        pooling=np.array([POOLINGS.index(name) for name in architecture.pooling], np.int64),
        output=float(t["dense3.bias"][0] + t["output_mean"][0]),
        lowest=float(t["output_range"][0]),
        highest=float(t["output_range"][1]),
    )


def _layer(t: Mapping[str, NDArray[np.float64]], prefix: str) -> dict[str, NDArray[np.float64]]:
    """One layer with its norm, its scores and the standardisation of edges folded into its matrices."""
    heads, size = t[f"{prefix}source"].shape
    scale, shift = t[f"{prefix}norm.weight"], t[f"{prefix}norm.bias"]
    message = t[f"{prefix}message.weight"].T
    said = message.reshape(-1, heads, size)
    source, target = (np.einsum("ihs,hs->ih", said, t[prefix + name]) for name in ("source", "target"))
    edge_score = t[f"{prefix}edge_score.weight"].T * t["edge_scale"][:, None]
    edge_message = t[f"{prefix}edge_message.weight"].T * t["edge_scale"][:, None]
    return {
        "message": message * scale[:, None],
        "score": np.concatenate([source, target], axis=1) * scale[:, None],
        "edge_score": edge_score,
        "edge_score_bias": shift @ (source + target) - t["edge_mean"] @ edge_score,
        "edge_message": edge_message.reshape(-1, heads, size).transpose(1, 0, 2),
        # The shares of attention add up to one, so what everybody says goes to the bias.
        "bias": t[f"{prefix}bias"] + shift @ message - t["edge_mean"] @ edge_message,
    }


def _full(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Zeros behind ``axis`` up to a multiple of ``LANES``."""
    missing = [(0, 0)] * values.ndim
    missing[axis] = (0, -values.shape[axis] % LANES)
    return np.pad(values, missing)


def _by_head(values: NDArray[np.float64], heads: int, axis: int) -> NDArray[np.float64]:
    """The same for each head's part of ``axis``."""
    shape = values.shape
    parts = values.reshape(*shape[:axis], heads, -1, *shape[axis + 1 :])
    return _full(parts, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :])
