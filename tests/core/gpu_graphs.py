"""GPU graphs written as a few lines of text, shapes included."""

from __future__ import annotations

import re

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape

Pairs = tuple[tuple[int, int], ...]

_LINE = re.compile(
    r"(?P<dtype>\w+)\[(?P<dims>[\d,]*)\] (?P<opcode>[\w-]+)"
    r"(?P<operands>(?: \d+)*)(?: \{(?P<dimensions>[\d,]*)\})?$"
)
_KINDS = {
    "param": Kind.PARAMETER,
    "const": Kind.CONSTANT,
    "dot": Kind.FIXED,
    "scatter": Kind.FIXED,
    "all-reduce": Kind.ALL_REDUCE,
    "bitcast": Kind.FREE,
}


def graph(text: str, inplace: Pairs = ()) -> Graph:
    """One node a line, ``f32[8,64] transpose 0 {1,0}``, numbered from 0; the last one is the root.

    All shapes are row-major; what stands in braces is the ``dimensions`` attribute.
    """
    nodes = []
    for i, line in enumerate(text.strip().splitlines()):
        match = _LINE.match(line.strip())
        assert match, line
        dims = _numbers(match["dims"])
        shape = Shape(match["dtype"], dims, tuple(range(len(dims)))[::-1])
        operands = tuple(map(int, match["operands"].split()))
        kind = _KINDS.get(match["opcode"], Kind.FUSIBLE)
        dimensions = _numbers(match["dimensions"] or "")
        key = f"{match['opcode']} {shape} {dimensions} {[str(nodes[o].shape) for o in operands]}"
        nodes.append(Node(i, match["opcode"], shape, operands, kind, key, dimensions=dimensions))
    return Graph(tuple(nodes), len(nodes) - 1, (), "gpu", "jit_step", "f00d", inplace)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
