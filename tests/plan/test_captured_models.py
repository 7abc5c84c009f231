"""The six models of the paper as XLA:GPU runs them at full size: what was read can be written again, and of their
arguments tokens and labels are found."""

from __future__ import annotations

import pytest

from disco_hlo.plan.apply import apply
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.variants import unfused
from disco_hlo.plugin.measuring.inputs.indices import index_bounds
from tests.captured import captured

SHAPES = {
    "bert": (19350, 1027, 15),
    "reformer": (10666, 1100, 25),
    "resnet50": (6455, 1000, 4),
    "rnnlm": (1450, 41, 7),
    "transformer": (19870, 787, 14),
    "vgg19": (1571, 104, 6),
}
"""Nodes, and XLA's kernels and buckets."""
WRITTEN = ("resnet50", "rnnlm", "vgg19")
"""The others are larger, which takes long and shows the same."""
SMALL = ("rnnlm", "vgg19")
"""Of these every op is written alone as well."""
INDICES = {
    "bert": {620: 2, 621: 512, 622: 2, 623: 30522, 624: 30522},
    "reformer": {419: 256},
    "resnet50": {430: 1000},
    "rnnlm": {29: 10000},
    "transformer": {546: 37000, 547: 37000},
    "vgg19": {78: 1000},
}
"""Parameters that are indices, and of how many rows."""


@pytest.mark.parametrize("model", SHAPES)
def test_xlas_own_plan_and_none_at_all_can_be_written(model: str) -> None:
    source = captured(f"h200_models/{model}")
    xla = read(source)
    assert (len(source.graph), len(xla.groups), len(xla.buckets)) == SHAPES[model]
    for strategy in [xla] * (model in WRITTEN) + [unfused(source.graph)] * (model in SMALL):
        verify(source, apply(strategy, source), strategy)


@pytest.mark.parametrize("model", SHAPES)
def test_tokens_and_labels_are_found(model: str) -> None:
    """Counters of steps, which have no other integers beside them there, stay 0 or 1."""
    assert index_bounds(captured(f"h200_models/{model}")) == INDICES[model]
