"""A profile becomes costs: by the trained estimator where weights ship for its device, else analytically; without one
the profile that ships, or constants. A network may be imagined, and measured kernels teach the profile.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.errors import DiscoError, ProfileError
from disco_hlo.estimator import gnn
from disco_hlo.estimator.analytic import AnalyticModel
from disco_hlo.estimator.gnn import GnnModel
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind, collective_bytes, collective_kind
from disco_hlo.hlo.cost_model import Kernels
from disco_hlo.hlo.graph import Kind
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.optimize.costs import (
    Network,
    costs_for,
    costs_of,
    estimates_ns,
    formula,
    machine_of,
    seen_kernels,
)
from disco_hlo.optimize.sends import sends_ns
from disco_hlo.plan.plan import Group
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.profiler.costs import MeasuredCosts
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.profiler.profile import Contention, OpTime, Profile, load
from disco_hlo.simulator.costs import holds_ns
from disco_hlo.structure.moves import SliceSend, apply_moves
from disco_hlo.whatif.machine import load as load_machine
from tests.estimator.steps import transformer
from tests.modules import module_of
from tests.report import plans

PROFILES = Path(__file__).parents[2] / "disco_hlo" / "data" / "profiles"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load(PROFILES / "nvidia-h200-nvlink.json")


def test_an_h200_s_kernels_are_estimated_by_the_network_trained_there(profile: Profile) -> None:
    graph = transformer().graph
    costs = costs_of(replace(profile, ops={}), transformer())
    assert isinstance(costs.estimator, GnnModel)
    kernels = unit_graph(graph, read(transformer())).kernels(graph)
    keys = kernel_keys(graph, kernels)
    measured = kernels.chosen(np.flatnonzero([key in profile.ops for key in keys]))
    truth = np.array([profile.ops[key].median_ns for key in keys if key in profile.ops])
    error = np.abs(costs.estimator.kernels_ns(graph, measured) - truth) / truth
    of_the_estimate = np.abs(costs.estimator.analytic.kernels_ns(graph, measured) - truth) / truth
    assert len(measured) > 50
    assert np.median(error) < 0.2 < np.median(of_the_estimate)


def test_another_gpu_s_are_estimated_analytically(profile: Profile, caplog: pytest.LogCaptureFixture) -> None:
    gnn._say_once.cache_clear()
    other = replace(profile, platform=replace(profile.platform, device_kind="Other GPU"))
    assert isinstance(costs_of(other, transformer()).estimator, AnalyticModel)
    assert caplog.text.count("Other GPU are estimated analytically") == 1


@pytest.mark.parametrize(
    ("device_kind", "bf16_flops_per_s"), [("NVIDIA H100 80GB HBM3", 791.5e12), ("Other GPU", 5e13)]
)
def test_matmuls_that_nobody_measured_go_by_the_machine_else_by_the_microbenchmark(
    profile: Profile, device_kind: str, bf16_flops_per_s: float
) -> None:
    other = replace(
        profile, ops={}, flops_per_s=5e13, platform=replace(profile.platform, device_kind=device_kind)
    )
    estimator = costs_of(other, transformer()).estimator
    rates = (estimator.analytic if isinstance(estimator, GnnModel) else estimator).library_flops_per_s
    assert rates["f32"] == 5e13
    assert rates.get("bf16", 5e13) == pytest.approx(bf16_flops_per_s, rel=1e-3)
    measured = costs_of(replace(profile, flops_per_s=5e13), transformer()).estimator.analytic
    assert measured.library_flops_per_s["f32"] > 2e14


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


def test_without_a_profile_the_constants_are_stated() -> None:
    (line,) = costs_for(plans.h200(), None, "NVIDIA A100").lines
    assert line.startswith("no profile: analytic model of an H200 on NVLink: 4000 GB/s of memory")
    (line,) = costs_for(plans.cpu(), None, None).lines
    assert line.startswith("no profile: analytic model of two CPU cores")


@pytest.mark.parametrize("device_kind", [None, "unknown", "NVIDIA H200"])
def test_a_gpu_step_without_a_profile_takes_the_one_that_ships(device_kind: str | None) -> None:
    costs = costs_for(plans.h200(), None, device_kind)
    assert costs.lines[0].startswith("no profile: taken instead: nvidia-h200-nvlink, which comes with")
    assert costs.lines[1].startswith("times from the profile of NVIDIA H200 (gpu, driver")
    assert costs.machine.compute_speed_ppm < 1_000_000


def test_what_the_profile_lacks_is_named_with_what_was_used_instead() -> None:
    lines = costs_for(plans.h200(), plans.sockets_profile(), "NVIDIA H200").lines
    assert lines[0] == "times from the profile of NVIDIA H200 (gpu, driver 580, jax 0.11.2, jaxlib 0.11.2)"
    assert "ops are not in the profile and are estimated from bytes and flops, first n" in lines[1]


def test_a_profile_of_another_device_is_refused() -> None:
    with pytest.raises(ProfileError, match="the profile was taken on NVIDIA H200"):
        costs_for(plans.h200(), plans.sockets_profile(), "NVIDIA A100")
    wrong = r"taken on NVIDIA H200 \(gpu\), this step is compiled for cpu"
    with pytest.raises(ProfileError, match=wrong):
        costs_for(plans.cpu(), plans.sockets_profile(), None)
    with pytest.raises(ProfileError, match=wrong):
        costs_for(plans.cpu(), plans.sockets_profile(), "cpu")


def test_what_kernels_hold_is_known_where_the_profile_has_it() -> None:
    """``disco search`` and ``disco simulate`` went without, and promised other times than the plugin."""
    graph, profile = plans.h200().graph, plans.sockets_profile()
    holds = replace(profile, contention=replace(profile.contention or Contention(1.0, 1.0), hold=0.8))
    costs = costs_for(plans.h200(), holds, "NVIDIA H200")
    held_ns, whole_ns = holds_ns(costs, graph, costs.op_ns(graph)), costs.op_ns(graph)
    assert (held_ns == (0.8 * whole_ns).astype(int))[held_ns > 0].all()
    assert (held_ns > 0).sum() > 50
    estimated = costs_for(plans.h200(), None, "NVIDIA A100")
    assert not holds_ns(estimated, graph, estimated.op_ns(graph)).any()


def test_what_if_on_another_network_only_all_reduces_change() -> None:
    graph, profile = plans.h200().graph, plans.sockets_profile()
    costs = costs_for(plans.h200(), profile, "NVIDIA H200")
    imagined = costs.imagine(Network(64, 12.5, 5.0))
    assert imagined.collective(ALL_REDUCE)([0, 125_000]).tolist() == [60_000, 80_000]
    assert imagined.machine == costs.machine
    assert imagined.op_ns(graph).tolist() == costs.op_ns(graph).tolist()
    assert imagined.lines[:-1] == costs.lines
    assert imagined.lines[-1].startswith("what if: 64 GPUs at 12.5 GB/s")


def test_on_a_machine_a_permute_is_a_send_and_knows_whether_it_leaves_the_node(profile: Profile) -> None:
    costs = costs_of(profile, plans.h200()).on(load_machine("h200"), 16)
    ring = tuple((device, (device + 1) % 16) for device in range(16))
    inside = tuple((device, device // 8 * 8 + (device + 1) % 8) for device in range(16))
    within, between = (
        costs.collective(CollectiveKind("collective-permute", groups))([10**9])[0]
        for groups in (inside, ring)
    )
    assert within == pytest.approx(1e9 / 370.8, rel=0.01)
    assert between == pytest.approx(1e9 * 8 / 384, rel=0.01)


SENDS = """
HloModule pipeline, is_scheduled=true

ENTRY %main (p: f32[250000]) -> (f32[250000], f32[250000]) {
  %p = f32[250000]{0} parameter(0)
  %next = f32[250000]{0} collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %begun = token[] after-all()
  %send = (f32[250000]{0}, u32[], token[]) send(%next, %begun), channel_id=2
  %recv = (f32[250000]{0}, u32[], token[]) recv(%begun), channel_id=3
  %sent = token[] send-done(%send), channel_id=2
  %received = (f32[250000]{0}, token[]) recv-done(%recv), channel_id=3
  %data = f32[250000]{0} get-tuple-element(%received), index=0
  ROOT %out = (f32[250000]{0}, f32[250000]{0}) tuple(%data, %next)
}
"""


@pytest.mark.parametrize(("devices", "gb_per_s"), [(8, 370.8), (16, 48.0)])
def test_on_a_machine_a_step_s_sends_take_what_its_links_say(
    profile: Profile, devices: int, gb_per_s: float
) -> None:
    step = canonicalize(module_of(SENDS))
    costs = costs_of(profile, step).on(load_machine("h200"), devices)
    ops_ns = costs.op_ns(step.graph).tolist()
    took = {node.opcode: ops_ns[node.id] for node in step.graph.nodes}
    assert took["collective-permute"] == 0, "it travels"
    took |= {step.graph.nodes[node].opcode: ns for node, ns in sends_ns(step.graph, costs).items()}
    assert took["collective-permute"] == pytest.approx(1e6 / 370.8 + 11_800, abs=2), (
        "its pairs are of one node"
    )
    outside_ns = 6_200 if devices > 8 else 0
    assert took["send"] == pytest.approx(1e6 / gb_per_s + 11_800 + outside_ns, abs=2)
    assert (took["recv"], took["recv-done"], took["send-done"]) == (0, 0, 0)


STAGES = """
HloModule stages

add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b) }
ENTRY main { x = f32[8000000] parameter(0)
  y = f32[8000000] all-reduce(x), channel_id=1, replica_groups=[2,8]<=[16], use_global_device_ids=true, to_apply=add
  ROOT s = f32[8000000] collective-permute(y), channel_id=2, source_target_pairs={
    {0,8}, {1,9}, {2,10}, {3,11}, {4,12}, {5,13}, {6,14}, {7,15}} }
"""


def test_between_nodes_a_sliced_send_takes_an_eighth_and_its_gather_is_within_the_node(
    profile: Profile,
) -> None:
    moved = apply_moves(module_of(STAGES), [SliceSend((), 2, 1, "all-reduce", 0)])
    took: list[dict[str, float]] = []
    for module in (module_of(STAGES), moved):
        step = canonicalize(module)
        costs = costs_of(profile, step).on(load_machine("h200"), 16)
        took.append({
            node.opcode: costs.collective(collective_kind(node))([collective_bytes(step.graph, node.id)])[0]
            for node in step.graph.nodes if node.opcode in COLLECTIVES
        })  # fmt: skip
    whole, sliced = took
    assert whole["collective-permute"] == pytest.approx(32e6 / 48 + 18_000, rel=1e-3)
    assert sliced["collective-permute"] == pytest.approx(4e6 / 48 + 18_000, rel=1e-3)
    assert sliced["all-gather"] < whole["all-reduce"]
    assert sum(sliced.values()) < 0.6 * sum(whole.values())


def test_a_profile_without_a_sweep_is_completed_and_says_so() -> None:
    bare = replace(plans.sockets_profile(), all_reduce=None)
    costs = costs_of(bare, plans.h200())
    assert costs.lines[-1].startswith("the profile has no all-reduce sweep; taken instead: an H200 on NVLink")
    assert costs.collective(ALL_REDUCE)([1000]).tolist() == [20_006]


def test_two_devices_use_a_ring() -> None:
    # 2 (N - 1) a = 20 µs, and 2 (N - 1)/N S/B = 1 s for 10 GB at 10 GB/s.
    line = formula(Network(2, 10.0, 10.0))
    assert line(np.array([0, 10**10])).tolist() == [20_000, 1_000_020_000]
    assert [piece.from_bytes for piece in line.lines] == [0]


def test_many_devices_use_trees_for_small_messages_and_a_ring_for_large_ones() -> None:
    line = formula(Network(64, 12.5, 5.0))
    # Trees: 2 * 6 * 5 µs = 60 µs. Ring: 2 * 63 * 5 µs = 630 µs, but 2 * 63/64 instead of 2 bytes a byte.
    assert int(line(np.array([0]))[0]) == 60_000
    assert int(line(np.array([125_000]))[0]) == 60_000 + 20_000
    large = 10**11
    assert int(line(np.array([large]))[0]) == round(630_000 + 2 * 63 / 64 * large / 12.5)


@given(st.integers(2, 4096), st.floats(0.1, 1000), st.floats(0, 1000), st.integers(0, 10**12))
def test_it_is_the_faster_of_both(devices: int, gigabytes: float, latency: float, size: int) -> None:
    ring = 2 * (devices - 1) * latency * 1e3 + 2 * (devices - 1) / devices * size / gigabytes
    tree = 2 * math.ceil(math.log2(devices)) * latency * 1e3 + 2 * size / gigabytes
    time_ns = int(formula(Network(devices, gigabytes, latency))(np.array([size]))[0])
    assert time_ns == pytest.approx(min(ring, tree), rel=1e-6, abs=2)


def test_trees_are_faster_at_every_size_where_a_message_takes_minutes() -> None:
    line = formula(Network(1 << 20, 1e6, 1e9))  # a ring would be faster from 1e30 bytes on, no 64-bit size
    assert line(np.array([0])).tolist() == [2 * 20 * 10**12]
    assert [piece.from_bytes for piece in line.lines] == [0]


def test_one_device_has_nothing_to_reduce_with() -> None:
    with pytest.raises(DiscoError, match="expected at least 2"):
        Network(1, 1.0, 1.0)


PROFILE = Path(__file__).parents[2] / "disco_hlo" / "data" / "profiles" / "nvidia-h200-nvlink.json"


@pytest.fixture
def told() -> MeasuredCosts:
    return costs_of(replace(load(PROFILE), ops={}), transformer())


def test_kernels_that_took_longer_than_estimated_raise_the_next_estimates(told: MeasuredCosts) -> None:
    graph, plan = transformer().graph, read(transformer())
    estimates = estimates_ns(told, graph, plan)
    slower = {
        key: OpTime(round(1.2 * ns), 10, 5)
        for key, ns in zip(
            kernel_keys(graph, unit_graph(graph, plan).kernels(graph)), estimates.tolist(), strict=True
        )
    }
    known = replace(told.profile, ops=slower)
    again = costs_of(known, transformer(), (plan,))
    nodes = tuple(sorted(plan.groups[0].nodes + plan.groups[1].nodes))
    larger = Kernels.of_lists([nodes], [nodes])
    (before,), (after,) = (costs.kernels_ns(graph, larger) for costs in (told, again))
    assert after / before == pytest.approx(1.2, abs=0.05)


def test_triton_s_kernels_tell_nothing_of_others(told: MeasuredCosts) -> None:
    graph, (first, second, *_) = transformer().graph, read(transformer()).groups
    plan = unfused(graph, [replace(first, kind="triton", config="{}"), second])
    keys = kernel_keys(graph, unit_graph(graph, plan).kernels(graph))
    known = replace(told.profile, ops=dict.fromkeys(keys, OpTime(9000, 10, 5)))
    assert [kernel.members for kernel in seen_kernels(known, graph, told.estimator, [plan])] == [second.ops]


def test_a_kernel_of_one_op_is_estimated_as_the_search_is_told(told: MeasuredCosts) -> None:
    """The simulator prices it as the op alone, whatever the network says of such a kernel."""
    graph = transformer().graph
    ops = [node.id for node in graph.nodes if node.kind is Kind.FUSIBLE][:50]
    plan = unfused(graph, [Group((op,)) for op in ops])
    assert estimates_ns(told, graph, plan).tolist() == told.op_ns(graph)[ops].tolist()
