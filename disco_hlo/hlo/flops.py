"""Operation counts of single instructions, by the rules of XLA's HloCostAnalysis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.attributes import backend_config
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.graph import Shape
from disco_hlo.hlo.opcodes import ELEMENTWISE, TRANSCENDENTAL
from disco_hlo.hlo.proto import Message, shape_of

_NOT_ARITHMETIC = frozenset(
    {"copy", "convert", "bitcast-convert", "real", "imag", "reduce-precision", "complex"}
)


@dataclass(frozen=True, slots=True)
class Counts:
    """Floating-point operations and transcendental evaluations of one execution."""

    flops: int = 0
    transcendentals: int = 0


_MOST_OPERATIONS = 1 << 60
"""No instruction executes more: it would take the fastest device minutes, and arrays hold its count."""


def operation_counts(proto: Message, shape: Shape, operands: Sequence[Shape], index: ModuleIndex) -> Counts:
    """Operation counts of one instruction; library calls and custom fusions by the matmuls they hold.

    Raises:
        ModuleError: it would execute more than any device does.
    """
    found = _counts(proto, shape, operands, index)
    if found.flops > _MOST_OPERATIONS:
        raise ModuleError(
            f"instruction {proto.name[:200]!r} ({proto.opcode}) takes {found.flops:.3g} operations, "
            f"expected at most {_MOST_OPERATIONS}"
        )
    return found


def _counts(proto: Message, shape: Shape, operands: Sequence[Shape], index: ModuleIndex) -> Counts:
    opcode = proto.opcode
    if opcode in TRANSCENDENTAL:
        return Counts(transcendentals=shape.element_count)
    if opcode in ELEMENTWISE:
        return Counts() if opcode in _NOT_ARITHMETIC else Counts(flops=shape.element_count)
    if opcode == "dot":
        contracted = prod(operands[0].dims[d] for d in proto.dot_dimension_numbers.lhs_contracting_dimensions)
        return Counts(flops=2 * shape.element_count * contracted)
    if opcode == "convolution":
        return Counts(flops=_convolution_flops(proto, shape, operands))
    if opcode == "reduce":
        return Counts(flops=max(0, operands[0].element_count - shape.first_array.element_count))
    if opcode in ("reduce-window", "select-and-scatter"):
        window = prod(dimension.size for dimension in proto.window.dimensions)
        return Counts(flops=shape.first_array.element_count * max(0, window - 1))
    if opcode == "custom-call":
        return Counts(flops=_library_matmul_flops(proto, shape, operands))
    if opcode == "fusion":
        return _body_counts(proto, index)
    return Counts()


def _convolution_flops(proto: Message, shape: Shape, operands: Sequence[Shape]) -> int:
    """For each output element one multiply-add per position in the window and input channel."""
    window = prod(int(dimension.size) for dimension in proto.window.dimensions)
    channels = operands[1].dims[int(proto.convolution_dimension_numbers.kernel_input_feature_dimension)]
    return 2 * shape.first_array.element_count * window * channels


def _library_matmul_flops(proto: Message, shape: Shape, operands: Sequence[Shape]) -> int:
    settings = backend_config(proto).get("gemm_backend_config")
    if not isinstance(settings, dict) or not operands:
        return 0
    numbers = settings.get("dot_dimension_numbers", {})
    contracting = [int(d) for d in numbers.get("lhs_contracting_dimensions", [])]
    if any(d >= len(operands[0].dims) for d in contracting):
        return 0
    return 2 * shape.first_array.element_count * prod(operands[0].dims[d] for d in contracting)


def _body_counts(proto: Message, index: ModuleIndex) -> Counts:
    body = index.computation(proto.called_computation_ids[0])
    shapes = {instruction.id: shape_of(instruction.shape) for instruction in body.instructions}
    flops = transcendentals = 0
    for instruction in body.instructions:
        operands = [shapes[operand] for operand in instruction.operand_ids]
        counts = operation_counts(instruction, shapes[instruction.id], operands, index)
        flops += counts.flops
        transcendentals += counts.transcendentals
    return Counts(flops, transcendentals)
