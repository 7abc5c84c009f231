"""What a step would gain from mechanisms that it does not have."""

from __future__ import annotations

from dataclasses import replace

from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.optimize.gains import one_by_one, producers, with_producers
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.simulator.build import Built, build
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.timeline import simulate
from tests.machines import GPU
from tests.plan.small_graphs import graph
from tests.simulator.cost_models import TableCosts

STEP = graph(
    """
    param
    dot 0
    all-reduce 1
    add 2 0
    tuple 3
""",
    backend="gpu",
)
COSTS = TableCosts((0, 1000, 0, 10, 0), line=LinearPieces.of((0, 0.0, 800.0)))


def built_on(machine: MachineModel) -> Built:
    return build(STEP, Strategy(buckets=(Bucket((2,)),)), COSTS, machine)


def test_half_an_all_reduce_overlaps_with_its_matmul_and_half_follows() -> None:
    built = built_on(GPU)
    assert simulate(built.problem).makespan_ns == 1000 + 800 + 10
    pairs = producers(built.problem)
    assert {built.problem.names[a]: built.problem.names[b] for a, b in pairs.items()} == {"b0": "n1"}
    for is_t3 in (False, True):
        problem = with_producers(STEP, built, pairs, 2, is_t3=is_t3)
        assert problem.names == ("n1", "b0", "n3", "b0.rest")
        assert simulate(problem).makespan_ns == 1000 + 400 + 10


def test_a_fused_kernel_pays_for_the_overlap_and_t3_does_not() -> None:
    built = built_on(replace(GPU, product_speed_ppm=500_000))
    pairs = producers(built.problem)
    # While the first half runs, 400 ns, the matmul does 200 ns of its work.
    fused = with_producers(STEP, built, pairs, 2, is_t3=False)
    assert simulate(fused).makespan_ns == 400 + 800 + 400 + 10
    assert simulate(with_producers(STEP, built, pairs, 2, is_t3=True)).makespan_ns == 1000 + 400 + 10


def test_a_collective_of_something_else_has_no_matmul_to_join() -> None:
    step = graph("param\nmul 0\nall-reduce 1\nadd 2 0\ntuple 3", backend="gpu")
    built = build(step, Strategy(buckets=(Bucket((2,)),)), COSTS, GPU)
    assert producers(built.problem) == {}
    same = with_producers(step, built, {}, 2, is_t3=True)
    assert simulate(same).makespan_ns == simulate(built.problem).makespan_ns


def test_buckets_are_taken_apart_in_their_order() -> None:
    assert one_by_one([Bucket((5, 2)), Bucket((7,))]) == (Bucket((5,)), Bucket((2,)), Bucket((7,)))
