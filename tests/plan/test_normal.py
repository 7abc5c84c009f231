"""The form in which two strategies that say the same are the same."""

from __future__ import annotations

from disco_hlo.plan.normal import normal_form
from disco_hlo.plan.strategy import Group, Strategy
from tests.plan.small_graphs import graph


def test_of_bitcasts_in_a_row_that_others_read_at_the_end_no_kernel_owns_one() -> None:
    """The inner one went to the kernel, which had one result more then, and could wait for itself."""
    step = graph("param\ndot 0\nbitcast 1\nbitcast 2\nadd 3\nmul 3\ntuple 4 5")
    alone = Strategy((Group((4,), (2, 3)),))
    assert normal_form(step, alone).groups == alone.groups


def test_a_bitcast_that_one_kernel_alone_reads_is_its_own() -> None:
    step = graph("param\ndot 0\nbitcast 1\nbitcast 2\nadd 3\nmul 4\ntuple 5")
    assert normal_form(step, Strategy((Group((4, 5), (2, 3)),))).groups == (Group((2, 3, 4, 5)),)
