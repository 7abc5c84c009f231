"""Graphs written as a few lines of text, so that a test shows the whole of what it works on."""

from __future__ import annotations

import re

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape

Pairs = tuple[tuple[int, int], ...]

KINDS = {
    "param": Kind.PARAMETER,
    "const": Kind.CONSTANT,
    "dot": Kind.FIXED,
    "all-reduce": Kind.ALL_REDUCE,
    "tuple": Kind.FREE,
    "bitcast": Kind.FREE,
    "get-tuple-element": Kind.FREE,
}
_SHAPED = re.compile(
    r"(?P<dtype>\w+)\[(?P<dims>[\d,]*)\] (?P<opcode>[\w-]+)"
    r"(?P<operands>(?: \d+)*)(?: \{(?P<dimensions>[\d,]*)\})?$"
)


def graph(text: str, before: Pairs = (), inplace: Pairs = (), backend: str = "cpu") -> Graph:
    """One node a line, ``opcode operand operand``, numbered from 0; the last one is the root.

    Node i is a vector of i + 1 floats.
    """
    nodes = []
    for i, line in enumerate(text.strip().splitlines()):
        opcode, *operands = line.split()
        kind = KINDS.get(opcode, Kind.FUSIBLE)
        key = f"{line.strip()} of {i + 1}"
        nodes.append(Node(i, opcode, Shape("f32", (i + 1,)), tuple(map(int, operands)), kind, key=key))
    return Graph(tuple(nodes), len(nodes) - 1, before, backend, "jit_step", "f00d", inplace)


def gpu_graph(text: str, inplace: Pairs = ()) -> Graph:
    """The same with shapes, all row-major, and in braces the ``dimensions`` attribute:
    ``f32[8,64] transpose 0 {1,0}``."""
    nodes: list[Node] = []
    for i, line in enumerate(text.strip().splitlines()):
        match = _SHAPED.match(line.strip())
        assert match, line
        dims, dimensions = _numbers(match["dims"]), _numbers(match["dimensions"] or "")
        shape = Shape(match["dtype"], dims, tuple(range(len(dims)))[::-1])
        operands = tuple(map(int, match["operands"].split()))
        kind = Kind.FIXED if match["opcode"] == "scatter" else KINDS.get(match["opcode"], Kind.FUSIBLE)
        key = f"{match['opcode']} {shape} {dimensions} {[str(nodes[o].shape) for o in operands]}"
        nodes.append(Node(i, match["opcode"], shape, operands, kind, key, dimensions=dimensions))
    return Graph(tuple(nodes), len(nodes) - 1, (), "gpu", "jit_step", "f00d", inplace)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
