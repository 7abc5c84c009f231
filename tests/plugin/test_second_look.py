"""What a look at a plan's kernels teaches the profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from disco_hlo.profiler.costs import fused_key
from disco_hlo.profiler.profile import OpTime, load
from disco_hlo.profiler.promises import Promises

from disco_hlo.plan.read import read
from disco_hlo.plugin.costing import costs_of
from disco_hlo.plugin.phases.second_look import estimates_ns, unknown_kernels, with_kernels
from tests.estimator.steps import transformer

PROFILE = Path(__file__).parents[2] / "disco_hlo" / "data" / "profiles" / "nvidia-h200-nvlink.json"


def test_kernels_that_took_longer_than_estimated_raise_the_next_estimates() -> None:
    graph, plan = transformer().graph, read(transformer())
    profile = replace(load(PROFILE), ops={})
    estimates = estimates_ns(costs_of(profile, [graph]).estimator, graph, plan)
    slower = {
        fused_key(graph, group): OpTime(round(1.2 * ns), 10, 5)
        for group, ns in zip(plan.groups, estimates.tolist(), strict=True)
    }
    known, told = with_kernels(profile, slower, graph, plan)
    assert told == len(plan.groups) == unknown_kernels(graph, profile, plan)
    assert unknown_kernels(graph, known, plan) == 0
    assert abs(known.promises.factor - 1.2) < 0.01
    assert with_kernels(known, slower, graph, plan) == (known, 0)
    again, _ = with_kernels(replace(known, ops={}), slower, graph, plan)
    assert again.promises == Promises(2 * known.promises.estimated_ns, 2 * known.promises.measured_ns)


def test_a_kernel_of_one_op_is_estimated_as_the_search_is_told() -> None:
    """The simulator prices it as the op alone, whatever the network says of such a kernel."""
    graph, plan = transformer().graph, read(transformer())
    estimator = costs_of(replace(load(PROFILE), ops={}), [graph]).estimator
    single = {}
    for place, group in enumerate(plan.groups):
        ops = [x for x in (*group.nodes, *group.duplicates) if graph.nodes[x].opcode != "bitcast"]
        if group.kind != "triton" and len(ops) == 1:
            single[place] = ops[0]
    assert single
    estimates, alone = estimates_ns(estimator, graph, plan), estimator.nodes_ns(graph)
    assert estimates[list(single)].tolist() == alone[list(single.values())].tolist()


def test_without_times_nothing_is_learned() -> None:
    graph, plan = transformer().graph, read(transformer())
    profile = replace(load(PROFILE), ops={})
    assert with_kernels(profile, {}, graph, plan) == (profile, 0)
