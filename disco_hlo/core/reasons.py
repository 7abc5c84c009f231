"""What the rules leave in working space: why nodes may not share a kernel, and marks on nodes.

Reasons are numbers for the rules and sentences for people. Marks need not be taken off: whoever marks some nodes takes
a number that no mark holds yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from disco_hlo.hlo.graph import Graph

(
    LEGAL, NO_RESULT, RESULT_SHAPES, SEVERAL_RESULTS, DEAD_MEMBER, NOT_FUSIBLE, OWN_BUFFER_COPY, NO_GENERATOR,
    TOO_MANY_OPERANDS, TOO_MANY_REDUCTIONS, TOO_MANY_EMISSIONS, TOO_MANY_EVALUATIONS, SHARED_BUFFER,
    TUPLE_BESIDE, SCATTER_BESIDE, SCATTERED_INSIDE, REDUCED_BESIDE, TRANSPOSED_BESIDE, REDUCED_INSIDE,
    OTHER_LOOPS, OTHER_ORDER, NO_LOOP, MOVED_BEFORE, REDUCED_TWICE, SHARED_MEMORY,
) = range(25)  # fmt: skip

REASONS: dict[int, str] = {
    NO_RESULT: "the group has no result: nothing outside reads it",
    RESULT_SHAPES: "results {0:shape} and {1:shape} differ in shape or layout",
    SEVERAL_RESULTS: "a concatenate, gather or reduce-window may only be the single result of a group",
    DEAD_MEMBER: "{0:op} is computed, but nothing reads it",
    NOT_FUSIBLE: "{0:op} cannot be fused",
    OWN_BUFFER_COPY: "{0:node} is a copy that gives its value a buffer of its own",
    NO_GENERATOR: "{0:op} has no code generator",
    TOO_MANY_OPERANDS: "{0} operands and results, more than {1}",
    TOO_MANY_REDUCTIONS: "{0} reductions, more than {1}",
    TOO_MANY_EMISSIONS: "{0:op} would be written {1} times into one kernel, more than {2}",
    TOO_MANY_EVALUATIONS: "one kernel would read {0} elements, its ops by themselves read {1}",
    SHARED_BUFFER: (
        "{0:node} overwrites the buffer of {1:node}, which {2:op} reads at other elements in the same kernel"
    ),
    TUPLE_BESIDE: "{0:op} has several results and may only be the single result of a group",
    SCATTER_BESIDE: "{0:op} may only be the single result of a group",
    SCATTERED_INSIDE: "{0:node}, which {1:op} updates in place, is used inside its kernel",
    REDUCED_BESIDE: "{0:op} would be reduced element by element beside the other results",
    TRANSPOSED_BESIDE: "{0:op} would be transposed element by element beside the other results",
    REDUCED_INSIDE: "{0:op} would be repeated for every element of its readers",
    OTHER_LOOPS: "results {0:shape} and {1:shape} need different loops",
    OTHER_ORDER: "{0:op} reads in another order than the kernel's other results",
    NO_LOOP: "{0:op} is a result that the kernel goes on from, and no loop computes it",
    MOVED_BEFORE: "{0:op} moves elements before {1:node}, a result that the kernel goes on from",
    REDUCED_TWICE: "{0:op} reduces what was already reduced in the same kernel",
    SHARED_MEMORY: "{0} bytes of shared memory, more than {1}",
}
"""What users read. In braces stand the numbers that :func:`refuse` noted: nodes, as they are named, and counts."""
STAMP: Final = 0
"""Place in ``number`` of working space: the largest number that any mark holds."""


def fresh_stamp(w: Any) -> Any:
    """A number that no mark in working space ``w`` holds yet."""
    w.number[STAMP] += 1
    return w.number[STAMP]


def refuse(w: Any, reason: Any, first: Any, second: Any, third: Any) -> Any:
    """``reason``, its nodes and counts noted in row ``about`` of working space ``w``."""
    w.about[0], w.about[1], w.about[2] = first, second, third
    return reason


def sentence(graph: Graph, reason: int, about: Sequence[int]) -> str:
    """What a refusal says."""
    return REASONS[reason].format(*(_Noted(graph, number) for number in about))


@dataclass(frozen=True, slots=True)
class _Noted:
    """A number that a rule noted, written as :data:`REASONS` asks for it."""

    graph: Graph
    number: int

    def __format__(self, way: str) -> str:
        if not way:
            return str(self.number)
        node = self.graph.nodes[self.number]
        return {
            "node": f"n{node.id}",
            "op": f"n{node.id} ({node.opcode})",
            "shape": f"n{node.id} {node.shape}",
        }[way]
