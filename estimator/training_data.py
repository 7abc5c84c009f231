"""Measured samples as training data: features, labels, splits, and how noisy the labels are.

Two splits (both are reported): samples whose structure training never saw, and whole models left
out. Single ops are never tested on: a profile measures them all, so the estimator is always told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import ProfileError
from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.estimator.calibration import calibrated, measured_ops
from disco_hlo.estimator.dataset import Dataset, Measurement, Sample
from disco_hlo.estimator.encoding import Batch
from disco_hlo.estimator.features import encode, graph_features, joined
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.cost_model import Kernels, triton_emitter
from disco_hlo.hlo.graph import Graph

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class TrainingData:
    """All measured samples of a data set, one row each."""

    known: Batch
    """Features with the measured times of single ops."""
    blind: Batch
    """The same without: the analytical estimate stands for them."""
    log_ns: NDArray[np.float64]
    """``[samples]``: natural logarithm of the label."""
    repeated_ns: tuple[tuple[float, ...], ...]
    """All measurements of each sample, in the order they were taken."""
    model: NDArray[np.str_]
    """``[samples]``: the model each was drawn from."""
    opcodes: tuple[frozenset[str], ...]
    """Op types in each."""
    is_single: NDArray[np.bool_]
    device: DeviceModel
    """The analytical estimate, calibrated on the single ops."""
    about: Mapping[str, Any]
    """Provenance of the data set."""

    def __len__(self) -> int:
        return len(self.log_ns)

    @property
    def fused(self) -> Indices:
        """The samples of two ops and more."""
        return np.flatnonzero(~self.is_single)


@dataclass(frozen=True, slots=True)
class Split:
    """Which samples to learn from, to stop by, and to report on."""

    train: Indices
    validation: Indices
    test: Indices


def label_ns(measurements: Sequence[Measurement], backend: str) -> float:
    """The time of a sample from the lower quartiles of its runs in each pack.

    Their middle; on CPU the least of them, since what else runs on the machine only adds.
    """
    low_ns = [measurement.low_ns for measurement in measurements]
    return float(min(low_ns) if BACKENDS[backend].shares_processor else np.median(low_ns))


def base_device(about: Mapping[str, Any]) -> DeviceModel:
    """The device before calibration, as the sampling assumed it."""
    config = about.get("config", {})
    try:
        bandwidth, flops = float(config["bandwidth"]), float(config["flops"])
        backend = BACKENDS[about["backend"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"the data set does not say what it was measured with ({error})") from error
    return DeviceModel(bandwidth, flops, hoists=backend.hoists)


def load(dataset: Dataset) -> TrainingData:
    """Read and encode all measured samples. :class:`ProfileError` where there are none, or the file is damaged."""
    measured = dataset.measurements()
    samples = [sample for sample in dataset.samples() if sample.id in measured]
    if not samples:
        raise ProfileError(
            f"{dataset.path} holds no measured samples; make some with scripts/sample_fused_ops.py"
        )
    sources = dataset.sources()
    graphs = {source.id: canonicalize(dataset.module(source)).graph for source in sources}
    for sample in samples:
        _check(sample, graphs.get(sample.source), str(dataset.path))
    samples.sort(key=lambda sample: (sample.source, sample.id))
    about = dataset.about()
    base = base_device(about)
    labels = {sample.id: label_ns(measured[sample.id], about["backend"]) for sample in samples}
    times = {sample.key: labels[sample.id] for sample in samples if len(sample.op.members) == 1}
    device = calibrated(base, measured_ops(graphs.values(), times))
    model_of = {source.id: source.model for source in sources}
    return TrainingData(
        known=_encoded(samples, graphs, device, times),
        blind=_encoded(samples, graphs, device, {}),
        log_ns=np.log([labels[sample.id] for sample in samples]),
        repeated_ns=tuple(tuple(float(m.low_ns) for m in measured[sample.id]) for sample in samples),
        model=np.array([model_of[sample.source] for sample in samples]),
        opcodes=tuple(_opcodes(sample, graphs[sample.source]) for sample in samples),
        is_single=np.array([len(sample.op.members) == 1 for sample in samples]),
        device=device,
        about={**about, "sources": {source.name: source.fingerprint for source in sources}},
    )


def _check(sample: Sample, graph: Graph | None, path: str) -> None:
    """Refuse a sample that is no kernel of its step."""
    members, results = sample.op.members, sample.op.results
    ascends = all(list(ids) == sorted({*ids}) for ids in (members, results))
    if graph is None or not results or not ascends or not {*results} <= {*members}:
        raise ProfileError(f"{path} is damaged: sample {sample.id} is no kernel of a step in it")
    if not 0 <= members[0] <= members[-1] < len(graph):
        raise ProfileError(f"{path} is damaged: sample {sample.id} has ops that its step has not")


def _encoded(
    samples: Sequence[Sample], graphs: Mapping[int, Graph], device: DeviceModel, times: Mapping[str, float]
) -> Batch:
    analytic = AnalyticModel(device)
    batches = []
    for source, graph in graphs.items():
        ops = [sample.op for sample in samples if sample.source == source]
        if not ops:
            continue
        kernels = Kernels.of_lists(
            [op.members for op in ops],
            [op.results for op in ops],
            [triton_emitter(op.config) if op.kind == "triton" else "" for op in ops],
        )
        batches.append(encode(graph_features(graph, analytic, times), kernels, analytic.scratch(graph)))
    return joined(batches)


def _opcodes(sample: Sample, graph: Graph) -> frozenset[str]:
    return frozenset(graph.nodes[member].opcode for member in sample.op.members)


def random_split(data: TrainingData, seed: int, test: int, validation: int) -> Split:
    """``test`` fused samples to report on. Structures are unique in a data set, so none of theirs is trained on."""
    fused = np.random.default_rng(seed).permutation(data.fused)
    if len(fused) < 2 * (test + validation):
        raise ProfileError(
            f"{len(fused)} fused samples are too few to put {test} aside for the test and {validation} for stopping"
        )
    held = fused[: test + validation]
    train = np.setdiff1d(np.arange(len(data)), held)
    return Split(train, np.sort(held[test:]), np.sort(held[:test]))


def model_split(data: TrainingData, model: str, seed: int, validation: int) -> Split:
    """All fused samples of one model to report on, nothing of it to learn from."""
    is_out = data.model == model
    test = np.flatnonzero(is_out & ~data.is_single)
    rest = np.flatnonzero(~is_out & ~data.is_single)
    if not len(test) or len(rest) < 2 * validation:
        raise ProfileError(
            f"cannot leave out {model}: {len(test)} fused samples of it, {len(rest)} of other models"
        )
    held = np.sort(np.random.default_rng(seed).permutation(rest)[:validation])
    return Split(np.setdiff1d(np.flatnonzero(~is_out), held), held, test)


def noise(data: TrainingData, chosen: Indices) -> NDArray[np.float64]:
    """How far one measurement lies from the others of the same sample: relative, one number for each
    repeatedly measured sample of ``chosen``. No estimate can be judged more finely."""
    found = []
    for index in chosen:
        *others, last = data.repeated_ns[index]
        if others:
            middle = float(np.median(others))
            found.append(abs(last - middle) / middle)
    return np.array(found)
