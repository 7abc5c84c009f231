"""The six models of the paper as XLA:GPU runs them at full size: what was read can be written again."""

from __future__ import annotations

import pytest

from disco_hlo.plan.apply import apply
from disco_hlo.plan.read import read, verify
from disco_hlo.plan.variants import unfused
from tests.captured import captured

SHAPES = {
    "bert": (19350, 1027, 15),
    "reformer": (10666, 1100, 25),
    "resnet50": (6455, 1000, 4),
    "rnnlm": (1450, 41, 7),
    "transformer": (19876, 787, 8),
    "vgg19": (1571, 104, 6),
}
"""Nodes, and XLA's kernels and buckets."""
ONLY_READ = ("reformer", "transformer")
"""Of the size of bert: writing and reading them again takes as long, and shows the same."""
SMALL = ("rnnlm", "vgg19")
"""Of these every op is written alone as well."""


@pytest.mark.parametrize("model", SHAPES)
def test_xlas_own_plan_and_none_at_all_can_be_written(model: str) -> None:
    source = captured(f"h200_models/{model}")
    xla = read(source)
    assert (len(source.graph), len(xla.groups), len(xla.buckets)) == SHAPES[model]
    written = [] if model in ONLY_READ else [xla, unfused(source.graph)] if model in SMALL else [xla]
    for strategy in written:
        verify(source, apply(strategy, source), strategy)
