"""The cost model of a profile: measured first, then estimated."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.allreduce import AllReduceFit, LinePiece
from disco_hlo.profiler.corrections import Corrections
from disco_hlo.profiler.costs import MeasuredCosts, fused_key
from disco_hlo.profiler.profile import OpTime, Platform, Profile
from tests.profiler.test_keys import TWO_LAYERS

PLATFORM = Platform("some cpu, 2 cores", "cpu", "", "0.12.0", "0.12.0")


class Guess:
    """An estimator whose figures are recognizable."""

    def nodes_ns(self, graph):
        return np.array(
            [0 if node.opcode in ("parameter", "tuple") else 1000 + node.id for node in graph.nodes]
        )

    def groups_ns(self, graph, groups):
        return np.array([5000 + len(group.nodes) for group in groups], np.int64)


def group(*nodes, duplicates=(), kind="loop", config=""):
    return SimpleNamespace(nodes=nodes, duplicates=duplicates, kind=kind, config=config)


def costs(ops, **fields):
    return MeasuredCosts(Profile(PLATFORM, ops, 500, 1e9, 1e9, **fields), Guess())


def test_measured_ops_come_first():
    found = costs({"key of tanh": OpTime(70, 1, 9), "key of parameter": OpTime(9, 1, 9)})
    assert found.nodes_ns(TWO_LAYERS).tolist() == [0, 70, 1002, 1003, 70, 1005, 1006, 0]
    assert [node.opcode for node in found.unmeasured(TWO_LAYERS)] == ["add", "dot", "add", "add"]


def test_measured_kernels_come_first_wherever_their_structure_stands():
    first = group(1, 2)
    found = costs({fused_key(TWO_LAYERS, group(2, duplicates=(1,))): OpTime(42, 1, 9)})
    second, tiled = group(5, duplicates=(4,)), group(5, duplicates=(4,), kind="triton", config="{}")
    assert found.groups_ns(TWO_LAYERS, [first, second, tiled]).tolist() == [42, 42, 5001]
    assert found.groups_ns(TWO_LAYERS, []).tolist() == []


def test_the_estimator_is_not_asked_where_nothing_is_left_to_it():
    class Nobody:
        def groups_ns(self, graph, groups):
            raise AssertionError(groups)

    first = group(1, 2)
    found = costs({fused_key(TWO_LAYERS, group(2, duplicates=(1,))): OpTime(42, 1, 9)})
    found.estimator = Nobody()
    assert found.groups_ns(TWO_LAYERS, [first]).tolist() == [42]


def test_the_estimator_is_asked_for_kernels_that_nobody_measured_alone():
    asked = []

    class Asked:
        def kernels_ns(self, graph, member_at, members, result_at, results):
            asked.append([found.tolist() for found in (member_at, members, result_at, results)])
            return np.array([5001, 5002])[: len(member_at) - 1]

    found = costs({fused_key(TWO_LAYERS, group(2, duplicates=(1,))): OpTime(42, 1, 9)})
    found.estimator = Asked()
    kernels = [[0, 1, 3, 5], [3, 1, 2, 4, 5], [0, 1, 2, 3], [3, 2, 5]]  # node 3 alone, then a layer each
    times = found.kernels_ns(TWO_LAYERS, *(np.array(numbers) for numbers in kernels))
    assert (times.tolist(), asked) == ([5001, 42, 42], [[[0, 1], [3], [0, 1], [3]]])


def test_what_is_read_is_the_estimator_s_business():
    class Looks(Guess):
        def read_classes(self, graph):
            return np.arange(len(graph)) % 3

    found = costs({})
    assert found.read_classes(TWO_LAYERS).tolist() == [0] * len(TWO_LAYERS)
    found.estimator = Looks()
    assert found.read_classes(TWO_LAYERS).tolist() == [x % 3 for x in range(len(TWO_LAYERS))]


def test_estimates_of_kernels_are_corrected_and_measured_times_are_not():
    measured = {fused_key(TWO_LAYERS, group(2, duplicates=(1,))): OpTime(42, 1, 9)}
    found = costs(measured)
    keys = {TWO_LAYERS.nodes[x].key for x in (1, 2, 5, 6)}
    found.corrections = Corrections(dict.fromkeys(keys, math.log(1.25)), dict.fromkeys(keys, 1.0))
    assert found.groups_ns(TWO_LAYERS, [group(1, 2), group(5, 6)]).tolist() == [42, 6252]  # 5002 x 1.25
    assert found.nodes_ns(TWO_LAYERS)[2] == 1002


def test_all_reduces_follow_the_fit():
    fit = AllReduceFit((LinePiece(0, 0.5, 100.0),), (), 0.0, 0.0)
    assert costs({}, all_reduce=fit).all_reduce_ns(np.array([0, 1000])).tolist() == [100, 600]


def test_a_profile_without_a_sweep_says_so():
    with pytest.raises(ProfileError, match="holds no all-reduce sweep"):
        costs({}).all_reduce_ns(np.array([1]))
