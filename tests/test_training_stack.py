"""The estimator is trained on Python 3.11, where DGL's last release meets a current torch: the pair works."""

import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="DGL has no wheel past Python 3.11; the 3.11 leg runs this"
)


def test_a_graph_attention_layer_learns_one_batch() -> None:
    import dgl
    import torch

    torch.manual_seed(0)
    chain, star = dgl.graph(([0, 1, 2], [1, 2, 3])), dgl.graph(([0, 0], [1, 2]))
    graph = dgl.batch([dgl.add_self_loop(chain), dgl.add_self_loop(star)])
    features, target = torch.randn(graph.num_nodes(), 5), torch.tensor([1.0, -1.0])
    attention, dense = dgl.nn.GATConv(5, 8, num_heads=2), torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*attention.parameters(), *dense.parameters()], lr=0.02)

    losses = []
    for _ in range(30):
        with graph.local_scope():
            graph.ndata["h"] = attention(graph, features).flatten(1)
            loss = ((dense(dgl.mean_nodes(graph, "h")).squeeze(1) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < 0.1 * losses[0]
