"""Strategies become problems."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError, IllegalStrategyError
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Graph, Shape
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.read import Repeat
from disco_hlo.simulator.build import build, in_orders
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.problem import Problem
from disco_hlo.simulator.timeline import simulate
from tests.graphs import graph_of
from tests.machines import CPU, GPU
from tests.simulator.random_steps import LoopCosts, TableCosts, random_step, random_strategy
from tests.simulator.reference import simulate_slowly

# Two gradients of 12 and 24 bytes, each reduced and applied to the parameter.
STEP = graph_of(
    "param\ndot 0\nmul 1\nall-reduce 2\nadd 3 0\nmul 1\nall-reduce 5\nadd 6 0\ntuple 4 7", elements=None
)
SEPARATE = (Bucket((3,)), Bucket((6,)))
TOGETHER = (Bucket((3, 6)),)
COSTS = TableCosts((0, 50, 10, 0, 4, 20, 0, 5, 0))


def listed(problem: Problem) -> dict[str, tuple[int, int, str]]:
    """Duration, resource and predecessors of each task by name."""
    return {
        name: (
            int(problem.duration_ns[task]),
            int(problem.resource[task]),
            " ".join(problem.names[earlier] for earlier in problem.predecessors[task]),
        )
        for task, name in enumerate(problem.names)
    }


def order_of(problem: Problem) -> str:
    return " ".join(problem.names[e] if e >= 0 else "~" + problem.names[~e] for e in problem.order.tolist())


def test_separate_buckets_on_a_channel() -> None:
    built = build(STEP, Strategy(buckets=SEPARATE), COSTS, replace(GPU, launch_ns=1))
    assert listed(built.problem) == {
        "n1": (51, 0, ""),
        "n2": (11, 0, "n1"),
        "b0": (16 + 5, 1, "n2"),
        "n4": (5, 0, "b0"),
        "n5": (21, 0, "n1"),
        "b1": (28 + 5, 1, "n5"),
        "n7": (6, 0, "b1"),
    }
    assert order_of(built.problem) == "n1 n2 b0 n5 b1 ~b0 n4 ~b1 n7"
    assert built.tokens == ("n1", "n2", "b0", "n4", "n5", "b1", "n7")


def test_buckets_that_block_run_on_the_compute_stream() -> None:
    built = build(STEP, Strategy(buckets=SEPARATE), COSTS, replace(CPU, launch_ns=1))
    assert listed(built.problem)["b0"] == (16 + 5 + 1, 0, "n2")
    assert order_of(built.problem) == "n1 n2 b0 n4 n5 b1 n7"
    assert simulate(built.problem).makespan_ns == 51 + 11 + 22 + 5 + 21 + 34 + 6


def test_an_explicit_order_is_followed_or_refused_where_it_is_for_the_other_kind_of_machine() -> None:
    order = ("n1", "n5", "b1.start", "n2", "b0.start", "b1.done", "n7", "b0.done", "n4")
    built = build(STEP, Strategy((), SEPARATE, order), COSTS, GPU)
    assert order_of(built.problem) == "n1 n5 b1 n2 b0 ~b1 n7 ~b0 n4"
    with pytest.raises(IllegalStrategyError, match=r"does not have: b1\.start, b0\.start"):
        build(STEP, Strategy((), SEPARATE, order), COSTS, CPU)


def test_a_collective_is_over_before_a_loop_begins_its_own() -> None:
    """Collectives take turns, so what was put before a loop of gathers only stopped it; it was predicted to cost
    nothing, 6 ms of a step of 199."""
    order = ("n1", "n2", "b0.start", "n5", "b0.done", "n4", "b1.start", "b1.done", "n7")
    built = build(
        STEP, Strategy((), SEPARATE, order), LoopCosts(COSTS.table_ns, {5: 8}), replace(GPU, launch_ns=1)
    )
    assert order_of(built.problem) == "n1 n2 b0 n5.head ~b0 n5 ~b0 n4 b1 ~b1 n7"
    timeline = simulate(built.problem)
    spans = dict(zip(built.problem.names, timeline.spans_ns.T.tolist(), strict=True))
    assert spans["b0"] == [62, 62 + 21]
    assert spans["n5.head"] == [62, 62 + 8]
    assert spans["n5"] == [83, 83 + 21 - 8]
    assert built.tokens[built.problem.names.index("n5.head")] == "n5"


def test_a_collective_after_a_loop_is_not_waited_for() -> None:
    order = ("n1", "n5", "n2", "b0.start", "b1.start", "b0.done", "n4", "b1.done", "n7")
    costs = LoopCosts(COSTS.table_ns, {5: 8})
    built = build(STEP, Strategy((), SEPARATE, order), costs, GPU)
    assert order_of(built.problem) == "n1 n5.head n5 n2 b0 b1 ~b0 n4 ~b1 n7"
    blocking = build(STEP, Strategy(buckets=SEPARATE), costs, CPU)
    assert order_of(blocking.problem) == "n1 n2 b0 n4 n5 b1 n7", "where collectives block, a loop is one task"
    assert (
        simulate(built.problem).makespan_ns
        == simulate(build(STEP, Strategy((), SEPARATE, order), COSTS, GPU).problem).makespan_ns
    )


def test_a_bucket_is_packed_and_kernels_read_their_gradients_in_it() -> None:
    gpu = replace(GPU, launch_ns=1, memory_bytes_per_us=4000)
    built = build(STEP, Strategy((Group((4, 7)),), TOGETHER), COSTS, gpu)
    assert listed(built.problem) == {
        "n1": (51, 0, ""),
        "n2": (11, 0, "n1"),
        "b0.pack": (1 + 2 * 44 // 4, 0, "n2 n5"),
        "b0": (44 + 5, 1, "b0.pack"),
        "g0": (10, 0, "b0"),
        "n5": (21, 0, "n1"),
    }
    assert order_of(built.problem) == "n1 n2 n5 b0.pack b0 ~b0 g0"
    assert built.tokens == ("n1", "n2", "b0", "b0", "g0", "n5")


def test_gradients_are_unpacked_for_readers_that_do_not_cut() -> None:
    step = graph_of("param\nneg 0\nall-reduce 1\nexp 0\nall-reduce 3\ndot 2\ntuple 5 4", elements=None)
    gpu = replace(GPU, memory_bytes_per_us=4000)
    built = build(step, Strategy(buckets=(Bucket((2, 4)),)), COSTS, gpu)
    assert order_of(built.problem) == "n1 n3 b0.pack b0 ~b0 b0.unpack2 n5 b0.unpack4"
    assert listed(built.problem)["b0.unpack2"] == (2 * 12 // 4, 0, "b0")
    assert listed(built.problem)["n5"][2] == "b0 b0.unpack2"


def test_a_variadic_bucket_needs_no_packing() -> None:
    bucket = (Bucket((3, 6), "variadic"),)
    assert listed(build(STEP, Strategy(buckets=bucket), COSTS, GPU).problem)["b0"] == (44 + 5, 1, "n2 n5")
    # XLA:CPU transfers the operands one after the other.
    assert listed(build(STEP, Strategy(buckets=bucket), COSTS, CPU).problem)["b0"][0] == 16 + 5 + 28 + 5


def test_duplicated_ops_cost_their_readers_and_no_longer_run() -> None:
    chain = graph_of("param\nneg 0\nexp 1\nmul 2\nadd 2\ntuple 3 4", elements=None)
    both = Strategy((Group((3,), duplicates=(1, 2)), Group((4,), duplicates=(1, 2))))
    built = build(chain, both, TableCosts((0, 3, 5, 7, 11)), CPU)
    assert listed(built.problem) == {"g0": (15, 0, ""), "g1": (19, 0, "")}


IN_PLACE = "param\nexp 0\ndot 1\nneg 2\ntuple 3"


@pytest.mark.parametrize(
    ("step", "strategy", "machine", "peak_bytes"),
    [
        # At n4 live the parameter, both reduced gradients, the gradient in flight, and the result of n4.
        (STEP, Strategy(buckets=SEPARATE), GPU, 4 + 16 + 28 + 24 + 20),
        # Gradients 12 + 24 go into 44 packed, 44 packed become 44 reduced, of which come 20 + 32.
        (STEP, Strategy((Group((4, 7)),), TOGETHER), GPU, 4 + max(12 + 24 + 44, 44 + 44, 44 + 20 + 32)),
        # An op in place needs no memory of its own, that of a donated parameter included.
        (graph_of(IN_PLACE, elements=None), Strategy(), CPU, 4 + 12 + 16),
        (graph_of(IN_PLACE, inplace=((1, 2),), elements=None), Strategy(), CPU, 4 + 8 + 16),
        (graph_of("param\nbitcast 0\ndot 1\ntuple 2", inplace=((1, 2),), elements=None), Strategy(), CPU, 4),
    ],
    ids=["separate", "packed", "apart", "in place", "donated"],
)
def test_memory_of_a_step(step: Graph, strategy: Strategy, machine: MachineModel, peak_bytes: int) -> None:
    assert simulate(build(step, strategy, COSTS, machine).problem).peak_bytes == peak_bytes


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
@given(st.integers(0, 2**32), st.integers(2, 40))
@settings(max_examples=30)
def test_random_strategies_become_sound_problems(machine: MachineModel, seed: int, nodes: int) -> None:
    random = Random(seed)
    step, costs = random_step(random, nodes)
    strategy = random_strategy(random, step, asynchronous=machine.asynchronous)
    model = replace(machine, launch_ns=3, memory_bytes_per_us=7)
    built = build(step, strategy, costs, model)
    slowly = simulate_slowly(built.problem)
    assert simulate(built.problem).makespan_ns == slowly.now
    ends = [slowly.end[task] for task in range(len(built.problem))]
    for unit, needed in enumerate(built.units.dependencies):
        mine = [task for task, other in enumerate(built.unit_of) if other == unit]
        theirs = [task for task, other in enumerate(built.unit_of) if other in needed]
        theirs = [task for task in theirs if "unpack" not in built.problem.names[task]]
        assert all(ends[earlier] <= slowly.start[task] for task in mine for earlier in theirs)


def test_orders_posed_together_are_posed_alike() -> None:
    """In one a collective overlaps with a kernel."""
    orders = [
        (),
        ("n1", "n2", "b0.start", "n5", "b1.start", "b0.done", "n4", "b1.done", "n7"),
        ("n1", "n5", "b1.start", "n2", "b0.start", "b1.done", "n7", "b0.done", "n4"),
    ]
    strategy = Strategy((), SEPARATE)
    for built, order in zip(in_orders(STEP, strategy, orders, COSTS, GPU), orders, strict=True):
        alone = build(STEP, replace(strategy, order=order), COSTS, GPU).problem
        assert (listed(built.problem), order_of(built.problem)) == (listed(alone), order_of(alone))
        assert simulate(built.problem).makespan_ns == simulate(alone).makespan_ns


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([0.0, -50, 10, 0, 4, 20, 0, 5, 0], r"node 1 \(dot\) takes -50.0 ns, expected a number from 0"),
        ([0, 50, math.nan, 0, 4, 20, 0, 5, 0], r"node 2 \(mul\) takes nan ns"),
        ([0, 50, 10, 0, math.inf, 20, 0, 5, 0], r"node 4 \(add\) takes inf ns"),
        ([0, 50, 10, 0, 4, 2**60, 0, 5, 0], r"node 5 \(mul\) takes 1152921504606846976 ns"),
        ([0, 50], r"returned int64\[2\], expected 9 times"),
        (["0"] * 9, r"returned <U1\[9\], expected 9 times"),
    ],
)
def test_impossible_times_of_ops_are_refused(times: list[float], message: str) -> None:
    class Costs(TableCosts):
        def op_ns(self, graph: Graph) -> NDArray[np.int64]:
            return np.array(times)

    with pytest.raises(DiscoError, match=message):
        build(STEP, Strategy(buckets=SEPARATE), Costs(()), CPU)


class ResultCosts(TableCosts):
    """10 ns an op and 100 ns a result."""

    def kernel_ns(self, graph, inside, results) -> int:
        return 10 * len(inside) + 100 * len(results)


def test_kernels_are_asked_for_with_what_they_return_in_this_strategy() -> None:
    # 1 leaves its group because 5 reads it, until 5 stands in the same group.
    costs = ResultCosts(COSTS.table_ns)
    first = build(STEP, Strategy((Group((1, 2)),), SEPARATE), costs, CPU).problem
    assert listed(first)["g0"][0] == 220
    both = build(STEP, Strategy((Group((1, 2, 5)),), SEPARATE), costs, CPU).problem
    assert listed(both)["g0"][0] == 230
    tiled = build(STEP, Strategy((Group((1, 2), kind="triton"),), SEPARATE), costs, CPU).problem
    assert listed(tiled)["g0"][0] == 220


def test_impossible_times_of_groups_and_buckets_are_refused() -> None:
    class Groups(TableCosts):
        def kernels_ns(self, graph: Graph, kernels: object) -> NDArray[np.int64]:
            return np.array([7, -1])

    grouped = Strategy((Group((1, 2, 5)), Group((4, 7))), SEPARATE)
    with pytest.raises(DiscoError, match="g1 takes -1 ns"):
        build(STEP, grouped, Groups(()), CPU)
    with pytest.raises(DiscoError, match="b0 of 16 bytes takes"):
        build(STEP, grouped, TableCosts((), line=LinearPieces.of((0, 1e18, 0.0))), CPU)


def test_what_xla_computes_again_counts_as_part_of_what_runs_next() -> None:
    machine = replace(GPU, launch_ns=3)
    strategy = Strategy(buckets=SEPARATE)
    without = listed(build(STEP, strategy, COSTS, machine).problem)
    again = (Repeat((2,), (2,), before=5), Repeat((5,), (5,), before=-1))
    found = listed(build(STEP, strategy, COSTS, machine, repeats=again).problem)
    assert found.pop("n5")[0] == without.pop("n5")[0] + 10 + 3
    assert found.pop("n7")[0] == without.pop("n7")[0] + 20 + 3
    assert found == without


def test_a_gradient_that_xla_cuts_out_of_its_bucket_is_copied_before_its_first_reader() -> None:
    strategy, cut = Strategy(buckets=SEPARATE), (Repeat((), (STEP.collectives[0],), before=5),)
    copied_bytes = STEP.nodes[STEP.collectives[0]].shape.size_bytes
    shortest_ns = min(ns for ns in COSTS.op_ns(STEP).tolist() if ns)
    # No kernel is shorter than the shortest.
    for rate, copied_ns in ((1, 2000 * copied_bytes), (10**6, shortest_ns)):
        machine = replace(GPU, launch_ns=3, memory_bytes_per_us=rate)
        without = listed(build(STEP, strategy, COSTS, machine).problem)
        found = listed(build(STEP, strategy, COSTS, machine, repeats=cut).problem)
        assert found["n5"][0] == without["n5"][0] + copied_ns + 3


def test_what_a_loop_carries_lives_until_the_last_reader_of_its_member() -> None:
    """The loop n3 carries n1 and n2. Only n5, a reader of the second member, comes after n6."""
    text = "param\nexp 0\nneg 0\nwhile 1 2\nget-tuple-element 3\ndot 4\nexp 0\ntuple 5 6"
    step = graph_of(text, elements=None)
    carrying = replace(
        step,
        nodes=tuple(
            replace(node, shape=Shape("tuple", (), (), (step.nodes[1].shape, step.nodes[2].shape)))
            if node.opcode == "while"
            else node
            for node in step.nodes
        ),
        lies_in=((0,), (1,), (2,), (1, 2), (2,), (5,), (6,), (5, 6)),
    )
    order = ("n1", "n2", "n3", "n6", "n5")
    size = [node.shape.size_bytes for node in carrying.nodes]
    late = build(carrying, Strategy(order=order), COSTS, CPU).problem
    assert simulate(late).peak_bytes == size[0] + max(size[1] + size[2], size[2] + size[6] + size[5])


def test_an_asynchronous_start_allocates_what_it_writes_alone() -> None:
    """Its tuple names the buffer that it reads as well: here a slice of a large array."""
    step = graph_of("param\nexp 0\nasync-start 1\nasync-done 2\nneg 3\ntuple 4", elements=None)
    large, part = step.nodes[1].shape, step.nodes[3].shape
    nodes = [*step.nodes]
    nodes[2] = replace(nodes[2], shape=Shape("tuple", (), (), (large, part)))
    slicing = replace(step, nodes=tuple(nodes), lies_in=((0,), (1,), (1, 3), (3,), (4,), (4,)))
    peak = simulate(build(slicing, Strategy(), COSTS, CPU).problem).peak_bytes
    sizes = [node.shape.size_bytes for node in (step.nodes[0], step.nodes[1], step.nodes[3], step.nodes[4])]
    assert peak == sizes[0] + max(sizes[1] + sizes[2], sizes[2] + sizes[3])
