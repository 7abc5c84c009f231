"""Strategies made of a graph or of other strategies."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from disco_hlo.plan.legal import check_order
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import (
    collective_depths,
    in_the_order_of,
    normal_form,
    without_circles,
    without_unfit,
)
from tests.graphs import graph_of
from tests.steps.intercept import captured_step


def test_transfers_one_behind_the_other_are_counted() -> None:
    step = graph_of("param\nall-reduce 0\nnegate 1\nall-reduce 2\nadd 3 1\ntuple 4 0")
    assert collective_depths(step) == [0, 0, 1, 1, 2, 2]


def test_an_op_that_all_who_read_it_by_other_shapes_recompute_goes_to_the_first_of_them() -> None:
    step = graph_of("param\nneg 0\nbitcast 1\nadd 2\nbitcast 2\nmul 4\ntuple 3 5")
    later_first = Strategy((Group((5,), (1,)), Group((3,), (1,))), order=("g0", "g1"))
    assert normal_form(step, later_first) == Strategy((Group((1, 3)), Group((5,), (1,))), order=("g1", "g0"))


def test_kernels_that_the_buckets_leave_no_place_for_are_taken_apart() -> None:
    # 3 is made of the first sum and 6 feeds the second: a kernel of both cannot stand beside one bucket of both.
    step = graph_of("param\nmul 0\nall-reduce 1\nmul 2\nmul 0\nneg 4\nneg 5\nall-reduce 6\ntuple 3 7")
    early, late = (Bucket((2,)), Bucket((7,))), (Bucket((2, 7)),)
    kernels = (Group((3, 6)), Group((4, 5)))
    assert without_circles(step, Strategy(kernels, early)).groups == kernels
    assert without_circles(step, Strategy(kernels, late)).groups == kernels[1:]


def test_a_kernel_goes_with_another_that_computed_its_value_for_itself() -> None:
    # Node 1 is computed in both kernels; without the second the first has to return it, beside node 2 of another shape.
    source: Any = Namespace(
        graph=graph_of("param\nmul 0\nneg 1\nadd 1\ntuple 2 3", elements=None), origins=()
    )
    both = Strategy((Group((1, 2)), Group((3,), duplicates=(1,))))
    assert without_unfit(source, both) == both
    assert without_unfit(source, Strategy(both.groups[:1])).groups == ()


def test_a_kernel_left_out_may_leave_no_place_for_another() -> None:
    # The kernel of 2 and 3 computes 1 for itself; it is refused, since it would return both, of different shapes.
    # Alone, 3 reads 1 from the kernel of 1 and 4, which reads 3.
    source: Any = Namespace(
        graph=graph_of("param\nmul 0\nneg 0\nadd 1 2\nmul 3 1\ntuple 2 4", elements=None), origins=()
    )
    refused, unplaced = Group((2, 3), duplicates=(1,)), Group((1, 4))
    unit_graph(source.graph, Strategy((refused, unplaced)))
    assert without_unfit(source, Strategy((refused, unplaced))).groups == ()


def test_another_plan_s_order_is_kept_as_far_as_can_be() -> None:
    source = captured_step("mlp")
    graph, xla = source.graph, read(source)
    assert in_the_order_of(graph, xla, xla, asynchronous=False) == xla
    separate = Strategy(xla.groups, tuple(Bucket((node,)) for node in graph.collectives))
    ordered = in_the_order_of(graph, separate, xla, asynchronous=False)
    check_order(unit_graph(graph, separate), ordered.order, asynchronous=False)
