"""What the project knows of HLO opcodes: what may be fused, what travels, and how many operations an instruction takes.

The sets follow XLA's own rules: ``CanBeLoopFused`` (cpu_instruction_fusion.cc) and ``IsLoopFusibleAsProducer``
(gpu_fusible.cc); operations are counted as ``HloCostAnalysis`` counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.attributes import backend_config
from disco_hlo.hlo.graph import Kind, Node, Shape
from disco_hlo.hlo.proto import Message, shape_of

if TYPE_CHECKING:
    from disco_hlo.hlo.flatten import ModuleIndex

TRANSCENDENTAL = frozenset({
    "atan2", "cbrt", "ceil-exp", "cosine", "erf", "exponential", "exponential-minus-one", "log",
    "log-plus-one", "logistic", "power", "rsqrt", "sine", "sqrt", "tan", "tanh", "acos", "acosh",
    "asin", "asinh", "atanh", "cosh", "sinh",
})  # fmt: skip
ELEMENTWISE = TRANSCENDENTAL | frozenset({
    "abs", "add", "and", "bitcast-convert", "ceil", "clamp", "compare", "complex", "convert", "copy",
    "count-leading-zeros", "divide", "floor", "imag", "is-finite", "maximum", "minimum", "multiply",
    "negate", "not", "or", "popcnt", "real", "reduce-precision", "remainder", "round-nearest-afz",
    "round-nearest-even", "select", "shift-left", "shift-right-arithmetic", "shift-right-logical",
    "sign", "subtract", "xor", "stochastic-convert",
})  # fmt: skip
"""Ops whose output element depends on the same element of each operand (scalars broadcast)."""
DATA_MOVEMENT = frozenset({
    "broadcast", "concatenate", "dynamic-slice", "gather", "iota", "pad", "reshape", "reverse",
    "slice", "transpose",
})  # fmt: skip
REDUCTIONS = frozenset({"reduce", "reduce-window"})
FUSIBLE = ELEMENTWISE | DATA_MOVEMENT | REDUCTIONS
FREE = frozenset({"bitcast", "get-tuple-element", "tuple", "after-all", "add-dependency", "opt-barrier"})
ASYNCHRONOUS = frozenset({"async-done", "async-start", "async-update", "copy-done", "copy-start"})
"""Parts of pairs that no bucket holds: copies of slices, which run next to the kernels."""
PRODUCTS = frozenset({"convolution", "custom-call", "dot"})
"""Matmuls, convolutions and whatever else libraries compute: their thread blocks are made to fill a device."""
SIDE_EFFECTS = frozenset({
    "domain", "infeed", "outfeed", "recv", "recv-done", "rng", "rng-get-and-update-state", "send",
    "send-done",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Collective:
    """What its opcode says of a collective."""

    travels: bool = False
    """Whether it may overlap with kernels as a plan says, where it is of one array."""
    shares: bool = False
    """Whether one instruction with several arrays does to each what one of its own would."""
    concatenates: bool = False
    """Whether a bucket may be one vector: each element is computed by itself, wherever it is."""
    in_place: bool = False
    """Whether its result may lie where its operand does."""
    reduces: bool = False
    """Whether it calls a computation."""
    names_pairs: bool = False
    """Whether it names sources and targets, not groups."""
    leaves_out: bool = False
    """Whether devices may be in no group."""
    alike: bool = False
    """Whether all devices of a group are left with the same."""
    parted: bool = False
    """Whether each device of a group is left with a part of its own of what the group had."""
    of_partitions: bool = False
    """Whether its groups name partitions wherever it has a channel, without a flag that says so."""
    along: bool = False
    """Whether it names the dimension along which it joins or cuts."""
    ring_share: float = 0.5
    """Bytes that each device sends around a ring, of those of an all-reduce."""
    passes_on: bool = False
    """Whether a device sends all that it has, however many take part."""


COLLECTIVE = {
    "all-gather": Collective(travels=True, shares=True, alike=True, along=True),
    "all-reduce": Collective(
        travels=True, shares=True, concatenates=True, in_place=True, reduces=True, alike=True, ring_share=1.0
    ),
    "all-to-all": Collective(travels=True, parted=True, of_partitions=True),
    "collective-broadcast": Collective(
        travels=True, in_place=True, leaves_out=True, alike=True, of_partitions=True, passes_on=True
    ),
    "collective-permute": Collective(
        travels=True, shares=True, names_pairs=True, of_partitions=True, passes_on=True
    ),
    "ragged-all-to-all": Collective(of_partitions=True),
    "reduce-scatter": Collective(travels=True, shares=True, reduces=True, parted=True, along=True),
}
"""By opcode. A new collective is one line."""
COLLECTIVES = frozenset(COLLECTIVE)
MOVED_COLLECTIVES = frozenset(opcode for opcode, collective in COLLECTIVE.items() if collective.travels)
"""Collectives that may overlap with kernels as a plan says, where they are of one array."""
ALIKE = frozenset(opcode for opcode, one in COLLECTIVE.items() if one.alike and not one.leaves_out)
"""Collectives that leave the same on all devices of each group, and leave no device out."""
MOSAIC_GPU = "mosaic_gpu_v2"
"""Target of a kernel that JAX lowers for GPUs."""
NEVER_MERGED = COLLECTIVES | SIDE_EFFECTS | frozenset({
    "copy", "copy-start", "copy-done", "custom-call", "opt-barrier", "while",
})  # fmt: skip
"""Ops that common-subexpression elimination must leave alone: they communicate, act, exist to give a
value a buffer of its own, or keep apart what is computed again on purpose."""


def kind_of(opcode: str) -> Kind:
    """The :class:`Kind` of an opcode outside fusions (of collectives that a plan moves the caller decides)."""
    if opcode == "parameter":
        return Kind.PARAMETER
    if opcode == "constant":
        return Kind.CONSTANT
    if opcode in FREE:
        return Kind.FREE
    if opcode in FUSIBLE:
        return Kind.FUSIBLE
    return Kind.FIXED


def reads_own_element(opcode: str, result: Shape, operands: Iterable[Shape]) -> bool:
    """Whether element i of the result reads element i of each of these operands: same dimensions, same layout."""
    if opcode not in ELEMENTWISE:
        return False
    return all(
        not shape.dims or (shape.dims, shape.layout) == (result.dims, result.layout) for shape in operands
    )


def moves_data(node: Node) -> bool:
    """Whether an op moves, converts or selects data, or is a scalar, such as the index of a slice."""
    is_scalar = node.shape.dtype != "tuple" and not node.shape.dims
    return is_scalar or node.opcode in DATA_MOVEMENT | ASYNCHRONOUS | {"convert", "copy"}


# Operation counts -------------------------------------------------------------------------------


_NOT_ARITHMETIC = frozenset(
    {"copy", "convert", "bitcast-convert", "real", "imag", "reduce-precision", "complex"}
)
_MOST_OPERATIONS = 1 << 60
"""No instruction executes more: it would take the fastest device minutes, and arrays hold its count."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Floating-point operations and transcendental evaluations of one execution."""

    flops: int = 0
    transcendentals: int = 0


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
    if proto.custom_call_target == MOSAIC_GPU:
        return _kernel_matmul_flops(shape, operands)
    settings = backend_config(proto).get("gemm_backend_config")
    if not isinstance(settings, dict) or not operands:
        return 0
    numbers = settings.get("dot_dimension_numbers", {})
    contracting = [int(d) for d in numbers.get("lhs_contracting_dimensions", [])]
    if any(d >= len(operands[0].dims) for d in contracting):
        return 0
    return 2 * shape.first_array.element_count * prod(operands[0].dims[d] for d in contracting)


def _kernel_matmul_flops(shape: Shape, operands: Sequence[Shape]) -> int:
    """Of a kernel of a matrix and a matrix or vector that fit: their product, with the rows that the kernel gathers."""
    if len(operands) < 2 or len(operands[0].dims) != 2 or len(operands[1].dims) not in (1, 2):
        return 0
    (rows, depth), (also, *columns) = operands[0].dims, operands[1].dims
    if depth != also:
        return 0
    results = [one.dims[0] for one in shape.elements if one.dims and [*one.dims[1:]] == columns]
    return 2 * max([rows, *results]) * depth * prod(columns)


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
