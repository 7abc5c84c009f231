"""Play a plan of one computation on the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from disco_hlo.hlo.graph import Graph
from disco_hlo.optimize.costs import Costs
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import Repeat
from disco_hlo.simulator.build import Built, build
from disco_hlo.simulator.timeline import Timeline, simulate


@dataclass(frozen=True, eq=False)
class Predicted:
    """A strategy and its simulated execution."""

    strategy: Strategy
    built: Built
    timeline: Timeline
    again: Sequence[Repeat] = ()


def predict(graph: Graph, strategy: Strategy, costs: Costs, again: Sequence[Repeat] = ()) -> Predicted:
    """Simulate one strategy. Of a whole step, with what its loops take: :func:`disco_hlo.optimize.regions.step_times`.

    Args:
        again: what a module of XLA's executes besides (:func:`~disco_hlo.plan.read.repeats`).

    Raises:
        IllegalStrategyError: it does not fit the graph.
    """
    built = build(graph, strategy, costs, costs.machine, repeats=again)
    return Predicted(strategy, built, simulate(built.problem), again)


def first_collective_ns(predicted: Predicted) -> int | None:
    """When the first collective begins, one inside an op counted; None where none overlaps with kernels."""
    problem, begins_ns = predicted.built.problem, predicted.timeline.spans_ns[0]
    on_channel = np.flatnonzero(problem.resource > 0).tolist()
    return min((int(begins_ns[task]) for task in (*on_channel, *predicted.built.calls)), default=None)
