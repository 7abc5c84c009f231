"""Training steps of any size, written as XLA would hand them over: layers of one matmul, their gradients summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disco_hlo.hlo import proto
from disco_hlo.hlo.graph import Shape

_SCALAR = Shape("f32")


class _Writer:
    """One computation while it is written."""

    def __init__(self, module: Any, number: int, name: str) -> None:
        self.computation = module.computations.add(id=number, name=name)
        self.parameters = 0

    def add(self, opcode: str, shape: Shape, operands: Sequence[int] = (), **fields: Any) -> int:
        number = len(self.computation.instructions)
        made = self.computation.instructions.add(
            name=f"{opcode}.{number}", opcode=opcode, id=number, operand_ids=operands, **fields
        )
        made.shape.CopyFrom(proto.shape_to_proto(shape))
        self.computation.root_id = number
        return number

    def parameter(self, shape: Shape) -> int:
        self.parameters += 1
        return self.add("parameter", shape, parameter_number=self.parameters - 1)

    def dot(self, shape: Shape, left: int, right: int, contracted: tuple[int, int]) -> int:
        number = self.add("dot", shape, (left, right))
        numbers = self.computation.instructions[number].dot_dimension_numbers
        numbers.lhs_contracting_dimensions.append(contracted[0])
        numbers.rhs_contracting_dimensions.append(contracted[1])
        return number


def large_step(
    layers: int, *, width: int = 64, batch: int = 32, ops: int = 2, constant_bytes: int = 0
) -> bytes:
    """A step of so many layers of ``width`` times ``width`` parameters, each with an all-reduce of its own.

    Args:
        batch: rows of the input.
        ops: elementwise ops in each layer, forwards and backwards.
        constant_bytes: size of a constant that is added to the input, if any.
    """
    module = proto.Module(name="jit_step", entry_computation_name="main", entry_computation_id=1)
    total = _Writer(module, 0, "add")
    total.add("add", _SCALAR, (total.parameter(_SCALAR), total.parameter(_SCALAR)))
    main = _Writer(module, 1, "main")
    rows, square = Shape("f32", (batch, width), (1, 0)), Shape("f32", (width, width), (1, 0))
    weights = [main.parameter(square) for _ in range(layers)]
    value = main.parameter(rows)
    if constant_bytes:
        value = _with_constant(main, value, rows, constant_bytes)
    inputs = []
    for weight in weights:
        inputs.append(value)
        value = main.dot(rows, value, weight, (1, 0))
        for _ in range(ops):
            value = main.add("tanh", rows, (value,))
    updated: list[int] = []
    for weight, given in zip(reversed(weights), reversed(inputs), strict=True):
        for _ in range(ops):
            value = main.add("multiply", rows, (value, given))
        gradient = main.dot(square, given, value, (0, 0))
        summed = main.add(
            "all-reduce", square, (gradient,), channel_id=1 + len(updated), called_computation_ids=[0]
        )
        updated.append(main.add("subtract", square, (weight, summed)))
        value = main.dot(rows, value, weight, (1, 1))
    results = [value, *reversed(updated)]
    shapes = (rows, *[square] * layers)
    main.add("tuple", Shape("tuple", elements=shapes), results)
    return proto.serialize(module)


def _with_constant(main: _Writer, value: int, rows: Shape, size_bytes: int) -> int:
    """The input with the first rows of a large constant added."""
    count = size_bytes // (4 * rows.dims[1])
    shape = Shape("f32", (count, rows.dims[1]), (1, 0))
    constant = main.add("constant", shape)
    literal = proto.DetailedInstruction(opcode="constant").literal
    literal.shape.MergeFromString(proto.shape_to_proto(shape).SerializeToString())
    literal.f32s.extend([0.5] * (count * rows.dims[1]))
    main.computation.instructions[constant].literal = literal.SerializeToString()
    cut = main.add("slice", rows, (constant,))
    for extent in rows.dims:
        main.computation.instructions[cut].slice_dimensions.add(start=0, limit=extent, stride=1)
    return main.add("add", rows, (value, cut))
