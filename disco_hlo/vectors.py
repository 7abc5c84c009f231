"""Vectors of LLVM's as values of compiled code: what ``estimator.lanes`` and ``profiler.words`` have in common.

Such a value lies in whatever registers the processor has for it. Here are its type, how it comes out of an array and
goes back, and the wrapping of an operation on it. Positions count from the first number of a C-contiguous array,
whatever its shape; nothing checks that they, and the numbers behind them, are inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

operation: Any = intrinsic
"""Decorates a function from numba's types to what :func:`made` and the like give. Numba's own types want from the
caller what numba hands over itself."""

_INDEX: Final = ir.IntType(32)
_IN_LLVM: Final = {types.float32: ir.FloatType(), types.uint64: ir.IntType(64)}


class VectorType(types.Type):
    """Numba's type of ``count`` numbers of ``kind`` (float32 or uint64) side by side."""

    def __init__(self, kind: Any, count: int) -> None:
        super().__init__(name=f"{kind} x {count}")
        self.in_llvm: Final = ir.VectorType(_IN_LLVM[kind], count)
        self.aligned_bytes: Final = kind.bitwidth // 8
        """What an array is aligned to, which is less than the processor likes best."""


@register_model(VectorType)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: VectorType) -> None:
        super().__init__(manager, kind, kind.in_llvm)  # type: ignore[no-untyped-call]


def from_array(kind: VectorType, array: Any) -> Any:
    """An operation on an array and a position: the vector that begins there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(context, builder, signature, arguments)
        return builder.load(builder.bitcast(pointer, kind.in_llvm.as_pointer()), align=kind.aligned_bytes)

    return kind(array, types.intp), generate


def into_array(kind: VectorType, array: Any) -> Any:
    """An operation on an array, a position and a vector, which is put there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_to(context, builder, signature, arguments)
        place = builder.bitcast(pointer, kind.in_llvm.as_pointer())
        builder.store(arguments[2], place, align=kind.aligned_bytes)
        return context.get_dummy_value()

    return types.void(array, types.intp, kind), generate


def made(signature: Any, build: Callable[..., Any]) -> Any:
    """An operation of this signature whose code, ``build(builder, *arguments)``, depends on its arguments alone."""

    def generate(context: Any, builder: Any, called_with: Any, arguments: Any) -> Any:
        return build(builder, *arguments)

    return signature, generate


def pointer_to(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Where the first two arguments, an array and a position, point to."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


def everywhere(kind: VectorType, builder: Any, number: Any) -> Any:
    """``number`` in every place of a vector."""
    one = builder.insert_element(ir.Constant(kind.in_llvm, ir.Undefined), number, _INDEX(0))
    mask = ir.Constant(ir.VectorType(_INDEX, kind.in_llvm.count), [0] * kind.in_llvm.count)
    return builder.shuffle_vector(one, one, mask)
