"""The fast engine agrees with the slow one, to the nanosecond."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disco_hlo.simulator.contention import new_progress
from disco_hlo.simulator.costs import MAX_TOTAL, Pace
from disco_hlo.simulator.timeline import evaluate, simulate
from tests.simulator.random_problems import random_order, random_problem, with_durations
from tests.simulator.reference import peak_bytes_slowly, simulate_slowly, simulate_tick_by_tick

SEEDS = st.integers(0, 2**32)
CHANNELS = st.integers(0, 3)


@given(SEEDS, st.integers(1, 60), CHANNELS)
@settings(max_examples=300)
def test_the_engine_agrees_with_the_reference(seed: int, tasks: int, channels: int) -> None:
    posed = random_problem(seed, tasks, channels)
    timeline, slowly = simulate(posed), simulate_slowly(posed)
    assert timeline.spans_ns[0].tolist() == [slowly.start[task] for task in range(tasks)]
    assert timeline.spans_ns[1].tolist() == [slowly.end[task] for task in range(tasks)]
    assert timeline.makespan_ns == slowly.now == max(slowly.end.values())
    assert timeline.peak_bytes == peak_bytes_slowly(posed)


@given(SEEDS, st.integers(1, 12), CHANNELS, st.booleans())
@example(7, 12, 1, True)  # transfers without duration that a kernel holds
@example(65, 12, 1, False)
@settings(max_examples=60)
def test_the_reference_agrees_with_going_through_the_nanoseconds(
    seed: int, tasks: int, channels: int, ready_queue: bool
) -> None:
    posed = random_problem(seed, tasks, channels)
    posed = with_durations(posed, posed.duration_ns % 40)
    expected = simulate_tick_by_tick(posed, ready_queue=ready_queue)
    assert simulate_slowly(posed, ready_queue=ready_queue).end == expected


def test_progress_can_be_used_for_one_order_after_another() -> None:
    posed = random_problem(3, 200, 2)
    progress = new_progress(200, Pace(posed.speed_ppm, posed.transfer_wait_ns))
    for seed in range(5):
        other = replace(posed, order=random_order(Random(seed), posed.predecessors, posed.resource))
        makespan = evaluate(
            other.order, other.duration_ns, other.resource, other.products, other.hold_ns, progress
        )
        assert makespan == simulate_slowly(other).now


@given(SEEDS, st.integers(1, 40), CHANNELS)
@settings(max_examples=100)
def test_a_timeline_adds_up(seed: int, tasks: int, channels: int) -> None:
    posed = random_problem(seed, tasks, channels)
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


def test_the_longest_step_that_is_allowed_stays_exact() -> None:
    posed = random_problem(11, 30, 1)
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
