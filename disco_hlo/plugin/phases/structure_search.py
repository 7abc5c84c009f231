"""Search over the step's structure: named schedules of moves, each searched like a step of its own.

It begins where order and buckets end: only if the best plan found leaves communication exposed that lies inside the
layer is any schedule tried. Each is handed to XLA, predicted with what is known of its ops, the most promising are
profiled and searched, and those that are predicted to beat the plan are measured with the finalists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Budget, Case, Optimized, optimize, unsearched
from disco_hlo.optimize.regions import step_times
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.measuring.candidates import Trial
from disco_hlo.plugin.measuring.cores import compiles_at_once
from disco_hlo.plugin.measuring.profiling import profile_step
from disco_hlo.plugin.measuring.room import room_bytes
from disco_hlo.plugin.phases.finding import search_settings
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.structure import Early, Restructured, early_module, named_schedules, restructured
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.profiler.store import ProfileStore
from disco_hlo.search.schedule import Scheduled

EXPOSED_SHARE = 0.03
"""Share of a step that its communication must leave exposed before any structure is tried."""
INSIDE_SHARE = 0.02
"""Share of a step's op time that must lie between transfers; a data-parallel step has none there."""
MOST_PROFILED = 3
"""Schedules that are profiled and searched."""
SEARCH_SHARE = 0.1
"""Share of the search's time that each of them gets."""
_TAKES_S = 300.0


def restructured_trials(
    session: Session, slot: PlanSlot, store: ProfileStore | None, found: Optimized | None
) -> list[Trial]:
    """Candidates of another structure, to be measured with the others. All ranks call this; whatever goes wrong,
    all go on without.

    Args:
        found: what the search over order and buckets found, on rank 0.
    """
    try:
        return _trials(session, slot, store, found)
    except Exception as error:
        session.say(
            "no other structure of the step (collectives split or moved inside a layer) is tried: %s",
            one_line(error),
        )
        return []


def why_not(case: Case, plan: Strategy) -> str:
    """Why no other structure than the best plan's is tried, as a sentence's end; empty where one is."""
    graph, costs = case.source.graph, case.costs
    if not costs.machine.asynchronous:
        return "collectives block on this device, so nothing can overlap them"
    times = step_times(case.source, plan, costs)
    exposed = times.exposed_ns / max(1, times.makespan_ns)
    if exposed < EXPOSED_SHARE:
        return f"the plan leaves {exposed:.1%} of the step to communication alone"
    inside = inside_share(graph, [int(ns) for ns in costs.op_ns(graph)])
    in_loops = any(region.source.graph.all_reduces for region in case.source.regions)
    if inside < INSIDE_SHARE and len(graph.all_reduces) > 1 and not in_loops:
        return f"only {inside:.1%} of the ops' time lies between transfers"
    return ""


def inside_share(graph: Graph, nodes_ns: Sequence[int]) -> float:
    """Share of the ops' time in ops that wait for one transfer and that another waits for."""
    after = [False] * len(graph)
    for node in graph.nodes:
        after[node.id] = any(after[x] or graph.nodes[x].kind is Kind.ALL_REDUCE for x in node.operands)
    before = [False] * len(graph)
    for node in reversed(graph.nodes):
        users = graph.users[node.id]
        before[node.id] = any(before[x] or graph.nodes[x].kind is Kind.ALL_REDUCE for x in users)
    inside = sum(ns for ns, a, b in zip(nodes_ns, after, before, strict=True) if a and b)
    return inside / max(1, sum(nodes_ns))


def _trials(
    session: Session, slot: PlanSlot, store: ProfileStore | None, found: Optimized | None
) -> list[Trial]:
    settings = session.settings
    if settings.structure == "off":
        return []
    with session.stage("structure"):
        mine = ""
        if found is not None and settings.forced_structure is None:
            mine = why_not(found.case, found.best.strategy)
    reason = session.tell(mine if session.leads else None, "structure")
    if reason:
        LOGGER.debug("no structure of the step is tried: %s", reason)
        return []
    made = _restructured(session)
    promising = session.tell(_most_promising(session, made, found), "promising structures")
    room = room_bytes(session)
    best: dict[str, Scheduled] = {}
    for name in promising:
        one = _searched(session, made[name], slot, store, room, found)
        if one is not None:
            best[name] = one
    return _told(session, best, made, slot, found)


def _restructured(session: Session) -> dict[str, Restructured]:
    """The step by each schedule that it has the pattern for, the same on all ranks."""
    with session.stage("schedules", takes_s=_TAKES_S):
        early = early_module(session.request)
        schedules = _wanted(session, named_schedules(early)) if session.leads else None
    key, schedules = session.tell([early.key, schedules], "schedules")
    with session.stage("early module"):
        if early.key != key:
            raise ProfileError("the ranks compile different early modules")
    made = _made(session, early, schedules)
    agreed = {}
    for name, one in made.items():
        try:
            with session.stage(f"structure {name}"):
                if isinstance(one, Exception):
                    raise one
                agreed[name] = one
        except Exception as error:
            _say_left_out(session, name, error)
    return agreed


def _say_left_out(session: Session, name: str, error: Exception) -> None:
    """A schedule that does not work is nothing to the user, unless it is the one asked for."""
    if name == session.settings.forced_structure:
        session.say("%s is not tried: %s", name, one_line(error))
    else:
        LOGGER.debug("%s: %s", name, one_line(error))


def _wanted(session: Session, schedules: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    forced = session.settings.forced_structure
    if forced is None:
        return schedules
    if forced not in schedules:
        listed = ", ".join(schedules) or "none"
        LOGGER.warning("DISCO_STRUCTURE is %s; this step has the pattern for %s", forced, listed)
        return {}
    return {forced: schedules[forced]}


def _made(
    session: Session, early: Early, schedules: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Restructured | Exception]:
    def make(name: str) -> Restructured | Exception:
        try:
            with jaxlink.ours():
                return restructured(session.request, early, name, schedules[name])
        except Exception as error:
            return error

    with ThreadPoolExecutor(compiles_at_once(session), "disco-structure") as pool:
        return dict(zip(schedules, pool.map(make, schedules), strict=True))


def _most_promising(
    session: Session, made: Mapping[str, Restructured], found: Optimized | None
) -> list[str] | None:
    """Names of the schedules worth profiling, on rank 0: by what is known of their ops so far."""
    if not session.leads or found is None:
        return [] if session.leads else None
    predicted: dict[str, int] = {}
    for name, one in made.items():
        try:
            xla = read(one.source)
            case = Case(one.source, xla, costs_of(found.case.costs.profile, one.source, [xla]))
            predicted[name] = unsearched(case).predicted_ns
        except Exception as error:
            _say_left_out(session, name, error)
    LOGGER.debug("structures as predicted before profiling: %s ns", predicted)
    return sorted(predicted, key=lambda name: (predicted[name], name))[:MOST_PROFILED]


def _searched(
    session: Session,
    one: Restructured,
    slot: PlanSlot,
    store: ProfileStore | None,
    room: int | None,
    found: Optimized | None,
) -> Scheduled | None:
    """The best plan for a schedule, on rank 0; None elsewhere, and where there is none.

    Its plans may need a little more memory than what XLA makes of the schedule. Whether the device has that is asked
    before any is run.
    """
    name, source, settings = one.record.name, one.source, session.settings
    try:
        xla = read(source)
        profiled = profile_step(session, source, xla, store, slot, restructured=one)
        with session.stage(f"search of {name}", takes_s=settings.budget_s + _TAKES_S):
            if profiled is None or found is None:
                return None
            budget = Budget.of(settings.budget_s * SEARCH_SHARE)
            case = Case(source, xla, costs_of(profiled.profile, source, [xla]), room)
            more_bytes = case.default.peak_bytes - found.case.default.peak_bytes
            session.say("%s: predicted to need %+.0f MiB on each device", name, more_bytes / 2**20)
            return optimize(case, replace(search_settings(settings), finalists=1), budget).best
    except Exception as error:
        _say_left_out(session, name, error)
        return None


def _told(
    session: Session,
    best: Mapping[str, Scheduled],
    made: Mapping[str, Restructured],
    slot: PlanSlot,
    found: Optimized | None,
) -> list[Trial]:
    """The candidates on every rank: those predicted to beat the plan, or the one that is forced."""
    kept = [
        [name, msgspec.to_builtins(one.strategy), one.predicted_ns]
        for name, one in best.items()
        if session.settings.forced_structure
        or (found is not None and one.predicted_ns < found.best.predicted_ns)
    ]
    trials = []
    for name, strategy, predicted_ns in session.tell(kept, "restructured finalists"):
        plan = msgspec.convert(strategy, Strategy)
        trials.append(Trial(name, plan, predicted_ns, marks=slot, restructured=made[name]))
    if trials:
        session.say("structures to measure: %s", ", ".join(trial.name for trial in trials))
    return trials
