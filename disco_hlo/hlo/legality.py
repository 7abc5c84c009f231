"""Which nodes may share one kernel, and the reason where they may not.

XLA trusts the module the hook returns: some illegal fusions are compile errors, others crash the
process, and an in-place update fused carelessly gives wrong numbers. So legality is decided here,
before XLA sees anything. The rules mirror XLA's own (cpu_instruction_fusion.cc,
cpu_multi_output_fusion.cc, gpu_fusible.cc); what XLA itself grouped is legal by construction and
is not judged by them (see ``plan.apply``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from disco_hlo.hlo.graph import Graph, Kind, Node, is_cloned
from disco_hlo.hlo.opcodes import ELEMENTWISE


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one kernel on one backend."""

    operands_and_results: int
    """External reads plus results of one kernel (GPU: MaxOperandsAndOutputsPerFusion)."""
    emissions: int
    """How often the code of one op may be repeated inside one kernel (XLA's code duplication guard)."""
    reductions: int
    """Reduce ops in one kernel."""


LIMITS: dict[str, Limits] = {
    "cpu": Limits(operands_and_results=64, emissions=8, reductions=5),
    "gpu": Limits(operands_and_results=96, emissions=8, reductions=8),
}


def is_joinable(node: Node) -> bool:
    """Whether the node may stand in a group at all."""
    return node.kind is Kind.FUSIBLE or node.opcode == "bitcast"


def keeps_own_buffer(graph: Graph, node: Node) -> bool:
    """Whether this is a copy that changes nothing: XLA put it there to give a value its own buffer."""
    return node.opcode == "copy" and graph.nodes[node.operands[0]].shape == node.shape


def is_elementwise(graph: Graph, node: Node) -> bool:
    """Whether element i of the result reads element i of each operand: same dimensions, same layout."""
    if node.opcode not in ELEMENTWISE:
        return False
    return all(
        not graph.nodes[operand].shape.dims
        or (graph.nodes[operand].shape.dims, graph.nodes[operand].shape.layout) == (node.shape.dims, node.shape.layout)
        for operand in node.operands
    )


def group_refusal(graph: Graph, members: Collection[int], results: Sequence[int]) -> str | None:
    """Why these nodes may not run as one kernel, or None where they may.

    Args:
        graph: the step.
        members: all nodes computed inside, owned and duplicated.
        results: the owned members whose value leaves the kernel, at least one.
    """
    inside = set(members)
    limits = LIMITS[graph.backend]
    return (
        _member_refusal(graph, inside, set(results))
        or _result_refusal(graph, results)
        or _size_refusal(graph, inside, results, limits)
        or _emission_refusal(graph, inside, results, limits)
        or _inplace_refusal(graph, inside)
    )


def _member_refusal(graph: Graph, inside: set[int], results: set[int]) -> str | None:
    for member in sorted(inside):
        node = graph.nodes[member]
        if member not in results and inside.isdisjoint(graph.users[member]):
            return f"n{member} ({node.opcode}) is computed, but nothing reads it"
        if not is_joinable(node):
            return f"n{member} ({node.opcode}) cannot be fused"
        if keeps_own_buffer(graph, node):
            return f"n{member} is a copy that gives its value a buffer of its own"
    return None


def _result_refusal(graph: Graph, results: Sequence[int]) -> str | None:
    if not results:
        return "the group has no result: nothing outside reads it"
    first = graph.nodes[results[0]]
    for result in results[1:]:
        node = graph.nodes[result]
        if node.shape != first.shape:
            return f"results n{first.id} {first.shape} and n{result} {node.shape} differ in shape or layout"
    if len(results) > 1 and any(graph.nodes[r].opcode in ("concatenate", "reduce-window", "gather") for r in results):
        return "a concatenate, gather or reduce-window may only be the single result of a group"
    return None


def external_reads(graph: Graph, inside: Collection[int]) -> list[int]:
    """Nodes read from outside the group, ascending; scalar constants are cloned and not counted."""
    reads = {operand for member in inside for operand in graph.nodes[member].operands if operand not in inside}
    return sorted(r for r in reads if not is_cloned(graph.nodes[r]))


def _size_refusal(graph: Graph, inside: set[int], results: Sequence[int], limits: Limits) -> str | None:
    total = len(external_reads(graph, inside)) + len(results)
    if total > limits.operands_and_results:
        return f"{total} operands and results, more than {limits.operands_and_results}"
    reductions = sum(graph.nodes[member].opcode == "reduce" for member in inside)
    if reductions > limits.reductions:
        return f"{reductions} reductions, more than {limits.reductions}"
    return None


def emissions(graph: Graph, inside: set[int], results: Sequence[int]) -> dict[int, int]:
    """How many times the emitter writes each member: once per distinct way its elements are indexed.

    Elementwise readers share their own index; every other reader adds one of its own for each time
    it is written itself.
    """
    written: dict[int, int] = {}
    shared = {result: 1 for result in results}
    for member in sorted(inside, reverse=True):
        count = shared.get(member, 0)
        node = graph.nodes[member]
        written[member] = max(1, count)
        elementwise = is_elementwise(graph, node)
        for operand in set(node.operands):
            if operand in inside:
                uses = written[member] * (1 if elementwise else node.operands.count(operand))
                shared[operand] = max(shared.get(operand, 0), uses) if elementwise else shared.get(operand, 0) + uses
    return written


def _emission_refusal(graph: Graph, inside: set[int], results: Sequence[int], limits: Limits) -> str | None:
    for member, count in emissions(graph, inside, results).items():
        if count > limits.emissions:
            return f"n{member} ({graph.nodes[member].opcode}) would be written {count} times into one kernel, more than {limits.emissions}"
    return None


def _inplace_refusal(graph: Graph, inside: set[int]) -> str | None:
    for buffer, writer in graph.inplace:
        if writer not in inside:
            continue
        reason = _shared_buffer_refusal(graph, inside, buffer, writer)
        if reason:
            return reason
    return None


def _shared_buffer_refusal(graph: Graph, inside: set[int], buffer: int, writer: int) -> str | None:
    """A kernel that overwrites a buffer may read it only at the element it is about to write."""
    home = graph.nodes[buffer]
    touched = {buffer}
    for member in sorted(inside):
        node = graph.nodes[member]
        if not touched.intersection(node.operands):
            continue
        touched.add(member)
        same_index = is_elementwise(graph, node) and (node.shape.dims, node.shape.layout) == (home.shape.dims, home.shape.layout)
        if not same_index:
            return (
                f"n{writer} overwrites the buffer of n{buffer}, which n{member} ({node.opcode}) "
                "reads at other elements in the same kernel"
            )
    return None
