"""A problem that makes no sense is refused, with the task named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from disco_hlo.errors import DiscoError
from disco_hlo.simulator.problem import Buffers, Lists, Problem
from tests.simulator.problems import problem

STEP = """
    a 2
    b 3 after a
    x 3 on 1 after a
    c 1 after x
"""


def int64(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def int32(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_lists_and_their_reverse() -> None:
    lists = Lists.of([[1, 2], [], [2]])
    assert [row.tolist() for row in lists] == [[1, 2], [], [2]]
    assert lists.owner.tolist() == [0, 0, 2]
    assert [row.tolist() for row in lists.reversed(4)] == [[], [0], [0, 2], []]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"duration_ns": int64(2, -3, 3, 1)}, r"task 1 \(b\) is -3 ns, expected 0 or more"),
        ({"duration_ns": int64(2, 2**62, 3, 2**62)}, r"add up to 9\.22e\+18 ns.* task 1 \(b\) with"),
        ({"duration_ns": int64(2, 3, 3)}, r"duration_ns is int64\[3\], expected int64\[4\]"),
        ({"duration_ns": np.array([2.0, np.nan, 3, 1])}, r"duration_ns is float64\[4\], expected int64\[4\]"),
        ({"transfer_wait_ns": -1}, r"transfers wait -1 ns, expected 0 to 10000000"),
        ({"resource": int32(0, 0, 2, 0)}, r"resource of task 2 \(x\) is 2, expected 0 to 1"),
        ({"resource": int32(0, 0, -1, 0)}, r"resource of task 2 \(x\) is -1, expected 0 to 1"),
        ({"communicates": np.zeros(4, np.bool_)}, r"task 2 \(x\) runs on the channel but is not communication"),
        ({"predecessors": Lists.of([[], [0], [7], [2]])}, r"predecessor of task 2 \(x\) is 7, expected 0 to"),
        ({"predecessors": Lists.of([[], [0], [0]])}, r"predecessors is int32\[4\], expected int32\[5\]"),
        ({"speed_ppm": np.zeros((4, 2), np.int64)}, r"speeds are .*, expected 100000 to 1000000"),
        ({"speed_ppm": np.full((4, 2), 900_000)}, r"beside no transfer compute goes at .*, expected 1000000"),
        ({"speed_ppm": np.zeros((2, 2), np.int64)}, r"speed_ppm is int64\[2, 2\], expected int64\[4, 2\]"),
        ({"products": np.zeros(1, np.int64)}, r"products is int64\[1\], expected bool\[\d+\]"),
        ({"buffers": Buffers.of([(8, 4, [], False)])}, r"buffer producer is 4, expected 0 to 3"),
        ({"buffers": Buffers.of([(8, 0, [9], False)])}, r"buffer reader is 9, expected 0 to 3"),
        ({"buffers": Buffers.of([(-8, 1, [], False)])}, r"buffer of task 1 \(b\) has -8 bytes"),
        ({"order": np.array([0, 1, 2, -3, 3])}, r"order is int64\[5\], expected int32\[entries\]"),
        ({"order": int32(0, 1, 9, ~2, 3)}, r"order entry is 9, expected 0 to 3"),
        ({"order": int32(0, 2, ~2, 3)}, r"task 1 \(b\) stands 0 times in the order, expected once"),
        ({"order": int32(0, 1, 1, 2, ~2, 3)}, r"task 1 \(b\) stands 2 times in the order"),
        ({"order": int32(0, 1, 2, 3)}, r"order never waits for task 2 \(x\)"),
        ({"order": int32(0, 1, ~1, 2, ~2, 3)}, r"waits at place 2 for task 1 \(b\), which runs on the comp"),
        ({"order": int32(0, 1, ~2, 2, 3)}, r"waits at place 2 for task 2 \(x\), which it issues later"),
        ({"order": int32(1, 0, 2, ~2, 3)}, r"starts task 1 \(b\) at place 0, before it is sure that task 0"),
        ({"order": int32(0, 1, 2, 3, ~2)}, r"starts task 3 \(c\) at place 3, before it is sure that task 2"),
    ],
)  # fmt: skip
def test_what_is_refused(changed: dict[str, Any], message: str) -> None:
    sound = problem(STEP, "a b x ~x c")
    with pytest.raises(DiscoError, match=message):
        replace(sound, **changed)


@pytest.mark.parametrize("count", [0, 2])
def test_buffers_of_different_lengths_are_refused(count: int) -> None:
    buffers = replace(Buffers.of([(8, 0, [1], False)]), producer=int32(*[0] * count))
    with pytest.raises(DiscoError, match=f"1 buffer sizes, but {count} producers, 1 lists of readers"):
        replace(problem(STEP, "a b x ~x c"), buffers=buffers)


def test_waiting_twice_is_allowed() -> None:
    posed: Problem = problem(STEP, "a x b ~x ~x c")
    assert len(posed.order) == 6
