"""Whatever moves are made, the strategy stays one that XLA could execute, and can be undone."""

from __future__ import annotations

from random import Random

from disco_hlo.search import layout as at
from disco_hlo.search.entries import undo
from disco_hlo.search.proposals import UNFUSE
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.plan.strategy import Group, Strategy
from tests.search.random_steps import random_step
from tests.search.states import MACHINES, Bench, check_consistent, check_legal, snapshot
from tests.search.steps import chain

SEEDS = st.integers(0, 2**32)
MACHINE = st.sampled_from(MACHINES)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 60), machine=MACHINE)
def test_any_sequence_of_moves_leaves_a_legal_strategy(seed: int, count: int, machine) -> None:
    random = Random(seed)
    bench = Bench(random_step(random, count, backend=machine.name), machine)
    bench.random_moves(random, 3 * count, methods=8)
    check_legal(bench)
    check_consistent(bench)


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 60))
def test_undoing_every_move_gives_the_start(seed: int, count: int) -> None:
    random = Random(seed)
    bench = Bench(random_step(random, count))
    bench.random_moves(random, count, methods=8)
    bench.scratch.number[at.LOGGED] = 0
    before = snapshot(bench)
    bench.random_moves(random, count, methods=8)
    undo(bench.step, bench.state, bench.scratch, 0)
    assert snapshot(bench) == before


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, count=st.integers(8, 60))
def test_a_refused_move_changes_nothing(seed: int, count: int) -> None:
    random = Random(seed)
    bench = Bench(random_step(random, count))
    bench.random_moves(random, count, methods=8)
    for _ in range(count):
        method = random.randrange(8)
        before, logged = snapshot(bench), int(bench.scratch.number[at.LOGGED])
        if not bench.move(method, *bench.random_arguments(random, method)):
            assert snapshot(bench) == before
            assert bench.scratch.number[at.LOGGED] == logged
            assert bench.scratch.number[at.CHANGES] == 0
        bench.costs.price_changed(bench.state, bench.scratch)


def test_an_op_taken_out_makes_what_it_reads_a_result_of_a_third_kernel() -> None:
    # 2 is recomputed by the second group, and no result of the first until 3 stands alone.
    graph = chain("param\nnegate 0\nexponential 1\nnegate 2\nexponential 3\nnegate 2\ntuple 4 5")
    bench = Bench(graph, start=Strategy((Group((1, 2, 5)), Group((3, 4), (1, 2)))))
    assert bench.move(UNFUSE, 3, 3)
    bench.costs.price_changed(bench.state, bench.scratch)
    check_consistent(bench)
    check_legal(bench)


def test_a_kernel_is_judged_again_when_a_copy_elsewhere_no_longer_reads_it() -> None:
    # 4 is recomputed by both of its readers' groups; once 5 reads it from its owner, the copy of 3 that fed
    # it is dropped, and 3 has no reader outside its group left.
    graph = chain(
        "param\nnegate 0\nexponential 1\nnegate 2\nexponential 3\nnegate 4\nexponential 4\ntuple 5 6"
    )
    bench = Bench(graph, start=Strategy((Group((1, 2, 3, 4, 6)), Group((5,), (3, 4)))))
    assert bench.move(UNFUSE, 5, 4)
    bench.costs.price_changed(bench.state, bench.scratch)
    check_consistent(bench)
    check_legal(bench)
