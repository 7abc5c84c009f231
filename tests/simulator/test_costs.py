"""Machine models and all-reduce lines; times in a coarser unit are the same times, but for rounding."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.collectives import ALL_REDUCE
from disco_hlo.hlo.cost_model import CostModel, Kernels, LinearPieces
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.variants import unfused
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import (
    ANY_COMPUTE,
    MAX_TOTAL,
    MAX_TOTAL_NS,
    BucketTimes,
    MachineModel,
    bucket_times,
    coarse,
    speed_ppm,
    unit_for,
)
from disco_hlo.simulator.timeline import simulate
from tests.machines import CPU, GPU
from tests.search.cost_models import HoldingCosts, LookingCosts, TrafficCosts
from tests.search.steps import random_step


def test_slow_downs_become_speeds_and_products_may_lose_more_than_others() -> None:
    assert (speed_ppm(1.0), speed_ppm(1.25)) == (1_000_000, 800_000)
    assert CPU.speed_ppm().tolist() == [[1_000_000]] * 4, (
        "without asynchronous collectives there is no channel"
    )
    gpu = replace(GPU, compute_speed_ppm=900_000, transfer_speed_ppm=800_000)
    assert gpu.speed_ppm().tolist() == [
        [1_000_000, 900_000], [1_000_000, 1_000_000], [800_000, 800_000], [1_000_000, 900_000],
    ]  # fmt: skip
    gpu = replace(GPU, compute_speed_ppm=900_000, product_speed_ppm=250_000, other_speed_ppm=950_000)
    assert gpu.speed_ppm()[[0, 3]].tolist() == [[1_000_000, 950_000], [1_000_000, 250_000]]
    assert gpu.fastest_ppm == 950_000
    assert gpu.pace().speed_ppm[ANY_COMPUTE].tolist() == [1_000_000, 900_000]
    assert replace(GPU, compute_speed_ppm=900_000).fastest_ppm == 900_000
    assert replace(GPU, transfer_wait_ns=30_000).pace().wait_ns == 30_000
    assert replace(CPU, transfer_wait_ns=30_000).pace().wait_ns == 0, "transfers that block have no wait"


@pytest.mark.parametrize("slow_down", [0.5, 11.0, math.nan, math.inf])
def test_impossible_slow_downs_are_refused(slow_down: float) -> None:
    with pytest.raises(DiscoError, match=r"slow-down of .*, expected 1 to 10"):
        speed_ppm(slow_down)


@pytest.mark.parametrize("wait_ns", [-1, 10_000_001])
def test_impossible_waits_are_refused(wait_ns: int) -> None:
    with pytest.raises(DiscoError, match=f"transfer_wait_ns is {wait_ns}, expected 0 to 10000000"):
        replace(GPU, transfer_wait_ns=wait_ns)


def test_all_reduce_pieces() -> None:
    pieces = LinearPieces.of((0, 1.0, 20.0), (1000, 0.25, 800.4))
    assert pieces([0, 10, 999, 1000, 4000]).tolist() == [20, 30, 1019, 1050, 1800]
    assert pieces(10).tolist() == 30


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], r"start at \[\] bytes"),
        ([(1, 1.0, 1.0)], r"start at \[1\] bytes, expected ascending sizes from 0"),
        ([(0, 1.0, 1.0), (5, 1.0, 1.0), (5, 1.0, 1.0)], r"start at \[0, 5, 5\] bytes"),
        ([(0, -1.0, 1.0)], "C = -1.0 ns per byte"),
        ([(0, math.nan, 1.0)], "C = nan ns per byte"),
        ([(0, 1.0, math.inf)], "D = inf ns"),
        ([(0, 1.0, 5.0), (100, 1.0, -200.0)], "piece from 100 bytes: C = 1.0 ns per byte, D = -200.0 ns"),
    ],
)
def test_impossible_pieces_are_refused(pieces: list[tuple[int, float, float]], message: str) -> None:
    with pytest.raises(DiscoError, match=message):
        LinearPieces.of(*pieces)


BY_THE_BYTE = LinearPieces.of((0, 1.0, 100.0))


@pytest.mark.parametrize(
    ("machine", "sizes_bytes", "packed_bytes", "expected"),
    [
        (CPU, [30, 50], 80, BucketTimes(main_ns=187, on_channel=False, pack_ns=87)),
        (CPU, [30, 50], 20, BucketTimes(main_ns=187, on_channel=False, pack_ns=27)),  # a line of another kind
        (CPU, [30, 50], None, BucketTimes(main_ns=287, on_channel=False, pack_ns=None)),  # one by one
        (CPU, [80], 80, BucketTimes(main_ns=187, on_channel=False, pack_ns=None)),
        (GPU, [30, 50], 80, BucketTimes(main_ns=180, on_channel=True, pack_ns=87)),
        (GPU, [30, 50], None, BucketTimes(main_ns=180, on_channel=True, pack_ns=None)),
    ],
)
def test_times_of_a_bucket(
    machine: MachineModel, sizes_bytes: list[int], packed_bytes: int | None, expected: BucketTimes
) -> None:
    machine = replace(machine, launch_ns=7, memory_bytes_per_us=2000)
    assert bucket_times(BY_THE_BYTE, machine, sizes_bytes, packed_bytes=packed_bytes, name="b0") == expected


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
    totals = (0, MAX_TOTAL, MAX_TOTAL + 1, 1000 * MAX_TOTAL + 1)
    assert [unit_for(total) for total in totals] == [1, 1, 1000, 10**6]
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


def test_a_coarse_model_asks_the_model_all_that_may_be_asked() -> None:
    """It had answers of its own where nobody had thought of it: no op needed memory, every transfer took its line's."""

    class Told(TrafficCosts):
        def transfers_ns(self, graph: Graph) -> dict[int, int]:
            return {len(graph) - 1: 1001}

        def temporary_bytes(self, graph: Graph) -> dict[int, int]:
            return {len(graph) - 1: 1001}

    graph, (made, _) = random_step(Random(2), 40), coarse(Told(), GPU, 1000)
    assert made.transfers_ns(graph) == {len(graph) - 1: 2}
    assert made.temporary_bytes(graph) == {len(graph) - 1: 1001}
    asked = {name for name in vars(CostModel) if not name.startswith("_")}
    assert asked <= vars(type(made)).keys()


def test_its_lines_and_machine_are_in_the_same_unit() -> None:
    machine = replace(GPU, launch_ns=2500, memory_bytes_per_us=400, transfer_wait_ns=7000)
    made, slower = coarse(TrafficCosts(LinearPieces.of((0, 1.0, 3000.0), (100, 0.5, 4000.0))), machine, 1000)
    assert made.collective(ALL_REDUCE) == LinearPieces.of((0, 0.001, 3.0), (100, 0.0005, 4.0))
    assert (slower.launch_ns, slower.memory_bytes_per_us, slower.transfer_wait_ns) == (3, 400_000, 7)
    assert abs(slower.copy_ns(10**6) - machine.copy_ns(10**6) / 1000) < 2
