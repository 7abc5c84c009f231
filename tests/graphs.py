"""Graphs written as a few lines of text, so that a test shows the whole of what it works on."""

from __future__ import annotations

import re

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from disco_hlo.hlo.opcodes import ELEMENTWISE, TRANSCENDENTAL

Pairs = tuple[tuple[int, int], ...]

_SHORT = {"param": "parameter", "const": "constant"}
_KINDS = {
    "parameter": Kind.PARAMETER,
    "constant": Kind.CONSTANT,
    "all-reduce": Kind.COLLECTIVE,
    **dict.fromkeys(("dot", "scatter", "while", "all-gather", "all-to-all"), Kind.FIXED),
    **dict.fromkeys(("tuple", "bitcast", "get-tuple-element"), Kind.FREE),
}
_ARRAY = re.compile(r"(\w+)(?:\[([\d,]*)\])?(?:\{([\d,]+)\})?")
_NODE = re.compile(
    r"(?:(?P<shape>\S*\[\S*) )?(?P<opcode>[\w-]+)(?P<operands>(?: \d+)*)(?: \{(?P<dims>[\d,]*)\})?"
)


def graph_of(
    text: str,
    before: Pairs = (),
    inplace: Pairs = (),
    *,
    backend: str = "cpu",
    elements: int | None = 8,
) -> Graph:
    """One node a line, or between semicolons: ``opcode operand operand``, numbered from 0; the last one is the root.

    A shape may stand before it, row-major unless it says its layout, and the ``dimensions`` attribute behind it:
    ``f32[8,64]{0,1} transpose 0 {1,0}``. Of equal opcodes, shapes and operands' shapes the cost keys are equal.

    Args:
        elements: length of the vectors of floats that nodes without a shape are; None: node i has i + 1.
    """
    nodes: list[Node] = []
    for line in text.replace(";", "\n").strip().splitlines():
        found = _NODE.fullmatch(line.strip())
        assert found is not None, line
        opcode = _SHORT.get(found["opcode"], found["opcode"])
        operands = tuple(map(int, found["operands"].split()))
        read = [nodes[one].shape for one in operands]
        if found["shape"]:
            shape = shape_of(found["shape"])
        elif opcode == "tuple":
            shape = Shape("tuple", elements=tuple(read))
        else:
            shape = Shape("f32", (len(nodes) + 1 if elements is None else elements,), (0,))
        dimensions = _numbers(found["dims"])
        kind = _KINDS.get(opcode, Kind.FUSIBLE)
        key = f"{opcode} {shape} {shape.layout} {dimensions} {[str(one) for one in read]}"
        nodes.append(
            Node(
                len(nodes), opcode, shape, operands, kind, key, _flops(opcode, shape, read),
                shape.element_count if opcode in TRANSCENDENTAL else 0, dimensions,
                collective="sum" if kind is Kind.COLLECTIVE else "",
            )
        )  # fmt: skip
    return Graph(tuple(nodes), len(nodes) - 1, before, backend, "jit_step", "f00d", inplace)


def shape_of(text: str) -> Shape:
    """An array, ``f32[8,64]{0,1}``, or a tuple, ``(f32[4],(bf16[]))``, of arrays and at most one more tuple."""
    if text.startswith("("):
        members = re.finditer(rf"\(.*\)|{_ARRAY.pattern}", text[1:-1])
        return Shape("tuple", elements=tuple(shape_of(member[0]) for member in members))
    found = _ARRAY.fullmatch(text)
    assert found is not None, text
    dims = _numbers(found[2])
    return Shape(found[1], dims, _numbers(found[3]) or tuple(range(len(dims)))[::-1])


def _numbers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in (text or "").split(",") if number)


def _flops(opcode: str, shape: Shape, read: list[Shape]) -> int:
    """By XLA's rules."""
    if opcode == "dot":
        return 2 * shape.element_count * read[0].dims[-1]
    if opcode == "reduce":
        return read[0].element_count - shape.element_count
    return shape.element_count if opcode in ELEMENTWISE - TRANSCENDENTAL - {"copy"} else 0
