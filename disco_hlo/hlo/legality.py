"""Which nodes may share one kernel, and the reason where they may not.

XLA trusts the module the hook returns: some illegal fusions are compile errors, others crash the
process, and an in-place update fused carelessly gives wrong numbers. So legality is decided here,
before XLA sees anything. The rules mirror XLA's own (cpu_instruction_fusion.cc,
cpu_multi_output_fusion.cc; for GPU see ``legality_gpu``); what XLA itself grouped is legal by
construction and is not judged by them (see ``plan.apply``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape, is_cloned, overwritten_names
from disco_hlo.hlo.legality_gpu import gpu_refusal
from disco_hlo.hlo.opcodes import reads_own_element


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

REPETITION = 100
"""How many times as much as its ops by themselves one kernel may read. Of XLA's own kernels (Triton's aside, which keep
tiles) none reads more than 10 times as much, in the steps of ``tests/data``."""
FEW_READS = 1 << 20
"""A kernel may always read so many elements, its own included: that takes a millisecond."""
MOST_WORK = 1 << 44
"""The work of ops by themselves is counted no further: no device does so much, and arrays hold many times it."""

_SINGLE_RESULT = frozenset({"concatenate", "gather", "reduce-window"})


def is_joinable(node: Node) -> bool:
    """Whether the node may stand in a group at all."""
    return node.kind is Kind.FUSIBLE or node.opcode == "bitcast"


def keeps_own_buffer(graph: Graph, node: Node) -> bool:
    """Whether this is a copy that changes nothing: XLA put it there to give a value its own buffer."""
    return node.opcode == "copy" and graph.nodes[node.operands[0]].shape == node.shape


def is_elementwise(graph: Graph, node: Node) -> bool:
    """Whether element i of the result reads element i of each operand: same dimensions, same layout."""
    return reads_own_element(node.opcode, node.shape, (graph.nodes[x].shape for x in node.operands))


def _same_geometry(left: Shape, right: Shape) -> bool:
    return (left.dims, left.layout) == (right.dims, right.layout)


def group_refusal(
    graph: Graph, members: Collection[int], results: Sequence[int], kind: str = "loop"
) -> str | None:
    """Why these nodes may not run as one kernel, or None where they may.

    Args:
        graph: the step.
        members: all nodes computed inside, owned and duplicated.
        results: the owned members whose value leaves the kernel, at least one.
        kind: the emitter, as in ``plan.strategy.Group``. XLA chooses between its own by what is inside;
            what Triton can emit is judged by the tiles that XLA found for it, and none are made here.
    """
    inside = set(members)
    limits = LIMITS[graph.backend]
    if not results:
        return "the group has no result: nothing outside reads it"
    if all(graph.nodes[member].kind is Kind.FREE for member in inside):
        return "the group computes nothing: there are only bitcasts in it"
    common = (
        _member_refusal(graph, inside, set(results))
        or _size_refusal(graph, inside, results, limits)
        or _emission_refusal(graph, inside, results, limits)
    )
    if common:
        return common
    if kind == "triton":  # it keeps tiles, and computes nothing again
        return None
    repeated = _evaluation_refusal(graph, inside, results)
    if repeated:
        return repeated
    if graph.backend == "gpu":
        return gpu_refusal(graph, inside, results)
    return _result_refusal(graph, results) or _inplace_refusal(graph, inside)


def _member_refusal(graph: Graph, inside: set[int], results: set[int]) -> str | None:
    for member in sorted(inside):
        node = graph.nodes[member]
        if member not in results and inside.isdisjoint(graph.users[member]):
            return f"n{member} ({node.opcode}) is computed, but nothing reads it"
        if not is_joinable(node) and not (graph.backend == "gpu" and node.opcode == "scatter"):
            return f"n{member} ({node.opcode}) cannot be fused"
        if keeps_own_buffer(graph, node):
            return f"n{member} is a copy that gives its value a buffer of its own"
    return None


def _result_refusal(graph: Graph, results: Sequence[int]) -> str | None:
    first = graph.nodes[results[0]]
    for result in results[1:]:
        node = graph.nodes[result]
        if node.shape != first.shape:
            return f"results n{first.id} {first.shape} and n{result} {node.shape} differ in shape or layout"
    if len(results) > 1 and any(graph.nodes[result].opcode in _SINGLE_RESULT for result in results):
        return "a concatenate, gather or reduce-window may only be the single result of a group"
    return None


def external_reads(graph: Graph, inside: Collection[int]) -> list[int]:
    """Nodes read from outside the group, ascending; scalar constants are cloned and not counted."""
    read = {operand for member in inside for operand in graph.nodes[member].operands}
    return sorted(x for x in read.difference(inside) if not is_cloned(graph.nodes[x]))


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
    shared = dict.fromkeys(results, 1)
    for member in sorted(inside, reverse=True):
        count = shared.get(member, 0)
        node = graph.nodes[member]
        written[member] = max(1, count)
        elementwise = is_elementwise(graph, node)
        for operand in set(node.operands):
            if operand in inside:
                before, uses = shared.get(operand, 0), written[member]
                added = before + uses * node.operands.count(operand)
                shared[operand] = max(before, uses) if elementwise else added
    return written


def _emission_refusal(graph: Graph, inside: set[int], results: Sequence[int], limits: Limits) -> str | None:
    for member, count in emissions(graph, inside, results).items():
        if count > limits.emissions:
            return (
                f"n{member} ({graph.nodes[member].opcode}) would be written {count} times into one kernel, "
                f"more than {limits.emissions}"
            )
    return None


def element_count(node: Node) -> int:
    """Elements of a node's array, or of the first where it has several (a reduce of several arrays)."""
    shape = node.shape
    while shape.elements:
        shape = shape.elements[0]
    return shape.element_count


def reads_per_element(graph: Graph, node: Node) -> int:
    """How many elements of an operand one element of the result is made of; 0: of one operand out of several."""
    if node.opcode == "concatenate":
        return 0
    own = max(1, element_count(node))
    if node.opcode == "reduce":
        return max(1, element_count(graph.nodes[node.operands[0]]) // own)
    return node.flops // own + 1 if node.opcode == "reduce-window" else 1


def evaluations(graph: Graph, inside: set[int], results: Sequence[int]) -> dict[int, int]:
    """How many elements of each member are evaluated, repeats included.

    Nothing is kept inside a kernel. A reduction of another one's window evaluates that anew for each of its own
    elements, and so does whatever reads a broadcast of it: such factors multiply.
    """
    counted = {result: element_count(graph.nodes[result]) for result in results}
    for member in sorted(inside, reverse=True):
        node = graph.nodes[member]
        own, reads = counted.setdefault(member, 0), reads_per_element(graph, node)
        elementwise = is_elementwise(graph, node)
        for operand in node.operands:
            if operand not in inside:
                continue
            before = counted.get(operand, 0)
            share = max(1, element_count(node) // max(1, element_count(graph.nodes[operand])))
            added = own * reads if reads else own // share
            counted[operand] = max(before, added) if elementwise else before + added
    return counted


def _evaluation_refusal(graph: Graph, inside: set[int], results: Sequence[int]) -> str | None:
    reads = {x: max(1, reads_per_element(graph, graph.nodes[x])) for x in inside}
    alone = min(MOST_WORK, sum(element_count(graph.nodes[x]) * reads[x] for x in inside))
    together = sum(count * reads[x] for x, count in evaluations(graph, inside, results).items())
    if together > max(FEW_READS, REPETITION * alone):
        return f"one kernel would read {together} elements, its ops by themselves read {alone}"
    return None


def _inplace_refusal(graph: Graph, inside: set[int]) -> str | None:
    for name, writer in overwritten_names(graph):
        if writer in inside:
            reason = _shared_buffer_refusal(graph, inside, name, writer)
            if reason:
                return reason
    return None


def _shared_buffer_refusal(graph: Graph, inside: set[int], name: int, writer: int) -> str | None:
    """A kernel that overwrites a buffer may read it only at the element it is about to write."""
    written = graph.nodes[writer].shape
    touched = {name}
    for member in sorted(inside):
        node = graph.nodes[member]
        if not touched.intersection(node.operands) or graph.shown[member] == graph.shown[name]:
            continue
        touched.add(member)
        if not is_elementwise(graph, node) or not _same_geometry(node.shape, written):
            return (
                f"n{writer} overwrites the buffer of n{name}, which n{member} ({node.opcode}) "
                "reads at other elements in the same kernel"
            )
    return None
