"""The one entry point of the search."""

from __future__ import annotations

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Strategy
from disco_hlo.search.api import OnBest, OnProgress, SearchResult, SearchSettings, Stop
from disco_hlo.search.backtracking import Backtracking
from disco_hlo.search.joint import Joint
from disco_hlo.simulator.costs import MachineModel

_METHODS: dict[str, type[Backtracking] | type[Joint]] = {"backtracking": Backtracking, "joint": Joint}


def search(
    graph: Graph,
    costs: CostModel,
    machine: MachineModel,
    *,
    start: Strategy,
    settings: SearchSettings,
    on_progress: OnProgress | None = None,
    on_best: OnBest | None = None,
    stop: Stop | None = None,
) -> SearchResult:
    """Look for a faster strategy than ``start``.

    Args:
        start: a strategy of ``graph``: unfused (every collective its own bucket) or XLA's plan.
        on_progress: called a few times a second.
        on_best: told of the best strategy so far whenever the joint method finds a better one.
        stop: asked between candidates; the search ends once it answers True.

    Returns:
        The best strategy found, never one predicted slower than ``start``. Interrupting the
        search (Ctrl-C) returns the best so far.

    Raises:
        IllegalStrategyError: ``start`` does not fit the graph.
        DiscoError: the settings name an unknown method.
    """
    method = _METHODS.get(settings.method)
    if method is None:
        raise DiscoError(f"Search method {settings.method!r}: expected one of {', '.join(sorted(_METHODS))}.")
    return method(graph, costs, machine, start, settings, on_progress, on_best, stop).run()
