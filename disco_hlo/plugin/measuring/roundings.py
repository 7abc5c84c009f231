"""How much a step's own roundings may change its numbers, by its module."""

from __future__ import annotations

import math

from disco_hlo.backends import Backend
from disco_hlo.hlo.proto import DTYPES, Message, parse
from disco_hlo.plugin.xla.executables import JAX_NAMES

_COARSEST = 2.0**-8
"""Of bf16. What is kept in 8 bits is computed from something finer."""
_TENSOR_FLOAT = 2.0**-11
"""Half a last digit of TF32, in which a GPU may multiply f32."""
_SUMMED = 2.0**-23
"""Sums of anything coarser are in f32."""
_OF_TERMS = 0.5
"""A sum in another order differs by so much of the root of the number of its terms: less where they cancel on the way,
more where they do not."""
_PRODUCTS = frozenset({"convolution", "custom-call", "dot"})


def rounding_of(module: bytes, backend: Backend) -> float:
    """By what part of it a number changes where a step rounds it in the coarsest type that it computes in, or where its
    longest sum is added up in another order.

    Args:
        module: what runs, as a serialized HloModuleProto.
        backend: where.
    """
    import jax.numpy as jnp

    message = parse(module)
    kinds = {
        DTYPES.get(instruction.shape.element_type, "")
        for computation in message.computations
        for instruction in computation.instructions
    }
    parts = [float(jnp.finfo(JAX_NAMES[kind]).eps) for kind in kinds & JAX_NAMES.keys() if _is_float(kind)]
    if backend.tensor_float and "f32" in kinds:
        parts.append(_TENSOR_FLOAT)
    coarsest = min(max(parts, default=0.0), _COARSEST)
    return max(coarsest, min(coarsest, _SUMMED) * _OF_TERMS * math.sqrt(longest_sum(message)))


def longest_sum(message: Message) -> float:
    """About how many terms the longest sum of a module has; 1 where it has none. Loops count once."""
    found = 1.0
    for computation in message.computations:
        shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
        for instruction in computation.instructions:
            operands = [_elements(shapes[operand]) for operand in instruction.operand_ids]
            if instruction.opcode == "reduce":
                found = max(found, operands[0] / max(1, _elements(instruction.shape)))
            elif instruction.opcode in _PRODUCTS and len(operands) >= 2:
                # Of [m, k] and [k, n] that is k; of convolutions it is so about.
                found = max(found, (operands[0] * operands[1] / max(1, _elements(instruction.shape))) ** 0.5)
    return found


def _elements(shape: Message) -> int:
    """Of an array, or of a tuple's first."""
    while shape.tuple_shapes:
        shape = shape.tuple_shapes[0]
    return math.prod(shape.dimensions)


def _is_float(kind: str) -> bool:
    return kind.startswith(("f", "bf"))
