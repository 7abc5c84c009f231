"""What the search says of an order is what the simulator says; sums that follow a state's changes say it sooner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.hlo.graph import Kind
from disco_hlo.plan.legal import check_order
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.search import layout as at
from disco_hlo.search.moves.table import MOVES
from disco_hlo.search.segments import ORDER_DIGEST, Segments, new_segments, run_order
from disco_hlo.search.strategies import to_strategy
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import PPM, MachineModel
from disco_hlo.simulator.timeline import simulate
from tests.graphs import graph_of
from tests.machines import CPU, GPU
from tests.search.cost_models import HoldingCosts, HoldingDots, TrafficCosts
from tests.search.states import FUSE, REORDER, Bench, count_order, moved, recount_order, undo
from tests.search.steps import random_step

SEEDS = st.integers(0, 2**32)
ALONE = replace(GPU, launch_ns=3, memory_bytes_per_us=2000)
MACHINES = [
    replace(ALONE, compute_speed_ppm=speed, transfer_speed_ppm=900_000, transfer_wait_ns=wait)
    for speed in (PPM, 870_000) for wait in (0, 25)
]  # fmt: skip
FAST_LINK = TrafficCosts(LinearPieces.of((0, 0.02, 30.0)))


class Followed:
    """A bench whose order is followed by sums and run by the engine."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.segments = self.fresh()
        self.count(self.segments)

    def fresh(self) -> Segments:
        return new_segments(self.bench.step, self.bench.ranked, self.bench.machine)

    def count(self, segments: Segments) -> int:
        return int(count_order(self.bench.step, self.bench.state, self.bench.scratch, segments))

    def follow(self, mark: int) -> int:
        bench = self.bench
        return int(recount_order(bench.step, bench.state, bench.scratch, self.segments, mark))

    def engine_ns(self) -> int:
        bench = self.bench
        return int(run_order(bench.step, bench.state, bench.scratch, self.segments)[0])

    def sums(self, segments: Segments) -> tuple[object, ...]:
        return segments.slot[:, :-1].tolist(), segments.block.tolist(), int(segments.number[ORDER_DIGEST])

    def check(self, found_ns: int) -> None:
        """What was followed is what a count from nothing gives, and what the engine says."""
        bench, other = self.bench, self.fresh()
        assert self.count(other) == found_ns
        assert self.sums(self.segments) == self.sums(other)
        units, engine_ns = int(bench.state.word[at.TOTAL, at.UNITS]), self.engine_ns()
        machine = bench.machine
        if machine.compute_speed_ppm == PPM:
            assert found_ns == engine_ns
        if machine.transfer_wait_ns:  # a nanosecond may decide whether a transfer has it
            units += 2 * machine.transfer_wait_ns * bench.ranked.size
        assert abs(engine_ns - found_ns) <= units
        if not machine.transfer_wait_ns:
            assert found_ns <= engine_ns


def followed_moves(followed: Followed, random: Random, count: int) -> Iterator[int]:
    """Makes random moves, each priced; the mark in the log before each one made."""
    bench = followed.bench
    for _ in range(count):
        mark, method = int(bench.scratch.number[at.LOGGED]), random.randrange(len(MOVES))
        if bench.move(method, *bench.random_arguments(random, method)):
            bench.costs.price_changed(bench.state, bench.scratch)
            yield mark


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 90), machine=st.sampled_from(MACHINES), fast=st.booleans())
def test_sums_follow_every_move_and_every_undo(
    seed: int, count: int, machine: MachineModel, fast: bool
) -> None:
    bench, random = moved(seed, count, machine, FAST_LINK if fast else TrafficCosts(), moves=0)
    followed = Followed(bench)
    for mark in followed_moves(followed, random, 2 * count):
        followed.check(followed.follow(mark))
        if random.random() < 0.4:
            undo(bench.step, bench.state, bench.scratch, mark)
            followed.check(followed.follow(mark))
    undo(bench.step, bench.state, bench.scratch, 0)
    followed.check(followed.follow(0))


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 60))
def test_where_transfers_block_everything_adds_up(seed: int, count: int) -> None:
    bench, random = moved(seed, count, replace(CPU, launch_ns=2), moves=0)
    followed = Followed(bench)
    for mark in followed_moves(followed, random, count):
        total = followed.bench.state.word[at.TOTAL]
        assert followed.follow(mark) == total[at.COMPUTE_NS] == followed.engine_ns()


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 60))
def test_the_digest_tells_orders_apart_and_nothing_else(seed: int, count: int) -> None:
    bench, random = moved(seed, count, ALONE, moves=0)
    followed, orders = Followed(bench), {}
    for _ in range(4 * count):
        mark, head = int(bench.scratch.number[at.LOGGED]), random.choice(bench.heads())
        if bench.move(REORDER, head, random.randrange(count)):
            followed.follow(mark)
        digest = int(followed.segments.number[ORDER_DIGEST])
        order = tuple(x for x in bench.state.word[at.ORDER].tolist() if x != -1)
        assert orders.setdefault(digest, order) == order
    assert len({*orders.values()}) == len(orders)


def test_long_runs_of_kernels_are_added_up_by_blocks() -> None:
    # 400 kernels, and a transfer of the last parameter's gradient that is issued first and awaited last.
    kernels = "\n".join(f"negate {i}" for i in [0, *range(3, 402)])
    graph = graph_of(f"param\nnegate 0\nall-reduce 1\n{kernels}\nadd 402 2\ntuple 403", backend="gpu")
    followed = Followed(Bench(graph, ALONE))
    state, mark = followed.bench.state, int(followed.bench.scratch.number[at.LOGGED])
    negate_ns, add_ns = (int(state.times[x, at.MAIN]) for x in (1, 403))
    transfer_ns = int(state.times[2, at.MAIN])
    assert transfer_ns < 400 * negate_ns
    followed.check(401 * negate_ns + add_ns)
    assert followed.bench.move(FUSE, 403, 402)
    followed.bench.costs.price_changed(state, followed.bench.scratch)
    followed.check(followed.follow(mark))
    assert followed.engine_ns() == 400 * negate_ns + int(state.times[402, at.MAIN])


def test_kernels_beside_a_transfer_are_rounded_up_together() -> None:
    # Kernels of 43 ns: one, then a transfer of 200 ns beside the first of four more, at 0.7 of their speed.
    # The engine ends them at 105, 167, 229 and, 9.8 ns being done when the transfer ends at 243, at 277.
    # Together 140 of their 172 ns are done by then.
    graph = graph_of(
        "param\nnegate 0\nall-reduce 1\nnegate 0\nnegate 3\nnegate 4\nnegate 5\ntuple 2 6", backend="gpu"
    )
    costs = TrafficCosts(LinearPieces.of((0, 0.0, 200.0)))
    contended = Followed(Bench(graph, replace(ALONE, compute_speed_ppm=700_000), costs))
    assert (contended.engine_ns(), contended.follow(0)) == (277, 275)
    free = Followed(Bench(graph, ALONE, costs))
    assert free.engine_ns() == free.follow(0) == 243


def holding(product_ppm: int, compute_ppm: int = PPM, **more: int) -> Followed:
    """43 ns in front of a transfer of 100; beside it a product of 43, of which 20 hold it, and two more of 43."""
    graph = graph_of("param\nnegate 0\nall-reduce 1\ndot 0\nnegate 3\nnegate 4\ntuple 2 5", backend="gpu")
    machine = replace(ALONE, product_speed_ppm=product_ppm, compute_speed_ppm=compute_ppm, **more)
    return Followed(Bench(graph, machine, HoldingDots(LinearPieces.of((0, 0.0, 100.0)))))


def test_a_product_that_holds_a_transfer_is_charged_for_it_once_and_goes_at_full_speed() -> None:
    # The transfer begins at 63 and ends at 163, before the third kernel behind it does, at 172.
    free = holding(PPM)
    assert free.engine_ns() == free.follow(0) == 4 * 43
    # The product would have lost 20 * 0.5, on half of the devices.
    paying = holding(500_000)
    assert paying.engine_ns() == paying.follow(0) == 4 * 43 + 5
    # Where the others lose, too, they run from 91 on at 0.8 of their speed; 28.4 of 86 are left at 163.
    slowed = holding(500_000, 800_000)
    assert slowed.engine_ns() == slowed.follow(0) == 163 + 29


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 60), wait=st.sampled_from((0, 25)))
def test_one_transfer_is_held_as_in_the_engine(seed: int, count: int, wait: int) -> None:
    random = Random(seed)
    step = random_step(random, count, backend="gpu")
    gradients = step.collectives
    nodes = tuple(
        replace(node, kind=Kind.FUSIBLE, opcode="negate", collective="") if node.id in gradients[1:] else node
        for node in step.nodes
    )
    costs = HoldingCosts(LinearPieces.of((0, 0.02, 30.0)))
    machine = replace(ALONE, transfer_speed_ppm=900_000, transfer_wait_ns=wait)
    followed = Followed(Bench(replace(step, nodes=nodes), machine, costs))
    for mark in followed_moves(followed, random, count):
        assert followed.follow(mark) == followed.engine_ns()


def test_a_slot_changed_among_holes_leaves_the_digest() -> None:
    # 1 and 2 became one unit, which stands at 2's slot; 1's is a hole, and moving there passes nobody.
    followed = Followed(
        Bench(graph_of("param\nnegate 0\nexponential 1\nnegate 2\ntuple 3", backend="gpu"), ALONE)
    )
    bench = followed.bench
    assert bench.move(FUSE, 2, 1)
    bench.costs.price_changed(bench.state, bench.scratch)
    followed.follow(0)
    digest, mark = int(followed.segments.number[ORDER_DIGEST]), int(bench.scratch.number[at.LOGGED])
    assert bench.state.word[at.ORDER, :3].tolist() == [-1, 1, 3]
    assert bench.move(REORDER, 1, 0)
    followed.follow(mark)
    assert int(followed.segments.number[ORDER_DIGEST]) == digest


BUSY = replace(
    GPU, launch_ns=3, compute_speed_ppm=800_000, transfer_speed_ppm=900_000, memory_bytes_per_us=2000
)
ORDERED_MACHINES = [
    replace(CPU, launch_ns=2, memory_bytes_per_us=900),
    GPU,
    BUSY,
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


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(8, 60),
    machine=st.sampled_from(ORDERED_MACHINES),
    costs=st.sampled_from([TrafficCosts(), HoldingCosts()]),
)
def test_an_order_takes_what_the_simulator_says(seed: int, count: int, machine, costs: TrafficCosts) -> None:
    bench, _ = moved(seed, count, machine, costs, moves=2 * count)
    graph = bench.graph
    cost_ns, strategy = run(bench)
    units = unit_graph(graph, strategy)
    check_order(units, strategy.order, machine.asynchronous)
    # Moves by dice may leave an op that all its readers recompute: the state runs it, the strategy does not.
    assume(len(units.units) == bench.state.word[at.TOTAL, at.UNITS])
    assert simulate(build(graph, strategy, bench.model, machine).problem).makespan_ns == cost_ns


def test_an_op_that_all_its_readers_recompute_is_in_no_order() -> None:
    machine = ORDERED_MACHINES[0]
    bench, _ = moved(213, 41, machine, moves=82)
    _, strategy = run(bench)
    units = unit_graph(bench.graph, strategy)
    assert len(units.units) < bench.state.word[at.TOTAL, at.UNITS]
    check_order(units, strategy.order, machine.asynchronous)
