"""What is measured beside the search's plans: XLA's own plan, and others that have only a part of the best one.

They win where the simulator is wrong about the other part, and tell the user what each part gains.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.baselines import one_bucket
from disco_hlo.plan.fitting import in_the_order_of, without_unfit
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.normal import normal_form
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plugin.measuring.candidates import DEFAULT
from disco_hlo.search.schedule import Scheduled, with_order
from disco_hlo.simulator.build import build
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.timeline import simulate

NO_FUSION = "no fusion"
ONE_BUCKET = "one bucket, XLA's op fusion"
PLAN_BUCKETS = "plan's buckets, XLA's op fusion"
OUR_ORDER = "our order, XLA's op fusion and buckets"
"""Where transfers run beside kernels their order alone gains, and nothing but it is changed."""
OUR_KERNELS = "our op fusion, XLA's buckets and order"
"""Its transfers run beside about what XLA's do: for what the simulator does not know of that."""

Named = tuple[str, Strategy | None, int]
"""(name, strategy, predicted ns) of something to measure; the strategy None is XLA's default."""


def beside_plans(
    source: CanonicalModule,
    plan: Strategy,
    xla: Strategy,
    default_ns: int,
    plain: Scheduled,
    costs: CostModel,
    machine: MachineModel,
    limit_bytes: int | None,
) -> list[Named]:
    """XLA's default, then what else is to be measured beside ``plan``, less what is illegal in this step.

    Args:
        source: the step.
        plan: the search's best.
        xla: XLA's own plan.
        default_ns: predicted for XLA's own plan.
        plain: the unfused step in our order, measured where nothing runs beside a transfer.
        costs: what the search was told of times.
        machine: and of the device.
        limit_bytes: most device memory that the plan's kernels may be predicted to need with XLA's buckets.
    """
    graph = source.graph
    named: list[Named] = [(DEFAULT, None, default_ns)]
    in_our_order = [
        (ONE_BUCKET, one_bucket(graph, xla.groups)),
        (PLAN_BUCKETS, Strategy(xla.groups, plan.buckets)),
    ]
    if machine.asynchronous:
        in_our_order.insert(0, (OUR_ORDER, replace(xla, order=())))
    else:
        named.append((NO_FUSION, plain.strategy, plain.predicted_ns))
    for name, strategy in in_our_order:
        with contextlib.suppress(IllegalStrategyError):
            baseline = with_order(graph, strategy, costs, machine)
            named.append((name, baseline.strategy, baseline.predicted_ns))
    if machine.asynchronous:
        tried = _our_kernels(source, plan, xla, costs, machine, limit_bytes)
        if tried is not None and tried.predicted_ns < default_ns:
            named.append((OUR_KERNELS, tried.strategy, tried.predicted_ns))
    return named


def _our_kernels(
    source: CanonicalModule,
    plan: Strategy,
    xla: Strategy,
    costs: CostModel,
    machine: MachineModel,
    limit_bytes: int | None,
) -> Scheduled | None:
    """The plan's kernels with XLA's buckets in XLA's order; None where that needs too much memory."""
    graph = source.graph
    with contextlib.suppress(IllegalStrategyError):
        kernels = without_unfit(source, Strategy(plan.groups, xla.buckets))
        strategy = normal_form(graph, in_the_order_of(graph, kernels, xla, machine.asynchronous))
        check_strategy(graph, strategy, unit_graph(graph, strategy), attested_groups(source))
        timeline = simulate(build(graph, strategy, costs, machine).problem)
        if limit_bytes is None or timeline.peak_bytes <= limit_bytes:
            return Scheduled(strategy, timeline.makespan_ns, timeline.peak_bytes)
    return None
