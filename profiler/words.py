"""Words of 64 bits for hashing, one or eight side by side: the same code for both.

Eight are a vector of LLVM's, in whatever registers the processor has. For compiled code only; positions count from
the first word of a C-contiguous array, and nothing checks that they, and the seven behind them, are inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

SIDE_BY_SIDE: Final = 8

_ONE: Final = ir.IntType(64)
_EIGHT: Final = ir.VectorType(_ONE, SIDE_BY_SIDE)
_INDEX: Final = ir.IntType(32)
_ALIGNED_BYTES: Final = 8
_operation: Any = intrinsic
"""Its own types want from the caller what numba hands over itself."""


class WordsType(types.Type):
    """Numba's type of eight words."""

    def __init__(self) -> None:
        super().__init__(name="Words")


_WORDS: Final = WordsType()


@register_model(WordsType)
class _WordsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _EIGHT)  # type: ignore[no-untyped-call]


@_operation
def load(_: Any, array: Any, position: Any) -> Any:
    """The words from ``position`` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature, arguments)
        return builder.load(builder.bitcast(pointer, _EIGHT.as_pointer()), align=_ALIGNED_BYTES)

    return _WORDS(array, types.intp), generate


@_operation
def store(_: Any, array: Any, position: Any, words: Any) -> Any:
    """Put ``words`` where ``position`` is, and behind it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, signature, arguments)
        builder.store(arguments[2], builder.bitcast(pointer, _EIGHT.as_pointer()), align=_ALIGNED_BYTES)
        return context.get_dummy_value()

    return types.void(array, types.intp, _WORDS), generate


@_operation
def spread(_: Any, word: Any) -> Any:
    """``word`` eight times."""
    return _made(_WORDS(types.uint64), _everywhere)


@_operation
def plus(_: Any, a: Any, b: Any) -> Any:
    """A + b, modulo 2^64."""
    return _made(a(a, a), lambda builder, x, y: builder.add(x, y))


@_operation
def either(_: Any, a: Any, b: Any) -> Any:
    """A ^ b."""
    return _made(a(a, a), lambda builder, x, y: builder.xor(x, y))


@_operation
def turned(_: Any, word: Any, bits: Any) -> Any:
    """``word`` turned to the right by so many bits."""

    def build(builder: Any, x: Any, by: Any) -> Any:
        name = "i64" if x.type == _ONE else f"v{SIDE_BY_SIDE}i64"
        by = by if x.type == _ONE else _everywhere(builder, by)
        kind = ir.FunctionType(x.type, [x.type] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fshr.{name}")
        return builder.call(function, (x, x, by))

    return _made(word(word, types.uint64), build)


def _made(signature: Any, build: Callable[..., Any]) -> Any:
    """What numba wants of an intrinsic whose code depends on its arguments alone."""

    def generate(context: Any, builder: Any, called_with: Any, arguments: Any) -> Any:
        return build(builder, *arguments)

    return signature, generate


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Where the first two arguments, an array and a position, point to."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


def _everywhere(builder: Any, word: Any) -> Any:
    one = builder.insert_element(ir.Constant(_EIGHT, ir.Undefined), word, _INDEX(0))
    mask = ir.Constant(ir.VectorType(_INDEX, SIDE_BY_SIDE), [0] * SIDE_BY_SIDE)
    return builder.shuffle_vector(one, one, mask)
