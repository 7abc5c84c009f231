"""The form in which two strategies that say the same are the same."""

from __future__ import annotations

from disco_hlo.plan.plan import Group, Strategy
from disco_hlo.plan.variants import normal_form
from tests.plan.small_graphs import graph


def test_an_op_that_all_who_read_it_by_other_shapes_recompute_goes_to_the_first_of_them() -> None:
    step = graph("param\nneg 0\nbitcast 1\nadd 2\nbitcast 2\nmul 4\ntuple 3 5")
    later_first = Strategy((Group((5,), (1,)), Group((3,), (1,))), order=("g0", "g1"))
    assert normal_form(step, later_first) == Strategy((Group((1, 3)), Group((5,), (1,))), order=("g1", "g0"))
