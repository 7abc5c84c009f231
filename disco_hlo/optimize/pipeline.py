"""The one way from a step and its costs to plans worth measuring: plugin, command line and benchmarks all take it.

A search from XLA's own plan within a budget of time, what it found ranked, and what the best of it is predicted to
take. The user waits for the search's code, for the search, and for what becomes of its plans. So the search gets what
is left of the budget, less what the rest will take; where nothing is left, the plan is XLA's own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from disco_hlo.errors import CircleError, DiscoError, IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.optimize.costs import Costs, costs_of
from disco_hlo.optimize.regions import (
    StepTimes,
    lower_bound,
    regions_callees_first,
    step_times,
    unmeasured_share,
)
from disco_hlo.plan.apply import apply, attested_groups
from disco_hlo.plan.check_module import faults
from disco_hlo.plan.legal import Kernel, check_strategy, refused_groups
from disco_hlo.plan.plan import DEFAULT, SEARCHED, Prediction, SearchRecord, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.units import groups_with_own_copies, unit_graph
from disco_hlo.plan.variants import unfused
from disco_hlo.printable import counted, time_text
from disco_hlo.profiler.profile import Profile
from disco_hlo.search.api import Dropped, OnBest, OnProgress, Progress, SearchResult, SearchSettings
from disco_hlo.search.moves.table import in_algorithm_1
from disco_hlo.search.run import search
from disco_hlo.search.schedule import Scheduled, best_buckets, with_order
from disco_hlo.search.strategies import kernels_of
from disco_hlo.search.warm import warm_up_in_time
from disco_hlo.simulator.build import resident_bytes
from disco_hlo.simulator.costs import MachineModel
from disco_hlo.simulator.timeline import Timeline

LOGGER = logging.getLogger("disco_hlo")
MEMORY_SHARE = 0.25
"""How much more memory than XLA's own plan a plan may be predicted to need on a GPU that is not at hand."""
_FINISHING_S: Final = 0.5e-3
"""What comes behind a search takes so long for each op of the step, on a processor that does nothing else."""
_WORTH_A_SEARCH: Final = 0.25
"""Where less than this share of it is left, no search begins: its first plan alone would take as long."""
_AFTER_RANKING: Final = 0.6
"""This share of it comes behind the ranking: predicting and writing the plan."""
_MOST_SHARE: Final = 0.6
"""Of what is left, kept for that: the search gets the rest at least."""
LEAST_SHARE: Final = 0.02
"""A loop or branch that takes less of the step is left as XLA compiled it."""
Regions = tuple[tuple[str, Strategy], ...]
"""Strategies of regions, as ``Strategy.regions`` has them."""
_ALGORITHM_1: Final = ("alpha", "beta", "moves")
"""Settings that the joint search does not read."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Wall time, counted from the beginning of what the user waits for."""

    seconds: float | None
    """None: no limit."""
    began: float
    """``time.monotonic`` at its beginning."""
    began_cpu: float
    """``time.process_time`` at its beginning."""
    compiling_s: float = 0.0
    """What compiling the search's code may take besides, once on a machine."""
    told: str = ""
    """What to say behind its seconds, where they are not those that the user gave."""

    @staticmethod
    def of(seconds: float | None, compiling_s: float = 0.0) -> Budget:
        """A budget that begins now."""
        return Budget(seconds, time.monotonic(), time.process_time(), compiling_s)

    @property
    def left_s(self) -> float | None:
        """What is left; below 0 where it was exceeded."""
        return None if self.seconds is None else self.seconds - self.spent_s

    @property
    def spent_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    @property
    def load(self) -> float:
        """How much longer everything takes than a processor of its own would need, 1 to 8."""
        return min(8.0, max(1.0, self.spent_s / max(time.process_time() - self.began_cpu, 1e-3)))


@dataclass(frozen=True)
class Case:
    """A step, XLA's own plan of it, and what it costs."""

    source: CanonicalModule
    xla: Strategy
    costs: Costs
    room_bytes: int | None = None
    """What each device has left for a plan (CPU); None where nobody knows."""

    @functools.cached_property
    def times(self) -> StepTimes:
        """The step as XLA compiled it, region by region."""
        return step_times(self.source, self.xla, self.costs, as_compiled=True)

    @property
    def default(self) -> Timeline:
        """The simulated step as XLA compiled it."""
        return self.times.predicted[ENTRY].timeline

    @functools.cached_property
    def unfused(self) -> Scheduled:
        """The step without any fusion, in our order."""
        graph = self.source.graph
        return with_order(graph, unfused(graph), self.times.costs[ENTRY], self.costs.machine)

    def costs_with(self, regions: Regions, name: str = ENTRY) -> Costs:
        """The costs of the entry, or of a region, where the step's regions have these strategies."""
        if not regions:
            return self.times.costs[name]
        return step_times(self.source, replace(self.xla, regions=regions), self.costs).costs[name]

    @functools.cached_property
    def limit_bytes(self) -> int | None:
        """Most memory that a plan may be predicted to need on each device: what the step has and what is free, but
        no less than XLA's own plan needs; None where nobody knows."""
        graph, machine = self.source.graph, self.costs.machine
        if not machine.asynchronous and self.room_bytes is None:
            return None
        needed_bytes = with_order(graph, self.xla, self.times.costs[ENTRY], machine).peak_bytes
        if self.room_bytes is None:
            return int(needed_bytes * (1 + MEMORY_SHARE))
        return max(needed_bytes, resident_bytes(graph) + self.room_bytes)

    def simulated(self, strategy: Strategy) -> Scheduled:
        """A strategy as it stands.

        Raises:
            IllegalStrategyError: it does not fit the step.
        """
        timeline = step_times(self.source, strategy, self.costs).predicted[ENTRY].timeline
        return Scheduled(strategy, timeline.makespan_ns, timeline.peak_bytes)

    def prediction(self, plan: Scheduled) -> Prediction:
        """What ``plan`` says of itself: its step, XLA's, one without fusion, and what none could beat."""
        limit = lower_bound(self.source, [self.xla, plan.strategy], self.costs)
        return Prediction(
            plan_ns=plan.predicted_ns,
            default_ns=self.default.makespan_ns,
            unfused_ns=self.unfused.predicted_ns,
            full_overlap_ns=limit.full_overlap_ns,
            bound_ns=limit.makespan_ns,
            peak_memory_bytes=plan.peak_bytes,
        )


def unsearched(case: Case) -> Scheduled:
    """XLA's kernels in the best buckets and order found without a search, region by region."""
    of_regions: dict[str, Strategy] = {}
    for name, source in regions_callees_first(case.source):
        regions = tuple(sorted(of_regions.items()))
        costs = case.costs_with(regions, name)
        best = best_buckets(source.graph, read(source).groups, costs, costs.machine)
        if name == ENTRY:
            break
        if best.predicted_ns < case.times.predicted[name].timeline.makespan_ns:
            of_regions[name] = best.strategy
    return replace(best, strategy=replace(best.strategy, regions=regions))


def foreseen(source: CanonicalModule, profile: Profile) -> tuple[int, float, int]:
    """What a step is predicted to take without a search, in ns, the part of what XLA made of it that kernels take which
    no trace has shown, 0 to 1, and the bytes that it needs on each device as XLA compiled it."""
    xla = read(source)
    case = Case(source, xla, costs_of(profile, source, [xla]))
    return unsearched(case).predicted_ns, unmeasured_share(source, case.times), case.default.peak_bytes


@dataclass(frozen=True, slots=True)
class RegionFound:
    """What a search found for a loop body, branch or called computation."""

    name: str
    executions: float
    """A step, as far as that is known."""
    default_ns: int
    """One execution as XLA compiled it, predicted."""
    plan_ns: int
    """And with what was found: no longer."""
    evaluations: int
    strategy: Strategy | None
    """None: nothing is predicted to be faster than XLA's own."""

    def __str__(self) -> str:
        return (
            f"searched {counted(self.evaluations, 'candidate')} for {self.name}, which runs "
            f"{counted(round(self.executions, 3), 'time')} a step: the best is predicted to take "
            f"{time_text(self.plan_ns)}, XLA's default {time_text(self.default_ns)}"
        )


@dataclass(frozen=True)
class Optimized:
    """What a search found for a step."""

    case: Case
    result: SearchResult
    plans: tuple[Scheduled, ...]
    """Worth measuring, best first."""
    search_s: float = 0.0
    """What it took, but for compiling its code."""
    notes: tuple[str, ...] = ()
    """What to tell the user, one line each."""
    regions: tuple[RegionFound, ...] = ()
    """The regions that were searched, callees first."""

    @property
    def evaluations(self) -> int:
        """Candidates of the entry and of all regions."""
        return self.result.evaluations + sum(one.evaluations for one in self.regions)

    @property
    def best(self) -> Scheduled:
        """The plan that is predicted to be the fastest."""
        return self.plans[0]

    @property
    def unmeasured(self) -> tuple[str, Scheduled]:
        """Name and plan of what is taken where nothing is measured: XLA's own, unless the best is predicted faster."""
        default = self.case.default
        if self.best.predicted_ns < default.makespan_ns:
            return SEARCHED, self.best
        return DEFAULT, Scheduled(self.case.xla, default.makespan_ns, default.peak_bytes)


def optimize(
    case: Case,
    settings: SearchSettings,
    budget: Budget,
    *,
    also: Sequence[Strategy] = (),
    on_progress: OnProgress | None = None,
    on_best: OnBest | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Optimized:
    """Search for the step's best plan and rank what is found, as long as the budget lasts.

    Args:
        also: plans to be ranked with those of this search.
        stop: asked now and then; what was found so far is ranked once it answers True.
    """
    graph, xla = case.source.graph, case.xla
    if (left_s := budget.left_s) is not None and left_s <= _WORTH_A_SEARCH * _finishing_s(budget, case):
        spent = f"preparing the search took {budget.spent_s:.1f} s of a budget of {budget.seconds:g} s{budget.told}"
        rest = f"writing a plan takes about {_finishing_s(budget, case):.1f} s"
        return _nothing(case, also, budget, f"{spent}, {rest}: XLA's own plan is kept; give it more time")
    compiling, costs = time.monotonic(), case.costs
    most_s = None if left_s is None else left_s + budget.compiling_s
    if not warm_up_in_time(graph, costs, costs.machine, settings, most_s, stop):
        return _nothing(
            case, also, budget,
            "the search's code is still being compiled, which takes minutes once: XLA's own plan is kept; search again "
            "in a while",
        )  # fmt: skip
    budget = replace(budget, began=budget.began + min(budget.compiling_s, time.monotonic() - compiling))
    found = _optimize_regions(case, settings, budget, stop)
    regions = tuple(sorted((one.name, one.strategy) for one in found if one.strategy is not None))
    costs, settings = case.costs_with(regions), replace(settings, memory_limit_bytes=case.limit_bytes)
    until = None
    if (left_s := budget.left_s) is not None:
        finishing_s = min(_finishing_s(budget, case), _MOST_SHARE * max(left_s, 0.0))
        settings = replace(settings, seconds=left_s - finishing_s)
        until = time.monotonic() + left_s - _AFTER_RANKING * finishing_s
    start = starting_point(graph, xla, costs.machine, settings.method)
    result = search(
        graph, costs, costs.machine, start=start, settings=settings,
        on_progress=on_progress, on_best=on_best, stop=stop,
    )  # fmt: skip
    if stop():
        until = time.monotonic()
    plans, dropped = ranked(case, result, also, until=until, regions=regions)
    notes = [one.sentence() for one in (result.dropped, dropped) if one.count]
    if result.stopped == "seconds" and not result.evaluations + sum(one.evaluations for one in found):
        notes.append("no time was left for a single candidate; give the search more")
    return Optimized(case, result, tuple(plans), budget.spent_s, tuple(notes), found)


def starting_point(graph: Graph, xla: Strategy, machine: MachineModel, method: str) -> Strategy:
    """XLA's plan; where collectives block, the paper's own search begins without any fusion instead, as XLA's fusions
    are not tuned there (Triton tiles and all)."""
    return searchable(graph, xla) if method == "joint" or machine.asynchronous else unfused(graph)


def searchable(graph: Graph, xla: Strategy) -> Strategy:
    """XLA's plan as the search can take it up: without the kernels whose place in the order it would misjudge, and
    without those that then wait for themselves or return what no rule allows."""
    start = _without(xla, groups_with_own_copies(graph, xla.groups))
    try:
        known = kernels_of(graph, xla)
        while unfit := _unfit(graph, start, known):
            start = _without(start, unfit)
    except IllegalStrategyError as error:
        LOGGER.debug("the search starts without XLA's kernels: %s", error)
        return unfused(graph)
    return start


def _without(strategy: Strategy, groups: Collection[int]) -> Strategy:
    if not groups:
        return strategy
    kept = tuple(group for i, group in enumerate(strategy.groups) if i not in groups)
    return Strategy(kept, strategy.buckets)


def _unfit(graph: Graph, strategy: Strategy, known: Collection[Kernel]) -> frozenset[int]:
    """Positions of groups that wait for each other; where none do, of those that are no legal kernels and none of XLA's
    any more, since others read more of them."""
    try:
        units = unit_graph(graph, strategy)
    except CircleError as error:
        waiting = frozenset(int(token[1:]) for token in error.tokens if token[0] == "g")
        if not waiting:
            raise
        return waiting
    return frozenset(i for i, _ in refused_groups(graph, strategy, units, known))


def _optimize_regions(
    case: Case, settings: SearchSettings, budget: Budget, stop: Callable[[], bool]
) -> tuple[RegionFound, ...]:
    """Search the regions that take a part of the step's time worth it, each with that part of the budget."""
    shares = {name: case.times.share(name) for name in case.times.predicted if name != ENTRY}
    of_regions: dict[str, Strategy] = {}
    found: list[RegionFound] = []
    for name, source in regions_callees_first(case.source):
        if name == ENTRY or shares[name] < LEAST_SHARE or stop():
            continue
        costs = case.costs_with(tuple(sorted(of_regions.items())), name)
        alone = Case(source, dict(case.xla.regions)[name], costs)
        left_s = budget.left_s
        within = Budget.of(None if left_s is None else left_s * min(1.0, shares[name]), budget.compiling_s)
        one = optimize(alone, settings, within, stop=stop)
        faster = (plan for plan in one.plans if plan.predicted_ns < alone.default.makespan_ns)
        best = next(
            (plan for plan in faster if not _adds_faults(case, of_regions, name, plan.strategy)), None
        )
        if best is not None:
            of_regions[name] = best.strategy
        found.append(
            RegionFound(
                name,
                case.times.executions[name],
                alone.default.makespan_ns,
                alone.default.makespan_ns if best is None else best.predicted_ns,
                one.result.evaluations,
                None if best is None else best.strategy,
            )
        )
    return tuple(found)


def _adds_faults(case: Case, others: Mapping[str, Strategy], name: str, strategy: Strategy) -> bool:
    """Whether the step would compute something else with this strategy in a region, by the last check of a module: all
    plans have it, and all would be refused. In a branch a value may have its caller's buffer, which no rule for kernels
    knows.

    Args:
        others: what is done in other regions.
    """
    found = _faults(case, {**others, name: strategy})
    if not found or found <= _faults(case, others):
        return False
    LOGGER.debug("left out: %s", "; ".join(sorted(found)))
    return True


def _faults(case: Case, of_regions: Mapping[str, Strategy]) -> frozenset[str]:
    strategy = replace(unfused(case.source.graph), regions=tuple(sorted(of_regions.items())))
    try:
        return frozenset(faults(apply(strategy, case.source), case.source.graph.backend))
    except DiscoError as error:
        return frozenset({str(error)})


def ranked(
    case: Case,
    result: SearchResult,
    also: Sequence[Strategy] = (),
    *,
    until: float | None = None,
    regions: Regions = (),
) -> tuple[list[Scheduled], Dropped]:
    """Plans worth measuring, best first, and what of the search is no plan of this step.

    They are what the search found, and for its kernels and XLA's the best buckets and order; with them those of
    ``also``. All are legal, and none is predicted to need more memory than the case allows.

    Args:
        until: when the time is up (``time.monotonic``): then what was looked at is ranked, one plan at least.
        regions: what all of them do in the step's regions.
    """
    graph, attested, costs = case.source.graph, attested_groups(case.source), case.costs_with(regions)
    found: dict[Strategy, Scheduled] = {}
    dropped = Dropped()
    longest_s, of_search = 0.0, len(result.finalists) + len(also)
    for number, make in enumerate(
        (
            *(functools.partial(with_order, graph, one.strategy) for one in result.finalists),
            *(functools.partial(with_order, graph, one) for one in also),
            functools.partial(best_buckets, graph, result.strategy.groups),
            functools.partial(best_buckets, graph, case.xla.groups),
            functools.partial(best_buckets, graph, case.xla.groups, form="variadic"),
        )
    ):
        began = time.monotonic()
        if found and until is not None and began + longest_s > until:
            break
        try:
            one = make(costs, costs.machine)
            check_strategy(graph, one.strategy, unit_graph(graph, one.strategy), attested)
        except IllegalStrategyError as error:
            LOGGER.debug("left out: %s", error)
            if number < of_search:
                dropped += Dropped(1, " ".join(str(error).split()))
            continue
        finally:
            longest_s = max(longest_s, time.monotonic() - began)
        if case.limit_bytes is None or one.peak_bytes <= case.limit_bytes:
            whole = replace(one, strategy=replace(one.strategy, regions=regions))
            found.setdefault(whole.strategy, whole)
    plans = sorted(found.values(), key=lambda one: one.predicted_ns)
    if not plans:
        one = with_order(graph, case.xla, costs, costs.machine)
        plans = [replace(one, strategy=replace(one.strategy, regions=regions))]
    return plans, dropped


def search_record(settings: SearchSettings, found: Optimized) -> SearchRecord:
    """What a plan says of the search that found it, in entry and regions; the improvements are the entry's."""
    left_out = {"method", "memory_limit_bytes", *(_ALGORITHM_1 if settings.method == "joint" else ())}
    asked = replace(settings, moves=settings.moves or in_algorithm_1())
    values = {name: value for name, value in asdict(asked).items() if name not in left_out}
    return SearchRecord(
        method=settings.method,
        settings={
            name: " ".join(value) if isinstance(value, tuple) else value for name, value in values.items()
        },
        evaluations=found.evaluations,
        improvements=tuple((one.evaluation, one.cost_ns) for one in found.result.trace),
    )


def _finishing_s(budget: Budget, case: Case) -> float:
    """What comes behind a search will take on this machine as it is now."""
    return len(case.source.graph) * _FINISHING_S * budget.load


def _nothing(case: Case, also: Sequence[Strategy], budget: Budget, why: str) -> Optimized:
    """XLA's own plan, and those found before."""
    plans = sorted(map(case.simulated, (*also, case.xla)), key=lambda one: one.predicted_ns)
    best = plans[0]
    result = SearchResult(best.strategy, best.predicted_ns, best.predicted_ns, (), 0, 0, 0.0, "seconds")
    return Optimized(case, result, tuple(plans), budget.spent_s, (why,))


@contextlib.contextmanager
def search_progress(wanted: bool) -> Iterator[OnProgress | None]:
    """Show how the best predicted step time falls; yields what the search calls, or None where nobody looks."""
    if not wanted:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("disco: searching"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("search", total=None, state="")

        def show(progress: Progress) -> None:
            gain = 100 * (1 - progress.best_ns / max(progress.start_ns, 1))
            tried = counted(progress.evaluations, "candidate")
            state = f"{tried}, {time_text(progress.best_ns)} predicted (-{gain:.1f} %)"
            bar.update(task, state=state)

        yield show
