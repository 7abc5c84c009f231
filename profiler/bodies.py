"""Bodies of loops and branches: which instruction of which body an event of a trace belongs to, and how often it ran.

DisCo (section 4.2) times the ops of a step that runs each of them once. Public trainers scan their layers, so most of
their time passes in bodies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from disco_hlo.hlo.attributes import backend_config
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.collectives import CollectiveKind, collective_bytes, collective_kind
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.proto import Message, parse, serialize
from disco_hlo.profiler.keys import owners_in


@dataclass(frozen=True)
class Body:
    """What a loop repeats, or a branch runs."""

    canonical: CanonicalModule
    around: int | None
    """Which of the module's bodies the loop or the conditional lies in; None: in the entry."""
    turns: int
    """Of the loop, each time it runs; 0 where the module does not say, and of branches."""
    owner: Mapping[str, str]
    """Instruction that the body runs, its own ones included -> its own one that runs it."""


def graphs_of(source: CanonicalModule) -> tuple[Graph, ...]:
    """The graphs of a step: its own, then those of its bodies."""
    return source.graph, *(body.canonical.graph for body in bodies_of(serialize(source.module)))


def travelling(source: CanonicalModule) -> dict[CollectiveKind, list[int]]:
    """The collectives of a step that travel as a plan says, those of bodies once: bytes of each, by kind."""
    found: dict[CollectiveKind, list[int]] = {}
    for graph in graphs_of(source):
        for node in graph.all_reduces:
            found.setdefault(collective_kind(graph.nodes[node]), []).append(collective_bytes(graph, node))
    return found


def bodies_of(module: bytes) -> tuple[Body, ...]:
    """The bodies of a module, each after the one it lies in.

    Raises:
        ModuleError: the bytes are no module, or it is inconsistent.
    """
    whole = parse(module)
    index = ModuleIndex(whole)
    found: list[Body] = []
    pending: list[tuple[int, int | None]] = [(whole.entry_computation_id, None)]
    seen: set[int] = set()
    while pending:
        computation_id, around = pending.pop()
        for loop, called in _called(index, computation_id):
            if called in seen:
                continue
            seen.add(called)
            own = {one.name: one.name for one in index.computation(called).instructions}
            found.append(
                Body(_as_module(whole, called), around, _turns(loop), owners_in(index, called) | own)
            )
            pending.append((called, len(found) - 1))
    return tuple(found)


def _called(index: ModuleIndex, computation_id: int) -> Iterator[tuple[Message, int]]:
    """Loops and conditionals of a computation with the bodies and branches that they run; those of what it calls are
    its own."""
    for instruction in index.computation(computation_id).instructions:
        if instruction.opcode == "while":
            yield instruction, instruction.called_computation_ids[0]
        elif instruction.opcode == "conditional":
            yield from ((instruction, called) for called in instruction.called_computation_ids)
        elif instruction.opcode == "call":
            yield from _called(index, instruction.called_computation_ids[0])


def _turns(loop: Message) -> int:
    known = backend_config(loop).get("known_trip_count", {})
    count = known.get("n", "0") if isinstance(known, dict) else "0"
    return int(count) if str(count).isdigit() else 0


def _as_module(whole: Message, computation_id: int) -> CanonicalModule:
    """A body as a step of its own, which no caller aliases."""
    alone = type(whole)()
    alone.CopyFrom(whole)
    alone.entry_computation_id = computation_id
    alone.ClearField("input_output_alias")
    return canonicalize(serialize(alone))
