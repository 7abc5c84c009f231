"""Which of the modules a training script compiles is its training step.

The rule: more than one device, at least one all-reduce of a computed value, more than a single op, neither an
evaluation nor an initialization, the largest such module so far. An evaluation returns single numbers alone, its loss
and accuracy; an initialization makes the parameters, so it takes none.
``DISCO_MODULE`` names it instead, by its name or, where several modules share one (all of pmap are called
``jit__fun``), by its key. Every choice comes with the reason, to be logged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from disco_hlo.hlo.collectives import moved_bytes
from disco_hlo.hlo.graph import Graph, Kind, Shape

_FEWEST_INSTRUCTIONS = 8
"""A sum over a sharded array, compiled by itself where no ``jit`` is around it, has four."""

_LARGEST_KEYS_BYTES = 64
"""Of an argument that holds random keys: four of the largest kind (rbg)."""


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """What the choice depends on."""

    name: str
    device_count: int
    computed_all_reduce_count: int
    """All-reduces whose operand is computed, not a parameter or constant."""
    all_reduce_bytes: int
    """Bytes of all all-reduces together, on one device."""
    instruction_count: int
    inner_collective_count: int = 0
    """Collectives inside loops and branches that stay as XLA compiled them."""
    numbers_only: bool = False
    """Whether all results are single numbers, as a loss is."""
    keys_only: bool = False
    """Whether all arguments are single numbers and random keys."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a module is the training step, and why, as a sentence's end."""

    chosen: bool
    reason: str


def facts_of(
    graph: Graph, device_count: int, inner_collective_count: int = 0, regions: Sequence[Graph] = ()
) -> ModuleFacts:
    """The facts of a canonical graph that runs on ``device_count`` devices, and runs these regions."""
    graphs = (graph, *regions)
    return ModuleFacts(
        name=graph.module_name,
        device_count=device_count,
        computed_all_reduce_count=sum(
            one.nodes[node].opcode != "all-gather" and _is_computed(one, node)
            for one in graphs
            for node in one.all_reduces
        ),
        all_reduce_bytes=sum(int(moved_bytes(one).sum()) for one in graphs),
        instruction_count=sum(map(len, graphs)),
        inner_collective_count=inner_collective_count,
        numbers_only=all(array.element_count == 1 for array in _arrays(graph.nodes[graph.root].shape)),
        keys_only=all(_is_number_or_key(node.shape) for node in graph.nodes if node.kind is Kind.PARAMETER),
    )


def choose(facts: ModuleFacts, seen: Iterable[ModuleFacts], *, named: bool | None = None) -> Choice:
    """Decide about a module, given the qualifying modules ``seen`` before it.

    ``named`` is None where the user named no module, else whether the name is this module's.
    """
    if named is not None:
        return Choice(named, "named by DISCO_MODULE" if named else "DISCO_MODULE names another")
    if facts.device_count < 2:
        return Choice(False, "runs on one device")
    if facts.computed_all_reduce_count == 0:
        return Choice(False, "has no all-reduce of a computed value" + outside_loops(facts))
    if facts.instruction_count < _FEWEST_INSTRUCTIONS:
        return Choice(False, f"is a single op ({_describe(facts)})")
    if why := _unlike_a_step(facts):
        return Choice(False, f"{why} ({_describe(facts)})")
    steps = (other for other in seen if qualifies(other) and not _unlike_a_step(other))
    largest = max(steps, key=_size, default=None)
    if largest is not None and _size(facts) <= _size(largest):
        return Choice(False, f"not larger than {largest.name} ({_describe(largest)})")
    return Choice(True, f"the largest module with all-reduces so far ({_describe(facts)})")


def qualifies(facts: ModuleFacts) -> bool:
    """Whether a module could be a data-parallel step: several devices, several ops, an all-reduced computed value."""
    return (
        facts.device_count > 1
        and facts.computed_all_reduce_count > 0
        and facts.instruction_count >= _FEWEST_INSTRUCTIONS
    )


def _unlike_a_step(facts: ModuleFacts) -> str:
    """What a module that could be a step by its collectives does instead; empty where nothing says so."""
    if facts.keys_only:
        return "takes nothing but single numbers and random keys, as an initialization does"
    if facts.numbers_only:
        return "returns nothing but single numbers, as an evaluation does"
    return ""


def outside_loops(facts: ModuleFacts) -> str:
    """As the end of "no all-reduce of a computed value": where those are that nothing can be done about, and the way
    out."""
    count = facts.inner_collective_count
    if not count:
        return ""
    collectives = f"{count} collective{'s' * (count != 1)} inside"
    return (
        f" outside loops and branches that stay as XLA compiled them ({collectives}); what a plan may change must "
        "stand elsewhere: one step a call, gradients averaged after the loop, layers unrolled"
    )


def _arrays(shape: Shape) -> Iterator[Shape]:
    if shape.dtype != "tuple":
        yield shape
    for element in shape.elements:
        yield from _arrays(element)


def _is_number_or_key(shape: Shape) -> bool:
    return shape.element_count == 1 or (shape.dtype == "u32" and shape.size_bytes <= _LARGEST_KEYS_BYTES)


def _is_computed(graph: Graph, node: int) -> bool:
    pending = list(graph.nodes[node].operands)
    while pending:
        operand = graph.nodes[pending.pop()]
        if operand.kind is Kind.FREE:
            pending.extend(operand.operands)
        elif operand.kind not in (Kind.PARAMETER, Kind.CONSTANT):
            return True
    return False


def _size(facts: ModuleFacts) -> tuple[int, int]:
    return facts.instruction_count, facts.all_reduce_bytes


def _describe(facts: ModuleFacts) -> str:
    count = facts.computed_all_reduce_count
    all_reduces = f"{count} all-reduce{'s' * (count != 1)}, {facts.all_reduce_bytes / 2**20:.2f} MiB"
    return f"{facts.instruction_count} instructions, {all_reduces}"
