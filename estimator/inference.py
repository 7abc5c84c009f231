"""The trained network without torch: the same function, compiled, one kernel after the other.

DisCo's estimator (section 4.3) sits in the inner loop of the search, so a prediction must cost
microseconds. A fused op has some ten or twenty nodes: its numbers stay in the first cache through all
layers, and each kernel is computed alone, so its prediction does not depend on what else is in the
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from disco_hlo.estimator import feature_spec as spec
from disco_hlo.estimator.architecture import POOLINGS
from disco_hlo.estimator.encoding import Batch
from disco_hlo.estimator.weights import Weights
from numpy.typing import NDArray

from disco_hlo.compiled import compiled_fast, inner_fast
from disco_hlo.errors import ProfileError

Array = NDArray[np.float32]

_SUM: Final = POOLINGS.index("sum")
_MEAN: Final = POOLINGS.index("mean")
_MAX: Final = POOLINGS.index("max")
_WORK: Final = POOLINGS.index("work")
_WORK_SHARE: Final = spec.NODE.index("work_share")
_BYTES_SHARE: Final = spec.NODE.index("bytes_share")
_SCORE_SLOPE: Final = np.float32(0.2)
_NODE_SLOPE: Final = np.float32(0.1)
_NORM_EPSILON: Final = np.float32(1e-5)


class Network(NamedTuple):
    """Weights as the compiled functions read them: matrices as [in, out], what is linear folded together."""

    op: Array
    """``[types, width]``: embedding and bias of the node input."""
    node: Array
    """``[columns, width]``"""
    columns: NDArray[np.int64]
    message: Array
    """``[layers, width, width + 2 heads]``: what a node says; its scores as source and as target."""
    message_bias: Array
    """``[layers, width + 2 heads]``"""
    edge_score: Array
    """``[EDGE, layers * heads]``"""
    edge_score_bias: Array
    """``[layers * heads]``"""
    edge_message: Array
    """``[layers, heads, EDGE, width / heads]``"""
    bias: Array
    """``[layers, width]``"""
    pooling: NDArray[np.int64]
    """Indices into ``POOLINGS``."""
    dense1: Array
    """``[pooled, first]``"""
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
    layers = [_layer(t, f"layers.{i}.") for i in range(architecture.layers)]
    node = t["node_input.weight"].T * t["node_scale"][:, None]
    pooled = architecture.width * len(architecture.pooling)
    dense1 = t["dense1.weight"].T.copy()
    dense1[pooled:] *= t["kernel_scale"][:, None]
    made = {
        "op": t["op_embedding.weight"] + t["node_input.bias"] - t["node_mean"] @ node,
        "node": node,
        "message": np.stack([layer["message"] for layer in layers]),
        "message_bias": np.stack([layer["message_bias"] for layer in layers]),
        "edge_score": np.concatenate([layer["edge_score"] for layer in layers], axis=1),
        "edge_score_bias": np.concatenate([layer["edge_score_bias"] for layer in layers]),
        "edge_message": np.stack([layer["edge_message"] for layer in layers]),
        "bias": np.stack([layer["bias"] for layer in layers]),
        "dense1": dense1,
        "dense1_bias": t["dense1.bias"] - t["kernel_mean"] @ dense1[pooled:],
        "dense2": t["dense2.weight"].T,
        "dense2_bias": t["dense2.bias"],
        "dense3": t["dense3.weight"][0],
    }
    return Network(
        **{name: np.ascontiguousarray(values, np.float32) for name, values in made.items()},
        columns=np.array(architecture.columns, np.int64),
        pooling=np.array([POOLINGS.index(name) for name in architecture.pooling], np.int64),
        output=float(t["dense3.bias"][0] + t["output_mean"][0]),
        lowest=float(t["output_range"][0]),
        highest=float(t["output_range"][1]),
    )


def _layer(t: Mapping[str, NDArray[np.float64]], prefix: str) -> dict[str, NDArray[np.float64]]:
    """One layer with its norm, its scores and the standardisation of edges folded into its matrices."""
    heads, size = t[f"{prefix}source"].shape
    message = t[f"{prefix}message.weight"].T
    said = message.reshape(-1, heads, size)
    scores = [np.einsum("ihs,hs->ih", said, t[prefix + name]) for name in ("source", "target")]
    extended = np.concatenate([message, *scores], axis=1)
    edge_score = t[f"{prefix}edge_score.weight"].T * t["edge_scale"][:, None]
    edge_message = t[f"{prefix}edge_message.weight"].T * t["edge_scale"][:, None]
    return {
        "message": extended * t[f"{prefix}norm.weight"][:, None],
        "message_bias": t[f"{prefix}norm.bias"] @ extended,
        "edge_score": edge_score,
        "edge_score_bias": -t["edge_mean"] @ edge_score,
        "edge_message": edge_message.reshape(-1, heads, size).transpose(1, 0, 2),
        # The shares of attention add up to one, so what every edge says goes to the bias.
        "bias": t[f"{prefix}bias"] - t["edge_mean"] @ edge_message,
    }


def predicted_ns(net: Network, batch: Batch) -> NDArray[np.float64]:
    """``[kernels]``: time of each encoded kernel in ns."""
    log_ratio = np.zeros(batch.estimate_ns.size, np.float32)
    _predict(net, batch, log_ratio)
    times: NDArray[np.float64] = batch.estimate_ns * np.exp(log_ratio.astype(np.float64))
    return times


@compiled_fast
def _predict(net: Network, batch: Batch, out: Array) -> None:
    """log(time / estimate) of every kernel into ``out``."""
    most_nodes = most_edges = 1
    for kernel in range(out.size):
        start, end = batch.node_start[kernel], batch.node_start[kernel + 1]
        most_nodes = max(most_nodes, end - start)
        most_edges = max(most_edges, batch.edge_start[end] - batch.edge_start[start])
    layers, width, spoken = net.message.shape
    node = np.zeros((most_nodes, width), np.float32)
    sent = np.zeros((most_nodes, spoken), np.float32)
    edge_score = np.zeros((most_edges, net.edge_score.shape[1]), np.float32)
    for kernel in range(out.size):
        start, end = batch.node_start[kernel], batch.node_start[kernel + 1]
        first, last = batch.edge_start[start], batch.edge_start[end]
        neighbour, edge = batch.neighbour[first:last], batch.edge[first:last]
        incoming = batch.edge_start[start : end + 1] - first
        _embed(net.op, net.node, net.columns, batch.op[start:end], batch.node[start:end], node)
        _multiply(edge, net.edge_score, net.edge_score_bias, edge_score)
        for layer in range(layers):
            _send(node[: end - start], net.message[layer], net.message_bias[layer], sent)
            scores = edge_score[
                : last - first, layer * (spoken - width) // 2 : (layer + 1) * (spoken - width) // 2
            ]
            _attend(sent, incoming, neighbour - start, scores)
            _receive(
                sent,
                incoming,
                neighbour - start,
                edge,
                scores,
                net.edge_message[layer],
                net.bias[layer],
                node,
            )
        pooled = _pooled(net.pooling, node[: end - start], batch.node[start:end], batch.kernel[kernel])
        out[kernel] = min(max(_dense(net, pooled), net.lowest), net.highest)


@inner_fast
def _multiply(vectors: Array, matrix: Array, bias: Array, out: Array) -> None:
    """``vectors`` [r, n] times ``matrix`` [n, m], plus ``bias`` [m], into the first rows of ``out`` [.., m]."""
    for r in range(vectors.shape[0]):
        vector, row = vectors[r], out[r]
        for j in range(row.size):
            row[j] = bias[j]
        even = vector.size - vector.size % 4
        for i in range(0, even, 4):
            v0, v1, v2, v3 = vector[i], vector[i + 1], vector[i + 2], vector[i + 3]
            m0, m1, m2, m3 = matrix[i], matrix[i + 1], matrix[i + 2], matrix[i + 3]
            for j in range(row.size):
                row[j] += v0 * m0[j] + v1 * m1[j] + v2 * m2[j] + v3 * m3[j]
        for i in range(even, vector.size):
            v0, m0 = vector[i], matrix[i]
            for j in range(row.size):
                row[j] += v0 * m0[j]


@inner_fast
def _embed(
    op: Array, matrix: Array, columns: NDArray[np.int64], ops: NDArray[np.int32], numbers: Array, out: Array
) -> None:
    for r in range(ops.size):
        row, own, kind = out[r], numbers[r], op[ops[r]]
        for j in range(row.size):
            row[j] = kind[j]
        for i in range(columns.size):
            value, line = own[columns[i]], matrix[i]
            for j in range(row.size):
                row[j] += value * line[j]


@inner_fast
def _send(node: Array, message: Array, bias: Array, sent: Array) -> None:
    """What every node says, and its scores as source and as target, from its normalised numbers."""
    count, width = node.shape
    normed = np.empty((count, width), np.float32)
    for r in range(count):
        row, out = node[r], normed[r]
        mean = np.float32(0)
        for j in range(width):
            mean += row[j]
        mean /= np.float32(width)
        variance = np.float32(0)
        for j in range(width):
            variance += (row[j] - mean) * (row[j] - mean)
        scale = np.float32(1) / np.sqrt(variance / np.float32(width) + _NORM_EPSILON)
        for j in range(width):
            out[j] = (row[j] - mean) * scale
    _multiply(normed, message, bias, sent)


@inner_fast
def _attend(sent: Array, incoming: NDArray[np.int64], source: NDArray[np.int64], score: Array) -> None:
    """Scores of edges become shares of attention: for every node and head, a softmax over the incoming edges."""
    heads = score.shape[1]
    source_at, target_at = sent.shape[1] - 2 * heads, sent.shape[1] - heads
    for target in range(incoming.size - 1):
        first, last = incoming[target], incoming[target + 1]
        own = sent[target]
        for head in range(heads):
            largest = np.float32(-1e30)
            for edge in range(first, last):
                value = sent[source[edge], source_at + head] + own[target_at + head] + score[edge, head]
                value = value if value > 0 else value * _SCORE_SLOPE
                score[edge, head] = value
                largest = max(largest, value)
            total = np.float32(0)
            for edge in range(first, last):
                value = np.exp(score[edge, head] - largest)
                score[edge, head] = value
                total += value
            for edge in range(first, last):
                score[edge, head] /= total


@inner_fast
def _receive(
    sent: Array,
    incoming: NDArray[np.int64],
    source: NDArray[np.int64],
    edge: Array,
    share: Array,
    edge_message: Array,
    bias: Array,
    node: Array,
) -> None:
    """Add to every node what it hears from its neighbours and edges, weighted by attention."""
    heads, numbers, size = edge_message.shape
    # Loops over parts of a row count from 0: the compiler must see that no index is negative.
    heard = np.empty((heads, size), np.float32)
    said = np.empty((heads, numbers), np.float32)
    for target in range(incoming.size - 1):
        heard[:] = bias.reshape(heads, size)
        said[:] = 0
        for i in range(incoming[target], incoming[target + 1]):
            own = edge[i]
            for head in range(heads):
                weight = share[i, head]
                part, row, line = heard[head], sent[source[i], head * size : head * size + size], said[head]
                for j in range(size):
                    part[j] += weight * row[j]
                for j in range(numbers):
                    line[j] += weight * own[j]
        for head in range(heads):
            part, out = heard[head], node[target, head * size : head * size + size]
            for i in range(numbers):
                weight, row = said[head, i], edge_message[head, i]
                for j in range(size):
                    part[j] += weight * row[j]
            for j in range(size):
                out[j] += part[j] if part[j] > 0 else part[j] * _NODE_SLOPE


@inner_fast
def _pooled(pooling: NDArray[np.int64], node: Array, numbers: Array, kernel: Array) -> Array:
    """The embeddings of all nodes as one, and the kernel's numbers behind it."""
    count, width = node.shape
    pooled = np.zeros(width * pooling.size + kernel.size, np.float32)
    pooled[width * pooling.size :] = kernel
    for k in range(pooling.size):
        part = pooled[k * width : (k + 1) * width]
        kind = pooling[k]
        if kind == _MAX:
            part[:] = node[0]
            for r in range(1, count):
                row = node[r]
                for j in range(width):
                    part[j] = max(part[j], row[j])
            continue
        column = _WORK_SHARE if kind == _WORK else _BYTES_SHARE
        for r in range(count):
            weight = np.float32(1)
            if kind == _MEAN:
                weight = np.float32(1) / np.float32(count)
            elif kind != _SUM:
                weight = min(max(numbers[r, column], np.float32(0)), np.float32(1))
            row = node[r]
            for j in range(width):
                part[j] += weight * row[j]
        if kind == _SUM:
            part[:] = np.maximum(part, np.float32(0))
    return pooled


@inner_fast
def _dense(net: Network, pooled: Array) -> float:
    first = np.empty((1, net.dense1_bias.size), np.float32)
    _multiply(pooled.reshape(1, -1), net.dense1, net.dense1_bias, first)
    second = np.empty((1, net.dense2_bias.size), np.float32)
    _multiply(np.maximum(first, np.float32(0)), net.dense2, net.dense2_bias, second)
    result = np.float32(net.output)
    for j in range(second.size):
        result += max(second[0, j], np.float32(0)) * net.dense3[j]
    return float(result)
