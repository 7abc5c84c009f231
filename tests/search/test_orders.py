"""What the search says of an order is what the simulator says of the strategy."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from disco_hlo.plan.order import check_order, unit_graph
from disco_hlo.plan.strategy import Strategy
from disco_hlo.search import layout as at
from disco_hlo.search.segments import new_segments, run_order
from disco_hlo.search.strategies import to_strategy
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate
from tests.machines import CPU, GPU
from tests.search.cost_models import HoldingCosts, TrafficCosts
from tests.search.random_steps import random_step
from tests.search.states import Bench

BUSY = replace(
    GPU, launch_ns=3, compute_speed_ppm=800_000, transfer_speed_ppm=900_000, memory_bytes_per_us=2000
)
MACHINES = [
    replace(CPU, launch_ns=2, memory_bytes_per_us=900),
    GPU,
    BUSY,
    replace(BUSY, channels=2),
    replace(BUSY, transfer_wait_ns=40),
    replace(BUSY, product_speed_ppm=300_000, other_speed_ppm=950_000),
]


def run(bench: Bench) -> tuple[int, Strategy]:
    """What the state's order takes, and the strategy with that order."""
    segments = new_segments(bench.step, bench.ranked, bench.machine)
    cost_ns, count = run_order(bench.step, bench.state, bench.scratch, segments)
    strategy = to_strategy(
        bench.graph, bench.step, bench.state, bench.kept, segments.started[:count], bench.machine.asynchronous
    )
    return int(cost_ns), strategy


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(8, 60),
    machine=st.sampled_from(MACHINES),
    costs=st.sampled_from([TrafficCosts(), HoldingCosts()]),
)
def test_an_order_takes_what_the_simulator_says(seed: int, count: int, machine, costs: TrafficCosts) -> None:
    random = Random(seed)
    graph = random_step(random, count, backend=machine.name)
    bench = Bench(graph, machine, costs)
    bench.random_moves(random, 2 * count)
    cost_ns, strategy = run(bench)
    units = unit_graph(graph, strategy)
    check_order(units, strategy.order, machine.asynchronous)
    # Moves by dice may leave an op that all its readers recompute: the state runs it, the strategy does not.
    assume(len(units.units) == bench.state.word[at.TOTAL, at.UNITS])
    assert simulate(build(graph, strategy, bench.model, machine).problem).makespan_ns == cost_ns


def test_an_op_that_all_its_readers_recompute_is_in_no_order() -> None:
    random, machine = Random(213), MACHINES[0]
    graph = random_step(random, 41, backend=machine.name)
    bench = Bench(graph, machine)
    bench.random_moves(random, 82)
    _, strategy = run(bench)
    units = unit_graph(graph, strategy)
    assert len(units.units) < bench.state.word[at.TOTAL, at.UNITS]
    check_order(units, strategy.order, machine.asynchronous)
