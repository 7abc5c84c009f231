"""Bodies of loops and branches: which instruction of which body an event of a trace belongs to, and how often it ran.

DisCo (section 4.2) times the ops of a step that runs each of them once. Public trainers scan their layers, so most of
their time passes in bodies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import CollectiveKind, collective_bytes, collective_kind
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.regions import regions_called, trip_count
from disco_hlo.profiler.keys import owners_in


@dataclass(frozen=True)
class Body:
    """A computation that a loop repeats, or that a branch or a call runs."""

    canonical: CanonicalModule
    around: int | None
    """Which of the module's bodies runs it; None: the entry."""
    turns: int
    """How often each time; 0 where the module does not say, and where several ops run it."""
    repeats: bool
    """Whether it is a loop's."""
    owner: Mapping[str, str]
    """Instruction that the body runs, its own ones included -> its own one that runs it."""


def bodies_of(module: CanonicalModule) -> tuple[Body, ...]:
    """The bodies of a module that have a canonical form, each after the one it lies in."""
    index, found = module.index, list[Body]()
    forms = {one.computation: one for region in module.regions for one in region.sources}
    callers = Counter(
        called
        for computation in (module.computation, *forms)
        for instruction in index.computation(computation).instructions
        for _, called in regions_called(instruction)
    )
    pending: list[tuple[int, int | None]] = [(module.computation, None)]
    seen: set[int] = set()
    while pending:
        computation, around = pending.pop()
        for instruction, kind, called in _called(index.computation(computation).instructions):
            if called in seen or called not in forms:
                continue
            seen.add(called)
            own = {one.name: one.name for one in index.computation(called).instructions}
            once = kind != "branch" and callers[called] == 1
            turns = (trip_count(instruction) or 0) if once else 0
            owner = owners_in(index, called) | own
            found.append(Body(forms[called], around, turns, kind == "loop", owner))
            pending.append((called, len(found) - 1))
    return tuple(found)


def _called(instructions: Iterable[Message]) -> Iterable[tuple[Message, str, int]]:
    for instruction in instructions:
        for kind, called in regions_called(instruction):
            yield instruction, kind, called


def graphs_of(source: CanonicalModule) -> tuple[Graph, ...]:
    """The graphs of a step: its own, then those of its bodies, of which those alike are one."""
    return source.graph, *(region.source.graph for region in source.regions)


def travelling(source: CanonicalModule) -> dict[CollectiveKind, list[int]]:
    """The collectives of a step that travel as a plan says, those of bodies once: bytes of each, by kind."""
    found: dict[CollectiveKind, list[int]] = {}
    for graph in graphs_of(source):
        for node in graph.all_reduces:
            found.setdefault(collective_kind(graph.nodes[node]), []).append(collective_bytes(graph, node))
    return found
