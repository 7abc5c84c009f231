"""Play plans of one step on the simulator, and state what none of them could beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disco_hlo.hlo.graph import Graph
from disco_hlo.optimize.costs import Costs
from disco_hlo.plan.read import Repeat
from disco_hlo.plan.strategy import Strategy
from disco_hlo.simulator.bound import Bound
from disco_hlo.simulator.build import Built, build
from disco_hlo.simulator.step_bound import lowest_bound
from disco_hlo.simulator.timeline import Timeline, simulate


@dataclass(frozen=True, eq=False)
class Predicted:
    """A strategy and its simulated step."""

    strategy: Strategy
    built: Built
    timeline: Timeline


def predict(graph: Graph, strategy: Strategy, costs: Costs, again: Sequence[Repeat] = ()) -> Predicted:
    """Simulate one strategy.

    Args:
        again: what a module of XLA's executes besides (:func:`~disco_hlo.plan.read.repeats`).

    Raises:
        IllegalStrategyError: it does not fit the graph.
    """
    built = build(graph, strategy, costs, costs.machine, repeats=again)
    return Predicted(strategy, built, simulate(built.problem))


def lower_bound(graph: Graph, strategies: Sequence[Strategy], costs: Costs) -> Bound:
    """The lowest bound over the kernels of these strategies, whatever their buckets and order."""
    kernels = (strategy.groups for strategy in strategies)
    return lowest_bound(graph, kernels, costs, costs.machine)
