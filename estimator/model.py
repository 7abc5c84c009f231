"""The graph neural network of DisCo's section 4.3 in DGL and torch: the model that is trained.

Six graph attention layers with several heads embed the ops of a fused op (equation 1), a pooling
makes one embedding of them (equation 2), three dense layers turn it into a time (section 4.3.2).
:class:`Architecture` says what we add to the paper: edge features in the attention and in the messages,
residual connections, the kernel's own numbers, an output relative to the analytical estimate.
``inference`` computes the same function without torch.
"""

from __future__ import annotations

from typing import NamedTuple

import dgl
import dgl.ops
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from disco_hlo.estimator import feature_spec as spec
from disco_hlo.estimator.architecture import Architecture
from disco_hlo.estimator.encoding import Batch

RANGE_MARGIN = 0.2
"""How far, as a difference of logarithms, a prediction may lie outside of what training saw."""


class GraphBatch(NamedTuple):
    """A :class:`Batch` as torch and DGL want it."""

    graph: dgl.DGLGraph
    """All kernels of the batch as one graph."""
    op: Tensor
    node: Tensor
    edge: Tensor
    kernel: Tensor
    owner: Tensor
    """Kernel of each node."""
    log_estimate: Tensor
    """``[kernels]``: natural logarithm of the analytical estimate in ns."""

    @classmethod
    def of(cls, batch: Batch) -> GraphBatch:
        """Copy a batch into tensors."""
        target = np.repeat(np.arange(batch.op.size), np.diff(batch.edge_start))
        owner = np.repeat(np.arange(batch.estimate_ns.size), np.diff(batch.node_start))
        graph = dgl.graph(
            (torch.from_numpy(batch.neighbour).long(), torch.from_numpy(target)), num_nodes=batch.op.size
        )
        return cls(
            graph, torch.from_numpy(batch.op).long(), torch.from_numpy(batch.node), torch.from_numpy(batch.edge),
            torch.from_numpy(batch.kernel), torch.from_numpy(owner),
            torch.from_numpy(np.log(batch.estimate_ns)).float(),
        )  # fmt: skip


class AttentionLayer(nn.Module):  # type: ignore[misc]
    """A multi-head graph attention layer: equation 1, heads side by side."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        width, heads = architecture.width, architecture.heads
        self.heads = heads
        self.is_residual = architecture.is_residual
        self.norm = nn.LayerNorm(width) if architecture.is_residual else nn.Identity()
        self.message = nn.Linear(width, width, bias=False)
        self.source = nn.Parameter(torch.empty(heads, width // heads))
        self.target = nn.Parameter(torch.empty(heads, width // heads))
        self.bias = nn.Parameter(torch.zeros(width))
        nn.init.xavier_normal_(self.source)
        nn.init.xavier_normal_(self.target)
        if architecture.uses_edges:
            self.edge_score = nn.Linear(len(spec.EDGE), heads, bias=False)
            self.edge_message = nn.Linear(len(spec.EDGE), width, bias=False)
        else:
            self.edge_score = self.edge_message = None

    def forward(self, graph: dgl.DGLGraph, nodes: Tensor, edges: Tensor) -> Tensor:
        """``nodes`` [n, width] and ``edges`` [e, len(EDGE)] -> [n, width]."""
        sent = self.message(self.norm(nodes)).view(len(nodes), self.heads, -1)
        score = dgl.ops.u_add_v(graph, (sent * self.source).sum(-1), (sent * self.target).sum(-1))
        if self.edge_score is not None:
            score = score + self.edge_score(edges)
        share = dgl.ops.edge_softmax(graph, nn.functional.leaky_relu(score, 0.2)).unsqueeze(-1)
        received = dgl.ops.u_mul_e_sum(graph, sent, share)
        if self.edge_message is not None:
            said = self.edge_message(edges).view(len(edges), self.heads, -1)
            received = received + dgl.ops.copy_e_sum(graph, said * share)
        heard = nn.functional.leaky_relu(received.flatten(1) + self.bias, 0.1)
        return nodes + heard if self.is_residual else heard


class FusedOpNet(nn.Module):  # type: ignore[misc]
    """The whole network. Inputs are standardised by ``*_mean`` and ``*_scale``, set by :meth:`standardise`."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        columns = len(architecture.columns)
        for name, width in (("node", columns), ("edge", len(spec.EDGE)), ("kernel", len(spec.KERNEL))):
            self.register_buffer(f"{name}_mean", torch.zeros(width))
            self.register_buffer(f"{name}_scale", torch.ones(width))
        self.register_buffer("output_mean", torch.zeros(1))
        self.register_buffer("output_range", torch.tensor([-20.0, 40.0]))
        self.op_embedding = nn.Embedding(len(spec.VOCABULARY), architecture.width)
        self.node_input = nn.Linear(columns, architecture.width)
        self.layers = nn.ModuleList(AttentionLayer(architecture) for _ in range(architecture.layers))
        first, second = architecture.dense
        self.dense1 = nn.Linear(architecture.pooled_width, first)
        self.dense2 = nn.Linear(first, second)
        self.dense3 = nn.Linear(second, 1)

    def standardise(self, batch: Batch, targets: NDArray[np.float64]) -> None:
        """Take means, scales and range from training data; ``targets`` are what :meth:`forward` should return."""
        numbers = (
            ("node", batch.node[:, self.architecture.columns]),
            ("edge", batch.edge),
            ("kernel", batch.kernel),
        )
        for name, values in numbers:
            scale = values.std(axis=0)
            getattr(self, f"{name}_mean").copy_(torch.from_numpy(values.mean(axis=0)))
            getattr(self, f"{name}_scale").copy_(torch.from_numpy(1 / np.where(scale < 1e-3, 1, scale)))
        self.output_mean.fill_(float(np.mean(targets)))
        self.output_range.copy_(torch.tensor([targets.min() - RANGE_MARGIN, targets.max() + RANGE_MARGIN]))

    def forward(self, batch: GraphBatch) -> Tensor:
        """``[kernels]``: log(time / estimate), or log(time in ns) where the architecture is not relative."""
        numbers = batch.node[:, self.architecture.columns]
        nodes = self.op_embedding(batch.op) + self.node_input((numbers - self.node_mean) * self.node_scale)
        edges = (batch.edge - self.edge_mean) * self.edge_scale
        for layer in self.layers:
            nodes = layer(batch.graph, nodes, edges)
        pooled = [self._pooled(name, nodes, batch) for name in self.architecture.pooling]
        if self.architecture.uses_kernel:
            pooled.append((batch.kernel - self.kernel_mean) * self.kernel_scale)
        hidden = nn.functional.relu(self.dense1(torch.cat(pooled, dim=1)))
        hidden = nn.functional.relu(self.dense2(hidden))
        output = self.dense3(hidden).squeeze(1) + self.output_mean
        return output if self.training else output.clamp(self.output_range[0], self.output_range[1])

    def log_times(self, batch: GraphBatch) -> Tensor:
        """``[kernels]``: log(time in ns)."""
        output = self(batch)
        return output + batch.log_estimate if self.architecture.is_relative else output

    def _pooled(self, name: str, nodes: Tensor, batch: GraphBatch) -> Tensor:
        count = len(batch.log_estimate)
        empty = nodes.new_zeros(count, nodes.shape[1])
        if name == "max":
            places = batch.owner.unsqueeze(1).expand_as(nodes)
            return empty.scatter_reduce(0, places, nodes, "amax", include_self=False)
        if name in ("work", "bytes"):
            column = spec.NODE.index(f"{name}_share")
            nodes = nodes * batch.node[:, column : column + 1].clamp(0, 1)
        summed = empty.index_add(0, batch.owner, nodes)
        if name == "mean":
            return summed / torch.bincount(batch.owner, minlength=count).unsqueeze(1)
        return torch.relu(summed) if name == "sum" else summed
