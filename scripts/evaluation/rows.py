"""What a step is measured as: every baseline a jax user has, the plan, its parts, and plans by dice."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import pairwise
from operator import or_
from typing import Any

from disco_hlo.backends import BACKENDS, Backend
from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import moved_bytes
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.hlo.opcodes import PRODUCTS
from disco_hlo.optimize.ablations import ONE_BUCKET, OUR_KERNELS, OUR_ORDER, PLAN_BUCKETS
from disco_hlo.optimize.costs import Costs
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.legal import bucket_of, check_strategy, started_late
from disco_hlo.plan.plan import DEFAULT, Bucket, Group, Strategy
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plan.units import UnitGraph, unit_graph
from disco_hlo.plan.variants import collective_depths, in_the_order_of, one_at_a_time, unfused, without_unfit
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.jaxlink.requests import CompileOptionValue
from disco_hlo.search.schedule import with_order
from disco_hlo.simulator.costs import MachineModel
from evaluation.record import ALONE_XLA, Record
from evaluation.step import OTHER_SEARCHES, FoundPlans, with_option

NO_COMBINING = "no all-reduce combining"
EVERYTHING = "threshold everything"
NO_OP_FUSION = "no op fusion"
PGLE = "PGLE"
O1 = "O1"
FUSION_ONLY, ORDER_ONLY, BUCKETS_ONLY = "plan's op fusion only", "plan's order only", "plan's buckets only"
BUCKETS_AND_ORDER = "plan's buckets and order (XLA's op fusion)"
OURS_IN_ONE = "one bucket in our order (XLA's op fusion)"
PER_BLOCK = "a bucket per block (XLA's op fusion)"
PGLE_BEST = "PGLE, best threshold"
NO_COMMAND_BUFFERS = "no command buffers"
DOUBLE_BUFFERED, PIPELINED = "XLA's double-buffered loop", "XLA's pipelined collectives"
PIPELINED_DOUBLE = "XLA's pipelined collectives, double-buffered loop"
_DOUBLE = {"xla_gpu_enable_while_loop_double_buffering": True}
_PIPELINE = {
    f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"
    for kind in ("all_gather", "all_reduce", "reduce_scatter")
}
_EVERYTHING_BYTES = 1 << 40
RANDOM_PLANS, RANDOM_ORDERS = 6, 3
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
    searched = [name for name, _, _ in context.plans.strategies]
    absent = "" if context.backend.asynchronous else f"XLA:{graph.backend.upper()} has none"
    has_loops = any(region.name.startswith("loop") for region in source.regions)
    total_bytes = sum(int(moved_bytes(one.graph).sum()) for one in source.computations.values())
    dice = 1000 * context.seed

    def own(name: str, kind: str, strategy: Callable[[], Strategy], **more: Any) -> Row:
        return Row(name, kind, lambda: Variant(request, strategy()), **more)

    def found(name: str, called: str) -> Row:
        return own(name, PLANNED, lambda: context.named(called), traced=name in (PLAN, ORDER_ONLY))

    def tried(called: str, name: str, strategy: Callable[[], Strategy]) -> Row:
        """Where the tool itself tries this, what it tried; elsewhere it is for comparison."""
        return found(name, called) if called in searched else own(name, PART, strategy)

    def with_groups(groups: tuple[Group, ...]) -> Strategy:
        return Strategy(groups, xla.buckets)

    def plan() -> Strategy:
        return context.named(PLAN)

    def guided(options: Mapping[str, CompileOptionValue] | None = None) -> Variant:
        return Variant(with_option(request, "fdo_profile", context.fdo_profile), options=options or {})

    def with_effort() -> Variant:
        from jax._src.compiler import CompilerEffortLevel

        return Variant(with_option(request, "optimization_level", CompilerEffortLevel["O1"].value))

    def threshold(name: str, size_bytes: int, **more: Any) -> Row:
        return Row(name, BASELINE, lambda: context.threshold(size_bytes), **more)

    def of_loops(name: str, options: Mapping[str, CompileOptionValue]) -> Row:
        no_loop = "" if has_loops else "the step has no loop"
        return Row(name, BASELINE, lambda: Variant(request, options=options), absent or no_loop)

    def random_plan(number: int) -> Strategy:
        costs = context.costs
        return random_strategy(source, dice + number, (xla, plan()), costs, costs.machine)

    mebibytes = [1 << power for power in range(20) if 1 << power + 20 < total_bytes]
    best_bytes = context.best_threshold_bytes
    best_guided: tuple[Row, ...] = ()
    if best_bytes is not None and context.fdo_profile:
        best = dict.fromkeys(context.backend.combiners, best_bytes)
        best_guided = (Row(PGLE_BEST, BASELINE, partial(guided, best)),)
    return [
        Row(DEFAULT, BASELINE, lambda: Variant(request), traced=True),
        *(found(name, name) for name in searched if name.startswith(PLAN) and name != PLAN_BUCKETS),
        *(own(name, OTHER_SEARCH, partial(context.found_otherwise, name)) for name in context.plans.others),
        threshold(NO_COMBINING, 0, traced=True),
        threshold(EVERYTHING, _EVERYTHING_BYTES),
        Row(PGLE, BASELINE, guided, absent),
        own(ALONE_XLA, ALONE, lambda: one_at_a_time(graph, xla), absent=absent, traced=True),
        tried(OUR_ORDER, ORDER_ONLY, lambda: context.best_order(replace(xla, order=()))),
        own(BUCKETS_ONLY, PART, lambda: context.in_xla_order(Strategy(xla.groups, plan().buckets))),
        # The plan's kernels, as many as go with XLA's buckets.
        tried(
            OUR_KERNELS, FUSION_ONLY,
            lambda: context.in_xla_order(without_unfit(source, with_groups(plan().groups))),
        ),
        found(BUCKETS_AND_ORDER, PLAN_BUCKETS),
        own(NO_OP_FUSION, BASELINE, lambda: context.in_xla_order(with_groups(()))),
        Row(O1, BASELINE, with_effort, absent),
        *(threshold(f"threshold {size} MiB", size << 20) for size in mebibytes),
        *(
            own(f"random plan {number}", RANDOM, partial(random_plan, number))
            for number in range(1, RANDOM_PLANS + 1)
        ),
        found(OURS_IN_ONE, ONE_BUCKET),
        of_loops(DOUBLE_BUFFERED, _DOUBLE),
        of_loops(PIPELINED, _PIPELINE),
        of_loops(PIPELINED_DOUBLE, {**_PIPELINE, **_DOUBLE}),
        Row(NO_COMMAND_BUFFERS, BASELINE, lambda: Variant(request, options=context.backend.singly_options), absent),
        own(PER_BLOCK, BASELINE, lambda: bucketed_per_block(source, xla)),
        *best_guided,
        *(
            own(name, RANDOM, partial(in_random_order, source, xla, dice + number))
            for number, name in enumerate(_ORDERS, 1)
        ),
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


# --- strategies -----------------------------------------------------------------------------------


def check(source: CanonicalModule, strategy: Strategy) -> Strategy:
    """``strategy``, where it is legal.

    Raises:
        IllegalStrategyError: it is not.
    """
    graph = source.graph
    check_strategy(graph, strategy, unit_graph(graph, strategy), attested_groups(source))
    return strategy


def gradients_in_order(graph: Graph, strategy: Strategy) -> list[int]:
    """Collectives in the order in which ``strategy`` transfers them."""
    members = {f"b{number}": bucket.collectives for number, bucket in enumerate(strategy.buckets)}
    found = [node for token in strategy.order for node in members.get(token.removesuffix(".start"), ())]
    return list(dict.fromkeys([*found, *graph.collectives]))


def bucketed_per_block(source: CanonicalModule, xla: Strategy) -> Strategy:
    """XLA's kernels in its order with the buckets that people make by hand: of each kind of collective one for a block
    of the model (:func:`per_block`), in the entry, in loop bodies and in branches.

    Raises:
        IllegalStrategyError: the entry cannot have them; a region that cannot keeps XLA's.
    """
    asynchronous = BACKENDS[source.graph.backend].asynchronous
    regions = []
    for name, own in xla.regions:
        region = source.computations[name]
        other = Strategy(own.groups, per_block(region.graph))
        with contextlib.suppress(IllegalStrategyError):
            own = check(region, in_the_order_of(region.graph, other, own, asynchronous))
        regions.append((name, own))
    entry = Strategy(xla.groups, per_block(source.graph), regions=tuple(regions))
    return check(source, in_the_order_of(source.graph, entry, xla, asynchronous))


def per_block(graph: Graph) -> tuple[Bucket, ...]:
    """Of each kind of collective a bucket for a block of the model: what lies between two equal shapes, where shapes
    repeat in the order in which their operands are made; what repeats nowhere is together, and so is a body of one
    layer. What needs another one's result is in a bucket of its own. Several arrays are one instruction, as XLA's own
    combiner makes it."""
    awaited: list[int] = []
    long = 0
    for one in graph.nodes:
        awaited.append(reduce(or_, (awaited[read] | 1 << read for read in one.operands), 0))
        if one.kind is Kind.COLLECTIVE or one.opcode in PRODUCTS:
            long |= 1 << one.id
    kinds: dict[object, list[int]] = {}
    for node in sorted(graph.collectives, key=lambda each: (awaited[each] & long).bit_count()):
        kinds.setdefault((graph.nodes[node].collective, graph.nodes[node].shape.dtype), []).append(node)
    buckets: list[Bucket] = []
    for nodes in kinds.values():
        for begin, end in pairwise(block_cuts([graph.nodes[node].shape for node in nodes])):
            apart: list[list[int]] = []
            for node in nodes[begin:end]:
                free = [
                    members for members in apart if not any(awaited[node] >> other & 1 for other in members)
                ]
                if free:
                    free[0].append(node)
                else:
                    apart.append([node])
            buckets += [bucket_of(graph, members, "variadic") for members in apart]
    return tuple(buckets)


def block_cuts(shapes: Sequence[object]) -> list[int]:
    """Where blocks begin, and the end: by the period with which most shapes come again; what follows the last of them
    begins a piece of its own."""
    count = len(shapes)

    def again(period: int) -> list[bool]:
        return [shapes[i] == shapes[i + period] for i in range(count - period)]

    period = max(range(1, count // 2 + 1), key=lambda one: (sum(again(one)), -one), default=0)
    same = again(period) if period else []
    if 3 * sum(same) < count:  # two equal matrices make no model of many layers
        return sorted({0, count})
    cuts, position = {0, count}, 0
    while position < len(same):
        if not same[position]:
            position += 1
            continue
        end = next((i for i in range(position, len(same)) if not same[i]), len(same))
        if end - position >= period:
            cuts |= set(range(position, end + period + 1, period))
        position = end
    return sorted(cuts)


def combined_up_to(graph: Graph, strategy: Strategy, threshold_bytes: int) -> tuple[Bucket, ...]:
    """Neighbouring gradients together, as many as stay below the threshold: what XLA's combiner does."""
    depth = collective_depths(graph)
    runs: list[list[int]] = []
    kinds: list[object] = []
    size = 0
    for node in gradients_in_order(graph, strategy):
        one = graph.nodes[node]
        kind = (one.collective, one.shape.dtype, depth[node])
        if runs and kinds[-1] == kind and size + one.shape.size_bytes <= threshold_bytes:
            runs[-1].append(node)
            size += one.shape.size_bytes
            continue
        runs.append([node])
        kinds.append(kind)
        size = one.shape.size_bytes
    return tuple(bucket_of(graph, run) for run in runs)


def random_strategy(
    source: CanonicalModule,
    seed: int,
    bases: Sequence[Strategy],
    costs: CostModel,
    machine: MachineModel,
    attempts: int = 20,
) -> Strategy:
    """A legal strategy by dice: some kernels of one of ``bases`` taken apart, gradients cut into random
    runs, and a list schedule or one of the bases' orders. A function of its arguments.

    Raises:
        IllegalStrategyError: none of the attempts was legal.
    """
    graph = source.graph
    dice = random.Random(seed)
    for _ in range(attempts):
        base = dice.choice(list(bases))
        kept = dice.choice([0.3, 0.6, 0.9, 1.0])
        groups = tuple(group for group in base.groups if dice.random() < kept)
        threshold_bytes = 1 << dice.randrange(18, 28)
        strategy = Strategy(groups, combined_up_to(graph, base, threshold_bytes))
        try:
            if dice.random() < 0.5:
                ordered = with_order(graph, strategy, costs, machine).strategy
            else:
                ordered = in_the_order_of(graph, strategy, dice.choice(list(bases)), machine.asynchronous)
            return check(source, ordered)
        except IllegalStrategyError:
            continue
    raise IllegalStrategyError(f"none of {attempts} random strategies was legal (seed {seed})")


def in_random_order(source: CanonicalModule, strategy: Strategy, seed: int) -> Strategy:
    """``strategy`` in an order by dice, in the entry, in loop bodies and in branches; kernels and buckets stay. A
    function of its arguments.

    Raises:
        IllegalStrategyError: the strategy does not fit the step.
    """
    dice = random.Random(seed)
    regions = []
    for name, own in strategy.regions:
        region = source.computations[name]
        regions.append((name, check(region, _shuffled(region, own, dice))))
    return check(source, replace(_shuffled(source, strategy, dice), regions=tuple(regions)))


def _shuffled(source: CanonicalModule, strategy: Strategy, dice: random.Random) -> Strategy:
    asynchronous = BACKENDS[source.graph.backend].asynchronous
    order = _random_order(unit_graph(source.graph, strategy), asynchronous, dice)
    return replace(strategy, order=started_late(strategy.buckets, order))


def _random_order(units: UnitGraph, asynchronous: bool, dice: random.Random) -> tuple[str, ...]:
    """Each next token is drawn from all that wait for nothing any more. How long collectives stay under way differs
    from order to order: else none of them would hide any."""
    patience = dice.choice((0.0, 0.5, 0.9, 0.99))
    missing = [len(needed) for needed in units.dependencies]
    ready = [(index, False) for index, count in enumerate(missing) if not count]
    order: list[str] = []
    while ready:
        drawn = dice.randrange(len(ready))
        ready[drawn], ready[-1] = ready[-1], ready[drawn]
        index, done = ready.pop()
        if done and not all(waits for _, waits in ready) and dice.random() < patience:
            ready.append((index, done))
            continue
        unit = units.units[index]
        order.append(unit.done_token(asynchronous) if done else unit.start_token(asynchronous))
        if unit.is_bucket and asynchronous and not done:
            ready.append((index, True))
            continue
        for dependent in units.dependents[index]:
            missing[dependent] -= 1
            if not missing[dependent]:
                ready.append((dependent, False))
    return tuple(order)
