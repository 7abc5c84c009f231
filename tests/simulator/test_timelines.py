"""Timelines drawn by hand, as a Chrome trace, and as the slow simulator has them, to the nanosecond.

In drawings the first line is the compute stream, the other is the channel.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disco_hlo.simulator.contention import new_progress
from disco_hlo.simulator.costs import MAX_TOTAL, Pace
from disco_hlo.simulator.timeline import evaluate, simulate
from tests.simulator.problems import draw, problem, random_order, random_problem, spans, with_durations
from tests.simulator.reference import peak_bytes_slowly, simulate_slowly, simulate_tick_by_tick

# Gradients a, b, c of a backward pass are reduced by x, y, z and applied by u, v, w.
BACKWARD = """
    a 3
    b 3
    c 3
    x 5 on 1 after a
    y 5 on 1 after b
    z 5 on 1 after c
    u 1 after x
    v 1 after y
    w 1 after z
"""


def test_all_reduces_hide_behind_the_backward_pass_and_queue_for_the_channel() -> None:
    timeline = simulate(problem(BACKWARD, "a x b y c z ~x u ~y v ~z w"))
    assert draw(timeline) == [
        "aaabbbcccu...v....w",
        "...xxxxxyyyyyzzzzz.",
    ]
    assert (timeline.compute_ns, timeline.communication_ns) == (12, 15)
    assert (timeline.overlap_ns, timeline.exposed_ns) == (8, 7)


DIAMOND = "a 2; b 4 after a; c 3 after a; d 2 after b c"
LATER = "a 2; b 3; x 3 on 1 after a; c 1 after x"
CONTENTION = "a 2; x 4 on 1 after a; b 3 after a; c 1 after x b"
HELD = "a 2; x 4 on 1 after a; b 5 after a; d 2 after b; c 1 after x d"
PRODUCT = "a 1; x 4 on 1 after a; b 1 after a; p 8 after a; c 1 after x p"
DRAWN: dict[str, list[tuple[str, str, dict[str, Any], list[str]]]] = {
    "a diamond has one stream for both branches": [
        (DIAMOND, "a b c d", {}, ["aabbbbcccdd"]), (DIAMOND, "a c b d", {}, ["aacccbbbbdd"]),
    ],
    "a fused tensor waits for its last part": [
        ("a 3; b 4; x 5 on 1 after a b; u 1 after x", "a b x ~x u", {}, ["aaabbbb.....u", ".......xxxxx."]),
    ],
    "a transfer begins where it is issued, not where its data is ready": [
        (LATER, "a x b ~x c", {}, ["aabbbc", "..xxx."]), (LATER, "a b x ~x c", {}, ["aabbb...c", ".....xxx."]),
    ],
    "a wait holds up the stream also for those who need nothing": [
        (LATER, "a x ~x b c", {}, ["aa...bbbc", "..xxx...."]),
    ],
    # p does 1 of its 2 ns while x runs, b would lose nothing.
    "a product may lose more than others while a transfer runs": [
        ("a 2; x 4 on 1 after a; p 2 after a; b 1 after p; c 1 after x b", "a x p b ~x c", {"product_speed": 0.25},
         ["aapppppbc", "..xxxx..."]),
    ],
    "a transfer that begins beside compute has a wait to do as well": [
        (CONTENTION, "a x b ~x c", {"wait_ns": 2}, ["aabbb...c", "..xxxxxx."]),
    ],
    "a kernel that takes no time makes no transfer wait": [
        ("a 2; e 0 after a; x 3 on 1 after a; c 1 after x e", "a x e ~x c", {"wait_ns": 2}, ["aa...c", "..xxx."]),
    ],
    "a queued transfer waits by what the stream does when its turn comes": [
        # u and v run when x and y end and y and z begin; the stream waited just before.
        (BACKWARD, "a x b y c z ~x u ~y v ~z w", {"wait_ns": 1}, ["aaabbbcccu.....v.....w", "...xxxxxxyyyyyyzzzzzz."]),
        # y begins while the stream waits for y itself, then z while it waits for z.
        (BACKWARD, "a x b y c z ~z w ~x u ~y v", {"wait_ns": 1}, ["aaabbbccc..........wuv", "...xxxxxxyyyyyzzzzz..."]),
    ],
    "the wait is work beside compute like the transfer itself": [
        ("a 2; x 1 on 1 after a; b 7 after a; c 1 after x b", "a x b ~x c", {"transfer_speed": 0.5, "wait_ns": 1},
         ["aabbbbbbbc", "..xxxx...."]),
    ],
    "a kernel holds a transfer until its thread blocks have their places": [
        (HELD, "a x b d ~x c", {"holds": "b3"}, ["aabbbbbddc", ".....xxxx."]),
        # Held to b's end it begins in its last nanosecond: d does not hold it again. A waiting stream holds nothing.
        (HELD, "a x b d ~x c", {"holds": "b4 d1"}, ["aabbbbbdd.c", "......xxxx."]),
        (HELD, "a x ~x b d c", {"holds": "b3"}, ["aa....bbbbbddc", "..xxxx........"]),
    ],
    # 3 of b's 5 ns at full speed, the others and d at half of it while x runs.
    "a kernel loses nothing to a transfer that it holds": [
        (HELD, "a x b d ~x c", {"compute_speed": 0.5, "holds": "b3"}, ["aabbbbbbbddc", ".....xxxx..."]),
    ],
    # x ends at 4, when b has 5 of its 6 ns to do; y gets in when it has 1.
    "a transfer whose turn comes beside a kernel is held by that too": [
        ("a 1; x 3 on 1 after a; y 3 on 1 after a; e 2 after a; b 6 after e; c 1 after x y b", "a x y e b ~x ~y c",
         {"holds": "b5"}, ["aeebbbbbb..c", ".xxx....yyy."]),
    ],
    "a product that began beside a transfer loses more than one that began before": [
        # 3 ns beside x at half speed. x slips in: 4 ns at half speed.
        (PRODUCT, "a x b p ~x c", {"product_speed": 0.5}, ["abppppppppppc", ".xxxx........"]),
        (PRODUCT, "a x p ~x b c", {"product_speed": 0.5}, ["appppppppppbc", ".xxxx........"]),
        # It holds x for 4 ns, and so has one more to do: at half speed it would have lost 2, on half of the devices.
        *((PRODUCT, order, {"product_speed": 0.5, "holds": "p4"}, ["apppppppppbc", ".....xxxx..."])
          for order in ("a x p ~x b c", "a x p b ~x c")),
    ],
    # At half speed it would have lost 3.5 ns, on half of the devices: 1.75, which takes until 11.
    "a product that holds to its end pays for all of it": [
        (PRODUCT, "a x p ~x b c", {"product_speed": 0.5, "holds": "p7"}, ["apppppppppp.bc", "........xxxx.."]),
    ],
    "a product pays once where another transfer follows the one that it holds": [
        ("a 1; x 2 on 1 after a; y 3 on 1 after a; p 8 after a; c 1 after x y p", "a x y p ~x ~y c",
         {"product_speed": 0.5, "holds": "p4"}, ["apppppppppc", ".....xxyyy."]),
    ],
    "a held transfer waits like others once it begins": [
        (HELD, "a x b d ~x c", {"holds": "b3", "wait_ns": 1}, ["aabbbbbdd.c", ".....xxxxx."]),
    ],
    # Both do 2 of their work by 6; then nothing is left of x that could slow b down.
    "contention in both directions": [
        ("a 2; x 2 on 1 after a; b 4 after a; c 1 after x b", "a x b ~x c",
         {"compute_speed": 0.5, "transfer_speed": 0.5}, ["aabbbbbbc", "..xxxx..."]),
    ],
    "tasks without duration take none": [
        ("a 2; n 0 after a; x 0 on 1 after n; y 2 on 1 after n; b 1 after x", "a n x y ~x b ~y", {}, ["aab.", "..yy"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_a_timeline_is_as_drawn(name: str) -> None:
    for step, order, options, expected in DRAWN[name]:
        assert draw(simulate(problem(step, order, **options))) == expected


def test_a_one_shot_all_reduce_runs_on_the_compute_stream() -> None:
    small = """
        a 2
        s 2 on 0 after a
        x 3 on 1 after a
        b 2 after a
        c 1 after s x
    """
    timeline = simulate(problem(small, "a s x b ~x c"))
    assert draw(timeline) == [
        "aassbb.c",
        "....xxx.",
    ]
    assert (timeline.compute_ns, timeline.communication_ns, timeline.exposed_ns) == (5, 5, 3)


def test_memory_peaks_where_most_buffers_live() -> None:
    # Bytes: a leaves 10 for b, b leaves 20 for c, c returns 5; 100 are parameters.
    chain = problem(
        "a 1\nb 1 after a\nc 1 after b",
        "a b c",
        buffers=[(10, "a", "b", False), (20, "b", "c", False), (5, "c", "", True)],
        resident_bytes=100,
    )
    assert simulate(chain).peak_bytes == 100 + 10 + 20


def test_a_transfer_holds_its_operand_until_it_is_waited_for() -> None:
    buffers = [(10, "a", "x", False), (10, "x", "c", False), (7, "b", "c", False)]
    assert simulate(problem(LATER, "a x b ~x c", buffers=buffers)).peak_bytes == 10 + 10 + 7
    assert simulate(problem(LATER, "a x ~x b c", buffers=buffers)).peak_bytes == 10 + 10


def test_an_empty_step_takes_no_time() -> None:
    timeline = simulate(problem("a 0", "a"))
    assert (timeline.makespan_ns, timeline.exposed_ns, timeline.peak_bytes) == (0, 0, 0)


SEEDS = st.integers(0, 2**32)
CHANNEL = st.booleans()


@given(SEEDS, st.integers(1, 60), CHANNEL)
@settings(max_examples=120)
def test_the_engine_agrees_with_the_reference(seed: int, tasks: int, channel: bool) -> None:
    posed = random_problem(seed, tasks, channel=channel)
    timeline, slowly = simulate(posed), simulate_slowly(posed)
    assert timeline.spans_ns[0].tolist() == [slowly.start[task] for task in range(tasks)]
    assert timeline.spans_ns[1].tolist() == [slowly.end[task] for task in range(tasks)]
    assert timeline.makespan_ns == slowly.now == max(slowly.end.values())
    assert timeline.peak_bytes == peak_bytes_slowly(posed)


@given(SEEDS, st.integers(1, 12), CHANNEL, st.booleans())
@example(7, 12, True, True)  # transfers without duration that a kernel holds
@example(65, 12, True, False)
@settings(max_examples=30)
def test_the_reference_agrees_with_going_through_the_nanoseconds(
    seed: int, tasks: int, channel: bool, ready_queue: bool
) -> None:
    posed = random_problem(seed, tasks, channel=channel)
    posed = with_durations(posed, posed.duration_ns % 40)
    expected = simulate_tick_by_tick(posed, ready_queue=ready_queue)
    assert simulate_slowly(posed, ready_queue=ready_queue).end == expected


def test_progress_can_be_used_for_one_order_after_another() -> None:
    posed = random_problem(3, 200)
    progress = new_progress(200, Pace(posed.speed_ppm, posed.transfer_wait_ns))
    for seed in range(5):
        other = replace(posed, order=random_order(Random(seed), posed.predecessors, posed.resource))
        makespan = evaluate(
            other.order, other.duration_ns, other.resource, other.products, other.hold_ns, progress
        )
        assert makespan == simulate_slowly(other).now


@given(SEEDS, st.integers(1, 40), CHANNEL)
@settings(max_examples=50)
def test_a_timeline_adds_up(seed: int, tasks: int, channel: bool) -> None:
    posed = random_problem(seed, tasks, channel=channel)
    timeline = simulate(posed)
    assert timeline.makespan_ns == timeline.compute_ns + timeline.exposed_ns
    work_ns = posed.duration_ns.sum() + posed.transfer_wait_ns * np.count_nonzero(posed.resource)
    assert timeline.makespan_ns <= 10 * work_ns + tasks
    assert 0 <= timeline.overlap_ns <= min(timeline.compute_ns, timeline.communication_ns)
    for resource in (0, 1):
        assert all(a[2] <= b[1] for a, b in pairwise(spans(timeline, resource)))
    for task in range(tasks):
        for earlier in posed.predecessors[task]:
            assert timeline.spans_ns[1, earlier] <= timeline.spans_ns[0, task]


def test_the_longest_step_that_is_allowed_stays_exact() -> None:
    posed = random_problem(11, 30)
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
