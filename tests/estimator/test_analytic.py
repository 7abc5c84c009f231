"""The analytical model as a cost model, and learning a device from measured single ops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.estimator.analytic import (
    AnalyticModel,
    DeviceModel,
    calibrated,
    library_flops_per_s,
    measured_ops,
)
from disco_hlo.estimator.kernel_tables import EXTENTS_AT, OPERANDS_AT, structure
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.cost_model import Kernels
from tests.graphs import graph_of
from tests.modules import module_of

# 1 ns a byte, 1 ns a flop
SLOW = DeviceModel(1e9, 1e9, hoists=True)

STEP = graph_of(
    "f32[4,8] param; f32[] const; f32[4,8] multiply 0 0; f32[4,8] log 2; f32[4,4] dot 3 0; "
    "f32[4,4] all-reduce 4; f32[16] bitcast 5; tuple 6"
)


def test_nodes_alone():
    # multiply: 256 bytes; log: 32 * 16 flops; dot: 2 * 16 * 8 flops against 64 + 128 + 128 bytes
    assert AnalyticModel(SLOW).op_ns(STEP).tolist() == [0, 0, 256, 512, 320, 0, 0, 0]


def test_kernels_and_what_they_return():
    model = AnalyticModel(SLOW)
    kernels = Kernels.of_lists(
        [(2, 3), (2,), (2, 3), (2, 3)], [(3,), (2,), (2, 3), (3,)], ["", "", "", "triton {}"]
    )
    assert model.kernels_ns(STEP, kernels).tolist() == [544, 256, 544, 544]
    assert model.kernels_ns(STEP, kernels).dtype == np.int64


def test_a_kernel_s_bytes_take_their_time_whatever_it_computes():
    """Two arrays of 128 bytes, one read and one written, at 1 ns a byte; the logarithm takes 512 ns."""
    model, kernels = AnalyticModel(SLOW), Kernels.of_lists([(3,), (2, 3), (2, 3)], [(3,), (3,), (2, 3)])
    on_gpu = replace(STEP, backend="gpu")
    assert model.moving_ns(on_gpu, kernels).tolist() == [256, 256, 384]
    assert model.kernels_ns(on_gpu, kernels).tolist() == [512, 544, 544]
    assert model.moving_ns(STEP, kernels).tolist() == [0, 0, 0], "caches of a CPU"


@pytest.mark.parametrize("rows", [16, 4096])
def test_an_update_by_itself_takes_what_reading_and_writing_its_slice_takes(rows):
    """A loop's turn writes its entry of an array of all turns; the whole array was counted, twice."""
    text = f"""ENTRY main {{ array = f32[{rows},2500] parameter(0)
  update = f32[1,2500] parameter(1)
  turn = s32[] parameter(2)
  zero = s32[] constant(0)
  ROOT written = f32[{rows},2500] dynamic-update-slice(array, update, turn, zero) }}"""
    graph = canonicalize(module_of(text)).graph
    (written,) = (node.id for node in graph.nodes if node.opcode == "dynamic-update-slice")
    assert AnalyticModel(SLOW).op_ns(graph)[written] == 2 * 10_000


def test_streaming_follows_the_measured_curve():
    curve = ((100.0, 10.0), (300.0, 50.0), (600.0, 50.0))
    model = AnalyticModel(DeviceModel(1e9, 1e15, hoists=True, shortest_kernel_ns=7.0, streaming=curve))
    sizes = [1, 10, 25, 50, 100]
    graph = graph_of("; ".join(f"f32[{n}] param; f32[{n}] copy" for n in sizes))
    times = model.op_ns(graph).tolist()[1::2]
    # 4 bytes a result: 4, 40, 100, 200 and 400 bytes
    assert times == [7, 7, 10, 30, 50]
    beyond = graph_of("f32[300] param; f32[300] copy")
    assert model.op_ns(beyond).tolist() == [0, 100]


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bandwidth": 0.0},
        {"flops_per_s": float("nan")},
        {"strided_ns": -1.0},
        {"element_ns": {"log": float("inf")}},
        {"streaming": ((200.0, 5.0), (100.0, 6.0))},
        {"streaming": ((100.0, 6.0), (200.0, 5.0))},
        {"streaming": ((0.0, 6.0),)},
    ],
)
def test_impossible_devices_are_refused(wrong):
    with pytest.raises(ProfileError, match="expected"):
        DeviceModel(**{"memory_bandwidth": 1e9, "flops_per_s": 1e9, "hoists": True, **wrong})


def test_a_tuple_of_what_a_bitcast_shows_needs_no_maps():
    found = structure(graph_of("f32[4,8] param; f32[32] bitcast 0; f32[32] negate 1; tuple 1 2"))
    lengths = found.node[EXTENTS_AT] - found.node[OPERANDS_AT]
    assert lengths[:4].tolist() == [0, 2, 2, 0]
    assert found.edge[found.node[OPERANDS_AT, 2]] == 0


BASE = DeviceModel(1e10, 1e12, hoists=True)
TRUE = DeviceModel(
    2e10, 1e12, hoists=True,
    shortest_kernel_ns=400.0,
    streaming=((2.0**12, 500.0), (2.0**16, 2_000.0), (2.0**20, 30_000.0), (2.0**24, 900_000.0)),
    strided_ns=3.0,
    element_ns={"log": 2.0, "exponential": 0.5, "reduce": 0.3},
)  # fmt: skip


def ops_graph():
    rows = []
    for width in (16, 64, 128, 256, 512, 1024):
        first = len(rows)
        rows += [
            f"f32[{width},{width}] param",
            "f32[] const",
            f"f32[{width},{width}] add {first} {first}",
            f"f32[{width},{width}] multiply {first} {first + 2}",
            f"f32[{width},{width}] log {first}",
            f"f32[{width},{width}] exponential {first}",
            f"f32[{width}] reduce {first} {first + 1} {{1}}",
            f"f32[{width}] reduce {first} {first + 1} {{0}}",
            f"f32[{width},{width}] broadcast {first + 1} {{}}",
        ]
    return graph_of("\n".join(rows))


GRAPH = ops_graph()


def times(device, noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    alone = AnalyticModel(device).op_ns(GRAPH)
    return {
        node.key: float(alone[node.id] * (1 + noise * random.standard_normal()))
        for node in GRAPH.nodes
        if alone[node.id]
    }


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_device_is_recovered_from_its_times(noise):
    found = calibrated(BASE, measured_ops([GRAPH], times(TRUE, noise)))
    tolerance = 0.02 + 4 * noise
    assert found.element_ns["log"] == pytest.approx(2.0, rel=tolerance)
    assert found.element_ns["exponential"] == pytest.approx(0.5, rel=tolerance)
    assert found.strided_ns == pytest.approx(3.0, rel=tolerance + 0.02)
    predicted, truth = AnalyticModel(found).op_ns(GRAPH), AnalyticModel(TRUE).op_ns(GRAPH)
    timed = truth > 0
    assert np.median(np.abs(predicted[timed] / truth[timed] - 1)) <= tolerance


def test_indexing_ops_stay_free_however_slow_they_measured():
    slow = {**times(TRUE), **{node.key: 1e9 for node in GRAPH.nodes if node.opcode == "broadcast"}}
    found = calibrated(BASE, measured_ops([GRAPH], slow))
    assert "broadcast" not in found.element_ns


def test_a_few_disturbed_measurements_move_little():
    disturbed = times(TRUE)
    key = next(node.key for node in GRAPH.nodes if node.opcode == "log" and node.shape.dims == (512, 512))
    disturbed[key] *= 50
    assert calibrated(BASE, measured_ops([GRAPH], disturbed)).element_ns["log"] == pytest.approx(
        2.0, rel=0.02
    )


def test_tiny_ops_alone_do_not_say_how_fast_large_ones_stream():
    """One scalar op in a profile once made a copy of 400 MB take minutes."""
    graph = graph_of("f32[2] param; f32[2] negate 0; f32[1048576] param; f32[1048576] negate 2")
    base = DeviceModel(memory_bandwidth=4e12, flops_per_s=4e14, hoists=False)
    device = calibrated(base, measured_ops([graph], {graph.nodes[1].key: 1000.0}))
    assert AnalyticModel(device).op_ns(graph).tolist() == [0, 1000, 0, 2097]


def test_a_bf16_matmul_is_estimated_at_the_rate_that_others_reached():
    """One that was not measured itself took as long as in f32: 3.8 ms on an H100, of which it needs 0.25."""
    entry = graph_of("bf16[64,64] param; bf16[1024,1024] param; bf16[64,64] dot 0 0; bf16[1024,1024] dot 1 1")
    body = graph_of("bf16[2048,2048] param; bf16[2048,2048] dot 0 0")
    times_ns = {entry.nodes[2].key: 5000.0, entry.nodes[3].key: 3579.0, body.nodes[1].key: 24_543.0}
    rates = library_flops_per_s([entry, body], times_ns)
    assert rates == {"bf16": pytest.approx(7e14, rel=1e-4)}
    unmeasured = graph_of(
        "bf16[4096,4096] param; bf16[4096,4096] dot 0 0; f32[4096,4096] param; f32[4096,4096] dot 2 2"
    )
    model = AnalyticModel(DeviceModel(3e12, 5e13, hoists=False), rates)
    assert model.op_ns(unmeasured).tolist() == [0, 196_344, 0, 2_748_779]


def test_nothing_measured_changes_nothing():
    assert calibrated(BASE, []) is BASE
    assert measured_ops([GRAPH], {}) == []
