"""The trained network without torch: the same function, compiled, one kernel after the other.

DisCo's estimator (section 4.3) sits in the inner loop of the search, so a prediction must cost
microseconds. What is linear in the weights is folded together once. The numbers of a fused op stay in the second cache
through all layers, and its sums are taken in one order, so that a prediction does not depend on what else is in the
batch.

A *row* is what ``width`` numbers say of a node, every head's part filled up with zeros to a multiple of ``LANES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.errors import ProfileError
from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator.architecture import POOLINGS
from disco_hlo.estimator.features import Batch
from disco_hlo.estimator.simd import (
    LANES,
    exp,
    filled,
    larger,
    last_of,
    load,
    minus,
    plus,
    spread,
    store,
    times,
    times_plus,
    total,
)
from disco_hlo.estimator.weights import Weights

_SUM: Final = POOLINGS.index("sum")
_MEAN: Final = POOLINGS.index("mean")
_MAX: Final = POOLINGS.index("max")
_WORK: Final = POOLINGS.index("work")
_WORK_SHARE: Final = spec.NODE.index("work_share")
_BYTES_SHARE: Final = spec.NODE.index("bytes_share")
_EDGE: Final = len(spec.EDGE)
_SCORE_SLOPE: Final = np.float32(0.2)
_NODE_SLOPE: Final = np.float32(0.1)
_NORM_EPSILON: Final = np.float32(1e-5)
_LEAST: Final = np.float32(-3e38)
_ROWS: Final = 6
"""Rows of a matmul taken together."""
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


class Room(NamedTuple):
    """Working space for one kernel at a time."""

    node: Array
    """``[nodes, row]``: what a node has heard so far, all layers added up."""
    normed: Array
    """``[nodes, row]``"""
    sent: Array
    """``[nodes + 1, row + 2 heads]``: one more than there are, since scores are loaded with what lies behind them."""
    heard: Array
    """``[nodes, row]``: what a node hears in this layer."""
    said: Array
    """``[nodes, heads * LANES]``: numbers of the incoming edges, weighted by attention."""
    edge: Array
    """``[edges, LANES]``: numbers of an edge, and 1 in the last place."""
    score: Array
    """``[edges + 1, layers * heads]``"""
    share: Array
    """``[edges * stride]``: shares of attention, up to a factor that is the same for all edges into a node."""
    stride: int
    """Numbers of ``share`` for an edge: one for each head. More than ``LANES`` are filled up, fewer lie close:
    what is written behind the scores of an edge is where those of the next go."""


def predicted_ns(net: Network, batch: Batch) -> NDArray[np.float64]:
    """``[kernels]``: time of each encoded kernel in ns."""
    log_ratio = np.zeros(batch.estimate_ns.size, np.float32)
    pooled = np.empty((log_ratio.size, net.dense1.shape[0]), np.float32)
    nodes, edges = np.diff(batch.node_start), np.diff(batch.edge_start[batch.node_start])
    room = room_for(net, int(nodes.max(initial=1)), int(edges.max(initial=1)))
    _predict(net, batch, room, pooled, log_ratio)
    times: NDArray[np.float64] = batch.estimate_ns * np.exp(log_ratio.astype(np.float64))
    return times


@compiled
def _predict(net: Network, batch: Batch, room: Room, pooled: Array, out: Array) -> None:
    """log(time / estimate) of every kernel into ``out``."""
    for kernel in range(out.size):
        embed_kernel(net, batch, kernel, room, pooled[kernel])
    dense(net, pooled, out)


def room_for(net: Network, nodes: int, edges: int) -> Room:
    """Room for a kernel of so many nodes and edges; at least one of each."""
    row, spoken = net.message.shape[1:]
    heads = net.edge_message.shape[1]
    stride = heads if heads <= LANES else heads + -heads % LANES
    return Room(
        np.empty((nodes, row), np.float32), np.empty((nodes, row), np.float32),
        np.empty((nodes + 1, spoken), np.float32), np.empty((nodes, row), np.float32),
        np.empty((nodes, heads * LANES), np.float32), np.empty((edges, LANES), np.float32),
        np.empty((edges + 1, net.edge_score.shape[1]), np.float32), np.empty(edges * stride + LANES, np.float32),
        stride,
    )  # fmt: skip


@inner
def embed_kernel(net: Any, batch: Any, kernel: Any, room: Any, pooled: Any) -> None:
    """All layers of one kernel of the batch; what its nodes add up to, and its own numbers, into ``pooled``."""
    layers, row, _ = net.message.shape
    heads = net.edge_message.shape[1]
    size = row // heads
    node, heard = room.node, room.heard
    start, end = batch.node_start[kernel], batch.node_start[kernel + 1]
    nodes = end - start
    incoming = batch.edge_start[start : end + 1]
    _embed(net, batch, start, nodes, incoming, room)
    for layer in range(layers):
        _norm(node, nodes, net.live, room.normed)
        _add_product(room.normed, 0, nodes, net.message[layer], False, room.sent, 0)
        _attend(room, row, heads, incoming, batch.neighbour, start, layer * heads)
        _hear(room, heads, incoming, batch.neighbour, start, net.bias[layer])
        for head in range(heads):
            told = net.edge_message[layer, head]
            _add_product(room.said, head * LANES, nodes, told, True, heard, head * size)
        for at in range(0, nodes * row, LANES):
            new = load(heard, at)
            store(node, at, plus(load(node, at), larger(new, times(new, filled(_NODE_SLOPE)))))
    _pool(net.pooling, node, nodes, batch.node[start:end], pooled)
    for i in range(batch.kernel.shape[1]):
        pooled[net.pooling.size * row + i] = batch.kernel[kernel, i]


@inner
def _embed(net: Any, batch: Any, start: Any, nodes: Any, incoming: Any, room: Any) -> None:
    """What nodes are before the first layer, and what the edges add to the scores of all layers."""
    row = room.node.shape[1]
    for r in range(nodes):
        for at in range(0, row, LANES):
            store(room.node, r * row + at, load(net.op, batch.op[start + r] * row + at))
    _add_product(batch.node[start : start + nodes], 0, nodes, net.node, True, room.node, 0)
    edge, score = batch.edge[incoming[0] : incoming[nodes]], room.score
    scored = score.shape[1]
    for e in range(edge.shape[0]):
        for i in range(_EDGE):
            room.edge[e, i] = edge[e, i]
        for i in range(_EDGE, LANES - 1):
            room.edge[e, i] = 0
        room.edge[e, LANES - 1] = 1
        for at in range(0, scored, LANES):
            store(score, e * scored + at, load(net.edge_score_bias, at))
    _add_product(edge, 0, edge.shape[0], net.edge_score, True, score, 0)


@inner
def _add_product(vectors: Any, column: Any, rows: Any, matrix: Any, adds: Any, out: Any, place: Any) -> None:
    """vectors[:rows, column : column + n] times ``matrix`` [n, m] to, or into, out[:rows, place : place + m].

    The last rows may be computed twice.
    """
    n, m = matrix.shape
    width, stride = vectors.shape[1], out.shape[1]
    last = rows - 1
    for first in range(0, rows, _ROWS):
        r0, r1, r2 = first, min(first + 1, last), min(first + 2, last)
        r3, r4, r5 = min(first + 3, last), min(first + 4, last), min(first + 5, last)
        v0, v1, v2 = r0 * width + column, r1 * width + column, r2 * width + column
        v3, v4, v5 = r3 * width + column, r4 * width + column, r5 * width + column
        o0, o1, o2 = r0 * stride + place, r1 * stride + place, r2 * stride + place
        o3, o4, o5 = r3 * stride + place, r4 * stride + place, r5 * stride + place
        for at in range(0, m, LANES):
            s0 = s1 = s2 = s3 = s4 = s5 = filled(np.float32(0))
            if adds:
                s0, s1, s2 = load(out, o0 + at), load(out, o1 + at), load(out, o2 + at)
                s3, s4, s5 = load(out, o3 + at), load(out, o4 + at), load(out, o5 + at)
            for i in range(n):
                line = load(matrix, i * m + at)
                s0 = times_plus(spread(vectors, v0 + i), line, s0)
                s1 = times_plus(spread(vectors, v1 + i), line, s1)
                s2 = times_plus(spread(vectors, v2 + i), line, s2)
                s3 = times_plus(spread(vectors, v3 + i), line, s3)
                s4 = times_plus(spread(vectors, v4 + i), line, s4)
                s5 = times_plus(spread(vectors, v5 + i), line, s5)
            store(out, o0 + at, s0)
            store(out, o1 + at, s1)
            store(out, o2 + at, s2)
            store(out, o3 + at, s3)
            store(out, o4 + at, s4)
            store(out, o5 + at, s5)


@inner
def _norm(node: Any, nodes: Any, live: Any, normed: Any) -> None:
    """Rows with mean 0 and variance 1."""
    row = node.shape[1]
    width = np.float32(0)
    for at in range(0, row, LANES):
        width += total(load(live, at))
    for first in range(0, nodes * row, row):
        sums = squares = filled(np.float32(0))
        for at in range(0, row, LANES):
            sums = plus(sums, load(node, first + at))
        mean = filled(-total(sums) / width)
        for at in range(0, row, LANES):
            centred = times_plus(mean, load(live, at), load(node, first + at))
            squares = times_plus(centred, centred, squares)
            store(normed, first + at, centred)
        scale = filled(np.float32(1) / np.sqrt(total(squares) / width + _NORM_EPSILON))
        for at in range(0, row, LANES):
            store(normed, first + at, times(load(normed, first + at), scale))


@inner
def _attend(room: Any, row: Any, heads: Any, incoming: Any, neighbour: Any, start: Any, column: Any) -> None:
    """Shares of attention of all edges: for every node and head, a softmax over the incoming edges. The scores of a
    layer begin at ``column``."""
    sent, share, stride, base = room.sent, room.share, room.stride, incoming[0]
    for target in range(incoming.size - 1):
        first, last = incoming[target], incoming[target + 1]
        for head in range(0, heads, LANES):
            own = load(sent, target * sent.shape[1] + row + heads + head)
            largest = filled(_LEAST)
            for e in range(first, last):
                largest = larger(
                    _score(room, own, neighbour[e] - start, row, e - base, column, head), largest
                )
            for e in range(first, last):
                value = _score(room, own, neighbour[e] - start, row, e - base, column, head)
                store(share, (e - base) * stride + head, minus(value, largest))
    for at in range(0, (incoming[incoming.size - 1] - base) * stride, LANES):
        store(share, at, exp(load(share, at)))


@inner
def _score(room: Any, own: Any, source: Any, row: Any, edge: Any, column: Any, head: Any) -> Any:
    """Scores of an edge with all heads from ``head`` on."""
    value = plus(load(room.sent, source * room.sent.shape[1] + row + head), own)
    value = plus(value, load(room.score, edge * room.score.shape[1] + column + head))
    return larger(value, times(value, filled(_SCORE_SLOPE)))


@inner
def _hear(room: Any, heads: Any, incoming: Any, neighbour: Any, start: Any, bias: Any) -> None:
    """What every node hears from its neighbours and edges, weighted by attention. Two heads at a time: while a number
    is added to one sum, there are others to add to."""
    sent, share, stride, edge, heard = room.sent, room.share, room.stride, room.edge, room.heard
    spoken, row, base = sent.shape[1], heard.shape[1], incoming[0]
    size = row // heads
    for target in range(incoming.size - 1):
        first, last = incoming[target] - base, incoming[target + 1] - base
        for h in range(0, heads, 2):
            k = min(h + 1, heads - 1)
            for at in range(0, size, LANES):
                h_at, k_at = h * size + at, k * size + at
                h_said = k_said = h_heard = k_heard = filled(np.float32(0))
                for e in range(first, last):
                    h_share, k_share = spread(share, e * stride + h), spread(share, e * stride + k)
                    numbers, source = load(edge, e * LANES), (neighbour[base + e] - start) * spoken
                    h_said, k_said = (
                        times_plus(h_share, numbers, h_said),
                        times_plus(k_share, numbers, k_said),
                    )
                    h_heard = times_plus(h_share, load(sent, source + h_at), h_heard)
                    k_heard = times_plus(k_share, load(sent, source + k_at), k_heard)
                # The last number of every edge is 1, so what it adds up to is the sum of the shares.
                h_scale = filled(np.float32(1) / last_of(h_said))
                k_scale = filled(np.float32(1) / last_of(k_said))
                store(room.said, (target * heads + h) * LANES, times(h_said, h_scale))
                store(room.said, (target * heads + k) * LANES, times(k_said, k_scale))
                store(heard, target * row + h_at, times_plus(h_heard, h_scale, load(bias, h_at)))
                store(heard, target * row + k_at, times_plus(k_heard, k_scale, load(bias, k_at)))


@inner
def _pool(pooling: Any, node: Any, nodes: Any, numbers: Any, pooled: Any) -> None:
    """The rows of all nodes as one for each kind of pooling."""
    row = node.shape[1]
    for k in range(pooling.size):
        kind = pooling[k]
        column = _WORK_SHARE if kind == _WORK else _BYTES_SHARE
        for at in range(0, row, LANES):
            sums = load(node, at) if kind == _MAX else filled(np.float32(0))
            for r in range(nodes):
                lanes = load(node, r * row + at)
                if kind == _MAX:
                    sums = larger(sums, lanes)
                elif kind in (_SUM, _MEAN):
                    sums = plus(sums, lanes)
                else:
                    weight = min(max(numbers[r, column], np.float32(0)), np.float32(1))
                    sums = times_plus(filled(weight), lanes, sums)
            if kind == _MEAN:
                sums = times(sums, filled(np.float32(1) / np.float32(nodes)))
            if kind == _SUM:
                sums = larger(sums, filled(np.float32(0)))
            store(pooled, k * row + at, sums)


@inner
def dense(net: Any, pooled: Any, out: Any) -> None:
    """The layers behind the pooling, of all kernels."""
    kernels = out.size
    first = np.empty((kernels, net.dense1.shape[1]), np.float32)
    second = np.empty((kernels, net.dense2.shape[1]), np.float32)
    wide, zero = second.shape[1], filled(np.float32(0))
    for r in range(kernels):
        # Numba compiles two seconds of error texts for ``first[r] = net.dense1_bias``.
        for at in range(first.shape[1]):
            first[r, at] = net.dense1_bias[at]
        for at in range(second.shape[1]):
            second[r, at] = net.dense2_bias[at]
    _add_product(pooled, 0, kernels, net.dense1, True, first, 0)
    for at in range(0, first.size, LANES):
        store(first, at, larger(load(first, at), zero))
    _add_product(first, 0, kernels, net.dense2, True, second, 0)
    for r in range(kernels):
        sums = zero
        for at in range(0, wide, LANES):
            sums = times_plus(larger(load(second, r * wide + at), zero), load(net.dense3, at), sums)
        out[r] = min(max(total(sums) + np.float32(net.output), net.lowest), net.highest)
