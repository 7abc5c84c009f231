"""Fused ops that searches choose, for scripts/sample_fused_ops.py to measure.

Of all kernels that never ran a search takes those that the estimator underestimates (``profiler.corrections``), and
random ones hold few of their kind. So the estimator also learns from the kernels of plans: what it, and the analytical
estimate that it corrects, would have chosen.

The kernels that the shipped weights for the H200 learned from were chosen on 2026-11-23, by searches of two seeds: one
began with what it was given, one with the unfused step. Today's have four, so the same configuration chooses others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from checkout import ROOT

from disco_hlo.estimator.gnn import GnnModel
from disco_hlo.estimator.samples import FusedOp
from disco_hlo.hlo.bitcasts import kernel_nodes
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph
from disco_hlo.optimize.costs import Costs, costs_for
from disco_hlo.optimize.pipeline import searchable
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.profiler.kernel_keys import GROUP_PREFIX
from disco_hlo.profiler.profile import load as load_profile
from disco_hlo.search.api import SearchSettings
from disco_hlo.search.run import search
from disco_hlo.search.strategies import kernels_of

PROFILE = ROOT / "disco_hlo" / "data" / "profiles" / "nvidia-h200-nvlink.json"
"""What ops take, as far as it knows them; no kernel of it is believed, so that all are estimated."""
_ON_THE_WAY = 8
"""Of the plans that a search finds on its way, about so many are looked at."""


def chosen_kernels(source: CanonicalModule, searches: int, candidates: int, seed: int) -> Iterator[FusedOp]:
    """Kernels of plans that were the best so far in one of so many searches, each with a seed of its own: every other
    by the trained network, the rest by the analytical estimate; two from XLA's kernels, then two from none.

    The same arguments give the same kernels. Triton's, whose tiles are made for what they compute, are left out.
    """
    profile = load_profile(PROFILE)
    profile = replace(
        profile, ops={key: time for key, time in profile.ops.items() if not key.startswith(GROUP_PREFIX)}
    )
    starts = searchable(source.graph, read(source)), unfused(source.graph)
    for number in range(searches):
        costs = costs_for(source, profile, None)
        if number % 2 and isinstance(costs.estimator, GnnModel):
            costs = Costs(profile, costs.estimator.analytic)
        plans: list[Strategy] = []
        settings = SearchSettings(seed=seed + number, evaluations=candidates, processes=1)
        found = search(
            source.graph, costs, costs.machine, start=starts[number // 2 % 2], settings=settings,
            on_best=lambda one, plans=plans: plans.append(one.strategy),
        )  # fmt: skip
        plans = plans[:: max(1, len(plans) // _ON_THE_WAY)]
        for plan in (*plans, *(one.strategy for one in found.finalists)):
            yield from kernels_in(source.graph, plan)


def kernels_in(graph: Graph, plan: Strategy) -> Iterator[FusedOp]:
    """The op groups of a plan as they would be measured, in the order of their results."""
    groups = {frozenset(group.ops): group for group in plan.groups}
    for ops, results in sorted(kernels_of(graph, plan), key=lambda kernel: kernel[1]):
        group = groups[ops]
        if group.kind != "triton":
            yield FusedOp(kernel_nodes(graph, ops), results, group.kind, group.config)
