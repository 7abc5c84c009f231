"""What the search takes a state to cost is what the simulator says of it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.hlo.collectives import ALL_REDUCE, CollectiveKind
from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.plan.variants import one_bucket, unfused
from disco_hlo.search import layout as at
from disco_hlo.search.climb import MOST_DRAWS, Climber
from disco_hlo.search.restart import KERNEL_MOVES
from disco_hlo.search.strategies import prepare
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate
from tests.graphs import graph_of
from tests.machines import GPU
from tests.search.cost_models import LookingCosts, TrafficCosts
from tests.search.states import Bench
from tests.search.steps import random_step

MACHINE = replace(GPU, launch_ns=3, memory_bytes_per_us=2000)
SEEDS = st.integers(0, 2**32)


def climbed(seed: int, count: int) -> Climber:
    """A state with kernels that nobody chose, priced by who made what they read."""
    graph = random_step(Random(seed), count, backend="gpu")
    climber = Climber(graph, LookingCosts(), MACHINE, prepare(graph, [unfused(graph)]), 0, seed)
    climber.climb(KERNEL_MOVES, 2000, 1000, ordered=False)
    return climber


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, count=st.integers(20, 80))
def test_kernels_alike_that_read_what_others_made_have_prices_of_their_own(seed: int, count: int) -> None:
    climber = climbed(seed, count)
    strategy = climber.strategy(climber.state)
    built = build(climber.graph, strategy, climber.model, MACHINE)
    assert simulate(built.problem).makespan_ns == climber.makespan_ns()


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_the_longer_a_unit_takes_the_more_often_it_is_drawn(seed: int) -> None:
    climber = climbed(seed, 60)
    climber.draw_by_time()
    ops, draws = np.unique(climber.pools[0], return_counts=True)
    assert ops.tolist() == climber.fusible.tolist()
    assert draws.max() <= MOST_DRAWS
    times_ns = climber.state.times[climber.state.word[at.OWNER, ops], at.MAIN]
    by_time = draws[np.argsort(times_ns, kind="stable")]
    assert (np.diff(by_time) >= 0).all()
    climber.draw_alike()
    assert climber.pools[0].tolist() == climber.fusible.tolist()


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_the_buckets_of_the_start_can_be_had_again(seed: int) -> None:
    graph = random_step(Random(seed), 60, backend="gpu")
    climber = Climber(graph, LookingCosts(), MACHINE, prepare(graph, [unfused(graph)]), 0, seed)
    ranked = climber.pools[1]
    given_to = climber.state.word[at.OWNER, ranked].tolist()
    climber.reschedule()
    climber.take_given_buckets()
    assert climber.state.word[at.OWNER, ranked].tolist() == given_to
    strategy = climber.strategy(climber.state)
    built = build(climber.graph, strategy, climber.model, MACHINE)
    assert simulate(built.problem).makespan_ns == climber.makespan_ns()


class SlowSums(TrafficCosts):
    """All-reduces, over another link, take twenty times as long by the byte as all-gathers."""

    def collective(self, kind: CollectiveKind) -> LinearPieces:
        return LinearPieces.of((0, 20.0 if kind == ALL_REDUCE else 1.0, 100.0))


def test_a_bucket_copies_its_own_bytes_whatever_it_counts_as_on_a_line_of_another_kind() -> None:
    """A sum of 32 bytes takes as long as a gather of 640."""
    text = "param\ndot 0\ndot 1\nall-reduce 1\nall-reduce 2\ngather 1\ngather 2\ngather 0\ntuple 3 4 5 6 7"
    whole, machine = graph_of(text, backend="gpu"), replace(MACHINE, memory_bytes_per_us=20)
    nodes = [
        replace(node, opcode="all-gather", kind=Kind.COLLECTIVE, collective="gather")
        if node.opcode == "gather"
        else node
        for node in whole.nodes
    ]
    graph = replace(whole, nodes=tuple(nodes))
    built = build(graph, one_bucket(graph), SlowSums(), machine)
    tasks = dict(zip(built.problem.names, built.problem.duration_ns.tolist(), strict=True))
    assert (tasks["b1.pack"], tasks["b1"]) == (machine.copy_ns(2 * 32), 100 + 2 * 640)
    bench = Bench(graph, machine, SlowSums(), one_bucket(graph))
    assert bench.state.times[3, [at.PACK, at.MAIN]].tolist() == [tasks["b1.pack"], tasks["b1"]]


class Fractions(TrafficCosts):
    """Times that are no whole nanoseconds."""

    def op_ns(self, graph: Graph) -> np.ndarray:
        return super().op_ns(graph) + 0.7


def test_fractions_of_a_nanosecond_are_rounded_as_the_simulator_does() -> None:
    """They were cut off, and two kernels of a search took two nanoseconds less than it predicted."""
    graph = graph_of("param\ndot 0\ndot 1\ntuple 2", backend="gpu")
    bench = Bench(graph, GPU, Fractions())
    built = build(graph, unfused(graph), Fractions(), GPU)
    assert int(bench.state.word[at.TOTAL, at.COMPUTE_NS]) == simulate(built.problem).makespan_ns
