"""What a search starts from: XLA's plan, as far as the search can take it up."""

from __future__ import annotations

from disco_hlo.optimize.pipeline import searchable
from disco_hlo.plan.strategy import Group, Strategy
from disco_hlo.plan.units import unit_graph
from tests.plan.small_graphs import graph


def test_kernels_that_wait_for_themselves_without_xlas_recomputing_one_are_left_out_and_no_others() -> None:
    """4 writes over what 3 reads. XLA's kernel of 3 recomputes that and may run after 4. The search never lets it: 3 by
    itself comes before 4, so the kernel of 2 and 5 would have to run before 3 and after 4."""
    step = graph(
        "param\nexp 0\nabs 0\nmul 1 2\ndot 1\nneg 4\nabs 0\nneg 6\ntuple 3 5 7",
        before=((3, 4),),
        inplace=((1, 4),),
    )
    across, recomputing, elsewhere = Group((2, 5)), Group((3,), duplicates=(1,)), Group((6, 7))
    assert searchable(step, Strategy((across, recomputing, elsewhere))) == Strategy((elsewhere,))
    assert searchable(step, Strategy((elsewhere,))) == Strategy((elsewhere,))


def test_a_kernel_that_others_read_more_of_without_xlas_recomputing_one_is_left_out_where_no_rule_allows_it() -> (
    None
):
    """3 reads 2, which XLA's kernel of 3 recomputes. By itself it has the other kernel return 2, a matmul, as well."""
    step = graph(
        "param\nexp 0\ndot 0\nmul 1 2\ndot 1\nneg 2\nneg 4\ntuple 3 5 6",
        before=((3, 4),),
        inplace=((1, 4),),
    )
    xla = Strategy((Group((2, 5)), Group((3,), duplicates=(1, 2))))
    assert unit_graph(step, xla).results_of_groups == ((5,), (3,))
    assert searchable(step, xla) == Strategy()
