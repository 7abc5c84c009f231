"""A profile becomes costs: by the trained estimator where weights ship for its device, else analytically."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from disco_hlo.estimator import gnn
from disco_hlo.estimator.analytic import AnalyticModel
from disco_hlo.estimator.gnn import GnnModel
from disco_hlo.optimize.costs import costs_of, machine_of
from disco_hlo.plan.read import read
from disco_hlo.profiler.costs import fused_key
from disco_hlo.profiler.profile import Contention, Profile, load
from tests.estimator.steps import transformer

PROFILES = Path(__file__).parents[2] / "disco_hlo" / "data" / "profiles"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load(PROFILES / "nvidia-h200-nvlink.json")


def test_an_h200_s_kernels_are_estimated_by_the_network_trained_there(profile: Profile) -> None:
    graph = transformer().graph
    costs = costs_of(replace(profile, ops={}), graph)
    assert isinstance(costs.estimator, GnnModel)
    measured = [group for group in read(transformer()).groups if fused_key(graph, group) in profile.ops]
    truth = np.array([profile.ops[fused_key(graph, group)].median_ns for group in measured])
    error = np.abs(costs.estimator.groups_ns(graph, measured) - truth) / truth
    of_the_estimate = np.abs(costs.estimator.analytic.groups_ns(graph, measured) - truth) / truth
    assert len(measured) > 50
    assert np.median(error) < 0.2 < np.median(of_the_estimate)


def test_another_gpu_s_are_estimated_analytically(profile: Profile, caplog: pytest.LogCaptureFixture) -> None:
    gnn._say_once.cache_clear()
    other = replace(profile, platform=replace(profile.platform, device_kind="Other GPU"))
    assert isinstance(costs_of(other, transformer().graph).estimator, AnalyticModel)
    assert caplog.text.count("Other GPU are estimated analytically") == 1


def test_a_transfer_beside_compute_takes_its_wait_and_its_slow_down(profile: Profile) -> None:
    slowed = machine_of(replace(profile, contention=Contention(1.25, 2.0, 30_000)))
    assert (slowed.compute_speed_ppm, slowed.transfer_speed_ppm) == (800_000, 500_000)
    assert slowed.speed_ppm()[[0, 3], 1].tolist() == [800_000, 800_000]
    by_kind = machine_of(replace(profile, contention=Contention(1.25, 2.0, products=4.0, others=1.0)))
    assert by_kind.speed_ppm()[[0, 3], 1].tolist() == [1_000_000, 250_000]
    assert 2.0 * slowed.transfer_wait_ns == 30_000  # its wait passes as slowly as the rest of it
    assert machine_of(replace(profile, contention=Contention(1.25, 2.0))).transfer_wait_ns == 0
    blocking = machine_of(replace(profile, platform=replace(profile.platform, backend="cpu")))
    assert blocking.pace().wait_ns == 0
