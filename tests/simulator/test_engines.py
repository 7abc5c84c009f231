"""The fast engines agree with the slow one, to the nanosecond."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disco_hlo.errors import DiscoError
from disco_hlo.simulator.costs import MAX_TOTAL
from disco_hlo.simulator.engine import STRIDE, evaluate, evaluate_move, new_memo, tables_of
from disco_hlo.simulator.problem import Problem
from disco_hlo.simulator.timeline import simulate
from tests.simulator.drawing import problem
from tests.simulator.random_problems import random_order, random_problem, with_durations
from tests.simulator.reference import peak_bytes_slowly, simulate_slowly, simulate_tick_by_tick

SEEDS = st.integers(0, 2**32)
CHANNELS = st.integers(0, 3)


@given(SEEDS, st.integers(1, 60), CHANNELS, st.booleans())
@settings(max_examples=400)
def test_engines_agree_with_the_reference(seed: int, tasks: int, channels: int, ordered: bool) -> None:
    posed = random_problem(seed, tasks, channels, ordered=ordered)
    timeline, slowly = simulate(posed), simulate_slowly(posed)
    assert timeline.spans_ns[0].tolist() == [slowly.start[task] for task in range(tasks)]
    assert timeline.spans_ns[1].tolist() == [slowly.end[task] for task in range(tasks)]
    assert timeline.makespan_ns == slowly.now == max(slowly.end.values())
    assert timeline.peak_bytes == peak_bytes_slowly(posed, slowly)
    if not ordered:
        assert list(timeline.started) == slowly.started


@given(SEEDS, st.integers(1, 12), CHANNELS, st.booleans())
@example(7, 12, 1, False)  # transfers without duration that a kernel holds
@example(65, 12, 1, True)
@settings(max_examples=60)
def test_the_reference_agrees_with_going_through_the_nanoseconds(
    seed: int, tasks: int, channels: int, ordered: bool
) -> None:
    posed = random_problem(seed, tasks, channels, ordered=ordered)
    posed = with_durations(posed, posed.duration_ns % 40)
    assert simulate_slowly(posed).end == simulate_tick_by_tick(posed)


def a_move(random: Random, posed: Problem) -> tuple[Problem, int, int]:
    """A legal order that differs in a short window, with other durations there; and the window."""
    assert posed.order is not None
    first = random.randrange(len(posed.order))
    last = min(len(posed.order) - 1, first + random.choice((0, 1, 5, 20, 90)))
    order, duration_ns = posed.order.copy(), posed.duration_ns.copy()
    source, target = random.randint(first, last), random.randint(first, last)
    entry = order[source]
    order = np.insert(np.delete(order, source), target, entry)
    for other in order[first : last + 1]:
        if other >= 0 and random.random() < 0.2:
            duration_ns[other] = random.randrange(2 * int(duration_ns[other]) + 2)
    try:
        return replace(with_durations(posed, duration_ns), order=order), first, last
    except DiscoError:  # an illegal order; the durations are enough of a move
        return with_durations(posed, duration_ns), first, last


@given(SEEDS, st.integers(STRIDE, 6 * STRIDE), CHANNELS)
@settings(max_examples=120)
def test_moves_evaluated_from_where_they_begin_agree_with_all_of_it(
    seed: int, tasks: int, channels: int
) -> None:
    random = Random(seed)
    posed = random_problem(seed, tasks, channels, ordered=True)
    memo, scratch, whole = new_memo(posed), new_memo(posed), new_memo(posed)
    evaluate(posed.order, tables_of(posed), memo)
    before = [array.copy() for array in memo]
    for _ in range(20):
        moved, first, last = a_move(random, posed)
        expected = evaluate(moved.order, tables_of(moved), whole)
        assert evaluate_move(moved.order, first, last, tables_of(moved), memo, scratch) == expected
    for array, kept in zip(memo, before, strict=True):
        np.testing.assert_array_equal(array, kept)


def test_a_move_that_changes_nothing_stops_at_the_next_saved_state() -> None:
    posed = random_problem(7, 5 * STRIDE, 1, ordered=True)
    memo, scratch = new_memo(posed), new_memo(posed)
    makespan = evaluate(posed.order, tables_of(posed), memo)
    scratch.spans_ns[:] = -1
    assert evaluate_move(posed.order, 70, 75, tables_of(posed), memo, scratch) == makespan
    assert posed.order is not None
    seen = {int(entry) for entry in posed.order[STRIDE : 2 * STRIDE] if entry >= 0}
    assert {*np.flatnonzero(scratch.spans_ns[1] >= 0).tolist()} <= {
        *seen,
        *(int(entry) for entry in posed.order[: 2 * STRIDE] if entry >= 0 and posed.resource[entry]),
    }


@numba.njit
def best_place_of_a_wait(order, tables, memo, scratch, at):  # type: ignore[no-untyped-def]
    """A search in miniature: let a wait change places with what follows, but the last, while that helps."""
    best = evaluate(order, tables, memo)
    while at + 2 < order.size:
        order[at], order[at + 1] = order[at + 1], order[at]
        makespan = evaluate_move(order, at, at + 1, tables, memo, scratch)
        if makespan >= best:
            order[at], order[at + 1] = order[at + 1], order[at]
            return best
        best = evaluate(order, tables, memo)
        at += 1
    return best


def test_the_engine_can_be_called_from_compiled_functions() -> None:
    posed = problem("a 2\nx 7 on 1 after a\nb 3\nc 3\nd 3 after x", "a x ~x b c d")
    assert posed.order is not None
    order, memo, scratch = posed.order.copy(), new_memo(posed), new_memo(posed)
    assert best_place_of_a_wait(order, tables_of(posed), memo, scratch, 2) == 2 + 7 + 3
    assert order.tolist() == [0, 1, 2, 3, ~1, 4]


def long_step(tasks: str, begin: str) -> Problem:
    """A step that begins as given, computes 200 times 10 ns, and then waits for z, x and y."""
    many = [f"t{i}" for i in range(200)]
    lines = [*tasks.split(", "), "u 700", *(f"{name} 10" for name in many)]
    return problem("\n".join(lines), " ".join([begin, *many, "~z ~x u ~y"]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The longer a is, the less is left of z at every later place.
        (
            ("a 10, z 3000 on 1, x 1 on 1, y 1 on 1", "z a x y"),
            ("a 500, z 3000 on 1, x 1 on 1, y 1 on 1", "z a x y"),
        ),
        # As many transfers of the same length queue behind z, in another order.
        (
            ("z 3000 on 1, x 1500 on 1, y 1500 on 1", "z x y"),
            ("z 3000 on 1, x 1500 on 1, y 1500 on 1", "z y x"),
        ),
        # The same transfers in the same order, but one that has not begun takes longer.
        (
            ("z 3000 on 1, x 1000 on 1, y 2000 on 1", "z x y"),
            ("z 3000 on 1, x 1000 on 1, y 4000 on 1", "z x y"),
        ),
    ],
    ids=["other work left", "other queue", "other durations queued"],
)
def test_a_move_is_followed_to_the_end_where_channels_differ(
    old: tuple[str, str], new: tuple[str, str]
) -> None:
    posed, moved = long_step(*old), long_step(*new)
    memo, scratch = new_memo(posed), new_memo(posed)
    evaluate(posed.order, tables_of(posed), memo)
    makespan = evaluate_move(moved.order, 0, 3, tables_of(moved), memo, scratch)
    assert makespan == simulate_slowly(moved).now


def test_a_transfer_that_did_nothing_yet_is_not_one_with_as_much_left() -> None:
    """At the 64th entry 13 ns are left of x: 10 and the wait of 3, of which the stream's own wait relieves it, or 13
    of 13 and a wait, 3 being done."""
    many = [f"t{i}" for i in range(62)]
    lines = "\n".join([*(f"{name} 10" for name in many), "a 3", "x {} on 1", "u 1 after x"])
    posed = problem(lines.format(10), " ".join([*many, "a x ~x u"]), wait_ns=3)
    moved = problem(lines.format(13), " ".join([*many, "x a ~x u"]), wait_ns=3)
    memo, scratch = new_memo(posed), new_memo(posed)
    assert evaluate(posed.order, tables_of(posed), memo) == 620 + 3 + 10 + 1
    assert evaluate_move(moved.order, 62, 63, tables_of(moved), memo, scratch) == 620 + 3 + 13 + 1


def test_a_memo_can_be_used_for_one_order_after_another() -> None:
    posed = random_problem(3, 200, 2, ordered=True)
    memo = new_memo(posed)
    for seed in range(5):
        other = replace(posed, order=random_order(Random(seed), posed))
        assert evaluate(other.order, tables_of(other), memo) == simulate_slowly(other).now


@given(SEEDS, st.integers(1, 40), CHANNELS, st.booleans())
@settings(max_examples=100)
def test_a_timeline_adds_up(seed: int, tasks: int, channels: int, ordered: bool) -> None:
    posed = random_problem(seed, tasks, channels, ordered=ordered)
    timeline = simulate(posed)
    assert timeline.makespan_ns == timeline.compute_ns + timeline.exposed_ns
    work_ns = posed.duration_ns.sum() + posed.transfer_wait_ns * np.count_nonzero(posed.resource)
    assert timeline.makespan_ns <= 10 * work_ns + tasks
    assert 0 <= timeline.overlap_ns <= min(timeline.compute_ns, timeline.communication_ns)
    for resource in range(channels + 1):
        spans = timeline.spans(resource)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
    for task in range(tasks):
        for earlier in posed.predecessors[task]:
            assert timeline.spans_ns[1, earlier] <= timeline.spans_ns[0, task]


@pytest.mark.parametrize("ordered", [True, False])
def test_the_longest_step_that_is_allowed_stays_exact(ordered: bool) -> None:
    posed = random_problem(11, 30, 1, ordered=ordered)
    on_channel = posed.resource > 0
    tenth = [1_000_000, 100_000]
    full = [1_000_000] * 2
    for slow in ([tenth, full, tenth, tenth], [tenth, full, full, tenth]):
        for long, rest in ((~on_channel, 1), (on_channel, 1), (on_channel | ~on_channel, 0)):
            waits_ns = posed.transfer_wait_ns * on_channel.sum()
            each = (MAX_TOTAL - 30 - waits_ns) // long.sum()
            longest = with_durations(posed, np.where(long, each, rest).astype(np.int64))
            longest = replace(longest, speed_ppm=np.array(slow, np.int64))
            assert simulate(longest).makespan_ns == simulate_slowly(longest).now
