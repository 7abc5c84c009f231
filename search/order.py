"""An order for given kernels and buckets by local search, where the rules of ``schedule`` leave something to gain.

DisCo leaves the order to a ready queue (section 4.4). A rule sees one collective at a time; which kernels should run
during which is a matter of all of them. So the best order by rule is where a climb begins that moves one kernel at a
time to another place, and simulates what comes of it.
"""

from __future__ import annotations

from typing import Final

from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import normal_form
from disco_hlo.search.boundary.starts import prepare
from disco_hlo.search.methods.climber import Climber
from disco_hlo.search.methods.restart import ORDER_DIVISORS, ORDER_MOVES
from disco_hlo.search.schedule import Scheduled, best_of, with_order
from disco_hlo.simulator.costs import MachineModel

MOVES_PER_UNIT: Final = 300
MOST_MOVES: Final = 10_000
"""Proposals of each climb."""
SEEDS: Final = 3


def best_order(
    graph: Graph,
    strategy: Strategy,
    costs: CostModel,
    machine: MachineModel,
    limit_bytes: int | None = None,
) -> Scheduled:
    """``strategy`` in normal form, its kernels and buckets in the best order found.

    Args:
        limit_bytes: most memory that an order may be predicted to need, if one by rule needs no more either.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    by_rule = with_order(graph, strategy, costs, machine, limit_bytes)
    if not machine.asynchronous or not graph.all_reduces:
        return by_rule
    starts, orders = prepare(graph, [by_rule.strategy]), [by_rule.strategy.order]
    units = len(unit_graph(graph, by_rule.strategy).units)
    proposals = min(MOVES_PER_UNIT * units, MOST_MOVES)
    for seed in range(SEEDS):
        climber = Climber(graph, costs, machine, starts, 0, seed)
        for divisor in ORDER_DIVISORS:
            threshold = climber.total() // units // divisor if divisor else 0
            climber.climb(ORDER_MOVES, proposals, threshold, ordered=True)
        found = normal_form(graph, climber.strategy(climber.state))
        if (found.groups, found.buckets) == (by_rule.strategy.groups, by_rule.strategy.buckets):
            orders.append(found.order)
    return best_of(graph, by_rule.strategy, orders, costs, machine, limit_bytes)
