"""Critical paths, read as sentences."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.simulator.critical_path import Reason
from disco_hlo.simulator.problem import Problem
from disco_hlo.simulator.timeline import simulate
from tests.simulator.drawing import problem
from tests.simulator.random_problems import random_problem


def told(posed: Problem) -> list[str]:
    """Each link as "task, why it starts when it does"."""
    names, path = posed.names, simulate(posed).critical_path
    sentences = [f"{names[path[0].task]} {path[0].reason}"]
    return sentences + [
        f"{names[link.task]} {link.reason} {names[before.task]}" for before, link in pairwise(path)
    ]


def test_exposed_communication_is_on_the_path() -> None:
    late = """
        a 2
        b 6
        x 3 on 1 after a
        y 4 on 1 after b
        u 1 after x
        v 1 after y
    """
    assert told(problem(late, "a x b y ~x u ~y v")) == [
        "a begins the step",
        "b follows on the compute stream a",
        "y needs the result of b",
        "v needs the result of y",
    ]


STEP = """
    a 2
    b 3
    x 3 on 1 after a
    y 9 on 1 after a
    c 1 after y
    d 1
"""


def test_a_busy_channel_is_a_reason() -> None:
    assert told(problem(STEP, "a x y b ~x ~y c d"))[:3] == [
        "a begins the step",
        "x needs the result of a",
        "y follows on the channel x",
    ]


def test_a_late_issue_is_a_reason() -> None:
    assert told(problem(STEP, "a b y x ~y c ~x d"))[1:3] == [
        "b follows on the compute stream a",
        "y is issued after b",
    ]


def test_a_wait_is_a_reason_for_those_who_need_nothing() -> None:
    assert told(problem(STEP, "a b y ~y d x ~x c"))[3:5] == [
        "d comes after the wait for y",
        "x is issued after d",
    ]


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(0, 2))
@settings(max_examples=150)
def test_the_path_has_no_gaps(seed: int, tasks: int, channels: int) -> None:
    timeline = simulate(random_problem(seed, tasks, channels))
    start, end = timeline.spans_ns
    path = timeline.critical_path
    assert start[path[0].task] == 0
    assert end[path[-1].task] == timeline.makespan_ns
    for a, b in pairwise(path):
        if b.reason is Reason.HOLD:
            assert start[a.task] < start[b.task] <= end[a.task]
        else:
            assert end[a.task] == start[b.task]
