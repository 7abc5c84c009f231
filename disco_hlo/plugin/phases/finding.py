"""What rank 0 finds: the search for the best plan, made again once the kernels that it made up were measured.

What is searched and how says ``disco_hlo.optimize``; here is what the ranks, the user and the plan directory have to do
with it. The search runs in the training's own process while a compile waits, and in one of its own beside a training
that goes on (:func:`search_apart`; DisCo, section 4.5: no device is needed). That one has a low priority, no devices,
and ends with the training. The strategies that it finds are checked like those of any plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast

import msgspec

from disco_hlo.backends import BACKENDS
from disco_hlo.compiled import is_cached
from disco_hlo.elsewhere import apart
from disco_hlo.errors import DiscoError
from disco_hlo.estimator.analytic import DeviceModel
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.ablations import Candidate, candidates, plans_in, without_parts
from disco_hlo.optimize.costs import costs_of, unknown_kernels, with_kernels
from disco_hlo.optimize.pipeline import Budget, Case, Optimized, optimize, search_progress, search_record
from disco_hlo.optimize.regions import lower_bound
from disco_hlo.plan.plan import SEARCHED, Prediction, SearchRecord, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.store import PlanSlot
from disco_hlo.plugin.logs import LOGGER, compared, configure, one_line, progress_wanted
from disco_hlo.plugin.measuring.known_times import measured_times, say_not_kept
from disco_hlo.plugin.measuring.profiling import kernel_times, kernels_of
from disco_hlo.plugin.session import Interruption, Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.structure import why_not
from disco_hlo.printable import time_text
from disco_hlo.profiler.profile import OpTime, Profile
from disco_hlo.search import run
from disco_hlo.search.api import SearchResult, SearchSettings
from disco_hlo.search.schedule import Scheduled
from disco_hlo.simulator import timeline

COMPILE_S = 600.0
"""The longest that a training waits for the search's code, once on a machine. The budget does not count it, nor what
compiling the code that predicts takes: otherwise the first search would end without a plan."""
MEASURE_BUDGET_S = 20.0
"""How long the candidates are measured."""
SHORTEST_COMPILING_S = 60.0
"""How long they may be compiled, however short a search is asked for."""
_CLOSED = frozenset({"conditional", "while"})
"""Ops whose inside stays as XLA compiled it."""
_AROUND_S = 300.0
"""What reading the step and ranking what was found may take besides."""


class Asker(Protocol):
    """Who asks for a search: a session, or the process that searches for one."""

    @property
    def settings(self) -> Settings:
        """The user's."""

    def say(self, message: str, *values: object) -> None:
        """One line for the user."""


@dataclass(frozen=True)
class FoundPlans:
    """What the measurement and the plan need of rank 0's search, which may have run in another process."""

    candidates: tuple[Candidate, ...]
    """Everything to measure, XLA's default first."""
    prediction: Prediction
    """Of the best plan."""
    record: SearchRecord
    searches_s: tuple[float, ...]
    """What each search took."""

    @property
    def best(self) -> Scheduled:
        """The search's plan; of its memory nothing is known."""
        [one] = (one for one in self.candidates if one.name == SEARCHED and one.strategy is not None)
        return Scheduled(cast(Strategy, one.strategy), one.predicted_ns, 0)

    def of(self, case: Case, profile: Profile) -> Found:
        """The search as if it had been made here, for this case; of what it tried on the way nothing is known."""
        best, tried = self.best, self.record.evaluations
        result = SearchResult(
            best.strategy, best.predicted_ns, case.default.makespan_ns, (), tried, tried, 0.0, ""
        )
        return Found((Optimized(case, result, (best,), sum(self.searches_s)),), self.candidates, profile)


@dataclass(frozen=True)
class Found:
    """What rank 0's search found."""

    searches: tuple[Optimized, ...]
    """The last one counts; each of those before was made again once its plan's kernels were measured."""
    candidates: tuple[Candidate, ...]
    """Everything to measure, XLA's default first."""
    profile: Profile

    @property
    def last(self) -> Optimized:
        """The search that counts."""
        return self.searches[-1]

    def plans(self, settings: Settings) -> FoundPlans:
        """What goes on from here."""
        record = search_record(search_settings(settings), [one.result for one in self.searches])
        seconds = tuple(one.search_s for one in self.searches)
        return FoundPlans(self.candidates, self.last.prediction, record, seconds)


def find(
    asker: Asker,
    source: CanonicalModule,
    xla: Strategy,
    profile: Profile,
    stop: Interruption,
    before: Found | None = None,
    *,
    room_bytes: int | None = None,
    with_parts: bool = False,
) -> Found:
    """Search on rank 0 and name what to measure.

    Args:
        before: an earlier search; its plans are ranked with those of this one, and what their kernels took, where they
            were measured since, corrects estimates.
        room_bytes: what each device has left for a plan; None where nobody knows.
        with_parts: whether parts of the plan are named, too.
    """
    settings, budget = asker.settings, Budget.of(asker.settings.budget_s, COMPILE_S)
    compiles = say_what_predicting_takes(asker)
    also = plans_in(before.candidates) if before is not None else []
    case = Case(source, xla, costs_of(profile, source, (xla, *also)), room_bytes)
    if before is None:
        asker.say("%s", outlook(settings, case))
    if compiles:
        budget = Budget.of(settings.budget_s, COMPILE_S)
    budget = replace(budget, seconds=settings.budget_s * share_of_a_search(settings, case))
    with search_progress(progress_wanted()) as on_progress:
        found = optimize(
            case,
            search_settings(settings),
            budget,
            also=also,
            on_progress=on_progress,
            stop=lambda: bool(stop),
        )
    for note in found.notes:
        asker.say("%s", note)
    for region in found.regions:
        asker.say("%s", region)
    asker.say(
        "searched %d candidates in %.1f s: the best is predicted to take %.2f ms a step, XLA's default %.2f ms",
        found.evaluations, found.search_s, found.best.predicted_ns / 1e6, case.default.makespan_ns / 1e6,
    )  # fmt: skip
    searches = (*before.searches, found) if before is not None else (found,)
    named = candidates if with_parts else without_parts
    return Found(searches, named(found, settings.finalists), profile)


def search_settings(settings: Settings) -> SearchSettings:
    """What the user's settings say to the search."""
    return SearchSettings(
        seed=settings.seed,
        unchanged=settings.patience,
        seconds=settings.budget_s,
        finalists=settings.finalists,
    )


def all_searches_s(settings: Settings, backend: str) -> float:
    """How long all searches for a step may take, those of other structures among them, for which nobody waits where
    the step trains meanwhile."""
    return settings.budget_s * (looks(settings, backend) + 1 + (settings.when == "training"))


def share_of_a_search(settings: Settings, case: Case) -> float:
    """Part of ``DISCO_BUDGET_S`` that one search of the step as it is gets. Where other structures may be tried, these
    get as much together."""
    if settings.structure == "off" or settings.when == "training":
        return 1.0
    if settings.forced_structure is None and why_not(case, case.times):
        return 1.0
    number = looks(settings, case.source.graph.backend) + 1
    return number / (number + 1)


# --- what the user is told before a search --------------------------------------------------------


def looks(settings: Settings, backend: str) -> int:
    """How often the best plan's kernels are measured and the search is made again."""
    if settings.when == "training":
        return 0
    return int(BACKENDS[backend].reprofiles) if settings.looks is None else settings.looks


def say_what_predicting_takes(asker: Asker) -> bool:
    """A line before the first prediction on a machine, whose code must be compiled first; whether that is so."""
    compiles = not all(map(is_cached, (DeviceModel.__module__, timeline.__name__)))
    if compiles:
        asker.say(
            "compiling the code that predicts step times, which takes up to two minutes, once on this machine"
        )
    return compiles


def outlook(settings: Settings, case: Case) -> str:
    """One line for somebody who waits: how much of the step can change, what can be gained, how long it takes."""
    default_ns = case.default.makespan_ns
    bound_ns = lower_bound(case.source, [case.xla], case.costs).makespan_ns
    share = changeable_share(case)
    closed = (
        ""
        if share == 1
        else (
            f"; a plan can change {share:.0%} of it, the rest lies in loops and branches that stay as XLA compiled them"
        )
    )
    gain = compared(default_ns, bound_ns)
    gain += "" if gain == "no faster" else " at best"
    number = looks(settings, case.source.graph.backend) + 1
    times = "" if number == 1 else f"{number} times "
    code = (
        "" if is_cached(run.__name__) else "compile the search's code (some minutes, once on this machine), "
    )
    measuring_s = max(settings.budget_s, SHORTEST_COMPILING_S) + MEASURE_BUDGET_S
    after = f"then compile and measure the best plans for up to {measuring_s:.0f} s"
    if settings.when == "training":
        after = "while the training goes on; then the best plans take turns with XLA's default in running it"
    return (
        f"a step is predicted to take {time_text(default_ns)}{closed}; another order and other buckets can make it "
        f"{gain}, other kernels perhaps more; next: {code}search for up to {times}{settings.budget_s:g} s "
        f"(DISCO_BUDGET_S), {after}"
    )


def changeable_share(case: Case) -> float:
    """What part of a step's time no loop or branch takes that stays as XLA compiled it."""
    graph = case.source.graph
    open_ops = {call.node for region in case.source.regions for call in region.calls if call.caller == ENTRY}
    closed = [node.id for node in graph.nodes if node.opcode in _CLOSED and node.id not in open_ops]
    closed_ns = int(case.costs.op_ns(graph)[closed].sum()) if closed else 0
    return max(0.0, 1 - closed_ns / max(1, case.default.makespan_ns))


# --- searching again with the times of kernels that had never run ------------------------------------


def look_again(
    session: Session,
    source: CanonicalModule,
    xla: Strategy,
    found: Found | None,
    slot: PlanSlot,
    stop: Interruption,
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
        room_bytes: as for :func:`find`.

    Raises:
        ActivationError: a rank failed in the new search.
    """
    raw = None
    if found is not None and not stop:
        best = found.last.best.strategy
        lacking = unknown_kernels(source, found.profile, best)
        LOGGER.debug("%d of %d kernels of the plan were never run", lacking, len(best.groups))
        raw = msgspec.to_builtins(best) if lacking else None
    raw = session.tell(raw, "plan to look at")
    if raw is None:
        return found
    times = _measured(session, source, msgspec.convert(raw, Strategy), slot, found)
    if not session.tell(bool(times), "looked at"):
        return found
    with session.stage("search again", takes_s=search_takes_s):
        if found is None or stop:
            return found
        profile, seen = with_kernels(found.last.case.costs, times, source, found.last.best.strategy)
        session.say(
            "measured %d kernels of the plan that had never run: together they take %.2f ms, estimated were %.2f ms",
            seen.kernels, seen.measured_ns / 1e6, seen.estimated_ns / 1e6,
        )  # fmt: skip
        explained = session.settings.explain
        return find(session, source, xla, profile, stop, found, room_bytes=room_bytes, with_parts=explained)


def _measured(
    session: Session, source: CanonicalModule, plan: Strategy, slot: PlanSlot, found: Found | None
) -> Mapping[str, OpTime]:
    """Times of the plan's kernels, on rank 0; nothing where they could not be measured, and elsewhere."""
    launch_ns = found.profile.launch_ns if found is not None else 0
    try:
        times = kernel_times(session, source, kernels_of(session, source, plan, slot), launch_ns)
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


# --- the search in a process of its own ----------------------------------------------------------------


@dataclass(frozen=True)
class _Apart:
    """Who asks for a search there: what it says goes to the training's stderr."""

    settings: Settings

    def say(self, message: str, *values: object) -> None:
        LOGGER.info(message, *values)


def longest_s(settings: Settings) -> float:
    """How long the search may take before it is given up."""
    return settings.budget_s + COMPILE_S + _AROUND_S


def search_apart(
    settings: Settings,
    module: bytes,
    profile: Profile,
    room_bytes: int | None,
    stop: Interruption,
    *,
    with_parts: bool = False,
) -> FoundPlans:
    """:func:`find` in a process of its own, which is killed at the end, after too long, or once ``stop`` says so.

    Raises:
        DiscoError: it found nothing: it died, or was killed.
        OSError: it cannot be started.
    """
    longest = longest_s(settings)
    asked = settings, module, profile, room_bytes, with_parts
    return apart(_found_apart, *asked, longest_s=longest, stop=lambda: stop)


def _found_apart(
    settings: Settings, module: bytes, profile: Profile, room_bytes: int | None, with_parts: bool
) -> FoundPlans:
    configure(settings.log_level)
    source = canonicalize(module)
    found = find(
        _Apart(settings), source, read(source), profile, Interruption(),
        room_bytes=room_bytes, with_parts=with_parts,
    )  # fmt: skip
    return found.plans(settings)
