"""What the graph knows of HLO opcodes: what may be fused, what costs how much.

The sets follow XLA's own rules: ``CanBeLoopFused`` (cpu_instruction_fusion.cc) and
``IsLoopFusibleAsProducer`` (gpu_fusible.cc); the flop counts follow ``HloCostAnalysis``.
"""

from __future__ import annotations

from collections.abc import Iterable

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

COLLECTIVES = frozenset({
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
    "ragged-all-to-all", "reduce-scatter",
})  # fmt: skip

TRANSFERS = frozenset({"all-gather", "all-reduce", "reduce-scatter"})
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
