"""Small graphs by hand, for the tests of the analytical estimate."""

import re

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from disco_hlo.hlo.opcodes import ELEMENTWISE, TRANSCENDENTAL

_KINDS = {
    "parameter": Kind.PARAMETER,
    "constant": Kind.CONSTANT,
    "dot": Kind.FIXED,
    "while": Kind.FIXED,
    "all-reduce": Kind.ALL_REDUCE,
    "bitcast": Kind.FREE,
    "tuple": Kind.FREE,
}


def f32(*dims, layout=None):
    """An f32 array, row-major unless told."""
    return Shape("f32", dims, tuple(reversed(range(len(dims)))) if layout is None else layout)


_ROW = re.compile(
    r"(?P<opcode>[\w-]+)\[(?P<dims>[\d,]*)\](?:@(?P<layout>[\d,]+))?"
    r"(?P<operands>(?: \d+)*)(?: \{(?P<rest>[\d,]*)\})?"
)


def row_of(text):
    """A row as text: ``add[4,8] 0 1``, ``broadcast[4,8] 1 {0}``, ``copy[4,8]@0,1 0``."""
    found = _ROW.fullmatch(text.strip())
    dims, layout, rest = (None if one is None else tuple(map(int, filter(None, one.split(","))))
                          for one in found.group("dims", "layout", "rest"))  # fmt: skip
    operands = tuple(map(int, found["operands"].split()))
    return found["opcode"], f32(*dims, layout=layout), operands, *([] if rest is None else [rest])


def graph_of(*rows, backend="cpu", root=None):
    """A graph from rows (opcode, shape, operands[, dimensions]), or of f32 arrays from one text of them with semicolons
    between; operation counts follow XLA's rules."""
    if isinstance(rows[0], str):
        rows = [row_of(one) for one in rows[0].split(";")]
    nodes = []
    for number, (opcode, shape, operands, *rest) in enumerate(rows):
        elements = shape.element_count
        flops = transcendentals = 0
        if opcode in TRANSCENDENTAL:
            transcendentals = elements
        elif opcode in ELEMENTWISE - {"copy"}:
            flops = elements
        elif opcode == "reduce":
            flops = nodes[operands[0]].shape.element_count - elements
        elif opcode == "dot":
            flops = 2 * elements * nodes[operands[0]].shape.dims[-1]
        kind = _KINDS.get(opcode, Kind.FUSIBLE)
        key = f"{opcode} {shape} {shape.layout} {rest} {[str(nodes[o].shape) for o in operands]}"
        dimensions = tuple(rest[0]) if rest else ()
        nodes.append(
            Node(number, opcode, shape, operands, kind, key, flops, transcendentals, dimensions=dimensions)
        )
    return Graph(tuple(nodes), len(nodes) - 1 if root is None else root, (), backend, "step", "f00")
