"""The cost model of a profile: measured first, then estimated and corrected."""

from __future__ import annotations

import math

import numpy as np
import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.collectives import ALL_REDUCE
from disco_hlo.hlo.cost_model import Kernels, LinearPieces
from disco_hlo.hlo.graph import flat_lists
from disco_hlo.profiler.collectives import CollectiveFit
from disco_hlo.profiler.costs import NONE, Corrections, MeasuredCosts, Seen, corrections
from disco_hlo.profiler.keys import group_key
from disco_hlo.profiler.profile import Contention, OpTime, Platform, Profile
from tests.cost_models import MadeUpCosts, listed
from tests.graphs import graph_of
from tests.profiler.test_keys import TWO_LAYERS

PLATFORM = Platform("some cpu, 2 cores", "cpu", "", "0.12.0", "0.12.0")
TANH_KEY = TWO_LAYERS.nodes[1].key
LAYERS = Kernels.of_lists([(1, 2), (4, 5), (4, 5)], [(2,), (5,), (5,)], ["", "", "triton {}"])
"""Two layers, and the second as Triton emits it."""


class Guess(MadeUpCosts):
    """An estimator whose figures are recognizable."""

    def op_ns(self, graph):
        return np.array(
            [0 if node.opcode in ("parameter", "tuple") else 1000 + node.id for node in graph.nodes]
        )

    def kernel_ns(self, graph, inside, results):
        return 5000 + len(inside)


def costs(ops, estimator=None, **fields):
    return MeasuredCosts(Profile(PLATFORM, ops, 500, 1e9, 1e9, **fields), estimator or Guess())


def layer_measured():
    return {group_key(TWO_LAYERS, (4, 5), (5,)): OpTime(42, 1, 9)}


def test_measured_ops_come_first():
    found = costs({TWO_LAYERS.nodes[x].key: OpTime(time_ns, 1, 9) for x, time_ns in ((TANH, 70), (0, 9))})
    assert found.op_ns(TWO_LAYERS).tolist() == [0, 70, 1002, 1003, 70, 1005, 1006, 0]
    assert [node.opcode for node in found.unmeasured(TWO_LAYERS)] == ["add", "dot", "add", "add"]


def test_the_estimator_is_asked_for_kernels_that_nobody_measured_alone():
    asked = []

    class Asked(Guess):
        def kernels_ns(self, graph, kernels):
            asked.extend(
                [*one, emitter] for one, emitter in zip(listed(kernels), kernels.emitters, strict=True)
            )
            return super().kernels_ns(graph, kernels)

    found = costs(layer_measured(), Asked())
    assert found.kernels_ns(TWO_LAYERS, LAYERS).tolist() == [42, 42, 5002], "wherever their structure stands"
    assert found.kernels_ns(TWO_LAYERS, Kernels.of_lists([], [])).tolist() == []
    assert asked == [[{4, 5}, [5], "triton {}"]]
    assert found.kernels_ns(TWO_LAYERS, LAYERS.chosen(np.array([1, 0]))).tolist() == [42, 42]
    assert len(asked) == 1


def test_what_is_read_is_the_estimator_s_business():
    class Looks(Guess):
        def read_classes(self, graph):
            return np.arange(len(graph)) % 3

    assert costs({}).read_classes(TWO_LAYERS).tolist() == [0] * len(TWO_LAYERS)
    assert costs({}, Looks()).read_classes(TWO_LAYERS).tolist() == [x % 3 for x in range(len(TWO_LAYERS))]


def test_estimates_of_kernels_are_corrected_and_measured_times_are_not():
    found = costs(layer_measured())
    keys = {TWO_LAYERS.nodes[x].key for x in (1, 2, 5, 6)}
    found.corrections = Corrections(dict.fromkeys(keys, math.log(1.25)), dict.fromkeys(keys, 1.0))
    kernels = Kernels.of_lists([(1, 2), (5, 6)], [(2,), (5, 6)])
    assert found.kernels_ns(TWO_LAYERS, kernels).tolist() == [42, 6252]  # 5002 x 1.25
    assert found.op_ns(TWO_LAYERS)[2] == 1002


def test_estimates_of_tritons_kernels_are_not_corrected():
    found = costs({})
    keys = {TWO_LAYERS.nodes[x].key for x in (4, 5)}
    found.corrections = Corrections(dict.fromkeys(keys, math.log(2)), dict.fromkeys(keys, 1.0))
    assert found.kernels_ns(TWO_LAYERS, LAYERS).tolist() == [10004, 10004, 5002]


def test_no_correction_makes_a_kernel_faster_than_its_bytes_are_moved():
    """Of nanodo's step on an H200 the estimate of a kernel that moves 1.6 GB was corrected from 369 us to 158."""

    class Moves(Guess):
        def moving_ns(self, graph, kernels):
            return np.array([4000 if 1 in inside else 6000 for inside, _ in listed(kernels)])

    found = costs({}, Moves())
    found.corrections = Corrections({TANH_KEY: math.log(0.5)}, {TANH_KEY: 1.0})
    kernels = Kernels.of_lists([(1, 2), (4, 5), (5, 6)], [(2,), (5,), (5, 6)])
    assert found.kernels_ns(TWO_LAYERS, kernels).tolist() == [4000, 5002, 5002], "nor slower than estimated"


def test_all_reduces_follow_the_fit():
    line = LinearPieces.of((0, 0.5, 100.0))
    fitted = CollectiveFit(line, (), 0.0, 0.0)
    assert costs({}, all_reduce=fitted).collective(ALL_REDUCE) == line
    launched = costs({}, all_reduce=fitted, contention=Contention(1.5, 1.0, transfer_launch_ns=20))
    assert launched.collective(ALL_REDUCE) == LinearPieces.of((0, 0.5, 120.0))


def test_a_profile_without_a_sweep_says_so():
    with pytest.raises(ProfileError, match="holds no all-reduce sweep"):
        costs({}).collective(ALL_REDUCE)
    with pytest.raises(ProfileError, match="nothing is known of all-reduce"):
        super(MadeUpCosts, Guess()).collective(ALL_REDUCE)


def test_a_collective_that_no_plan_moves_follows_the_line_of_its_kind():
    graph = graph_of("param; all-to-all 0; tuple 1", elements=256, backend="gpu")
    fitted = CollectiveFit(LinearPieces.of((0, 0.5, 100.0)), (), 0.0, 0.0)
    assert costs({}, all_reduce=fitted).op_ns(graph)[1] == 100 + 256  # 512 bytes of 1024, at half a ns each
    assert costs({graph.nodes[1].key: OpTime(7, 0, 1)}, all_reduce=fitted).op_ns(graph)[1] == 7


TANH, ADD, DOT, LATER_TANH, LATER_ADD = 1, 2, 3, 4, 5


def factors(known, *kernels):
    return known.factors(known.of_nodes(TWO_LAYERS), *flat_lists(kernels)).tolist()


def test_a_kernel_is_off_by_what_those_with_its_ops_are_off():
    known = corrections(TWO_LAYERS, [Seen((TANH, ADD), 1000, 1500)])
    same, alike, one_op, unknown = factors(known, (TANH, ADD), (LATER_TANH, LATER_ADD), (ADD,), (DOT,))
    assert (same, alike, one_op, unknown) == pytest.approx((1.5, 1.5, 1.5, 1.0))


def test_a_rare_op_tells_more_than_one_in_every_kernel():
    # Half of each kernel's time is the tanh's: 500 + 1000 ns in two kernels, which weighs 1500 / 2 / 4; the dot in one
    # weighs 1000. The tanh is off by the mean of ln 1 and ln 2 that weighs 500 and 1000, the dot by ln 2.
    seen = [Seen((TANH, ADD), 1000, 1000), Seen((LATER_TANH, DOT), 2000, 4000)]
    tanh, both = factors(corrections(TWO_LAYERS, seen), (TANH,), (TANH, DOT))
    assert tanh == pytest.approx(2 ** (2 / 3))
    assert both == pytest.approx(2 ** ((187.5 * 2 / 3 + 1000) / 1187.5))


def test_an_estimate_of_something_else_corrects_by_four_at_most():
    known = corrections(TWO_LAYERS, [Seen((TANH,), 10, 9000), Seen((DOT,), 9000, 2250)])
    assert factors(known, (TANH,), (DOT,)) == pytest.approx([4.0, 0.25])


def test_a_kernel_estimated_at_far_too_much_does_not_outweigh_the_others():
    # By its estimate the first would weigh 700 times what the second does, and correct every other add by 1/4.
    update, other = Seen((ADD, LATER_TANH), 4_700_000, 6_900), Seen((ADD, DOT), 6_900, 6_900)
    assert factors(corrections(TWO_LAYERS, [update, other]), (ADD, LATER_TANH)) == [1.0]


def test_nothing_seen_corrects_nothing():
    assert corrections(TWO_LAYERS, []) is NONE
    assert corrections(TWO_LAYERS, [Seen((TANH,), 1000, 0)]) is NONE
    assert corrections(TWO_LAYERS, [Seen((TANH,), 9000, 10)]) is NONE


def test_the_order_in_which_kernels_were_seen_does_not_matter():
    random = np.random.default_rng(0)
    seen = [
        Seen(members, int(random.integers(1, 5000)), int(random.integers(1, 5000)))
        for members in ((TANH,), (ADD, DOT), (DOT, LATER_TANH), (TANH, ADD))
        for _ in range(2)
    ]
    known, turned = corrections(TWO_LAYERS, seen), corrections(TWO_LAYERS, seen[::-1])
    kernels = (TANH, ADD), (DOT,), (ADD, DOT, LATER_TANH)
    assert factors(known, *kernels) == pytest.approx(factors(turned, *kernels))
