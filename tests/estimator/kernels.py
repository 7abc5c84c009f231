"""Small graphs by hand, for the tests of the analytical estimate."""

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


def graph_of(*rows, backend="cpu", root=None):
    """A graph from rows (opcode, shape, operands[, dimensions]); operation counts follow XLA's rules."""
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
