"""The code is compiled on a step like the one to be searched."""

from __future__ import annotations

import pytest
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.warm import warm_up

from disco_hlo.errors import ProfileError
from disco_hlo.simulator.costs import CPU
from tests.plan.small_graphs import graph
from tests.search.cost_models import OneDevice


@pytest.mark.parametrize("method", ["joint", "backtracking"])
def test_a_step_on_one_device_needs_no_all_reduce_times(method: str) -> None:
    alone = graph("param\nexp 0\nneg 1\ntuple 2")
    warm_up(alone, OneDevice(), CPU, SearchSettings(method=method))
    together = graph("param\nexp 0\nall-reduce 1\ntuple 2")
    with pytest.raises(ProfileError):
        warm_up(together, OneDevice(), CPU, SearchSettings(method=method))
