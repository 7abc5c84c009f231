"""What plain strategies are made of."""

from __future__ import annotations

from disco_hlo.plan.variants import all_reduce_depths
from tests.plan.small_graphs import graph


def test_transfers_one_behind_the_other_are_counted() -> None:
    step = graph("""
        param
        all-reduce 0
        negate 1
        all-reduce 2
        add 3 1
        tuple 4 0
    """)
    assert all_reduce_depths(step) == [0, 0, 1, 1, 2, 2]
