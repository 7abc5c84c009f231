"""The graph neural network of DisCo's section 4.3 in DGL and torch, and its training.

Six graph attention layers with several heads embed the ops of a fused op (equation 1), a pooling
makes one embedding of them (equation 2), three dense layers turn it into a time (section 4.3.2).
:class:`Architecture` says what we add to the paper: edge features in the attention and in the messages,
residual connections, the kernel's own numbers, an output relative to the analytical estimate.
``estimator/network.py`` computes the same function without torch.

Training (sections 4.3.3 and 5.2) is Adam on mini-batches, stopped by held-out samples.
Which loss: the paper prints ``mean log((y - y')^2)``. Near zero it falls without bound, so a few samples that are
met exactly outweigh all others, and far off its gradient fades; it is here as ``paper``, cut off at
``PAPER_FLOOR_US``. The default, ``huber``, is Huber's loss on the difference of logarithms: a relative error
counts the same at every size, and a badly measured sample does not count more than linearly.

Everything random follows from the seed and the epoch, so a run that was interrupted goes on exactly where its last
checkpoint left it.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import dgl
import dgl.ops
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from disco_hlo.errors import ProfileError
from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator.architecture import Architecture
from disco_hlo.estimator.dataset import Indices, Split, TrainingData
from disco_hlo.estimator.features import Batch, joined, selected
from disco_hlo.estimator.weights import Weights
from disco_hlo.regular_file import read_regular, write_whole

RANGE_MARGIN = 0.2
"""How far, as a difference of logarithms, a prediction may lie outside of what training saw."""
PAPER_FLOOR_US = 1e-3
LOSSES = ("huber", "paper")
_MOST_BYTES = 1 << 30
"""Of a checkpoint."""
_EVALUATED_AT_ONCE = 1024


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


@dataclass(frozen=True)
class TrainSettings:
    """How to train."""

    seed: int = 0
    epochs: int = 80
    patience: int = 25
    """Stop after this many epochs without a better validation error."""
    batch: int = 128
    learning_rate: float = 2e-3
    warm_up: float = 0.1
    """Share of the steps in which the learning rate rises; after that it falls as a cosine."""
    weight_decay: float = 1e-4
    loss: str = "huber"
    huber_delta: float = 0.05
    """Difference of logarithms beyond which an error counts linearly."""
    blind_share: float = 0.15
    """How often a fused op is shown without the measured times of its ops (single ops always are)."""
    threads: int = 1
    architecture: Architecture = field(default_factory=Architecture)

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ProfileError(f"loss {self.loss!r}: expected one of {', '.join(LOSSES)}")
        if min(self.epochs, self.batch, self.patience, self.threads) < 1 or not (
            0 < self.learning_rate < math.inf
        ):
            raise ProfileError(
                "expected at least one epoch, batch size, patience and thread, and a positive learning rate"
            )
        if not 0 <= self.huber_delta < math.inf:
            raise ProfileError(f"huber_delta {self.huber_delta}: expected a number from 0 on")


@dataclass(frozen=True, slots=True)
class Epoch:
    """One point of the training curves."""

    number: int
    train_loss: float
    validation_error: float
    """Mean relative error."""
    seconds: float


OnEpoch = Callable[[Epoch], None]


@dataclass
class _Progress:
    network: FusedOpNet
    optimizer: torch.optim.Optimizer
    best: dict[str, Tensor]
    curve: list[Epoch] = field(default_factory=list)

    @property
    def best_epoch(self) -> Epoch | None:
        return min(self.curve, key=lambda epoch: epoch.validation_error, default=None)


def train(
    data: TrainingData,
    split: Split,
    settings: TrainSettings,
    *,
    checkpoint: Path | None = None,
    start: FusedOpNet | None = None,
    on_epoch: OnEpoch = lambda _: None,
) -> tuple[FusedOpNet, list[Epoch]]:
    """The network of the epoch with the best validation error, and the curves.

    Args:
        data: all samples.
        split: which of them to learn from and to stop by.
        settings: how.
        checkpoint: written after each epoch; where it exists, training goes on from it.
        start: a trained network to go on from (fine-tuning); it is not changed.
        on_epoch: called after each epoch.

    Raises:
        ProfileError: the checkpoint is damaged or of another training.
    """
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    network = FusedOpNet(settings.architecture)
    if start is None:
        network.standardise(
            selected(data.known, split.train), _targets(data, settings.architecture)[split.train]
        )
    else:
        network.load_state_dict(start.state_dict())
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    progress = _Progress(network, optimizer, _copied(network))
    identity = _identity(data, split, settings, start)
    if checkpoint is not None and checkpoint.exists():
        _restore(progress, checkpoint, identity)
    for number in range(len(progress.curve), settings.epochs):
        best = progress.best_epoch
        if best is not None and number - best.number > settings.patience:
            break
        epoch = _epoch(progress, data, split, settings, number)
        progress.curve.append(epoch)
        if progress.best_epoch is epoch:
            progress.best = _copied(network)
        if checkpoint is not None:
            _save(progress, checkpoint, identity)
        on_epoch(epoch)
    network.load_state_dict(progress.best)
    network.eval()
    return network, progress.curve


def _copied(network: FusedOpNet) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def _targets(data: TrainingData, architecture: Architecture) -> NDArray[np.float64]:
    return data.log_ns - np.log(data.known.estimate_ns) if architecture.is_relative else data.log_ns


def _epoch(
    progress: _Progress, data: TrainingData, split: Split, settings: TrainSettings, number: int
) -> Epoch:
    started = time.perf_counter()
    dice = np.random.default_rng([settings.seed, number])
    order = dice.permutation(split.train)
    steps = -(-len(order) // settings.batch)
    network, losses = progress.network.train(), []
    for step in range(steps):
        rate = learning_rate(settings, (number * steps + step) / (settings.epochs * steps))
        for group in progress.optimizer.param_groups:
            group["lr"] = rate
        chosen = order[step * settings.batch : (step + 1) * settings.batch]
        is_blind = data.is_single[chosen] | (dice.random(len(chosen)) < settings.blind_share)
        batch, log_ns = _batch(data, chosen[~is_blind], chosen[is_blind])
        loss = loss_of(network.log_times(batch), log_ns, settings)
        progress.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        progress.optimizer.step()
        losses.append(loss.item())
    error = np.abs(np.expm1(predict(network, data, split.validation) - data.log_ns[split.validation]))
    return Epoch(number, float(np.mean(losses)), float(error.mean()), time.perf_counter() - started)


def learning_rate(settings: TrainSettings, progress: float) -> float:
    """The learning rate after this share of all steps."""
    if progress < settings.warm_up:
        return settings.learning_rate * (0.05 + 0.95 * progress / settings.warm_up)
    after = (progress - settings.warm_up) / max(1 - settings.warm_up, 1e-9)
    return settings.learning_rate * (0.005 + 0.995 * 0.5 * (1 + float(np.cos(np.pi * min(after, 1.0)))))


def _batch(data: TrainingData, known: Indices, blind: Indices) -> tuple[GraphBatch, Tensor]:
    batch = joined([selected(data.known, known), selected(data.blind, blind)])
    return GraphBatch.of(batch), torch.from_numpy(data.log_ns[np.concatenate([known, blind])]).float()


def loss_of(log_times: Tensor, log_ns: Tensor, settings: TrainSettings) -> Tensor:
    """The loss of predicted logarithms of times in ns."""
    if settings.loss == "huber":
        return torch.nn.functional.smooth_l1_loss(log_times, log_ns, beta=settings.huber_delta)
    difference = (log_times.clamp(max=25.0).exp() - log_ns.exp()) / 1e3
    return torch.log(difference.square() + PAPER_FLOOR_US**2).mean()


def predict(
    network: FusedOpNet, data: TrainingData, chosen: Indices, *, blind: bool = False
) -> NDArray[np.float64]:
    """log(time in ns) of the chosen samples."""
    network.eval()
    features = data.blind if blind else data.known
    found = []
    with torch.no_grad():
        for first in range(0, len(chosen), _EVALUATED_AT_ONCE):
            batch = selected(features, chosen[first : first + _EVALUATED_AT_ONCE])
            found.append(network.log_times(GraphBatch.of(batch)).double().numpy())
    return np.concatenate(found) if found else np.zeros(0)


def exported(network: FusedOpNet, data: TrainingData, about: Mapping[str, Any]) -> Weights:
    """The network as ``network`` loads it."""
    tensors = {name: tensor.detach().numpy().copy() for name, tensor in network.state_dict().items()}
    return Weights(network.architecture, data.device, tensors, about)


def imported(weights: Weights) -> FusedOpNet:
    """Exported weights as a network again, to go on training."""
    network = FusedOpNet(weights.architecture)
    network.load_state_dict(
        {name: torch.from_numpy(tensor.copy()) for name, tensor in weights.tensors.items()}
    )
    network.eval()
    return network


# --- checkpoints ----------------------------------------------------------------------------------


def _identity(
    data: TrainingData, split: Split, settings: TrainSettings, start: FusedOpNet | None
) -> dict[str, Any]:
    """What a checkpoint must agree with to be gone on from.

    The samples themselves count: of another split as large, those to report on would have been learned from.
    """
    body: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    started_from = () if start is None else (tensor.numpy() for tensor in start.state_dict().values())
    return {
        **body,
        "samples": len(data),
        "train": _digest(split.train),
        "validation": _digest(split.validation),
        "labels": round(float(data.log_ns.sum()), 6),
        "start": _digest(*started_from),
    }


def _digest(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def _save(progress: _Progress, path: Path, identity: Mapping[str, Any]) -> None:
    body = {
        "training": dict(identity),
        "curve": [asdict(epoch) for epoch in progress.curve],
        "network": progress.network.state_dict(),
        "best": progress.best,
        "optimizer": progress.optimizer.state_dict(),
    }
    file = io.BytesIO()
    torch.save(body, file)
    write_whole(path.parent, {path.name: file.getvalue()})


def _restore(progress: _Progress, path: Path, identity: Mapping[str, Any]) -> None:
    try:
        # Nothing but numbers, tensors and tables is read: no code.
        body = torch.load(io.BytesIO(read_regular(path, _MOST_BYTES)), weights_only=True)
        if body["training"] != dict(identity):
            raise ProfileError(
                f"{path} is of another training (data, split, start or settings differ); remove it to start anew"
            )
        progress.curve = [Epoch(**epoch) for epoch in body["curve"]]
        progress.network.load_state_dict(body["network"])
        progress.best = body["best"]
        progress.optimizer.load_state_dict(body["optimizer"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, UnpicklingError) as error:
        raise ProfileError(f"{path} is no usable checkpoint: {error}; remove it to start anew") from error
