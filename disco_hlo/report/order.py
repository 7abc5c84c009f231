"""The order in which a plan's units are executed, also where the plan leaves it to the default."""

from __future__ import annotations

from dataclasses import replace

from disco_hlo.backends import BACKENDS
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.legal import default_order
from disco_hlo.plan.plan import Strategy
from disco_hlo.report.bundle import Bundle


def order_of(bundle: Bundle) -> tuple[tuple[str, ...], bool]:
    """The order of a plan, and whether the plan itself has it. Empty where nobody knows."""
    strategy = bundle.strategy
    if strategy.order or bundle.source is None:
        return strategy.order, True
    return with_order(bundle.source.graph, strategy).order, False


def with_order(graph: Graph, strategy: Strategy) -> Strategy:
    """The same strategy with its order written out.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    if strategy.order:
        return strategy
    order = default_order(graph, strategy, BACKENDS[graph.backend].asynchronous)
    return replace(strategy, order=order)
