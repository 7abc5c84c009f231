"""The regions of a step for a person: what each is, how often it runs, and what one execution takes and holds.

Under a plan and under XLA's own, so that they stand next to each other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.plan.plan import Strategy

if TYPE_CHECKING:  # commands that simulate nothing need not wait for its import
    from disco_hlo.optimize.regions import StepTimes

_KINDS = {ENTRY: "entry computation", "loop": "loop body", "branch": "branch", "call": "call"}
XLA, PLAN = "XLA", "plan"
"""Whose kernels, buckets and order a region has."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """One op that runs a region."""

    caller: str
    """The region that the op is in."""
    op: str
    """``n17``."""
    trips: int | None
    """How often it runs the region; None where only a measurement can tell."""


@dataclass(frozen=True, slots=True)
class RegionFacts:
    """A region under one strategy; times are predicted, in ns."""

    name: str
    kind: str
    """``entry computation``, ``loop body``, ``branch`` or ``call``."""
    calls: tuple[CallFacts, ...]
    executions: float
    """In a step, as far as that is known."""
    strategy: str
    """:data:`PLAN`, or :data:`XLA` where the region stays as XLA compiled it."""
    execution_ns: int
    """One execution, with the regions that it runs."""
    share: float
    """Of the step's time, all executions together."""
    kernels: int
    buckets: int
    collectives: int
    """Each counted once an execution."""
    collective_bytes: int
    """What they return, on one device."""
    exposed_ns: int
    """Communication of one execution during which nothing is computed; of regions that it runs theirs is not in it."""
    peak_bytes: int

    @property
    def what(self) -> str:
        """``loop body of n75, 16 trips``; of nested ones with the region that the op is in."""
        ops = ", ".join(
            f"{call.op}{'' if call.caller == ENTRY else f' in {call.caller}'}" for call in self.calls[:3]
        )
        more = f" and {len(self.calls) - 3} more" if len(self.calls) > 3 else ""
        trips = {call.trips for call in self.calls} if self.kind == "loop body" else set()
        counted = ", ".join(
            "unknown" if one is None else str(one) for one in sorted(trips, key=lambda one: one or 0)
        )
        return (f"{self.kind} of {ops}{more}" if self.calls else self.kind) + (
            f", trips {counted}" if trips else ""
        )


def region_names(source: CanonicalModule) -> tuple[str, ...]:
    """The regions of a step in the order in which its ops run them, the entry first."""
    return (ENTRY, *(region.name for region in source.regions))


def check_region(name: str, known: Collection[str]) -> None:
    """Refuse the name of a region that there is not.

    Raises:
        DiscoError: naming those that there are.
    """
    if name not in known:
        raise DiscoError(f"the step has no region {name!r}; it has {', '.join(known)}")


def region_facts(
    source: CanonicalModule,
    times: StepTimes,
    strategy: Strategy | None = None,
    default: StepTimes | None = None,
) -> list[RegionFacts]:
    """The regions of a step, the entry first.

    Args:
        strategy: the plan's, whose times these are; None where they are XLA's own.
        default: XLA's own times; its regions stand behind the plan's where their figures are others.
    """
    planned = () if strategy is None else (ENTRY, *(name for name, _ in strategy.regions))
    calls = {
        region.name: tuple(CallFacts(call.caller, f"n{call.node}", call.trips) for call in region.calls)
        for region in source.regions
    }
    rows = []
    for name, computation in source.computations.items():
        called, graph = calls.get(name, ()), computation.graph
        ours = _facts(name, graph, called, times, PLAN if name in planned else XLA)
        xla = ours if default is None else _facts(name, graph, called, default, XLA)
        rows += [ours] if _figures(ours) == _figures(xla) else [ours, xla]
    return rows


def _facts(
    name: str, graph: Graph, calls: tuple[CallFacts, ...], times: StepTimes, strategy: str
) -> RegionFacts:
    predicted = times.predicted[name]
    units = predicted.built.units.units
    buckets = sum(unit.is_bucket for unit in units)
    collectives = [node for node in graph.nodes if node.opcode in COLLECTIVES]
    return RegionFacts(
        name=name,
        kind=_KINDS[name.rstrip("0123456789")],
        calls=calls,
        executions=times.executions[name],
        strategy=strategy,
        execution_ns=predicted.timeline.makespan_ns,
        share=times.share(name),
        kernels=len(units) - buckets,
        buckets=buckets,
        collectives=len(collectives),
        collective_bytes=sum(node.shape.size_bytes for node in collectives),
        exposed_ns=predicted.timeline.exposed_ns,
        peak_bytes=predicted.timeline.peak_bytes,
    )


def _figures(facts: RegionFacts) -> tuple[int, ...]:
    return facts.execution_ns, facts.kernels, facts.buckets, facts.exposed_ns, facts.peak_bytes
