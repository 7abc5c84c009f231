"""What a search may come to, said before it begins: how much of the step can change, what can be gained, how long it
takes."""

from __future__ import annotations

from disco_hlo.compiled import is_cached
from disco_hlo.estimator.analytic import DeviceModel
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plugin.logs import compared
from disco_hlo.plugin.session import Session
from disco_hlo.search import run
from disco_hlo.simulator import engine

MEASURE_BUDGET_S = 40.0
"""How long the candidates are measured."""
SHORTEST_COMPILING_S = 60.0
"""How long they may be compiled, however short a search is asked for."""
_CLOSED = frozenset({"conditional", "while"})
"""Ops whose inside stays as XLA compiled it."""


def looks(session: Session) -> int:
    """How often the best plan's kernels are measured and the search is made again."""
    wanted = session.settings.looks
    return int(session.facts.backend == "gpu") if wanted is None else wanted


def say_what_predicting_takes(session: Session) -> None:
    """A line before the first prediction on a machine: the step is simulated only once that code is compiled."""
    if not all(map(is_cached, (DeviceModel.__module__, engine.__name__))):
        session.say(
            "compiling the code that predicts step times, once on this machine: up to a minute or two"
        )


def outlook(session: Session, graph: Graph, costs: CostModel, default_ns: int, bound_ns: int) -> str:
    """One line for somebody who waits.

    Args:
        default_ns: predicted for XLA's own plan.
        bound_ns: what no plan with XLA's kernels can beat.
    """
    settings = session.settings
    share = changeable_share(graph, costs, default_ns)
    closed = "" if share == 1 else ", the rest lies in loops and branches"
    number = looks(session) + 1
    times = "" if number == 1 else f"{number} times "
    code = (
        "" if is_cached(run.__name__) else "compile the search's code (some minutes, once on this machine), "
    )
    measuring_s = max(settings.budget_s, SHORTEST_COMPILING_S) + MEASURE_BUDGET_S
    return (
        f"{share:.0%} of a step of {default_ns / 1e6:.2f} ms (predicted) can change{closed}; another order and other "
        f"buckets make the step {compared(default_ns, bound_ns)} at best, other kernels perhaps more; "
        f"next: {code}search for up to {times}{settings.budget_s:g} s (DISCO_BUDGET_S), compile and measure what is "
        f"found for about {measuring_s:.0f} s at most"
    )


def changeable_share(graph: Graph, costs: CostModel, default_ns: int) -> float:
    """What part of a step's time no loop or branch of it takes."""
    closed = [node.id for node in graph.nodes if node.opcode in _CLOSED]
    closed_ns = int(costs.op_ns(graph)[closed].sum()) if closed else 0
    return max(0.0, 1 - closed_ns / max(1, default_ns))
