"""Where a search starts."""

from __future__ import annotations

import logging
from collections.abc import Collection

from disco_hlo.errors import CircleError, IllegalStrategyError
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.legal import Kernel, refused_groups
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import groups_with_own_copies, unit_graph
from disco_hlo.search.boundary.finalists import kernels_of
from disco_hlo.search.boundary.state import as_searched, kept_as_given, signatures
from disco_hlo.simulator.costs import MachineModel

LOGGER = logging.getLogger("disco_hlo")


def starting_point(graph: Graph, xla: Strategy, machine: MachineModel, method: str) -> Strategy:
    """XLA's plan; where collectives block, the paper's own search begins without any fusion instead, as XLA's fusions
    are not tuned there (Triton tiles and all)."""
    return searchable(graph, xla) if method == "joint" or machine.asynchronous else unfused(graph)


def searchable(graph: Graph, xla: Strategy) -> Strategy:
    """XLA's plan as the search can take it up: without the kernels whose place in the order it would misjudge, and
    without those that then wait for themselves or return what no rule allows; no fusion where XLA's kernels cannot be
    told apart in its terms."""
    start = _without(xla, groups_with_own_copies(graph, xla.groups))
    try:
        known = kernels_of(graph, xla)
        while unfit := _circle_as_searched(graph, start) or _illegal(graph, start, known):
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


def _circle_as_searched(graph: Graph, strategy: Strategy) -> frozenset[int]:
    """Positions of groups that wait for each other, as they are or in the terms of the search."""
    positions = list(range(len(strategy.groups)))
    try:
        unit_graph(graph, strategy)
        positions = [i for i, (owned, _) in enumerate(signatures(graph, strategy)) if owned]
        unit_graph(graph, as_searched(graph, strategy))
    except CircleError as error:
        waiting = frozenset(positions[int(token[1:])] for token in error.tokens if token[0] == "g")
        if not waiting:
            raise
        return waiting
    return frozenset()


def _illegal(graph: Graph, strategy: Strategy, known: Collection[Kernel]) -> frozenset[int]:
    """Positions of groups that are no legal kernels and none of XLA's any more: others read more of them, or the search
    writes them in another way."""
    found = {i for i, _ in refused_groups(graph, strategy, unit_graph(graph, strategy), known)}
    searched = as_searched(graph, strategy)
    positions = [i for i, (owned, _) in enumerate(signatures(graph, strategy)) if owned]
    refused = [positions[i] for i, _ in refused_groups(graph, searched, unit_graph(graph, searched), known)]
    if refused:
        found.update(set(refused) - kept_as_given(graph, strategy))
    return frozenset(found)
