from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.optimize.costs import Link, costs_for, formula
from disco_hlo.profiler.profile import Contention
from disco_hlo.simulator.costs import HoldsTransfers, holds_ns
from tests.report import plans


def test_two_devices_use_a_ring() -> None:
    # 2 (N - 1) a = 20 µs, and 2 (N - 1)/N S/B = 1 s for 10 GB at 10 GB/s.
    line = formula(Link(2, 10.0, 10.0))
    assert line(np.array([0, 10**10])).tolist() == [20_000, 1_000_020_000]
    assert line.from_bytes == (0,)


def test_many_devices_use_trees_for_small_messages_and_a_ring_for_large_ones() -> None:
    line = formula(Link(64, 12.5, 5.0))
    # Trees: 2 * 6 * 5 µs = 60 µs. Ring: 2 * 63 * 5 µs = 630 µs, but 2 * 63/64 instead of 2 bytes a byte.
    assert int(line(np.array([0]))[0]) == 60_000
    assert int(line(np.array([125_000]))[0]) == 60_000 + 20_000
    large = 10**11
    assert int(line(np.array([large]))[0]) == round(630_000 + 2 * 63 / 64 * large / 12.5)


@given(st.integers(2, 4096), st.floats(0.1, 1000), st.floats(0, 1000), st.integers(0, 10**12))
def test_it_is_the_faster_of_both(devices: int, gigabytes: float, latency: float, size: int) -> None:
    ring = 2 * (devices - 1) * latency * 1e3 + 2 * (devices - 1) / devices * size / gigabytes
    tree = 2 * math.ceil(math.log2(devices)) * latency * 1e3 + 2 * size / gigabytes
    time_ns = int(formula(Link(devices, gigabytes, latency))(np.array([size]))[0])
    assert time_ns == pytest.approx(min(ring, tree), rel=1e-6, abs=2)


def test_trees_are_faster_at_every_size_where_a_message_takes_minutes() -> None:
    line = formula(Link(1 << 20, 1e6, 1e9))  # a ring would be faster from 1e30 bytes on, no 64-bit size
    assert line(np.array([0])).tolist() == [2 * 20 * 10**12]
    assert line.from_bytes == (0,)


def test_one_device_has_nothing_to_reduce_with() -> None:
    with pytest.raises(DiscoError, match="expected at least 2"):
        Link(1, 1.0, 1.0)


def test_without_a_profile_the_constants_are_stated() -> None:
    (line,) = costs_for(plans.h200().graph, None, "NVIDIA A100").lines
    assert line.startswith("no profile: analytic model of an H200 on NVLink: 4000 GB/s of memory")
    (line,) = costs_for(plans.cpu().graph, None, None).lines
    assert line.startswith("no profile: analytic model of two CPU cores")


@pytest.mark.parametrize("device_kind", [None, "unknown", "NVIDIA H200"])
def test_a_gpu_step_without_a_profile_takes_the_one_that_ships(device_kind: str | None) -> None:
    costs = costs_for(plans.h200().graph, None, device_kind)
    assert costs.lines[0].startswith("no profile: taken instead: nvidia-h200-nvlink, which comes with")
    assert costs.lines[1].startswith("times from the profile of NVIDIA H200 (gpu, driver")
    assert costs.machine.compute_speed_ppm < 1_000_000


def test_what_the_profile_lacks_is_named_with_what_was_used_instead() -> None:
    lines = costs_for(plans.h200().graph, plans.sockets_profile(), "NVIDIA H200").lines
    assert lines[0] == "times from the profile of NVIDIA H200 (gpu, driver 580, jax 0.11.2, jaxlib 0.11.2)"
    assert "ops are not in the profile and are estimated from bytes and flops, first n" in lines[1]


def test_a_profile_of_another_device_is_refused() -> None:
    with pytest.raises(ProfileError, match="the profile was taken on NVIDIA H200"):
        costs_for(plans.h200().graph, plans.sockets_profile(), "NVIDIA A100")
    wrong = r"taken on NVIDIA H200 \(gpu\), this step is compiled for cpu"
    with pytest.raises(ProfileError, match=wrong):
        costs_for(plans.cpu().graph, plans.sockets_profile(), None)
    with pytest.raises(ProfileError, match=wrong):
        costs_for(plans.cpu().graph, plans.sockets_profile(), "cpu")


def test_what_kernels_hold_is_known_where_the_profile_has_it() -> None:
    """``disco search`` and ``disco simulate`` went without, and promised other times than the plugin."""
    graph, profile = plans.h200().graph, plans.sockets_profile()
    holds = replace(profile, contention=replace(profile.contention or Contention(1.0, 1.0), hold=0.8))
    costs = costs_for(graph, holds, "NVIDIA H200")
    assert isinstance(costs, HoldsTransfers)
    held_ns, whole_ns = holds_ns(costs, graph, costs.nodes_ns(graph)), costs.nodes_ns(graph)
    assert (held_ns == (0.8 * whole_ns).astype(int))[held_ns > 0].all()
    assert (held_ns > 0).sum() > 50
    estimated = costs_for(graph, None, "NVIDIA A100")
    assert not holds_ns(estimated, graph, estimated.nodes_ns(graph)).any()
