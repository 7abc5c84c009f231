"""Times in a coarser unit are the same times, but for rounding."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.collectives import ALL_REDUCE
from disco_hlo.hlo.cost_model import Kernels, LinearPieces
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.baselines import unfused
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import MAX_TOTAL, MAX_TOTAL_NS, coarse, unit_for
from disco_hlo.simulator.timeline import simulate
from tests.machines import CPU, GPU
from tests.search.cost_models import HoldingCosts, LookingCosts, TrafficCosts
from tests.search.random_steps import random_step


class Slower(TrafficCosts):
    """Everything takes so many times as long."""

    factor = 1

    def op_ns(self, graph: Graph):
        return super().op_ns(graph) * self.factor

    def collective(self, kind):
        return super().collective(kind).times(self.factor)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), machine=st.sampled_from([CPU, GPU]))
def test_a_step_of_hours_takes_a_thousand_times_as_long_as_one_of_seconds(seed: int, machine) -> None:
    graph = random_step(Random(seed), 60, backend=machine.name)
    short, long = Slower(), Slower()
    object.__setattr__(short, "factor", 10_000)
    object.__setattr__(long, "factor", 10_000_000)
    found = [build(graph, unfused(graph), costs, machine).problem for costs in (short, long)]
    assert found[0].unit_ns == 1
    assume(found[1].unit_ns == 1000)
    timelines = [simulate(problem) for problem in found]
    assert timelines[1].makespan_ns == 1000 * timelines[0].makespan_ns
    assert timelines[1].spans_ns.tolist() == (1000 * timelines[0].spans_ns).tolist()
    assert timelines[1].peak_bytes == timelines[0].peak_bytes


def test_what_takes_longer_than_anything_is_refused() -> None:
    graph, costs = random_step(Random(1), 40), Slower()
    object.__setattr__(costs, "factor", 10**13)
    with pytest.raises(DiscoError, match=r"expected (at most|a number from 0 to) 8"):
        build(graph, unfused(graph), costs, CPU)


def test_the_unit_grows_with_the_time() -> None:
    assert [unit_for(total) for total in (0, MAX_TOTAL, MAX_TOTAL + 1, 1000 * MAX_TOTAL + 1)] == [
        1,
        1,
        1000,
        10**6,
    ]
    assert unit_for(MAX_TOTAL_NS) == unit_for(100 * MAX_TOTAL_NS) == 10**6


@pytest.mark.parametrize("model", [TrafficCosts(), LookingCosts(), HoldingCosts()])
def test_a_coarse_model_says_what_the_model_does(model) -> None:
    made, machine = coarse(model, GPU, 1000)
    graph = random_step(Random(2), 40)
    kernels = Kernels.of_lists([(8, 9), (10,)], [(9,), (10,)])
    assert made.op_ns(graph).tolist() == (-(-model.op_ns(graph) // 1000)).tolist()
    assert made.kernels_ns(graph, kernels).tolist() == (-(-model.kernels_ns(graph, kernels) // 1000)).tolist()
    assert made.read_classes(graph).tolist() == model.read_classes(graph).tolist()
    assert made.hold_shares(graph).tolist() == model.hold_shares(graph).tolist()
    assert coarse(model, machine, 1) == (model, machine)


def test_its_lines_and_machine_are_in_the_same_unit() -> None:
    machine = replace(GPU, launch_ns=2500, memory_bytes_per_us=400, transfer_wait_ns=7000)
    made, slower = coarse(TrafficCosts(LinearPieces.of((0, 1.0, 3000.0), (100, 0.5, 4000.0))), machine, 1000)
    assert made.collective(ALL_REDUCE) == LinearPieces.of((0, 0.001, 3.0), (100, 0.0005, 4.0))
    assert (slower.launch_ns, slower.memory_bytes_per_us, slower.transfer_wait_ns) == (3, 400_000, 7)
    assert abs(slower.copy_ns(10**6) - machine.copy_ns(10**6) / 1000) < 2
