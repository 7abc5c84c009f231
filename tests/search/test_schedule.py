"""Buckets and order for fixed kernels, on cases that can be worked out by hand."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.search.arrange import contiguous_buckets
from disco_hlo.search.schedule import best_buckets
from tests.machines import GPU
from tests.plan.small_graphs import graph
from tests.search.cost_models import OneDevice


def line(size_bytes: int) -> int:
    """10 ns an all-reduce and 1 ns a byte."""
    return 10 + size_bytes


def finish(runs: list[list[int]], ready: list[int], sizes: list[int]) -> int:
    clock = 0
    for run in runs:
        clock = max(clock, ready[run[-1]]) + line(sum(sizes[i] for i in run))
    return clock


def test_gradients_that_are_all_ready_travel_together() -> None:
    assert contiguous_buckets([0, 0, 0], [1, 1, 1], "aaa", line) == [[0, 1, 2]]


def test_a_late_gradient_does_not_hold_up_the_early_ones() -> None:
    # Alone: 0-30, then 100-111. Together: 100-131.
    assert contiguous_buckets([0, 0, 100], [10, 10, 1], "aaa", line) == [[0, 1], [2]]


def test_where_each_transfer_waits_fewer_travel() -> None:
    # Apart: 0-20, then to 50. Together: 11-51. With 15 of waiting each: to 80 and 66.
    assert contiguous_buckets([0, 11], [10, 20], "aa", line) == [[0], [1]]
    assert contiguous_buckets([0, 11], [10, 20], "aa", line, wait_ns=15) == [[0, 1]]


def test_two_kinds_never_share_a_run() -> None:
    assert contiguous_buckets([0, 0, 0], [1, 1, 1], "aba", line) == [[0], [1], [2]]


def test_no_gradient_no_run() -> None:
    assert contiguous_buckets([], [], [], line) == []


def test_a_step_on_one_device_is_ordered_without_all_reduce_times() -> None:
    found = best_buckets(graph("param\nexp 0\nneg 1\ntuple 2"), (), OneDevice(), GPU)
    assert found.strategy.buckets == ()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=7))
def test_no_other_cut_ends_earlier(gradients: list[tuple[int, int]]) -> None:
    ready = sorted(time for time, _ in gradients)
    sizes = [size for _, size in gradients]
    count = len(ready)
    cuts = [cut for n in range(count) for cut in combinations(range(1, count), n)]
    every = [[list(range(a, b)) for a, b in zip((0, *cut), (*cut, count), strict=True)] for cut in cuts]
    best = min(finish(runs, ready, sizes) for runs in every)
    found = contiguous_buckets(ready, sizes, [0] * count, line)
    assert finish(found, ready, sizes) == best
    assert [i for run in found for i in run] == list(range(count))
