"""Steps for the search's tests: small enough to draw, and random ones, reproducible from a seed."""

from __future__ import annotations

from random import Random

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape

_SHAPES = (
    *(Shape("f32", (64, 128), (1, 0)),) * 6,
    Shape("f32", (128, 64), (1, 0)),
    Shape("f32", (64, 128), (0, 1)),
    Shape("bf16", (64, 128), (1, 0)),
    Shape("f32", (128,), (0,)),
)
_UNARY = ("exponential", "exponential", "exponential", "negate", "copy", "transpose", "reduce", "broadcast",
          "slice", "gather", "concatenate", "bitcast")  # fmt: skip


def random_step(
    random: Random, count: int, *, backend: str = "cpu", ties: bool = True, turned: bool = False
) -> Graph:
    """A graph of about ``count`` ops, with gradients that are reduced and applied to parameters.

    Args:
        ties: whether to add pairs that must run in order, and buffers that are overwritten.
        turned: whether half of the matmuls are also shown by bitcasts.
    """
    nodes: list[Node] = []

    def add(opcode: str, shape: Shape, operands: tuple[int, ...], kind: Kind, **more) -> int:
        read = " ".join(f"{nodes[o].shape} {nodes[o].shape.layout}" for o in operands)
        key = f"{opcode} {shape} {shape.layout} {more} {read}"
        nodes.append(Node(len(nodes), opcode, shape, operands, kind, key=key, **more))
        return len(nodes) - 1

    values = [add("parameter", random.choice(_SHAPES), (), Kind.PARAMETER) for _ in range(3)]
    scalar = add("constant", Shape("f32"), (), Kind.CONSTANT)
    updates = []
    while len(nodes) < count:
        operand = random.choice(values[-8:]) if random.random() < 0.8 else random.choice(values)
        shape = nodes[operand].shape
        draw = random.random()
        if draw < 0.4:
            others = [v for v in values if nodes[v].shape == shape and v != operand]
            other = random.choice(others) if others and random.random() < 0.7 else scalar
            values.append(add("multiply", shape, (operand, other), Kind.FUSIBLE))
        elif draw < 0.8:
            opcode = random.choice(_UNARY)
            result, dimensions = _result(random, opcode, shape)
            kind = Kind.FREE if opcode == "bitcast" else Kind.FUSIBLE
            values.append(add(opcode, result, (operand,), kind, dimensions=dimensions))
        elif draw < (0.86 if turned else 0.84):
            values.append(add("dot", random.choice(_SHAPES), (operand, random.choice(values)), Kind.FIXED))
            if turned and random.random() < 0.5:
                values.append(add("bitcast", nodes[values[-1]].shape, (values[-1],), Kind.FREE))
        elif draw < 0.87:
            values.append(add("scatter", shape, (operand, scalar, random.choice(values)), Kind.FIXED))
        else:
            mode = random.choice(("sum", "sum", "max"))
            gradient = add("all-reduce", shape, (operand,), Kind.COLLECTIVE, collective=mode)
            through = add("bitcast", shape, (gradient,), Kind.FREE) if random.random() < 0.3 else gradient
            updates.append(add("add", shape, (through, scalar), Kind.FUSIBLE))
    read = {operand for node in nodes for operand in node.operands}
    outputs = [node.id for node in nodes if node.id not in read and node.kind is not Kind.PARAMETER]
    outputs += random.sample(values, min(2, len(values)))
    root = add("tuple", Shape("tuple"), tuple(dict.fromkeys(outputs)), Kind.FREE)
    before, inplace = _ties(random, nodes, updates) if ties else ((), ())
    return Graph(tuple(nodes), root, before, backend, "jit_step", "f00d", inplace)


def _result(random: Random, opcode: str, shape: Shape) -> tuple[Shape, tuple[int, ...]]:
    """Shape and dimensions of an op of one operand."""
    rank = len(shape.dims)
    if opcode in ("exponential", "negate") or (opcode == "copy" and random.random() < 0.5):
        return shape, ()
    if opcode == "transpose":
        return Shape(shape.dtype, shape.dims[::-1], tuple(range(rank))[::-1]), tuple(range(rank))[::-1]
    if opcode == "reduce" and rank:
        gone = random.randrange(rank)
        kept = tuple(extent for i, extent in enumerate(shape.dims) if i != gone)
        return Shape(shape.dtype, kept, tuple(range(rank - 1))[::-1]), (gone,)
    if opcode == "copy":
        return Shape(shape.dtype, shape.dims, shape.layout[::-1]), ()
    result = random.choice(_SHAPES)
    return result, tuple(range(min(rank, len(result.dims)))) if opcode == "broadcast" else (0,)


def _ties(
    random: Random, nodes: list[Node], updates: list[int]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Pairs in numerical order, which is topological; some updates overwrite a parameter."""
    pairs = set()
    for _ in range(3):
        a, b = sorted(random.sample(range(3, len(nodes) - 1), 2))
        if Kind.FREE not in (nodes[a].kind, nodes[b].kind):  # readers would be meant, and may come after b
            pairs.add((a, b))
    inplace = []
    for parameter, writer in zip(range(3), updates, strict=False):
        readers = [node.id for node in nodes if parameter in node.operands]
        if all(nodes[reader].kind is not Kind.FREE for reader in readers) and all(
            reader <= writer for reader in readers
        ):
            inplace.append((parameter, writer))
            pairs |= {(reader, writer) for reader in readers if reader != writer}
    return tuple(sorted(pairs)), tuple(inplace)
