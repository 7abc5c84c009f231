"""Which bitcasts a kernel holds, and what lies behind them."""

from __future__ import annotations

from disco_hlo.hlo.graph import as_kernel, behind_bitcasts, kernel_nodes, readers
from tests.plan.small_graphs import graph

STEP = graph("param\nneg 0\nbitcast 1\nbitcast 2\nadd 3 1\nbitcast 4\nmul 5\ntuple 5 6")


def test_behind_a_row_of_bitcasts_lies_the_op() -> None:
    assert behind_bitcasts(STEP) == (0, 1, 1, 1, 4, 4, 6, 7)


def test_a_kernel_holds_the_bitcasts_through_which_its_ops_read_and_no_other() -> None:
    assert kernel_nodes(STEP, (4,)) == (2, 3, 4)
    assert kernel_nodes(STEP, {6, 4}) == (2, 3, 4, 5, 6)
    assert kernel_nodes(STEP, (1,)) == (1,)


def test_a_kernel_of_a_module_is_its_ops_wherever_its_bitcasts_stand() -> None:
    assert as_kernel(STEP, (1, 2, 3, 4, 5), (2, 5)) == ((1, 4), (1, 4))
    assert as_kernel(STEP, (2, 3), (3,)) == ((), (1,))


def test_readers_look_through_bitcasts() -> None:
    assert sorted(readers(STEP, 1)) == [4]
    assert sorted(readers(STEP, 4)) == [6, 7]
