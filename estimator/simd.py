"""Sixteen float32 at a time, written as such: what the compiled network computes with.

Left to itself the compiler keeps the sums of a matmul in memory. Here a value is a vector of
LLVM's, in whatever registers the processor has for it, so that a loop says what stays in them. Nothing is
reordered: the same numbers give the same bits.

All of it is for compiled code. Positions count from the first number of a C-contiguous array of float32,
whatever its shape; nothing checks that they, and the fifteen behind them, are inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from disco_hlo.compiled import inner

LANES: Final = 16

_NUMBERS: Final = ir.VectorType(ir.FloatType(), LANES)
_INDEX: Final = ir.IntType(32)
_ALIGNED_BYTES: Final = 4
"""What an array is aligned to, which is less than the processor likes best."""
_INTEGERS: Final = ir.VectorType(_INDEX, LANES)
_MANTISSA_BITS: Final = 23
_EXPONENT_OF_ONE: Final = 127

_LOG2_E: Final = np.float32(1.44269504)
_LN_2: Final = np.float32(0.693359375)
"""In few bits, so that a small whole number times it is exact;"""
_LN_2_REST: Final = np.float32(-2.12194440e-4)
"""and what is missing."""
_LOWEST: Final = np.float32(-87)
"""Below it e^x is no normal float32."""
_C2: Final = np.float32(0.5)
_C3: Final = np.float32(1.6666665459e-1)
_C4: Final = np.float32(4.1665795894e-2)
_C5: Final = np.float32(8.3334519073e-3)
_C6: Final = np.float32(1.3981999507e-3)
_C7: Final = np.float32(1.9875691500e-4)
"""Of e^x on either side of 0 up to ln(2) / 2 (Moshier, Cephes, ``expf``)."""


operation: Any = intrinsic
"""Decorates a function from numba's types to what :func:`_made` and the like give. Numba's own types want from the
caller what numba hands over itself."""


class _LanesType(types.Type):
    """Numba's type of so many numbers side by side."""

    def __init__(self) -> None:
        super().__init__(name=f"float32 x {LANES}")


@register_model(_LanesType)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: _LanesType) -> None:
        super().__init__(manager, kind, _NUMBERS)  # type: ignore[no-untyped-call]


_LANES: Final = _LanesType()


def _made(signature: Any, build: Callable[..., Any]) -> Any:
    """An operation of this signature whose code, ``build(builder, *arguments)``, depends on its arguments alone."""

    def generate(context: Any, builder: Any, called_with: Any, arguments: Any) -> Any:
        return build(builder, *arguments)

    return signature, generate


def _pointer_to(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Where the first two arguments, an array and a position, point to."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


def _everywhere(builder: Any, number: Any) -> Any:
    """``number`` in every lane."""
    one = builder.insert_element(ir.Constant(_NUMBERS, ir.Undefined), number, _INDEX(0))
    mask = ir.Constant(_INTEGERS, [0] * LANES)
    return builder.shuffle_vector(one, one, mask)


@operation
def load(_: Any, array: Any, position: Any) -> Any:
    """The numbers from ``position`` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer_to(context, builder, signature, arguments)
        return builder.load(builder.bitcast(pointer, _NUMBERS.as_pointer()), align=_ALIGNED_BYTES)

    return _LANES(array, types.intp), generate


@operation
def store(_: Any, array: Any, position: Any, lanes: Any) -> Any:
    """Put ``lanes`` where ``position`` is, and behind it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer_to(context, builder, signature, arguments)
        builder.store(arguments[2], builder.bitcast(pointer, _NUMBERS.as_pointer()), align=_ALIGNED_BYTES)
        return context.get_dummy_value()

    return types.void(array, types.intp, _LANES), generate


@operation
def spread(_: Any, array: Any, position: Any) -> Any:
    """The number at ``position`` in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _everywhere(builder, builder.load(_pointer_to(context, builder, signature, arguments)))

    return _LANES(array, types.intp), generate


@operation
def filled(_: Any, number: Any) -> Any:
    """``number`` in every lane."""
    return _made(_LANES(types.float32), _everywhere)


@operation
def plus(_: Any, a: Any, b: Any) -> Any:
    """A + b."""
    return _made(_LANES(_LANES, _LANES), lambda builder, x, y: builder.fadd(x, y))


@operation
def minus(_: Any, a: Any, b: Any) -> Any:
    """A - b."""
    return _made(_LANES(_LANES, _LANES), lambda builder, x, y: builder.fsub(x, y))


@operation
def times(_: Any, a: Any, b: Any) -> Any:
    """A * b."""
    return _made(_LANES(_LANES, _LANES), lambda builder, x, y: builder.fmul(x, y))


@operation
def times_plus(_: Any, a: Any, b: Any, c: Any) -> Any:
    """A * b + c, rounded once where the processor does that."""

    def build(builder: Any, *numbers: Any) -> Any:
        kind = ir.FunctionType(_NUMBERS, [_NUMBERS] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")
        return builder.call(function, numbers)

    return _made(_LANES(_LANES, _LANES, _LANES), build)


@operation
def larger(_: Any, a: Any, b: Any) -> Any:
    """The larger of both; ``b`` where one is not a number."""
    return _made(
        _LANES(_LANES, _LANES), lambda builder, x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y)
    )


@operation
def total(_: Any, a: Any) -> Any:
    """Sum of the lanes, float32: halves are added until one is left."""

    def build(builder: Any, sums: Any) -> Any:
        left = LANES // 2
        while left:
            low, high = (
                ir.Constant(ir.VectorType(_INDEX, left), list(range(first, first + left)))
                for first in (0, left)
            )
            sums = builder.fadd(
                builder.shuffle_vector(sums, sums, low), builder.shuffle_vector(sums, sums, high)
            )
            left //= 2
        return builder.extract_element(sums, _INDEX(0))

    return _made(types.float32(_LANES), build)


@operation
def last_of(_: Any, a: Any) -> Any:
    """The last lane, float32."""
    return _made(types.float32(_LANES), lambda builder, x: builder.extract_element(x, _INDEX(LANES - 1)))


@inner
def exp(x: Any) -> Any:
    """e^x for x of at most 0, to 2e-7 of it; e^-87 for less than -87."""
    x = larger(x, filled(_LOWEST))
    power = _nearest_below_zero(times(x, filled(_LOG2_E)))
    x = times_plus(power, filled(-_LN_2), x)
    x = times_plus(power, filled(-_LN_2_REST), x)
    series = filled(_C7)
    series = times_plus(series, x, filled(_C6))
    series = times_plus(series, x, filled(_C5))
    series = times_plus(series, x, filled(_C4))
    series = times_plus(series, x, filled(_C3))
    series = times_plus(series, x, filled(_C2))
    series = plus(times_plus(series, times(x, x), x), filled(np.float32(1)))
    return times(series, _power_of_two(power))


@operation
def _nearest_below_zero(_: Any, a: Any) -> Any:
    """The whole numbers nearest to numbers of at most 0."""

    def build(builder: Any, numbers: Any) -> Any:
        half = ir.Constant(_NUMBERS, [0.5] * LANES)
        return builder.sitofp(builder.fptosi(builder.fsub(numbers, half), _INTEGERS), _NUMBERS)

    return _made(_LANES(_LANES), build)


@operation
def _power_of_two(_: Any, a: Any) -> Any:
    """2 to the power of whole numbers."""

    def build(builder: Any, powers: Any) -> Any:
        one, shift = (ir.Constant(_INTEGERS, [n] * LANES) for n in (_EXPONENT_OF_ONE, _MANTISSA_BITS))
        exponents = builder.add(builder.fptosi(powers, _INTEGERS), one)
        return builder.bitcast(builder.shl(exponents, shift), _NUMBERS)

    return _made(_LANES(_LANES), build)
