"""Kernels read each value under one name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.names import named_once
from disco_hlo.plan.strategy import Group, Strategy
from disco_hlo.plan.units import unit_graph
from tests.plan.small_graphs import graph


def _step() -> Graph:
    """A sum of a value with its transpose, which is a bitcast and a copy to the value's own layout."""
    step = graph("param\nneg 0\nbitcast 1\ncopy 2\nadd 1 3\nsin 4")
    return replace(step, shown=(0, 1, 1, 3, 4, 5))


def test_a_bitcast_is_computed_where_the_value_is_read_by_another_name() -> None:
    found = named_once(_step(), Strategy((Group((4,), (3,)),), order=("n1", "g0", "n5")))
    assert found == Strategy((Group((4,), (2, 3)),), order=("n1", "g0", "n5"))


def test_a_kernel_of_whose_nodes_each_reader_has_its_own_is_left_out() -> None:
    """Nothing read what it produced, and no strategy was written."""
    step = _step()
    found = named_once(step, Strategy((Group((2,), (1,)), Group((4,), (3,))), order=("n1", "g0", "g1", "n5")))
    assert found == Strategy((Group((4,), (2, 3)),), order=("n1", "g0", "n5"))
    assert len(unit_graph(step, found).units) == 3


def test_a_kernel_that_nothing_ever_read_stays_to_be_refused() -> None:
    useless = Group((3,))
    found = named_once(_step(), Strategy((useless, Group((4,), (3,)))))
    assert found.groups == (useless, Group((4,), (2, 3)))


@pytest.mark.parametrize("group", [Group((-1, 4)), Group((4, 2**40)), Group((4,), (-1,))])
def test_a_node_that_does_not_exist_is_refused(group: Group) -> None:
    with pytest.raises(IllegalStrategyError, match="but the graph has nodes 0 to 5"):
        named_once(_step(), Strategy((group,)))
