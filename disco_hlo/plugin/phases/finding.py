"""What rank 0 finds: the search for the best plan, and all that is to be measured (DisCo, section 4.5)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from disco_hlo.plan import plan as plans
from disco_hlo.plan.baselines import unfused
from disco_hlo.plan.read import repeats
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plugin.costing import costs_of, machine_of
from disco_hlo.plugin.interruption import Interruption
from disco_hlo.plugin.logs import progress_wanted
from disco_hlo.plugin.phases.beside import Named, beside_plans
from disco_hlo.plugin.phases.outlook import outlook, say_what_predicting_takes
from disco_hlo.plugin.phases.progress import search_progress
from disco_hlo.plugin.phases.ranking import memory_limit_bytes, prediction, searchable
from disco_hlo.plugin.phases.searching import Budget, search_within
from disco_hlo.plugin.phases.sharding import advice_for, worth_saying
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.step import Step
from disco_hlo.profiler.profile import Profile
from disco_hlo.search.api import SearchResult, SearchSettings
from disco_hlo.search.schedule import with_order
from disco_hlo.search.sharding_advice import sentence
from disco_hlo.search.warm import warm_up_in_time
from disco_hlo.simulator.build import build
from disco_hlo.simulator.step_bound import bound_of_kernels, lowest_bound
from disco_hlo.simulator.timeline import simulate

PLAN = plans.SEARCHED
_COMPILE_S = 600.0
"""The longest that a training waits for the search's code, once on a machine; the budget begins behind it. Otherwise
the first search would end without a plan."""


@dataclass(frozen=True)
class Found:
    """What rank 0's search hands to the measurement."""

    result: SearchResult
    trials: tuple[Named, ...]
    """Everything to measure: XLA's default first, then what else stands beside the plans, then these."""
    prediction: plans.Prediction
    profile: Profile
    search_s: float
    sharding: plans.Sharding | None = None
    """What splitting the optimizer's state would gain, where there is some to split."""
    earlier: tuple[tuple[int, float], ...] = ()
    """(evaluations, seconds) of the searches before this one, each made again after a look at its plan."""


def find(
    session: Session,
    step: Step,
    xla: Strategy,
    profile: Profile,
    stop: Interruption,
    also: Sequence[Strategy] = (),
    *,
    quiet: bool = False,
    room_bytes: int | None = None,
) -> Found:
    """Search and name what to measure; of ``session`` only the settings and the voice are used.

    Args:
        also: plans of an earlier search, to be ranked with those of this one; what their kernels took, where they were
            measured since, corrects estimates.
        room_bytes: what each device has left for a plan (CPU); None where nobody knows.
        quiet: nobody waits for what is found, so that nobody is told how long it takes.
    """
    graph, settings = step.source.graph, session.settings
    budget = Budget.of(settings.budget_s)
    if not quiet:
        say_what_predicting_takes(session)
    costs, machine = costs_of(profile, graph, (xla, *also)), machine_of(profile)
    chosen = replace(
        search_settings(settings),
        memory_limit_bytes=memory_limit_bytes(graph, xla, costs, machine, room_bytes),
    )
    default = simulate(build(graph, xla, costs, machine, repeats=repeats(step.source)).problem)
    if not also and not quiet:
        bound = bound_of_kernels(graph, xla.groups, costs, machine)
        session.say("%s", outlook(session, graph, costs, default.makespan_ns, bound.makespan_ns))
    compiling = time.monotonic()
    warm_up_in_time(graph, costs, machine, chosen, _COMPILE_S, lambda: bool(stop))
    budget = budget.longer_by(time.monotonic() - compiling)
    with search_progress(progress_wanted()) as on_progress:
        searched = search_within(
            budget, step.source, xla, costs, machine, chosen, begin=lambda: searchable(graph, xla), also=also,
            room_bytes=room_bytes,
            on_progress=on_progress, stop=lambda: bool(stop),
        )  # fmt: skip
    for note in searched.notes:
        session.say("%s", note)
    result, plans_found, search_s = searched.result, searched.plans, budget.spent_s
    best = plans_found[0]
    session.say(
        "searched %d candidates in %.1f s: the best is predicted to take %.2f ms a step, XLA's default %.2f ms",
        result.evaluations, search_s, best.predicted_ns / 1e6, default.makespan_ns / 1e6,
    )  # fmt: skip
    plain = with_order(graph, unfused(graph), costs, machine)
    trials = beside_plans(
        step.source, best.strategy, xla, default.makespan_ns, plain, costs, machine, chosen.memory_limit_bytes
    )
    for number, one in enumerate(plans_found[: settings.finalists]):
        trials.append((PLAN if number == 0 else f"{PLAN} {number + 1}", one.strategy, one.predicted_ns))
    kernels = (xla.groups, best.strategy.groups)
    limit = lowest_bound(graph, kernels, costs, machine)
    predicted = prediction(
        plan_ns=best.predicted_ns, peak_bytes=best.peak_bytes, default=default,
        unfused_ns=plain.predicted_ns, limit=limit,
    )  # fmt: skip
    advice = advice_for(step.source, best.strategy, costs, machine)
    if advice is not None and worth_saying(advice):
        session.say("%s", sentence(advice))
    return Found(result, tuple(trials), predicted, profile, search_s, advice)


def search_settings(settings: Settings) -> SearchSettings:
    """What the user's settings say to the search."""
    return SearchSettings(
        alpha=settings.alpha,
        beta=settings.beta,
        seed=settings.seed,
        unchanged=settings.patience,
        seconds=settings.budget_s,
        finalists=settings.finalists,
    )
