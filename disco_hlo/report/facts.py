"""What a plan holds and how two differ, in terms a reader knows: for ``disco inspect``, ``disco diff`` and the
report.

Everything here is read from the plan, the module beside it and the profile; nothing is simulated. Units of two plans
are told apart by their nodes, not by their numbers: two plans number alike only by chance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import UNSET

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import PlanError
from disco_hlo.hlo.graph import Graph, external_reads, kernel_nodes, readers
from disco_hlo.plan.legal import default_order
from disco_hlo.plan.plan import DEFAULT, Bucket, Candidate, Group, Plan, Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.profiler.keys import kernel_keys
from disco_hlo.profiler.profile import OpTime
from disco_hlo.report.bundle import Bundle


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One kernel of a strategy."""

    token: str
    kind: str
    nodes: tuple[int, ...]
    duplicates: tuple[int, ...]
    opcodes: tuple[tuple[str, int], ...]
    """How often each opcode occurs, most frequent first; empty without the module."""
    bytes_saved: int
    """Bytes that its ops, each as a kernel of its own, would read and write beyond what it does."""
    source: str
    """The source line that most of its ops come from."""
    measured_ns: int | None
    """Its time on the device, where the profile has it."""

    @property
    def size(self) -> int:
        """Number of ops inside, duplicates included."""
        return len(self.nodes) + len(self.duplicates)


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """Collectives that travel together."""

    token: str
    form: str
    collectives: tuple[int, ...]
    size_bytes: int | None
    """None without the module."""


@dataclass(frozen=True, slots=True)
class OrderFacts:
    """What the order says, in a few numbers."""

    units: int
    kernels: int
    buckets: int
    explicit: bool
    """False: the default order of ``apply``."""
    kernels_before_first_bucket: int
    kernels_after_last_bucket: int
    most_in_flight: int
    """Buckets issued and not yet waited for, at most; 1 where collectives block."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times in ns; None where nobody said."""

    predicted_default: int
    predicted_plan: int
    measured_default: Candidate | None
    measured_plan: Candidate | None

    @property
    def predicted_speedup(self) -> float | None:
        """How many times faster the plan is said to be."""
        return self.predicted_default / self.predicted_plan if self.predicted_plan else None

    @property
    def measured_speedup(self) -> float | None:
        """How many times faster the plan was."""
        before, after = self.measured_default, self.measured_plan
        if before is None or after is None or not before.median_ns or not after.median_ns:
            return None
        return before.median_ns / after.median_ns


def group_facts(bundle: Bundle) -> list[GroupFacts]:
    """The op groups of a plan, largest first."""
    groups = bundle.strategy.groups
    graph = bundle.source.graph if bundle.source else None
    measured: Sequence[OpTime | None] = [None] * len(groups)
    if graph is not None and bundle.profile is not None:
        keys = kernel_keys(graph, unit_graph(graph, bundle.strategy).kernels(graph))
        measured = [bundle.profile.ops.get(key) for key in keys]
    facts = [
        _group(f"g{i}", group, graph, time)
        for i, (group, time) in enumerate(zip(groups, measured, strict=True))
    ]
    return sorted(facts, key=lambda group: (-group.size, -group.bytes_saved, group.nodes))


def _group(token: str, group: Group, graph: Graph | None, measured: OpTime | None) -> GroupFacts:
    if graph is None:
        return GroupFacts(token, group.kind, group.nodes, group.duplicates, (), 0, "", None)
    inside = [graph.nodes[node] for node in (*group.nodes, *group.duplicates)]
    return GroupFacts(
        token,
        group.kind,
        group.nodes,
        group.duplicates,
        tuple(sorted(Counter(node.opcode for node in inside).items(), key=lambda item: (-item[1], item[0]))),
        bytes_saved(graph, group),
        _most_telling(node.source for node in inside if node.source),
        measured.median_ns if measured else None,
    )


def _most_telling(sources: Iterable[str]) -> str:
    """The line that occurs most, lines of installed packages only where there are no others."""
    counts = Counter(sources)
    ranked = sorted(counts, key=lambda line: ("site-packages" in line, -counts[line], line))
    return ranked[0] if ranked else ""


def bytes_saved(graph: Graph, group: Group) -> int:
    """Memory traffic that a group avoids: of its ops as kernels of their own, less that of the group.

    Traffic is distinct reads plus results. Duplicated ops have a kernel of their own either way, so
    what they cost inside the group counts against it.
    """
    apart = sum(_traffic(graph, (node,), (node,)) for node in group.nodes)
    results = [n for n in group.nodes if n == graph.root or not {*readers(graph, n)}.issubset(group.ops)]
    return apart - _traffic(graph, group.ops, results)


def _traffic(graph: Graph, ops: Sequence[int], results: Sequence[int]) -> int:
    moved = [*results, *external_reads(graph, kernel_nodes(graph, ops))]
    return sum(graph.nodes[node].shape.size_bytes for node in moved)


def bucket_facts(strategy: Strategy, graph: Graph | None) -> list[BucketFacts]:
    """The buckets, in order of their numbers."""

    def size_bytes(bucket: Bucket) -> int | None:
        if graph is None:
            return None
        return sum(graph.nodes[node].shape.size_bytes for node in bucket.collectives)

    return [
        BucketFacts(f"b{i}", bucket.form, bucket.collectives, size_bytes(bucket))
        for i, bucket in enumerate(strategy.buckets)
    ]


def order_facts(order: Sequence[str], explicit: bool) -> OrderFacts:
    """Summary of an order of units."""
    kernels = before_first = after_last = 0
    in_flight: set[str] = set()
    most = buckets = 0
    for token in order:
        name, _, part = token.partition(".")
        if name[0] != "b":
            kernels += 1
            after_last += 1
            continue
        if part != "done":
            before_first = kernels if not buckets else before_first
            buckets += 1
            in_flight.add(name)
            most = max(most, len(in_flight))
        if part != "start":
            in_flight.discard(name)
        after_last = 0
    return OrderFacts(kernels + buckets, kernels, buckets, explicit, before_first, after_last, most)


def step_times(plan: Plan) -> StepTimes:
    """Step time before and after, predicted and measured."""
    candidates, results = (plan.measured.candidates, plan.measured.results) if plan.measured else ((), {})
    predicted = [one.predicted_ns for one in candidates if one.name == plan.chosen and not one.error]
    predicted_ns = next(filter(None, predicted), plan.prediction.plan_ns)
    return StepTimes(plan.prediction.default_ns, predicted_ns, results.get(DEFAULT), results.get(plan.chosen))


def order_of(bundle: Bundle) -> tuple[tuple[str, ...], bool]:
    """The order of a plan, and whether the plan itself has it. Empty where nobody knows."""
    strategy = bundle.strategy
    if strategy.order or bundle.source is None:
        return strategy.order, True
    return with_order(bundle.source.graph, strategy).order, False


def with_order(graph: Graph, strategy: Strategy) -> Strategy:
    """The same strategy with its order written out.

    Raises:
        IllegalStrategyError: the strategy does not fit the graph.
    """
    if strategy.order:
        return strategy
    order = default_order(unit_graph(graph, strategy), BACKENDS[graph.backend].asynchronous)
    return replace(strategy, order=order)


@dataclass(frozen=True, slots=True)
class GroupChange:
    """A group of one plan that the other does not have, with the groups there that share ops with it."""

    token: str
    group: Group
    shares_with: tuple[str, ...]
    """Tokens in the other plan, of groups (``g3``) and of ops that stand alone there (``n17``)."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A collective that is in another bucket."""

    collective: int
    bucket_a: str
    bucket_b: str


@dataclass(frozen=True)
class Difference:
    """How plan B differs from plan A."""

    common_groups: int
    groups_a: tuple[GroupChange, ...]
    """Only in A."""
    groups_b: tuple[GroupChange, ...]
    """Only in B."""
    common_buckets: int
    buckets_a: tuple[tuple[str, Bucket], ...]
    buckets_b: tuple[tuple[str, Bucket], ...]
    moved_collectives: tuple[Moved, ...]
    common_units: int
    moved_units: tuple[str, ...]
    """Fewest units that both have and that must be moved to turn one order into the other, as B
    calls them. Empty where one of the orders is not known."""

    @property
    def same(self) -> bool:
        """Whether both execute the same."""
        return not (self.groups_a or self.groups_b or self.buckets_a or self.buckets_b or self.moved_units)


def require_comparable(a: Plan, b: Plan) -> None:
    """Refuse plans of two training steps.

    Raises:
        PlanError: naming both.
    """
    left, right = a.target, b.target
    if left.key != right.key:
        raise PlanError(
            f"these plans do not compare: one is for {left.module_name!r} ({left.key[:16]}), "
            f"the other for {right.module_name!r} ({right.key[:16]}), another training step"
        )
    made = ["XLA's" if one.structure is UNSET else one.structure.name for one in (a, b)]
    if a.ops_key != b.ops_key:
        raise PlanError(
            f"these plans do not compare: the step's structure is {made[0]} in one and {made[1]} in the other, so "
            "that their ops are not the same"
        )


def compare(a: Strategy, b: Strategy) -> Difference:
    """How ``b`` differs from ``a``; both of one graph, in normal form where that is possible."""
    keys_a, keys_b = _unit_keys(a), _unit_keys(b)
    groups_a = {group: f"g{i}" for i, group in enumerate(a.groups)}
    groups_b = {group: f"g{i}" for i, group in enumerate(b.groups)}
    buckets_a = {bucket: f"b{i}" for i, bucket in enumerate(a.buckets)}
    buckets_b = {bucket: f"b{i}" for i, bucket in enumerate(b.buckets)}
    home_a = {node: token for bucket, token in buckets_a.items() for node in bucket.collectives}
    home_b = {node: token for bucket, token in buckets_b.items() for node in bucket.collectives}
    only_a = {bucket: token for bucket, token in buckets_a.items() if bucket not in buckets_b}
    only_b = {bucket: token for bucket, token in buckets_b.items() if bucket not in buckets_a}
    regrouped = sorted(node for bucket in only_b for node in bucket.collectives)
    place_b = [keys_b[token] for token in b.order]
    known = set(place_b)
    place_a = [keys_a[token] for token in a.order if keys_a[token] in known]
    return Difference(
        common_groups=len(groups_a.keys() & groups_b.keys()),
        groups_a=_changes(groups_a, groups_b),
        groups_b=_changes(groups_b, groups_a),
        common_buckets=len(buckets_a.keys() & buckets_b.keys()),
        buckets_a=tuple((token, bucket) for bucket, token in only_a.items()),
        buckets_b=tuple((token, bucket) for bucket, token in only_b.items()),
        moved_collectives=tuple(Moved(n, home_a[n], home_b[n]) for n in regrouped if n in home_a),
        common_units=len(place_a),
        moved_units=_moved(place_a, place_b, b.order),
    )


def _changes(mine: dict[Group, str], other: dict[Group, str]) -> tuple[GroupChange, ...]:
    inside: dict[int, list[str]] = {}
    for group, token in other.items():
        for node in (*group.nodes, *group.duplicates):
            inside.setdefault(node, []).append(token)
    changes = []
    for group, token in mine.items():
        if group in other:
            continue
        nodes = (*group.nodes, *group.duplicates)
        shares = dict.fromkeys(found for node in nodes for found in inside.get(node, [f"n{node}"]))
        changes.append(GroupChange(token, group, tuple(shares)))
    return tuple(changes)


def _unit_keys(strategy: Strategy) -> dict[str, Hashable]:
    """What a token of the order stands for, whatever its number."""
    keys: dict[str, Hashable] = {}
    for token in strategy.order:
        name, _, part = token.partition(".")
        number = int(name[1:])
        if name[0] == "g":
            keys[token] = strategy.groups[number]
        elif name[0] == "b":
            keys[token] = (strategy.buckets[number], part)
        else:
            keys[token] = number
    return keys


def _moved(
    place_a: Sequence[Hashable], place_b: Sequence[Hashable], names_b: Sequence[str]
) -> tuple[str, ...]:
    """The units of B outside a longest run of units that stand in the same order in A."""
    rank = {key: i for i, key in enumerate(place_a)}
    shared = [(rank[key], name) for key, name in zip(place_b, names_b, strict=True) if key in rank]
    ends: list[int] = []
    ends_at: list[int] = []
    before: list[int] = []
    for position, (value, _) in enumerate(shared):
        slot = bisect_left(ends, value)
        before.append(ends_at[slot - 1] if slot else -1)
        ends[slot : slot + 1] = [value]
        ends_at[slot : slot + 1] = [position]
    kept: set[int] = set()
    position = ends_at[-1] if ends_at else -1
    while position >= 0:
        kept.add(position)
        position = before[position]
    return tuple(name for i, (_, name) in enumerate(shared) if i not in kept)
