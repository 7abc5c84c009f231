"""The analytical model as a cost model."""

import numpy as np
import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.estimator.kernel_tables import EXTENTS_AT, OPERANDS_AT, structure
from disco_hlo.hlo.cost_model import Kernels
from tests.estimator.kernels import f32, graph_of

# 1 ns a byte, 1 ns a flop
SLOW = DeviceModel(1e9, 1e9, hoists=True)

STEP = graph_of(
    ("parameter", f32(4, 8), ()),
    ("constant", f32(), ()),
    ("multiply", f32(4, 8), (0, 0)),
    ("log", f32(4, 8), (2,)),
    ("dot", f32(4, 4), (3, 0)),
    ("all-reduce", f32(4, 4), (4,)),
    ("bitcast", f32(16), (5,)),
    ("tuple", f32(16), (6,)),
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


def test_streaming_follows_the_measured_curve():
    curve = ((100.0, 10.0), (300.0, 50.0), (600.0, 50.0))
    model = AnalyticModel(DeviceModel(1e9, 1e15, hoists=True, shortest_kernel_ns=7.0, streaming=curve))
    sizes = [1, 10, 25, 50, 100]
    graph = graph_of(*[row for n in sizes for row in (("parameter", f32(n), ()), ("copy", f32(n), ()))])
    times = model.op_ns(graph).tolist()[1::2]
    # 4 bytes a result: 4, 40, 100, 200 and 400 bytes
    assert times == [7, 7, 10, 30, 50]
    beyond = graph_of(("parameter", f32(300), ()), ("copy", f32(300), ()))
    assert model.op_ns(beyond).tolist() == [0, 100]


def test_one_graph_is_prepared_once():
    model = AnalyticModel(SLOW)
    assert model.tables(STEP) is model.tables(STEP)
    assert model.scratch(STEP) is model.scratch(STEP)


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
    found = structure(
        graph_of(
            ("parameter", f32(4, 8), ()),
            ("bitcast", f32(32), (0,)),
            ("negate", f32(32), (1,)),
            ("tuple", f32(32), (1, 2)),
        )
    )
    lengths = found.node[EXTENTS_AT] - found.node[OPERANDS_AT]
    assert lengths[:4].tolist() == [0, 2, 2, 0]
    assert found.edge[found.node[OPERANDS_AT, 2]] == 0
