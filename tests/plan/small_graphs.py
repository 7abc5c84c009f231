"""Graphs written as a few lines of text, so that a test shows the whole of what it works on."""

from __future__ import annotations

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
