"""Look again at what the search chose: measure the kernels it made up, and search with their times.

A search over estimates ends where they are too low: of all kernels that never ran it takes those that the estimator
flatters most. On H200 plans took up to 11 % of the step longer than they had been promised to, XLA's own kernels,
which had been measured, up to 4 % (docs/benchmarks/until-2026-11-24.md). DisCo (section 4.3) leaves it at one
estimate. Here the best plan's kernels are run under the profiler, as XLA's were before the search, and the search is
made once more: now they cost what they cost, and what it takes instead has to be better than that by as much as such
promises fell short (``profiler.corrections``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.plugin.costing import costs_of
from disco_hlo.plugin.interruption import Interruption
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.measured_times import measured_times, say_not_kept
from disco_hlo.plugin.measuring.profiling import kernel_times, kernels_of
from disco_hlo.plugin.phases.finding import PLAN, Found, find
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.step import Step
from disco_hlo.profiler.costs import MeasuredCosts
from disco_hlo.profiler.kernel_keys import kernel_keys
from disco_hlo.profiler.profile import OpTime, Profile
from disco_hlo.simulator.build import groups_ns


def look_again(
    session: Session,
    step: Step,
    xla: Strategy,
    found: Found | None,
    slot: PlanSlot,
    interruption: Interruption,
    *,
    search_takes_s: float,
    room_bytes: int | None = None,
) -> Found | None:
    """What a search finds that knows the times of the kernels of ``found``'s best plan; on all ranks at once.

    ``found`` itself, where all of them were known, or they could not be measured. Its plans are among those that the
    new search ranks.

    Args:
        found: what the search found; None on ranks other than 0.
        search_takes_s: how long rank 0 may keep the others waiting.
        room_bytes: as for :func:`~disco_hlo.plugin.phases.finding.find`.

    Raises:
        ActivationError: a rank failed in the new search.
    """
    raw = None
    if found is not None and not interruption:
        best = plans_in(found.trials)[0]
        lacking = unknown_kernels(step.source.graph, found.profile, best)
        LOGGER.debug("%d of %d kernels of the plan were never run", lacking, len(best.groups))
        raw = msgspec.to_builtins(best) if lacking else None
    raw = session.tell(raw, "plan to look at")
    if raw is None:
        return found
    times = _measured(session, step, msgspec.convert(raw, Strategy), slot, found)
    if not session.tell(bool(times), "looked at"):
        return found
    with session.stage("search again", takes_s=search_takes_s):
        if found is None or interruption:
            return found
        plans, graph = plans_in(found.trials), step.source.graph
        told = costs_of(found.profile, graph, (xla, *plans))
        profile, look = with_kernels(told, times, graph, plans[0])
        session.say(
            "measured %d kernels of the plan that had never run: %.2f ms, estimated %.2f",
            look.kernels, look.measured_ns / 1e6, look.estimated_ns / 1e6,
        )  # fmt: skip
        again = find(session, step, xla, profile, interruption, also=plans, room_bytes=room_bytes)
        return replace(again, earlier=(*found.earlier, (found.result.evaluations, found.search_s)))


def plans_in(trials: Iterable[tuple[str, Strategy | None, int]]) -> list[Strategy]:
    """The search's own plans among what is to be measured (name, strategy, predicted ns), the best first."""
    return [
        strategy
        for name, strategy, _ in trials
        if strategy is not None and (name == PLAN or name.startswith(f"{PLAN} "))
    ]


def unknown_kernels(graph: Graph, profile: Profile, plan: Strategy) -> int:
    """How many kernels of ``plan`` no trace has shown."""
    return sum(key not in profile.ops for key in kernel_keys(graph, unit_graph(graph, plan).kernels))


@dataclass(frozen=True, slots=True)
class Look:
    """Kernels of a plan that had only been estimated and were measured then."""

    kernels: int
    estimated_ns: int
    measured_ns: int

    @property
    def ratio(self) -> float:
        """Measured over estimated time; 1 where there is nothing to compare."""
        return self.measured_ns / self.estimated_ns if self.estimated_ns else 1.0


def with_kernels(
    told: MeasuredCosts, times: Mapping[str, OpTime], graph: Graph, plan: Strategy
) -> tuple[Profile, Look]:
    """The profile with ``times`` of what it does not know, and what these tell of the kernels of ``plan``.

    Args:
        told: what the search was told by; the profile is its.
    """
    profile = told.profile
    keys = kernel_keys(graph, unit_graph(graph, plan).kernels)
    new = [i for i, key in enumerate(keys) if key in times and key not in profile.ops]
    estimates = estimates_ns(told, graph, plan)[new] if new else np.zeros(0, np.int64)
    look = Look(len(new), int(estimates.sum()), sum(times[keys[i]].median_ns for i in new))
    return replace(profile, ops={**times, **profile.ops}), look


def estimates_ns(costs: CostModel, graph: Graph, plan: Strategy) -> NDArray[np.int64]:
    """Of each group what a search is told by ``costs``, as the simulator asks for it."""
    return groups_ns(graph, unit_graph(graph, plan), costs, costs.op_ns(graph))


def _measured(
    session: Session, step: Step, plan: Strategy, slot: PlanSlot, found: Found | None
) -> Mapping[str, OpTime]:
    """Times of the plan's kernels, on rank 0; nothing where they could not be measured, and elsewhere."""
    launch_ns = found.profile.launch_ns if found is not None else 0
    try:
        times = kernel_times(session, step.source, kernels_of(session, step.source, plan, slot), launch_ns)
    except Exception as error:  # the same on every rank, by the stages it goes through
        session.say("the plan's kernels are not measured: %s", one_line(error))
        return {}
    if found is not None:
        _keep(session, found.profile, times)
    return times


def _keep(session: Session, profile: Profile, times: Mapping[str, OpTime]) -> None:
    """Add what is new to the store. One that fails is done without: the error would be rank 0's alone, and the
    others would wait for it."""
    new = {key: time for key, time in times.items() if key not in profile.ops}
    with measured_times(session) as store:
        if store is None or not store.writable:
            return
        try:
            store.add_ops(profile.platform, new)
        except DiscoError as error:
            say_not_kept(store.path, one_line(error))
