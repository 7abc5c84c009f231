"""The torch model and the compiled one are the same function; the paper's network runs too."""

import sys

import numpy as np
import pytest

if sys.version_info >= (3, 12):
    pytest.skip("DGL has no wheel past Python 3.11; the 3.11 leg runs this", allow_module_level=True)

import torch

from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator.architecture import PAPER, Architecture
from disco_hlo.estimator.features import selected
from disco_hlo.estimator.network import network, predicted_ns
from disco_hlo.estimator.train import FusedOpNet, GraphBatch, imported
from disco_hlo.estimator.weights import expected_shapes
from tests.estimator.steps import random_weights
from tests.estimator.test_features import MANY
from tests.estimator.test_inference import WIDE


@pytest.mark.parametrize("architecture", [Architecture(), WIDE])
def test_the_exported_network_is_the_trained_one(architecture: Architecture) -> None:
    weights = random_weights(architecture, seed=3)
    with torch.no_grad():
        trained = imported(weights).log_times(GraphBatch.of(MANY)).double().numpy()
    np.testing.assert_allclose(np.log(predicted_ns(network(weights), MANY)), trained, atol=1e-5)


@pytest.mark.parametrize("architecture", [Architecture(), PAPER])
def test_weights_hold_exactly_what_the_network_has(architecture: Architecture) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in FusedOpNet(architecture).state_dict().items()}
    assert found == expected_shapes(architecture)


def test_the_paper_s_network_has_six_attention_layers_and_three_dense_ones() -> None:
    net = FusedOpNet(PAPER)
    assert [type(layer).__name__ for layer in net.layers] == ["AttentionLayer"] * 6
    assert all(layer.heads > 1 for layer in net.layers)
    assert net.dense3.out_features == 1
    batch = GraphBatch.of(MANY)
    with torch.no_grad():
        assert torch.equal(net.eval().log_times(batch), net(batch))


def test_the_paper_s_network_sees_types_sizes_times_and_edges_only() -> None:
    net = FusedOpNet(PAPER).eval()
    given = [spec.NODE.index(name) for name in spec.PAPER_NODE]
    others = [column for column in range(len(spec.NODE)) if column not in given]
    node = MANY.node.copy()
    node[:, others] = 0.5
    blurred = MANY._replace(node=node, edge=np.zeros_like(MANY.edge), kernel=np.zeros_like(MANY.kernel))
    with torch.no_grad():
        assert torch.equal(net(GraphBatch.of(blurred)), net(GraphBatch.of(MANY)))
        node[:, given] += 1
        assert not torch.equal(net(GraphBatch.of(blurred._replace(node=node))), net(GraphBatch.of(MANY)))


def test_standardised_inputs_have_mean_zero_and_deviation_one() -> None:
    net = FusedOpNet(Architecture())
    net.standardise(MANY, np.linspace(-1, 2, len(MANY.estimate_ns)))
    standard = (torch.from_numpy(MANY.edge) - net.edge_mean) * net.edge_scale
    varying = torch.from_numpy(MANY.edge).std(0) > 1e-3
    assert standard.mean(0).abs().max() < 1e-4
    assert (standard.std(0)[varying] - 1).abs().max() < 1e-2
    assert net.output_mean.item() == 0.5
    np.testing.assert_allclose(net.output_range.numpy(), [-1.2, 2.2], atol=1e-6)


def test_pooling_by_work_weighs_nodes_by_their_share() -> None:
    net = FusedOpNet(Architecture(pooling=("work",)))
    one = GraphBatch.of(selected(MANY, np.array([3])))
    nodes = torch.ones(len(one.op), 48)
    share = one.node[:, spec.NODE.index("work_share")].clamp(0, 1).sum()
    torch.testing.assert_close(net._pooled("work", nodes, one), share.expand(1, 48))
