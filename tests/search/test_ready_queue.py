"""The queue of the search is that of the slow simulator, and orders take as long as they say."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from disco_hlo.hlo.collectives import ALL_REDUCE
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.baselines import all_reduce_depths, unfused
from disco_hlo.search.explore import evaluate
from disco_hlo.search.hashing import new_table
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate
from tests.machines import CPU, GPU
from tests.search.cost_models import TrafficCosts
from tests.search.random_steps import random_step
from tests.search.states import Bench
from tests.search.steps import chain
from tests.simulator.reference import simulate_slowly

BUSY = replace(
    GPU, launch_ns=3, compute_speed_ppm=800_000, transfer_speed_ppm=900_000, memory_bytes_per_us=2000
)

WAITING = replace(BUSY, transfer_wait_ns=40)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(8, 50),
    machine=st.sampled_from([CPU, GPU, BUSY, WAITING, replace(WAITING, channels=2)]),
)
def test_the_queue_of_the_search_is_that_of_the_reference(seed: int, count: int, machine) -> None:
    random = Random(seed)
    bench = Bench(random_step(random, count, backend=machine.name), machine)
    bench.random_moves(random, count)
    built = build(bench.graph, bench.strategy(), bench.model, machine)
    if any(".unpack" in name for name in built.problem.names):
        return  # the search slices a bucket apart in one go
    assert bench.makespan_ns() == simulate_slowly(built.problem, ready_queue=True).now


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(8, 50), machine=st.sampled_from([GPU, BUSY, WAITING]))
def test_the_order_written_down_takes_as_long_as_the_queue(seed: int, count: int, machine) -> None:
    random = Random(seed)
    graph = random_step(random, count, backend="gpu")
    bench = Bench(graph, machine)
    bench.random_moves(random, count)
    built = build(graph, bench.strategy(), bench.model, machine)
    depths = all_reduce_depths(graph)
    if any(".unpack" in name for name in built.problem.names) or any(depths[x] for x in graph.all_reduces):
        return  # a transfer that waits for a transfer is issued by the device, after the op it is busy with
    assert bench.makespan_ns() == simulate(built.problem).makespan_ns


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(8, 50))
def test_where_collectives_block_the_cost_is_the_sum(seed: int, count: int) -> None:
    random = Random(seed)
    bench = Bench(random_step(random, count), replace(CPU, launch_ns=3, memory_bytes_per_us=2000))
    bench.random_moves(random, count)
    table = new_table(1)
    cost, _ = evaluate(bench.step, bench.state, bench.scratch, bench.progress, table, bench.started)
    assert cost == bench.makespan_ns()
    assert (
        cost == simulate(build(bench.graph, bench.strategy(), bench.model, bench.machine).problem).makespan_ns
    )


def test_a_gradient_travels_while_the_device_computes() -> None:
    # exp (8 elements: 32 + 8 ns) makes the gradient, dot works on meanwhile.
    graph = chain("param\nexponential 0\nall-reduce 1\ndot 0\nnegate 2\ntuple 3 4", backend="gpu")
    bench = Bench(graph, GPU)
    transfer = int(bench.model.collective(ALL_REDUCE)(np.array([32]))[0])
    assert transfer == 332
    assert bench.makespan_ns() == 40 + 332 + 40
    assert bench.strategy().order == ("n1", "b0.start", "n3", "b0.done", "n4")


def test_an_unfused_step_starts_with_the_smallest_node() -> None:
    graph = chain("param\nnegate 0\nexponential 0\nmultiply 1 2\ntuple 3")
    assert Bench(graph).strategy().order == ("n1", "n2", "n3")
    assert Bench(graph).strategy().buckets == unfused(graph).buckets == ()


@dataclass(frozen=True)
class _Times(TrafficCosts):
    """Of each node, ns; a transfer takes 2."""

    ns: tuple[int, ...] = ()
    line: LinearPieces = field(default_factory=lambda: LinearPieces.of((0, 0.0, 2.0)))

    def op_ns(self, graph: Graph) -> NDArray[np.int64]:
        return np.array(self.ns, np.int64)


def queued(text: str, *ns: int) -> tuple[int, tuple[str, ...]]:
    """Makespan and order of an unfused step by the ready queue."""
    bench = Bench(chain(text, backend="gpu"), GPU, _Times(ns=ns))
    return bench.makespan_ns(), bench.strategy().order


def test_what_became_ready_first_is_taken_first() -> None:
    # The reader 5 of the gradient is ready at 4, the dot 4 at 5.
    step = "param\ndot 0\nall-reduce 1\ndot 1\ndot 3\ndot 2\ntuple 4 5"
    assert queued(step, 0, 2, 0, 3, 3, 2, 0) == (10, ("n1", "b0.start", "n3", "b0.done", "n5", "n4"))


def test_gradients_are_reduced_in_the_order_in_which_they_are_produced() -> None:
    # Ids say 3 before 4, but the gradient of 4 is there first: 2 to 4, then 5 to 7.
    step = "param\ndot 0\ndot 1\nall-reduce 2\nall-reduce 1\ntuple 3 4"
    assert queued(step, 0, 2, 3, 0, 0, 0) == (7, ("n1", "b1.start", "n2", "b1.done", "b0.start", "b0.done"))


def test_what_becomes_ready_at_once_is_taken_by_node() -> None:
    # At 4 both the transfer and the dot 3 end.
    step = "param\ndot 0\nall-reduce 1\ndot 1\ndot 2\ndot 3\ntuple 4 5"
    assert queued(step, 0, 2, 0, 2, 1, 1, 0)[1][-2:] == ("n4", "n5")
