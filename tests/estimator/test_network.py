"""The compiled network: equal to its formulas, to itself in any company, and blind to node order."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator import simd as wide
from disco_hlo.estimator.architecture import PAPER, Architecture
from disco_hlo.estimator.features import Batch, selected
from disco_hlo.estimator.network import network, predicted_ns
from disco_hlo.estimator.weights import Weights
from tests.estimator.steps import SMALL, random_weights
from tests.estimator.test_features import many

WIDE = Architecture(
    layers=6, heads=3, width=21, dense=(10, 7), pooling=("bytes", "sum", "max", "mean", "work")
)

LONG_HEADS = Architecture(
    layers=3, heads=3, width=60, dense=(17, 33), node_numbers=("rank", "work_ns", "bytes")
)
"""No part of it is a multiple of sixteen, and one head is more than sixteen."""
MANY_HEADS = Architecture(layers=2, heads=19, width=38, dense=(16, 1))


def by_the_formulas(weights: Weights, batch: Batch) -> np.ndarray:
    """log(time / estimate), one kernel and one node at a time, in double precision."""
    t = {name: tensor.astype(np.float64) for name, tensor in weights.tensors.items()}
    architecture = weights.architecture
    found = []
    for kernel in range(len(batch.estimate_ns)):
        start, end = batch.node_start[kernel : kernel + 2]
        numbers = (batch.node[start:end, architecture.columns] - t["node_mean"]) * t["node_scale"]
        node = (
            t["op_embedding.weight"][batch.op[start:end]]
            + numbers @ t["node_input.weight"].T
            + t["node_input.bias"]
        )
        for layer in range(architecture.layers):
            node = node + heard(t, f"layers.{layer}.", node, batch, start)
        parts = [pooled(name, node, batch.node[start:end]) for name in architecture.pooling]
        x = np.concatenate([*parts, (batch.kernel[kernel] - t["kernel_mean"]) * t["kernel_scale"]])
        for dense in ("dense1", "dense2"):
            x = np.maximum(t[f"{dense}.weight"] @ x + t[f"{dense}.bias"], 0)
        output = (t["dense3.weight"] @ x + t["dense3.bias"] + t["output_mean"])[0]
        found.append(np.clip(output, *t["output_range"]))
    return np.array(found)


def heard(t, prefix: str, node: np.ndarray, batch: Batch, start: int) -> np.ndarray:
    centred = node - node.mean(axis=1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    heads, size = t[f"{prefix}source"].shape
    sent = (normed * t[f"{prefix}norm.weight"] + t[f"{prefix}norm.bias"]) @ t[f"{prefix}message.weight"].T
    sent = sent.reshape(len(node), heads, size)
    rows = []
    for target in range(len(node)):
        incoming = range(*batch.edge_start[start + target : start + target + 2])
        source = batch.neighbour[incoming] - start
        edge = (batch.edge[incoming] - t["edge_mean"]) * t["edge_scale"]
        score = (sent[source] * t[f"{prefix}source"]).sum(-1) + (sent[target] * t[f"{prefix}target"]).sum(-1)
        score = score + edge @ t[f"{prefix}edge_score.weight"].T
        score = np.where(score > 0, score, 0.2 * score)
        score = np.exp(score - score.max(axis=0))
        share = (score / score.sum(axis=0))[:, :, None]
        said = (edge @ t[f"{prefix}edge_message.weight"].T).reshape(len(edge), heads, size)
        total = ((sent[source] + said) * share).sum(axis=0).ravel() + t[f"{prefix}bias"]
        rows.append(np.where(total > 0, total, 0.1 * total))
    return np.array(rows)


def pooled(name: str, node: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    if name in ("work", "bytes"):
        share = np.clip(numbers[:, spec.NODE.index(f"{name}_share")], 0, 1)
        return (node * share[:, None]).sum(axis=0)
    if name == "sum":
        return np.maximum(node.sum(axis=0), 0)
    return node.max(axis=0) if name == "max" else node.mean(axis=0)


@pytest.mark.parametrize("architecture", [SMALL, WIDE, LONG_HEADS, MANY_HEADS])
def test_it_computes_what_the_formulas_say(architecture: Architecture) -> None:
    weights = random_weights(architecture, seed=1)
    expected = by_the_formulas(weights, many())
    assert expected.std() > 0.05
    found = np.log(predicted_ns(network(weights), many()) / many().estimate_ns)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_a_prediction_does_not_depend_on_what_else_is_in_the_batch() -> None:
    net = network(random_weights())
    together = predicted_ns(net, many())
    for kernel in range(len(many().estimate_ns)):
        assert predicted_ns(net, selected(many(), np.array([kernel])))[0] == together[kernel]


def test_it_computes_the_same_bits_again() -> None:
    net = network(random_weights(MANY_HEADS))
    assert predicted_ns(net, many()).tobytes() == predicted_ns(net, many()).tobytes()


def test_no_kernels_no_predictions() -> None:
    assert predicted_ns(network(random_weights()), selected(many(), np.zeros(0, np.int64))).tolist() == []


def test_scores_far_apart_leave_all_attention_to_the_highest() -> None:
    weights = random_weights(LONG_HEADS, seed=2)
    for layer in range(LONG_HEADS.layers):
        weights.tensors[f"layers.{layer}.edge_score.weight"] *= 1000
    found = np.log(predicted_ns(network(weights), many()) / many().estimate_ns)
    np.testing.assert_allclose(found, by_the_formulas(weights, many()), atol=1e-3)


def test_the_order_of_nodes_and_edges_changes_nothing() -> None:
    net = network(random_weights(WIDE))
    for kernel in range(len(many().estimate_ns)):
        one = selected(many(), np.array([kernel]))
        shuffled = reordered(one, np.random.default_rng(kernel).permutation(one.op.size))
        np.testing.assert_allclose(predicted_ns(net, shuffled), predicted_ns(net, one), rtol=1e-5)


def reordered(batch: Batch, order: np.ndarray) -> Batch:
    """The same kernel with its nodes in another order."""
    place = np.argsort(order)
    incoming = [np.arange(*batch.edge_start[node : node + 2])[::-1] for node in order]
    edges = np.concatenate(incoming)
    return batch._replace(
        edge_start=np.concatenate([[0], np.cumsum([len(rows) for rows in incoming])]),
        op=batch.op[order],
        node=batch.node[order],
        neighbour=place[batch.neighbour[edges]].astype(np.int32),
        edge=batch.edge[edges],
    )


def test_predictions_stay_in_the_range_that_training_saw() -> None:
    weights = random_weights()
    weights.tensors["output_mean"][:] = 50
    np.testing.assert_allclose(predicted_ns(network(weights), many()), np.exp(3.0) * many().estimate_ns)


def test_networks_made_for_comparison_have_no_compiled_form() -> None:
    with pytest.raises(ProfileError, match="made for comparison"):
        network(random_weights(PAPER))


LANES = wide.LANES


@numba.njit
def exps(x, out):
    for at in range(0, x.size, LANES):
        wide.store(out, at, wide.exp(wide.load(x, at)))


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
