"""A small data set whose times follow a rule, so that a test can know what is to be learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.estimator.dataset import Dataset, Measurement
from disco_hlo.estimator.features import encode, graph_features
from disco_hlo.estimator.samples import FusedOp, Grower, single_ops
from disco_hlo.hlo.cost_model import Kernels
from tests.captured import captured, stored

STEP = "h200_models/rnnlm"
CONFIG = {"bandwidth": 2e12, "flops": 2e13}


def write(path: Path, count: int = 240) -> None:
    """Singles and ``count`` fused ops of two sources; a fused op takes longer by a tenth for each further op.

    Single ops, by which the estimate is calibrated, do not show that.
    """
    graph = captured(STEP).graph
    grower = Grower(graph, [], 10, 0)
    found: dict[tuple[int, ...], FusedOp] = {}
    while len(found) < count:
        op = grower.draw()
        if op is not None:
            found[op.members] = op
    fused = list(found.values())
    singles = single_ops(graph)[:60]
    with Dataset(path) as data:
        data.describe({"backend": "gpu", "device_kind": "Test GPU", "jax": "0", "config": CONFIG})
        halves = (singles + fused[::2], fused[1::2])
        for name, ops in zip(("one", "two"), halves, strict=True):
            source = data.add_source(name, f"{name} full", graph.fingerprint, stored(STEP))
            data.add_samples(source, {_key(op): op for op in ops})
        samples = data.samples()
        times = dict(zip([s.id for s in samples], _times([s.op for s in samples]), strict=True))
        for factor in (1.0, 1.02):
            measured = {
                id_: Measurement(round(t * factor), round(t * factor) + 9, 4, 20, 0.0)
                for id_, t in times.items()
            }
            data.record(data.begin(samples), measured)


def _key(op: FusedOp) -> str:
    graph = captured(STEP).graph
    return graph.nodes[op.members[0]].key if len(op.members) == 1 else f"g:{op.members}"


def _times(ops: list[FusedOp]) -> list[float]:
    graph = captured(STEP).graph
    model = AnalyticModel(DeviceModel(CONFIG["bandwidth"], CONFIG["flops"], hoists=False))
    kernels = Kernels.of_lists([op.members for op in ops], [op.results for op in ops])
    estimate = encode(graph_features(graph, model, {}), kernels, model.scratch(graph)).estimate_ns
    further = np.array([len(op.members) - 1 for op in ops])
    return ((2000 + estimate) * (1 + 0.1 * further)).tolist()
