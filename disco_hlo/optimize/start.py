"""Where a search starts."""

from __future__ import annotations

import logging
from collections.abc import Collection

from disco_hlo.errors import CircleError, IllegalStrategyError
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.legal import Kernel, refused_groups
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import groups_with_own_copies, unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.search.boundary.finalists import kernels_of
from disco_hlo.simulator.costs import MachineModel

LOGGER = logging.getLogger("disco_hlo")


def starting_point(graph: Graph, xla: Strategy, machine: MachineModel, method: str) -> Strategy:
    """XLA's plan; where collectives block, the paper's own search begins without any fusion instead, as XLA's fusions
    are not tuned there (Triton tiles and all)."""
    return searchable(graph, xla) if method == "joint" or machine.asynchronous else unfused(graph)


def searchable(graph: Graph, xla: Strategy) -> Strategy:
    """XLA's plan as the search can take it up: without the kernels whose place in the order it would misjudge, and
    without those that then wait for themselves or return what no rule allows."""
    start = _without(xla, groups_with_own_copies(graph, xla.groups))
    try:
        known = kernels_of(graph, xla)
        while unfit := _unfit(graph, start, known):
            start = _without(start, unfit)
    except IllegalStrategyError as error:
        LOGGER.debug("the search starts without XLA's kernels: %s", error)
        return unfused(graph)
    return start


def _without(strategy: Strategy, groups: Collection[int]) -> Strategy:
    if not groups:
        return strategy
    kept = tuple(group for i, group in enumerate(strategy.groups) if i not in groups)
    return Strategy(kept, strategy.buckets)


def _unfit(graph: Graph, strategy: Strategy, known: Collection[Kernel]) -> frozenset[int]:
    """Positions of groups that wait for each other; where none do, of those that are no legal kernels and none of XLA's
    any more, since others read more of them."""
    try:
        units = unit_graph(graph, strategy)
    except CircleError as error:
        waiting = frozenset(int(token[1:]) for token in error.tokens if token[0] == "g")
        if not waiting:
            raise
        return waiting
    return frozenset(i for i, _ in refused_groups(graph, strategy, units, known))
