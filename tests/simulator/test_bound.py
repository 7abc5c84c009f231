"""The bound, and that nothing is ever below it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.hlo.cost_model import LinearPieces
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.simulator.bound import Bound, bound, least_communication_ns, tight_bound_ns
from disco_hlo.simulator.build import build
from disco_hlo.simulator.timeline import simulate
from tests.machines import CPU, GPU
from tests.simulator.problems import problem
from tests.simulator.random_steps import HoldingCosts, random_step, random_strategy

# Before x lie a, before y lie a and b; after x comes u, after y come v and u.
STEP = """
    a 3
    b 4 after a
    c 2 after b
    x 5 on 1 after a
    y 5 on 1 after b
    v 1 after y
    u 6 after x v
"""
LINE = LinearPieces.of((0, 2.0, 10.0))


def test_parts_of_the_bound() -> None:
    found = bound(problem(STEP), communication_ns=20, overlaps=True)
    assert found == Bound(compute_ns=16, before_ns=3, communication_ns=20, after_ns=6, overlaps=True)
    assert (found.makespan_ns, found.full_overlap_ns) == (3 + 20 + 6, 20)
    assert bound(problem(STEP), communication_ns=2, overlaps=True).makespan_ns == 16, "compute alone"
    blocking = bound(problem(STEP), communication_ns=20, overlaps=False)
    assert (blocking.makespan_ns, blocking.full_overlap_ns) == (36, 20), (
        "nothing hides where collectives block"
    )
    assert bound(problem("a 3\nb 4"), 0, True) == Bound(7, 0, 0, 0, True)


def test_what_starts_late_takes_its_time_behind_that() -> None:
    # Both: 3 of compute, 210 on the link, and u (6) behind. With x of one byte, y alone: 7, 110, v and u (7).
    assert tight_bound_ns(problem(STEP), [50, 50], LINE, GPU) == pytest.approx(3 + 210 + 6, abs=1)
    assert tight_bound_ns(problem(STEP), [1, 50], LINE, GPU) == pytest.approx(7 + 110 + 7, abs=1)


def test_a_late_gradient_that_travels_with_an_early_one_may_be_faster_for_it() -> None:
    # From 60 bytes on an all-reduce takes 1 ns: y is best carried together with x, and compute is the bound.
    pieces = LinearPieces.of((0, 2.0, 10.0), (60, 0.0, 1.0))
    assert tight_bound_ns(problem(STEP), [50, 50], pieces, GPU) == 16


def test_what_runs_beside_transfers_holds_them_up() -> None:
    # Of 16, 3 come before and 6 behind; 7 run beside transfers of 210, which do half their work in 7 / 0.8.
    slow = replace(GPU, compute_speed_ppm=800_000, transfer_speed_ppm=500_000)
    assert tight_bound_ns(problem(STEP), [50, 50], LINE, slow) == pytest.approx(3 + 210 + 6 + 4, abs=1)
    # Where a transfer beside compute all but stands still, the 7 cost themselves: no plan must run both at once.
    slower = replace(slow, transfer_speed_ppm=100_000)
    assert tight_bound_ns(problem(STEP), [50, 50], LINE, slower) == pytest.approx(3 + 210 + 6 + 7, abs=1)


def test_what_is_hidden_slows_the_compute_down() -> None:
    # Compute of 16, and a transfer of 7 beside which it loses half its speed.
    short, slow = LinearPieces.of((0, 2.0, 3.0)), replace(GPU, compute_speed_ppm=500_000)
    assert tight_bound_ns(problem(STEP), [1, 1], short, slow) == pytest.approx(16 + 3, abs=1)


def test_an_early_transfer_slows_what_computes_beside_it_or_comes_behind() -> None:
    # y takes 110 behind a and b; x takes 100, beside b, which loses half its speed meanwhile: 50.
    early = "a 3\nb 400 after a\nx 5 on 1 after a\ny 5 on 1 after b\nu 6 after x y"
    half = replace(GPU, compute_speed_ppm=500_000)
    assert tight_bound_ns(problem(early), [50, 50], LINE, half) == pytest.approx(403 + 110 + 6 + 50, abs=1)
    # With all but no speed beside it, x comes behind y: 100.
    still = replace(GPU, compute_speed_ppm=100_000, transfer_speed_ppm=900_000)
    assert tight_bound_ns(problem(early), [50, 50], LINE, still) == pytest.approx(403 + 110 + 6 + 100, abs=1)


def test_what_is_computed_for_an_early_transfer_alone_delays_the_late_ones() -> None:
    # w (30) could run beside y, but then x would come behind it: in front of b it costs itself.
    early = "a 3\nw 30 after a\nb 400 after a\nx 5 on 1 after w\ny 5 on 1 after b\nu 6 after x y"
    assert tight_bound_ns(problem(early), [50, 50], LINE, GPU) == pytest.approx(403 + 110 + 6 + 30, abs=1)
    # x takes 20: less than w.
    assert tight_bound_ns(problem(early), [10, 50], LINE, GPU) == pytest.approx(403 + 110 + 6 + 20, abs=1)


def test_a_product_that_holds_a_transfer_saves_what_it_loses_to_others() -> None:
    # p holds x for 4 ns and pays 1 for it; the 80 ns that x takes at half speed, from 5 on, lie beside the rest of p.
    # Before p or behind it x takes 40 ns of its own; beside p from p's beginning it would cost p 40.
    step = "a 1\nx 40 on 1 after a\np 100 after a\nb 1 after x p"
    order = "a p x ~x b", "a x p ~x b", "a x ~x p b"
    drawn = [
        problem(step, one, compute_speed=0.5, product_speed=0.5, transfer_speed=0.5, holds="p4")
        for one in order
    ]
    assert [simulate(one).makespan_ns for one in drawn] == [142, 103, 142]
    half = replace(GPU, compute_speed_ppm=500_000, transfer_speed_ppm=500_000)
    line = LinearPieces.of((0, 0.0, 40.0))
    assert tight_bound_ns(drawn[0], [1], line, half) == pytest.approx(102, abs=1)
    # One that holds nothing saves nothing.
    held_by_none = replace(drawn[0], hold_ns=0 * drawn[0].hold_ns)
    assert tight_bound_ns(held_by_none, [1], line, half) == pytest.approx(142, abs=1)


def test_products_that_run_before_or_behind_all_transfers_save_nothing() -> None:
    half = replace(GPU, compute_speed_ppm=500_000, transfer_speed_ppm=500_000)
    line = LinearPieces.of((0, 0.0, 40.0))
    for step, order in (
        ("p 100\na 1 after p\nx 40 on 1 after a\nc 100 after a\nb 1 after x c", "p a x c ~x b"),
        ("a 1\nx 40 on 1 after a\nc 100 after a\nb 1 after x c\np 100 after b", "a x c ~x b p"),
    ):
        posed = problem(step, order, compute_speed=0.5, transfer_speed=0.5, holds="p4")
        found = tight_bound_ns(posed, [1], line, half)
        assert found == tight_bound_ns(replace(posed, hold_ns=0 * posed.hold_ns), [1], line, half)
        assert found == pytest.approx(simulate(posed).makespan_ns, abs=2)


def test_one_bucket_is_the_least_on_one_line_and_small_ones_may_be_where_they_take_another_algorithm() -> (
    None
):
    assert least_communication_ns([100, 300], LINE) == pytest.approx(2 * 400 + 10, abs=1)
    # Up to 99 bytes cost 1 ns per byte, more cost 3: ten times 40 are best left alone.
    pieces = LinearPieces.of((0, 1.0, 0.0), (100, 3.0, 50.0))
    assert 385 <= least_communication_ns([40] * 10, pieces) <= 400


@given(st.integers(0, 2**32), st.integers(2, 30))
@settings(max_examples=120)
def test_no_simulated_step_is_below_the_bound(seed: int, nodes: int) -> None:
    random = Random(seed)
    step, table = random_step(random, nodes, dots=random.choice((0, 8)))
    machine = replace(
        random.choice((CPU, GPU)),
        launch_ns=random.choice((0, 2)),
        memory_bytes_per_us=random.choice((0, 9000)),
        compute_speed_ppm=random.choice((1_000_000, 700_000)),
        transfer_speed_ppm=random.choice((1_000_000, 600_000, 200_000)),
        transfer_wait_ns=random.choice((0, 3, 40)),
        product_speed_ppm=random.choice((0, 300_000, 1_000_000)),
        other_speed_ppm=random.choice((0, 900_000)),
    )
    pieces = random.choice(
        (
            LinearPieces.of((0, 1.0, 5.0)),
            LinearPieces.of((0, 0.4, 0.3), (50, 3.3, 20.0)),
            LinearPieces.of((0, 2.0, 0.0), (40, 0.1, 70.0), (90, 0.5, 33.3)),
        )
    )
    shares = random.choice(((0.0,), (0.0, 0.1, 0.5, 0.9, 1.0), tuple(random.random() for _ in range(nodes))))
    costs = HoldingCosts(table.table_ns, shares, line=pieces)
    groups = random_strategy(random, step, asynchronous=machine.asynchronous).groups
    apart = Strategy(groups, tuple(Bucket((node,)) for node in step.collectives))
    sizes = [step.nodes[node].shape.size_bytes for node in step.collectives]
    least = least_communication_ns(sizes, pieces)
    built = build(step, apart, costs, machine)
    found = bound(built.problem, least, machine.asynchronous)
    if machine.asynchronous:
        moved = [
            sum(step.nodes[node].shape.size_bytes for node in built.units.units[built.unit_of[task]].nodes)
            for task in built.problem.communicates.nonzero()[0]
        ]
        found = replace(found, tight_ns=tight_bound_ns(built.problem, moved, pieces, machine))
    for _ in range(4):
        strategy = random_strategy(random, step, asynchronous=machine.asynchronous, groups=groups)
        built = build(step, strategy, costs, machine)
        assert found.makespan_ns <= simulate(built.problem).makespan_ns
