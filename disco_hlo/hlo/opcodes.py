"""What the graph knows of HLO opcodes: what may be fused, what costs how much.

The sets follow XLA's own rules: ``CanBeLoopFused`` (cpu_instruction_fusion.cc) and
``IsLoopFusibleAsProducer`` (gpu_fusible.cc); the flop counts follow ``HloCostAnalysis``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from disco_hlo.hlo.graph import Kind, Node, Shape

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


def reads_own_element(opcode: str, result: Shape, operands: Iterable[Shape]) -> bool:
    """Whether element i of the result reads element i of each of these operands: same dimensions, same layout."""
    if opcode not in ELEMENTWISE:
        return False
    return all(
        not shape.dims or (shape.dims, shape.layout) == (result.dims, result.layout) for shape in operands
    )


DATA_MOVEMENT = frozenset({
    "broadcast", "concatenate", "dynamic-slice", "gather", "iota", "pad", "reshape", "reverse",
    "slice", "transpose",
})  # fmt: skip

REDUCTIONS = frozenset({"reduce", "reduce-window"})

FUSIBLE = ELEMENTWISE | DATA_MOVEMENT | REDUCTIONS

FREE = frozenset({"bitcast", "get-tuple-element", "tuple", "after-all", "add-dependency", "opt-barrier"})


@dataclass(frozen=True, slots=True)
class Collective:
    """What its opcode says of a collective."""

    travels: bool = False
    """Whether it may overlap with kernels as a plan says, and share a bucket, where it is of one array."""
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
    ring_share: float = 0.5
    """Bytes that each device sends around a ring, of those of an all-reduce."""
    passes_on: bool = False
    """Whether a device sends all that it has, however many take part."""


COLLECTIVE = {
    "all-gather": Collective(travels=True),
    "all-reduce": Collective(travels=True, concatenates=True, in_place=True, reduces=True, ring_share=1.0),
    "all-to-all": Collective(),
    "collective-broadcast": Collective(in_place=True, leaves_out=True, passes_on=True),
    "collective-permute": Collective(names_pairs=True, passes_on=True),
    "ragged-all-to-all": Collective(),
    "reduce-scatter": Collective(travels=True, reduces=True),
}
"""By opcode. A new collective is one line."""
COLLECTIVES = frozenset(COLLECTIVE)
TRANSFERS = frozenset(opcode for opcode, collective in COLLECTIVE.items() if collective.travels)
"""Collectives that may overlap with kernels as a plan says, where they are of one array."""

ASYNCHRONOUS = frozenset({"async-done", "async-start", "async-update", "copy-done", "copy-start"})
"""Parts of pairs that no bucket holds: copies of slices, which run next to the kernels."""


def moves_data(node: Node) -> bool:
    """Whether an op moves, converts or selects data, or is a scalar, such as the index of a slice."""
    is_scalar = node.shape.dtype != "tuple" and not node.shape.dims
    return is_scalar or node.opcode in DATA_MOVEMENT | ASYNCHRONOUS | {"convert", "copy"}


PRODUCTS = frozenset({"convolution", "custom-call", "dot"})
"""Matmuls, convolutions and whatever else libraries compute: their thread blocks are made to fill a device."""

SIDE_EFFECTS = frozenset({
    "domain", "infeed", "outfeed", "recv", "recv-done", "rng", "rng-get-and-update-state", "send",
    "send-done",
})  # fmt: skip

NEVER_MERGED = COLLECTIVES | SIDE_EFFECTS | frozenset({
    "copy", "copy-start", "copy-done", "custom-call", "opt-barrier", "while",
})  # fmt: skip
"""Ops that common-subexpression elimination must leave alone: they communicate, act, exist to give a
value a buffer of its own, or keep apart what is computed again on purpose."""


def kind_of(opcode: str) -> Kind:
    """The :class:`Kind` of an opcode outside fusions (all-reduces are decided by the caller)."""
    if opcode == "parameter":
        return Kind.PARAMETER
    if opcode == "constant":
        return Kind.CONSTANT
    if opcode in FREE:
        return Kind.FREE
    if opcode in FUSIBLE:
        return Kind.FUSIBLE
    return Kind.FIXED
