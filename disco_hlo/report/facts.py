"""What a plan holds, in terms a reader knows: the records behind ``disco inspect`` and the report.

Everything here is read from the plan, the module beside it and the profile; nothing is simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disco_hlo.hlo.graph import Graph, Node, external_reads, kernel_nodes, readers
from disco_hlo.plan.plan import DEFAULT, Bucket, Candidate, Group, Plan, Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.profiler.kernel_keys import kernel_keys
from disco_hlo.profiler.profile import OpTime
from disco_hlo.report.bundle import Bundle


@dataclass(frozen=True, slots=True)
class OpFacts:
    """One op of the step. Names come from the module and may hold anything."""

    node: int
    opcode: str
    shape: str
    size_bytes: int
    name: str
    op_name: str
    source: str
    """The user's source line, where the module has it."""


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
    """All-reduces that travel together."""

    token: str
    form: str
    all_reduces: tuple[int, ...]
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


def op_facts(node: Node) -> OpFacts:
    """One op as a reader knows it."""
    return OpFacts(
        node.id, node.opcode, str(node.shape), node.shape.size_bytes, node.name, node.op_name, node.source
    )


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
        return sum(graph.nodes[node].shape.size_bytes for node in bucket.all_reduces)

    return [
        BucketFacts(f"b{i}", bucket.form, bucket.all_reduces, size_bytes(bucket))
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
