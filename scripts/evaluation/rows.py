"""What a step is measured as: every baseline a jax user has, the plan, its parts, and plans by dice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from disco_hlo.backends import BACKENDS, Backend
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import moved_bytes
from disco_hlo.optimize.ablations import ONE_BUCKET, OUR_KERNELS, OUR_ORDER, PLAN_BUCKETS
from disco_hlo.optimize.costs import Costs
from disco_hlo.plan.plan import DEFAULT, Strategy
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plan.variants import in_the_order_of, one_at_a_time, unfused, without_unfit
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.jaxlink.requests import CompileOptionValue
from disco_hlo.search.schedule import with_order
from evaluation.record import ALONE_XLA, Record
from evaluation.step import OTHER_SEARCHES, FoundPlans, with_option
from evaluation.strategies import bucketed_per_block, check, combined_up_to, in_random_order, random_strategy

NO_COMBINING = "no all-reduce combining"
EVERYTHING = "threshold everything"
NO_OP_FUSION = "no op fusion"
PGLE = "PGLE"
O1 = "O1"
FUSION_ONLY, ORDER_ONLY, BUCKETS_ONLY = "plan's op fusion only", "plan's order only", "plan's buckets only"
BUCKETS_AND_ORDER = "plan's buckets and order (XLA's op fusion)"
OURS_IN_ONE = "one bucket in our order (XLA's op fusion)"
PER_BLOCK = "a bucket per block (XLA's op fusion)"
PGLE_BEST = "PGLE with the best threshold"
NO_COMMAND_BUFFERS = "no command buffers"
DOUBLE_BUFFERED, PIPELINED = "XLA's double-buffered loop", "XLA's pipelined collectives"
PIPELINED_DOUBLE = "XLA's pipelined collectives and double-buffered loop"
_DOUBLE = {"xla_gpu_enable_while_loop_double_buffering": True}
_PIPELINE = {
    f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"
    for kind in ("all_gather", "all_reduce", "reduce_scatter")
}
_EVERYTHING_BYTES = 1 << 40
RANDOM_PLANS, RANDOM_ORDERS = 20, 3
_FIRST_RANDOM = 3
"""So many plans by dice are worth their time before the last rows."""
MINIMUM = (DEFAULT, PLAN, f"{PLAN} 2", f"{PLAN} 3", NO_COMBINING, EVERYTHING, PGLE, ALONE_XLA)
"""Enough to say whether the plan wins, and what the link was like, in the least time."""
_ORDERS = tuple(f"random order {number}" for number in range(1, RANDOM_ORDERS + 1))
FORM = (DEFAULT, ORDER_ONLY, PLAN, DOUBLE_BUFFERED, *_ORDERS)
"""What each form of the Llama step is measured as."""
_OF_LOOPS = (DOUBLE_BUFFERED, PIPELINED, PIPELINED_DOUBLE)
_FORM_MEBIBYTES = (1, 4, 16, 64, 256)
XLA = (
    DEFAULT, *(f"threshold {size} MiB" for size in _FORM_MEBIBYTES), EVERYTHING, O1, PGLE, PGLE_BEST,
    *_OF_LOOPS, PER_BLOCK, NO_COMMAND_BUFFERS,
)  # fmt: skip
"""What XLA offers such a form without us, and the buckets that people make by hand."""
_CHOICES = {"minimum": MINIMUM, "form": FORM, "xla": XLA}
_NAMES = (
    "all", DEFAULT, PLAN, NO_COMBINING, EVERYTHING, NO_OP_FUSION, PGLE, O1, FUSION_ONLY,
    ORDER_ONLY, BUCKETS_ONLY, BUCKETS_AND_ORDER, OURS_IN_ONE, ALONE_XLA, *_OF_LOOPS,
    PGLE_BEST, PER_BLOCK, NO_COMMAND_BUFFERS, *OTHER_SEARCHES,
)  # fmt: skip
_ONLY_FORM = (*_OF_LOOPS, *_ORDERS)
_THRESHOLD = re.compile(r"threshold (\d+) MiB")
_NUMBERED = re.compile(r"plan \d+|random (plan|order) \d+|threshold \d+ MiB")
BASELINE, PLANNED, PART, RANDOM, ALONE = "baseline", "plan", "part of the plan", "random", "transfers alone"
OTHER_SEARCH = "another search"
AS_ENACTED = frozenset({PLANNED, PART, RANDOM, OTHER_SEARCH})
"""Kinds of rows that are compiled as the plugin would compile such a plan."""


@dataclass(frozen=True)
class Variant:
    """How a row is compiled."""

    request: CompileRequest
    strategy: Strategy | None = None
    """None: XLA decides, under ``options``."""
    options: Mapping[str, CompileOptionValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One line of the comparison."""

    name: str
    kind: str
    make: Callable[[], Variant]
    absent: str = ""
    """Why this step, or this backend, has no such row."""
    traced: bool = False


@dataclass(frozen=True)
class Context:
    """What rows are made from."""

    request: CompileRequest
    source: CanonicalModule
    xla: Strategy
    costs: Costs
    seed: int
    plans: FoundPlans
    """What the search found."""
    fdo_profile: bytes = b""
    """What jax collected of the default step."""
    best_threshold_bytes: int | None = None
    """Of XLA's combiners, with which an earlier run was fastest; None before one."""

    @property
    def backend(self) -> Backend:
        """That the step was compiled for."""
        return BACKENDS[self.source.graph.backend]

    def named(self, name: str) -> Strategy:
        """One of the search's strategies."""
        return self.plans.named[name]

    def found_otherwise(self, name: str) -> Strategy:
        """What another search found."""
        return self.plans.others[name].strategy

    def with_plans_buckets(self) -> Strategy:
        """XLA's kernels in its order, with the plan's buckets."""
        return self.in_xla_order(Strategy(self.xla.groups, self.named(PLAN).buckets))

    def with_plans_kernels(self) -> Strategy:
        """The plan's kernels in XLA's order, as many as go with XLA's buckets."""
        kernels = Strategy(self.named(PLAN).groups, self.xla.buckets)
        return self.in_xla_order(without_unfit(self.source, kernels))

    @property
    def dice(self) -> int:
        """Where the seeds of this step's rows by dice begin."""
        return 1000 * self.seed

    def random_plan(self, number: int) -> Strategy:
        """XLA's plan or ours with kernels, buckets and order by dice."""
        bases = (self.xla, self.named(PLAN))
        return random_strategy(self.source, self.dice + number, bases, self.costs, self.costs.machine)

    def guided(self, options: Mapping[str, CompileOptionValue] | None = None) -> Variant:
        """XLA's own scheduler with the times that jax measured."""
        return Variant(with_option(self.request, "fdo_profile", self.fdo_profile), options=options or {})

    @property
    def can_be_guided_at_best(self) -> bool:
        """Whether both are known: those times, and which threshold is best."""
        return self.best_threshold_bytes is not None and bool(self.fdo_profile)

    def guided_at_best(self) -> Variant:
        """:meth:`guided`, with the combine threshold that was measured fastest."""
        assert self.best_threshold_bytes is not None
        return self.guided(dict.fromkeys(self.backend.combiners, self.best_threshold_bytes))

    def with_effort(self) -> Variant:
        """What XLA does at its optimization level O1."""
        from jax._src.compiler import CompilerEffortLevel

        return Variant(with_option(self.request, "optimization_level", CompilerEffortLevel["O1"].value))

    def best_order(self, strategy: Strategy) -> Strategy:
        """``strategy`` in the order that the search would give it; IllegalStrategyError where it has none."""
        found = with_order(self.source.graph, strategy, self.costs, self.costs.machine).strategy
        return check(self.source, found)

    def in_xla_order(self, strategy: Strategy) -> Strategy:
        """``strategy`` in XLA's order, as far as its kernels and buckets allow."""
        asynchronous = self.backend.asynchronous
        return check(self.source, in_the_order_of(self.source.graph, strategy, self.xla, asynchronous))

    def threshold(self, size_bytes: int) -> Variant:
        """XLA's own combiner where it has the option; elsewhere its rule, written by us."""
        if self.backend.combiners:
            return Variant(self.request, options=dict.fromkeys(self.backend.combiners, size_bytes))
        graph, groups = self.source.graph, self.xla.groups
        ordered = self.in_xla_order(replace(unfused(graph, groups), order=()))
        buckets = combined_up_to(graph, ordered, size_bytes)
        return Variant(self.request, self.in_xla_order(Strategy(groups, buckets)))


def rows_of(context: Context) -> list[Row]:
    """All rows, in the order in which they are worth their time."""
    source, graph, xla, request = context.source, context.source.graph, context.xla, context.request
    absent = "" if context.backend.asynchronous else f"XLA:{graph.backend.upper()} has none"
    has_loop = any(region.name.startswith("loop") for region in source.regions)
    no_loop = "" if has_loop else "the step has no loop"
    searched = [name for name, _, _ in context.plans.strategies]
    plans = (name for name in searched if name.startswith(PLAN) and name != PLAN_BUCKETS)
    total_bytes = sum(int(moved_bytes(one.graph).sum()) for one in source.computations.values())
    mebibytes = [1 << power for power in range(20) if 1 << power + 20 < total_bytes]
    singly = context.backend.singly_options

    def xlas(name: str, missing: str = "", **options: CompileOptionValue) -> Row:
        return Row(name, BASELINE, lambda: Variant(request, options=options), missing)

    def threshold(name: str, size_bytes: int, **more: Any) -> Row:
        return Row(name, BASELINE, lambda: context.threshold(size_bytes), **more)

    def own(name: str, kind: str, strategy: Callable[[], Strategy], **more: Any) -> Row:
        return Row(name, kind, lambda: Variant(request, strategy()), **more)

    def found(name: str, called: str) -> Row:
        return own(name, PLANNED, lambda: context.named(called), traced=name in (PLAN, ORDER_ONLY))

    def tried(called: str, name: str, strategy: Callable[[], Strategy]) -> Row:
        """Where the tool itself tries this, what it tried; elsewhere it is for comparison."""
        return found(name, called) if called in searched else own(name, PART, strategy)

    by_dice = [
        own(f"random plan {number}", RANDOM, partial(context.random_plan, number))
        for number in range(1, RANDOM_PLANS + 1)
    ]
    return [
        Row(DEFAULT, BASELINE, lambda: Variant(request), traced=True),
        *(found(name, name) for name in plans),
        *(own(name, OTHER_SEARCH, partial(context.found_otherwise, name)) for name in context.plans.others),
        threshold(NO_COMBINING, 0, traced=True),
        threshold(EVERYTHING, _EVERYTHING_BYTES),
        Row(PGLE, BASELINE, context.guided, absent),
        own(ALONE_XLA, ALONE, lambda: one_at_a_time(graph, xla), absent=absent, traced=True),
        tried(OUR_ORDER, ORDER_ONLY, lambda: context.best_order(replace(xla, order=()))),
        own(BUCKETS_ONLY, PART, context.with_plans_buckets),
        tried(OUR_KERNELS, FUSION_ONLY, context.with_plans_kernels),
        found(BUCKETS_AND_ORDER, PLAN_BUCKETS),
        own(NO_OP_FUSION, BASELINE, lambda: context.in_xla_order(Strategy((), xla.buckets))),
        Row(O1, BASELINE, context.with_effort, absent),
        *(threshold(f"threshold {size} MiB", size << 20) for size in mebibytes),
        *by_dice[:_FIRST_RANDOM],
        found(OURS_IN_ONE, ONE_BUCKET),
        xlas(DOUBLE_BUFFERED, absent or no_loop, **_DOUBLE),
        xlas(PIPELINED, absent or no_loop, **_PIPELINE),
        xlas(PIPELINED_DOUBLE, absent or no_loop, **_PIPELINE, **_DOUBLE),
        xlas(NO_COMMAND_BUFFERS, absent, **singly),
        own(PER_BLOCK, BASELINE, lambda: bucketed_per_block(source, xla)),
        *([Row(PGLE_BEST, BASELINE, context.guided_at_best)] if context.can_be_guided_at_best else []),
        *(
            own(name, RANDOM, partial(in_random_order, source, xla, context.dice + number))
            for number, name in enumerate(_ORDERS, 1)
        ),
        *by_dice[_FIRST_RANDOM:],
    ]  # fmt: skip


def promised_ns(context: Context) -> dict[str, int]:
    """By name of a row, what the search expects its finalists to take."""
    names = {
        OUR_ORDER: ORDER_ONLY, OUR_KERNELS: FUSION_ONLY, PLAN_BUCKETS: BUCKETS_AND_ORDER, ONE_BUCKET: OURS_IN_ONE,
    }  # fmt: skip
    others = {name: one.predicted_ns for name, one in context.plans.others.items()}
    return {names.get(name, name): ns for name, _, ns in context.plans.strategies} | others


def best_threshold_bytes(record: Record) -> int | None:
    """The combine threshold with which a step was measured fastest, XLA's default's aside; None where none was."""
    sizes = {NO_COMBINING: 0, EVERYTHING: _EVERYTHING_BYTES}
    measured: dict[int, float] = {}
    for name, row in record.data["rows"].items():
        if found := _THRESHOLD.fullmatch(name):
            sizes[name] = int(found[1]) << 20
        if name in sizes and "of_default" in row:
            measured[sizes[name]] = row["of_default"]
    return min(measured, key=lambda size: measured[size], default=None)


def chosen_names(choice: str) -> set[str]:
    """The names that ``--rows`` asks for; empty for all.

    Raises:
        ValueError: something is no row's name.
    """
    names: set[str] = set()
    for name in filter(None, map(str.strip, choice.split(","))):
        names |= set(_CHOICES.get(name, (name,)))
    unknown = [name for name in sorted(names) if name not in _NAMES and not _NUMBERED.fullmatch(name)]
    if unknown:
        listed = ", ".join([*_CHOICES, *_NAMES])
        raise ValueError(
            f"--rows: no row is called {unknown[0]!r}; there are {listed}, plan N, threshold N MiB"
        )
    return set() if "all" in names else names


def wanted(rows: Sequence[Row], choice: str) -> list[Row]:
    """The rows that ``--rows`` asks for; DEFAULT always, since all else is held against it.

    Raises:
        ValueError: as :func:`chosen_names`.
    """
    names = chosen_names(choice)
    if not names:
        return [row for row in rows if row.name not in _ONLY_FORM]
    return [row for row in rows if row.name in names | {DEFAULT}]
