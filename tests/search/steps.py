"""Steps small enough to draw."""

from __future__ import annotations

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape

KINDS = {
    "param": Kind.PARAMETER,
    "const": Kind.CONSTANT,
    "dot": Kind.FIXED,
    "all-reduce": Kind.ALL_REDUCE,
    "tuple": Kind.FREE,
    "bitcast": Kind.FREE,
}


def chain(
    text: str, *, backend: str = "cpu", elements: int = 8, before: tuple[tuple[int, int], ...] = ()
) -> Graph:
    """One node a line, ``opcode operand operand``, all of one shape; the last one is the root."""
    nodes = []
    for i, line in enumerate(text.strip().splitlines()):
        opcode, *operands = line.split()
        kind = KINDS.get(opcode, Kind.FUSIBLE)
        shape = Shape("tuple") if opcode == "tuple" else Shape("f32", (elements,), (0,))
        nodes.append(Node(i, opcode, shape, tuple(map(int, operands)), kind, key=opcode, collective="sum"))
    return Graph(tuple(nodes), len(nodes) - 1, before, backend, "jit_step", "f00d")
