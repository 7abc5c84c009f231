"""The last check of what a search returns, by the rules everybody else goes by.

The compiled rules are held equal to those of ``hlo`` and ``plan`` by tests; a user's training does
not depend on that. A strategy that fails here is dropped, and whoever searches is told how many were.
"""

from __future__ import annotations

from collections.abc import Set

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.legal import Kernel, check_order, check_strategy
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import normal_form


def kernels_of(graph: Graph, strategy: Strategy) -> set[Kernel]:
    """The kernels of a strategy, each by the ops that it computes and those that it returns.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    units = unit_graph(graph, strategy)
    return {
        (frozenset(group.ops), results)
        for group, results in zip(strategy.groups, units.results_of_groups, strict=True)
    }


def checked(graph: Graph, strategy: Strategy, asynchronous: bool, attested: Set[Kernel]) -> Strategy:
    """``strategy`` in normal form.

    Args:
        asynchronous: whether its order has a start and a done for every bucket.
        attested: kernels that need no rule, because XLA made them.

    Raises:
        DiscoError: it is not legal.
    """
    normal = normal_form(graph, strategy)
    units = unit_graph(graph, normal)
    check_order(units, normal.order, asynchronous)
    check_strategy(graph, normal, units, attested)
    _check_tiles(graph, normal, attested)
    return normal


def _check_tiles(graph: Graph, strategy: Strategy, attested: Set[Kernel]) -> None:
    """Triton's tiles fit one kernel, with its very results."""
    tiled = {frozenset(group.ops) for group in strategy.groups if group.kind == "triton"}
    for members, results in kernels_of(graph, strategy):
        if members in tiled and (members, results) not in attested:
            raise IllegalStrategyError(f"the kernel of n{min(members)} has tiles made for other results")
