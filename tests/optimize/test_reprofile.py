"""What the measured kernels of a plan teach the profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from disco_hlo.hlo.cost_model import Kernels
from disco_hlo.hlo.graph import Kind
from disco_hlo.optimize.costs import Reprofiled, costs_of, estimates_ns, unknown_kernels, with_kernels
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Group
from disco_hlo.plan.units import unit_graph
from disco_hlo.profiler.costs import MeasuredCosts
from disco_hlo.profiler.kernel_keys import kernel_keys
from disco_hlo.profiler.profile import OpTime, load
from tests.estimator.steps import transformer

PROFILE = Path(__file__).parents[2] / "disco_hlo" / "data" / "profiles" / "nvidia-h200-nvlink.json"


@pytest.fixture
def told() -> MeasuredCosts:
    return costs_of(replace(load(PROFILE), ops={}), transformer())


def test_kernels_that_took_longer_than_estimated_raise_the_next_estimates(told: MeasuredCosts) -> None:
    graph, plan = transformer().graph, read(transformer())
    estimates = estimates_ns(told, graph, plan)
    slower = {
        key: OpTime(round(1.2 * ns), 10, 5)
        for key, ns in zip(
            kernel_keys(graph, unit_graph(graph, plan).kernels(graph)), estimates.tolist(), strict=True
        )
    }
    known, look = with_kernels(told, slower, transformer(), plan)
    assert look.kernels == len(plan.groups) == unknown_kernels(transformer(), told.profile, plan)
    assert look.ratio == pytest.approx(1.2, abs=0.01)
    assert unknown_kernels(transformer(), known, plan) == 0
    again = costs_of(known, transformer(), (plan,))
    assert with_kernels(again, slower, transformer(), plan) == (known, Reprofiled(0, 0, 0))
    nodes = tuple(sorted(plan.groups[0].nodes + plan.groups[1].nodes))
    larger = Kernels.of_lists([nodes], [nodes])
    (before,), (after,) = (costs.kernels_ns(graph, larger) for costs in (told, again))
    assert after / before == pytest.approx(1.2, abs=0.05)


def test_a_kernel_of_one_op_is_estimated_as_the_search_is_told(told: MeasuredCosts) -> None:
    """The simulator prices it as the op alone, whatever the network says of such a kernel."""
    graph = transformer().graph
    ops = [node.id for node in graph.nodes if node.kind is Kind.FUSIBLE][:50]
    plan = unfused(graph, [Group((op,)) for op in ops])
    assert estimates_ns(told, graph, plan).tolist() == told.op_ns(graph)[ops].tolist()


def test_without_times_nothing_is_learned(told: MeasuredCosts) -> None:
    plan = read(transformer())
    assert with_kernels(told, {}, transformer(), plan) == (told.profile, Reprofiled(0, 0, 0))
