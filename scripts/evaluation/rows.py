"""What a step is measured as: every baseline a jax user has, the plan, its parts, and plans by dice."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import moved_bytes
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.optimize.ablations import ONE_BUCKET, OUR_KERNELS, OUR_ORDER, PLAN_BUCKETS
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.legal import check_strategy
from disco_hlo.plan.plan import DEFAULT, Bucket, Strategy
from disco_hlo.plan.plan import SEARCHED as PLAN
from disco_hlo.plan.units import UnitGraph, unit_graph
from disco_hlo.plan.variants import all_reduce_depths, in_the_order_of, one_at_a_time, unfused, without_unfit
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.jaxlink.requests import CompileOptionValue
from disco_hlo.search.schedule import with_order
from disco_hlo.simulator.costs import MachineModel
from evaluation.record import ALONE_XLA
from evaluation.step import Costs, FoundPlans, with_effort, with_fdo_profile

NO_COMBINING = "no all-reduce combining"
EVERYTHING = "threshold everything"
NO_OP_FUSION = "no op fusion"
PGLE = "PGLE"
O1 = "O1"
BEFORE_LOOKS = "plan before a look"
FUSION_ONLY, ORDER_ONLY, BUCKETS_ONLY = "plan's op fusion only", "plan's order only", "plan's buckets only"
BUCKETS_AND_ORDER = "plan's buckets and order (XLA's op fusion)"
OURS_IN_ONE = "one bucket in our order (XLA's op fusion)"
THRESHOLD_OPTION = "xla_gpu_all_reduce_combine_threshold_bytes"
DOUBLE_BUFFERED = "XLA's double-buffered loop"
DOUBLE_BUFFERING_OPTION = "xla_gpu_enable_while_loop_double_buffering"
RANDOM_PLANS, RANDOM_ORDERS = 6, 3
MINIMUM = (DEFAULT, PLAN, f"{PLAN} 2", f"{PLAN} 3", NO_COMBINING, EVERYTHING, PGLE, ALONE_XLA)
"""Enough to say whether the plan wins, and what the link was like, in the least time."""
_ORDERS = tuple(f"random order {number}" for number in range(1, RANDOM_ORDERS + 1))
FORM = (DEFAULT, ORDER_ONLY, PLAN, DOUBLE_BUFFERED, *_ORDERS)
"""What each form of the Llama step is measured as."""
_FAMILIES = ("thresholds", "random", "form")
_NAMES = (
    "all", *_FAMILIES, DEFAULT, PLAN, BEFORE_LOOKS, NO_COMBINING, EVERYTHING, NO_OP_FUSION, PGLE, O1, FUSION_ONLY,
    ORDER_ONLY, BUCKETS_ONLY, BUCKETS_AND_ORDER, OURS_IN_ONE, ALONE_XLA, DOUBLE_BUFFERED,
)  # fmt: skip
_ONLY_FORM = (DOUBLE_BUFFERED, *_ORDERS)
_NUMBERED = re.compile(r"plan \d+|random (plan|order) \d+|threshold \d+ MiB")
BASELINE, PLANNED, PART, RANDOM, ALONE = "baseline", "plan", "part of the plan", "random", "transfers alone"


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

    @property
    def on_gpu(self) -> bool:
        """Whether collectives are asynchronous, and XLA takes the GPU's options."""
        return self.source.graph.backend == "gpu"

    @property
    def plan(self) -> Strategy:
        """The search's first."""
        return self.named(PLAN)

    def named(self, name: str) -> Strategy:
        """One of the search's strategies."""
        return next(strategy for found, strategy, _ in self.plans.strategies if found == name)

    def best_order(self, strategy: Strategy) -> Strategy:
        """``strategy`` in the order that the search would give it; IllegalStrategyError where it has none."""
        found = with_order(self.source.graph, strategy, self.costs, self.costs.machine).strategy
        return check(self.source, found)

    def in_xla_order(self, strategy: Strategy) -> Strategy:
        """``strategy`` in XLA's order, as far as its kernels and buckets allow."""
        graph = self.source.graph
        return check(self.source, in_the_order_of(graph, strategy, self.xla, self.on_gpu))


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
    make: Callable[[Context], Variant]
    absent: str = ""
    """Why this step, or this backend, has no such row."""
    traced: bool = False


def rows_of(context: Context) -> list[Row]:
    """All rows, in the order in which they are worth their time."""
    default, no_combining, everything, pgle, no_op_fusion, o1, *thresholds = _baselines(context)
    finalists = [name for name, _, _ in context.plans.strategies if name.startswith(PLAN)]
    finalists = [name for name in finalists if name != PLAN_BUCKETS]
    return [
        default,
        *(_searched(name, name, PLANNED) for name in finalists),
        *_before_looks(context),
        no_combining,
        everything,
        pgle,
        Row(
            ALONE_XLA,
            ALONE,
            lambda c: _own(c, one_at_a_time(c.source.graph, c.xla)),
            absent=_gpu_only(context),
            traced=True,
        ),
        _tried(context, OUR_ORDER, ORDER_ONLY, lambda c: c.best_order(replace(c.xla, order=()))),
        Row(BUCKETS_ONLY, PART, lambda c: _own(c, c.in_xla_order(Strategy(c.xla.groups, c.plan.buckets)))),
        _fusion_only(context),
        _searched(PLAN_BUCKETS, BUCKETS_AND_ORDER, PLANNED),
        no_op_fusion,
        o1,
        *thresholds,
        *(_random(number) for number in range(1, RANDOM_PLANS + 1)),
        _searched(ONE_BUCKET, OURS_IN_ONE, PLANNED),
        *_of_forms(context),
    ]


def _of_forms(context: Context) -> Iterator[Row]:
    """What only forms of one step are measured as: their collectives are inside loops."""
    loops = [region for region in context.source.regions if region.name.startswith("loop")]
    yield Row(
        DOUBLE_BUFFERED,
        BASELINE,
        lambda c: Variant(c.request, options={DOUBLE_BUFFERING_OPTION: True}),
        absent=_gpu_only(context) or ("" if loops else "the step has no loop"),
    )
    for number, name in enumerate(_ORDERS, 1):
        yield Row(
            name, RANDOM, lambda c, n=number: _own(c, in_random_order(c.source, c.xla, 1000 * c.seed + n))
        )


def _gpu_only(context: Context) -> str:
    return "" if context.on_gpu else f"XLA:{context.source.graph.backend.upper()} has none"


def _baselines(context: Context) -> list[Row]:
    """What a jax user has without us."""
    return [
        Row(DEFAULT, BASELINE, lambda c: Variant(c.request), traced=True),
        Row(NO_COMBINING, BASELINE, lambda c: _threshold(c, 0), traced=True),
        Row(EVERYTHING, BASELINE, lambda c: _threshold(c, _above_all(c))),
        Row(
            PGLE,
            BASELINE,
            lambda c: Variant(with_fdo_profile(c.request, c.fdo_profile)),
            absent=_gpu_only(context),
        ),
        Row(NO_OP_FUSION, BASELINE, lambda c: _own(c, c.in_xla_order(Strategy((), c.xla.buckets)))),
        Row(O1, BASELINE, lambda c: Variant(with_effort(c.request, "O1")), absent=_gpu_only(context)),
        *_thresholds(context),
    ]


def promised_ns(context: Context) -> dict[str, int]:
    """By name of a row, what the search expects its finalists to take."""
    names = {
        OUR_ORDER: ORDER_ONLY, OUR_KERNELS: FUSION_ONLY, PLAN_BUCKETS: BUCKETS_AND_ORDER, ONE_BUCKET: OURS_IN_ONE,
    }  # fmt: skip
    return {names.get(name, name): ns for name, _, ns in context.plans.strategies}


def _before_looks(context: Context) -> Iterator[Row]:
    """For comparison, not to be taken: what the plan would be if its kernels had not been measured."""
    earlier = context.plans.before_looks
    if earlier is not None and earlier != context.plan:
        yield Row(BEFORE_LOOKS, PART, lambda c: _own(c, earlier))


def _fusion_only(context: Context) -> Row:
    """The plan's kernels, as many as go with XLA's buckets."""

    def kernels(c: Context) -> Strategy:
        return c.in_xla_order(without_unfit(c.source, Strategy(c.plan.groups, c.xla.buckets)))

    return _tried(context, OUR_KERNELS, FUSION_ONLY, kernels)


def _tried(context: Context, found: str, name: str, make: Callable[[Context], Strategy]) -> Row:
    """Where the tool itself tries this, what it tried; elsewhere it is for comparison."""
    if any(name == found for name, _, _ in context.plans.strategies):
        return _searched(found, name, PLANNED)
    return Row(name, PART, lambda c: _own(c, make(c)))


def chosen_names(choice: str) -> set[str]:
    """The names that ``--rows`` asks for; empty for all.

    Raises:
        ValueError: something is no row's name.
    """
    names = {name.strip() for name in choice.split(",") if name.strip()}
    if "minimum" in names:
        names |= set(MINIMUM)
    if "form" in names:
        names |= set(FORM)
    names -= {"minimum", "form"}
    unknown = [name for name in sorted(names) if name not in _NAMES and not _NUMBERED.fullmatch(name)]
    if unknown:
        listed = ", ".join(["minimum", *_NAMES])
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
    return [row for row in rows if row.name in names | {DEFAULT} or _family(row) in names]


def _family(row: Row) -> str:
    if row.name.startswith("threshold "):
        return "thresholds"
    return "random" if row.name.startswith("random plan ") else ""


def _searched(found: str, name: str, kind: str) -> Row:
    return Row(name, kind, lambda c: Variant(c.request, c.named(found)), traced=name in (PLAN, ORDER_ONLY))


def _own(context: Context, strategy: Strategy) -> Variant:
    return Variant(context.request, strategy)


def _total_bytes(context: Context) -> int:
    graph = context.source.graph
    return int(moved_bytes(graph).sum())


def _above_all(context: Context) -> int:
    return 1 << max(20, (2 * _total_bytes(context)).bit_length())


def _thresholds(context: Context) -> Iterator[Row]:
    """From 1 MiB, doubling, to below everything."""
    mebibytes = 1
    while mebibytes << 20 < _total_bytes(context):
        size = mebibytes << 20
        yield Row(f"threshold {mebibytes} MiB", BASELINE, lambda c, size=size: _threshold(c, size))
        mebibytes *= 2


def _threshold(context: Context, size_bytes: int) -> Variant:
    """XLA's own combiner where it has the option (GPU); elsewhere its rule, written by us."""
    if context.on_gpu:
        return Variant(context.request, options={THRESHOLD_OPTION: size_bytes})
    graph, xla = context.source.graph, context.xla
    separate = replace(unfused(graph, xla.groups), order=())
    ordered = context.in_xla_order(separate)
    return _own(
        context, context.in_xla_order(Strategy(xla.groups, combined_up_to(graph, ordered, size_bytes)))
    )


def _random(number: int) -> Row:
    def make(context: Context) -> Variant:
        bases, costs = (context.xla, context.plan), context.costs
        seed = 1000 * context.seed + number
        return _own(context, random_strategy(context.source, seed, bases, costs, costs.machine))

    return Row(f"random plan {number}", RANDOM, make)


def check(source: CanonicalModule, strategy: Strategy) -> Strategy:
    """``strategy``, where it is legal.

    Raises:
        IllegalStrategyError: it is not.
    """
    graph = source.graph
    check_strategy(graph, strategy, unit_graph(graph, strategy), attested_groups(source))
    return strategy


def gradients_in_order(graph: Graph, strategy: Strategy) -> list[int]:
    """All-reduces in the order in which ``strategy`` transfers them."""
    members = {f"b{number}": bucket.all_reduces for number, bucket in enumerate(strategy.buckets)}
    found = [node for token in strategy.order for node in members.get(token.removesuffix(".start"), ())]
    return list(dict.fromkeys([*found, *graph.all_reduces]))


def combined_up_to(graph: Graph, strategy: Strategy, threshold_bytes: int) -> tuple[Bucket, ...]:
    """Neighbouring gradients together, as many as stay below the threshold: what XLA's combiner does."""
    depth = all_reduce_depths(graph)
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
    return tuple(Bucket(tuple(run)) for run in runs)


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
    units = unit_graph(source.graph, strategy)
    return replace(strategy, order=_random_order(units, source.graph.backend == "gpu", dice))


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
