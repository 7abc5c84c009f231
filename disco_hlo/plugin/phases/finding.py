"""What rank 0 finds: the search for the best plan.

What is searched and how says ``disco_hlo.optimize``; here is what the ranks, the user and the plan directory have to do
with it. The search runs in the training's own process while a compile waits, and in one of its own beside a training
that goes on (:func:`search_apart`; DisCo, section 4.5: no device is needed). That one has a low priority, no devices,
and ends with the training. The strategies that it finds are checked like those of any plan.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

from disco_hlo.backends import BACKENDS
from disco_hlo.compiled import can_be_ready, is_cached, is_ready, note_ready
from disco_hlo.cores import own_cores
from disco_hlo.elsewhere import Run, apart, here
from disco_hlo.estimator.analytic import DeviceModel
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.ablations import Candidate, candidates, without_parts
from disco_hlo.optimize.cold_start import COMPILE_S, compile_code
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Budget, Case, Optimized, optimize, search_progress, search_record
from disco_hlo.optimize.regions import lower_bound
from disco_hlo.plan.plan import SEARCHED, Prediction, SearchRecord, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plugin.logs import LOGGER, compared, configure, one_line, progress_wanted
from disco_hlo.plugin.session import Interruption, Session
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.structure import why_not
from disco_hlo.printable import counted, time_text
from disco_hlo.profiler.profile import Profile
from disco_hlo.search import run
from disco_hlo.search.api import SearchResult, SearchSettings
from disco_hlo.search.schedule import Scheduled
from disco_hlo.simulator import timeline

_PREDICTIONS = "predictions"
"""All code that they need is in the cache: of a search that ended while it was compiled a part may be."""
MEASURE_BUDGET_S = 20.0
"""How long the candidates are measured."""
SHORTEST_COMPILING_S = 60.0
"""How long they may be compiled, however short a search is asked for."""
_CLOSED = frozenset({"conditional", "while"})
"""Ops whose inside stays as XLA compiled it."""
_AROUND_S = 300.0
"""What reading the step and ranking what was found may take besides."""
Say = Callable[..., None]
"""One line for the user, from a message and its values."""


@dataclass(frozen=True)
class FoundPlans:
    """What the measurement and the plan need of rank 0's search, which may have run in another process."""

    candidates: tuple[Candidate, ...]
    """Everything to measure, XLA's default first."""
    prediction: Prediction
    """Of the best plan."""
    record: SearchRecord
    search_s: float
    """What the search took."""

    @property
    def best(self) -> Scheduled:
        """The search's plan; of its memory nothing is known."""
        [one] = (one for one in self.candidates if one.name == SEARCHED and one.strategy is not None)
        return Scheduled(cast(Strategy, one.strategy), one.predicted_ns, 0)

    def of(self, case: Case) -> Optimized:
        """The search as if it had been made here, for this case; of what it tried on the way nothing is known."""
        best, tried = self.best, self.record.evaluations
        result = SearchResult(
            best.strategy, best.predicted_ns, case.default.makespan_ns, (), tried, tried, 0.0, ""
        )
        return Optimized(case, result, (best,), self.search_s)


@dataclass(frozen=True)
class Found:
    """What rank 0's search found."""

    search: Optimized
    candidates: tuple[Candidate, ...]
    """Everything to measure, XLA's default first."""
    profile: Profile

    def plans(self, settings: Settings, run: Run = here) -> FoundPlans:
        """What goes on from here; ``run`` calls what takes Python long."""
        record = search_record(search_settings(settings), self.search)
        prediction = run(Case.prediction, self.search.case, self.search.best)
        return FoundPlans(self.candidates, prediction, record, self.search.search_s)


def find(
    settings: Settings,
    say: Say,
    source: CanonicalModule,
    xla: Strategy,
    profile: Profile,
    stop: Interruption,
    *,
    room_bytes: int | None = None,
    with_parts: bool = False,
) -> Found:
    """Search on rank 0 and name what to measure.

    Args:
        room_bytes: what each device has left for a plan; None where nobody knows.
        with_parts: whether parts of the plan are named, too.
    """
    budget = Budget.of(settings.budget_s, COMPILE_S)
    compiles = say_what_predicting_takes(say)
    case = Case(source, xla, costs_of(profile, source, [xla]), room_bytes)
    say("%s", outlook(settings, case))
    if compiles:
        _ = case.unfused  # in our order, for which there is code, too
        note_ready(timeline.__name__, _PREDICTIONS)
        budget = Budget.of(settings.budget_s, COMPILE_S)
    share = share_of_a_search(settings, case)
    told = (
        "" if share == 1 else " (half of DISCO_BUDGET_S; the other half is for other structures of the step)"
    )
    budget = replace(budget, seconds=settings.budget_s * share, told=told)
    with search_progress(progress_wanted()) as on_progress:
        found = optimize(
            case,
            search_settings(settings),
            budget,
            on_progress=on_progress,
            stop=lambda: bool(stop),
        )
    say_what_was_found(say, found)
    named = candidates if with_parts else without_parts
    return Found(found, named(found, settings.finalists), profile)


def say_what_was_found(say: Say, found: Optimized) -> None:
    """A line for the step, and one for each loop, branch or call for which something faster was found: a step may have
    dozens of them."""
    for note in found.notes:
        say("%s", note)
    for region in found.regions:
        (LOGGER.debug if region.strategy is None else say)("%s", region)
    say(
        "searched %s in %.1f s: the best is predicted to take %.2f ms a step, XLA's default %.2f ms",
        counted(found.evaluations, "candidate"), found.search_s,
        found.best.predicted_ns / 1e6, found.case.default.makespan_ns / 1e6,
    )  # fmt: skip


def search_settings(settings: Settings) -> SearchSettings:
    """What the user's settings say to the search."""
    return SearchSettings(
        seed=settings.seed,
        unchanged=settings.patience,
        seconds=settings.budget_s,
        finalists=settings.finalists,
    )


def for_a_structure(settings: Settings, seconds: float) -> Settings:
    """What a search of the step in another structure is asked for, which has no other. It says nothing: its lines,
    those of the step's own search again, would not tell which structure they are about."""
    level = "warning" if settings.log_level == "info" else settings.log_level
    return replace(settings, budget_s=seconds, finalists=1, log_level=level, structure="off")


def all_searches_s(settings: Settings) -> float:
    """How long all searches for a step may take, those of other structures among them, for which nobody waits where
    the step trains meanwhile."""
    return settings.budget_s * (1 + (settings.when == "training"))


def share_of_a_search(settings: Settings, case: Case) -> float:
    """Part of ``DISCO_BUDGET_S`` that one search of the step as it is gets. Where other structures may be tried, these
    get as much together."""
    if settings.structure == "off" or settings.when == "training":
        return 1.0
    if settings.forced_structure is None and why_not(case, case.times):
        return 1.0
    return 0.5


@contextlib.contextmanager
def code_compiled_beside(
    session: Session, module: bytes, stop: Callable[[], bool]
) -> Iterator[Callable[[], None]]:
    """Around profiling and the search: on a host of GPUs the search's code is compiled beside the former, in a process
    of low priority, the first time on a machine that keeps it, and has a core for that. Yields what waits for it, or
    until ``stop`` says so: the search itself would take as long."""
    begins = session.leads and BACKENDS[session.facts.backend].queues and len(own_cores()) > 1
    if not begins or is_cached(run.__name__) or not can_be_ready(run.__name__):
        yield lambda: None
        return
    ended, began = threading.Event(), time.monotonic()
    with ThreadPoolExecutor(1, "disco-code") as pool:
        compiled = pool.submit(
            apart, compile_code, module, session.facts.device_kind,
            longest_s=COMPILE_S, stop=lambda: ended.is_set() or stop(),
        )  # fmt: skip

        def finish() -> None:
            why = "" if (error := compiled.exception()) is None else f", but not wholly: {one_line(error)}"
            LOGGER.debug("the search's code was compiled after %.1f s%s", time.monotonic() - began, why)

        try:
            yield finish
        finally:
            ended.set()


# --- what the user is told before a search --------------------------------------------------------


def say_what_predicting_takes(say: Say) -> bool:
    """A line before the first prediction on a machine, whose code must be compiled first; whether that is so."""
    cached = all(map(is_cached, (DeviceModel.__module__, timeline.__name__)))
    compiles = not cached or not is_ready(timeline.__name__, _PREDICTIONS)
    if compiles:
        say(
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
    gain = compared(bound_ns / default_ns)
    gain += "" if gain == "no faster" else " at best"
    code = (
        "" if is_cached(run.__name__) else "compile the search's code (some minutes, once on this machine), "
    )
    measuring_s = max(settings.budget_s, SHORTEST_COMPILING_S) + MEASURE_BUDGET_S
    after = f"then compile and measure the best plans for up to {measuring_s:.0f} s"
    if settings.when == "training":
        after = "while the training goes on; then the best plans take turns with XLA's default in running it"
    return (
        f"a step is predicted to take {time_text(default_ns)}{closed}; another order and other buckets can make it "
        f"{gain}, other kernels perhaps more; next: {code}search for up to {settings.budget_s:g} s "
        f"(DISCO_BUDGET_S), {after}"
    )


def changeable_share(case: Case) -> float:
    """What part of a step's time no loop or branch takes that stays as XLA compiled it."""
    graph = case.source.graph
    open_ops = {call.node for region in case.source.regions for call in region.calls if call.caller == ENTRY}
    closed = [node.id for node in graph.nodes if node.opcode in _CLOSED and node.id not in open_ops]
    closed_ns = int(case.costs.op_ns(graph)[closed].sum()) if closed else 0
    return max(0.0, 1 - closed_ns / max(1, case.default.makespan_ns))


# --- the search in a process of its own ----------------------------------------------------------------


def longest_s(settings: Settings) -> float:
    """How long rank 0 may wait for the search's code, and then search."""
    return COMPILE_S + _search_s(settings)


def _search_s(settings: Settings) -> float:
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
    longest = _search_s(settings)
    asked = settings, module, profile, room_bytes, with_parts
    return apart(_found_apart, *asked, longest_s=longest, stop=lambda: stop)


def search_structure_apart(
    settings: Settings, stop: Interruption, module: bytes, case: Case, seconds: float
) -> Scheduled:
    """As :func:`search_apart`, of the step in another structure: its best plan."""
    asked = for_a_structure(settings, seconds)
    return search_apart(asked, module, case.costs.profile, case.room_bytes, stop).best


def _found_apart(
    settings: Settings, module: bytes, profile: Profile, room_bytes: int | None, with_parts: bool
) -> FoundPlans:
    configure(settings.log_level)
    source = canonicalize(module)
    found = find(
        settings, LOGGER.info, source, read(source), profile, Interruption(),
        room_bytes=room_bytes, with_parts=with_parts,
    )  # fmt: skip
    return found.plans(settings)
