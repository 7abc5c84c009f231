"""The bound of a step: what none of its plans with given kernels can beat (``simulator/bound.py`` says why)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from disco_hlo.hlo.cost_model import CostModel, as_all_reduces
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Group
from disco_hlo.plan.variants import unfused
from disco_hlo.simulator.bound import Bound, bound, least_communication_ns, tight_bound_ns
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import MachineModel


def bound_of_kernels(
    graph: Graph,
    groups: Sequence[Group],
    costs: CostModel,
    machine: MachineModel,
) -> Bound:
    """What no plan with these op groups can beat, whatever its buckets and order.

    Raises:
        IllegalStrategyError: the groups do not fit the graph.
    """
    line, size_bytes = as_all_reduces(graph, costs)
    sizes = size_bytes[list(graph.all_reduces)].tolist()
    least_ns = least_communication_ns(sizes, line) if sizes else 0
    built = build(graph, unfused(graph, groups), costs, machine)
    found = bound(built.problem, least_ns, machine.asynchronous)
    if not sizes or not machine.asynchronous:
        return found
    units = [built.units.units[unit] for unit in built.unit_of]
    moved = [
        int(size_bytes[list(unit.nodes)].sum())
        for unit, communicates in zip(units, built.problem.communicates, strict=True)
        if communicates
    ]
    return replace(found, tight_ns=tight_bound_ns(built.problem, moved, line, machine))


def lowest_bound(
    graph: Graph,
    kernels: Iterable[tuple[Group, ...]],
    costs: CostModel,
    machine: MachineModel,
) -> Bound:
    """The lowest of the bounds of several plans' op groups; arguments and errors as of :func:`bound_of_kernels`."""
    found = [bound_of_kernels(graph, groups, costs, machine) for groups in dict.fromkeys(kernels)]
    return min(found, key=lambda one: one.makespan_ns)
