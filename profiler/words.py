"""Words of 64 bits for hashing, one or eight side by side: the same code for both.

Eight are a vector of LLVM's, in whatever registers the processor has. For compiled code only; positions count from
the first word of a C-contiguous array, and nothing checks that they, and the seven behind them, are inside.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from disco_hlo.vectors import VectorType, everywhere, from_array, into_array, made, operation

SIDE_BY_SIDE: Final = 8

_WORDS: Final = VectorType(types.uint64, SIDE_BY_SIDE)
_ONE: Final = ir.IntType(64)


@operation
def load(_: Any, array: Any, position: Any) -> Any:
    """The words from ``position`` on."""
    return from_array(_WORDS, array)


@operation
def store(_: Any, array: Any, position: Any, words: Any) -> Any:
    """Put ``words`` where ``position`` is, and behind it."""
    return into_array(_WORDS, array)


@operation
def spread(_: Any, word: Any) -> Any:
    """``word`` eight times."""
    return made(_WORDS(types.uint64), lambda builder, x: everywhere(_WORDS, builder, x))


@operation
def plus(_: Any, a: Any, b: Any) -> Any:
    """A + b, modulo 2^64."""
    return made(a(a, a), lambda builder, x, y: builder.add(x, y))


@operation
def either(_: Any, a: Any, b: Any) -> Any:
    """A ^ b."""
    return made(a(a, a), lambda builder, x, y: builder.xor(x, y))


@operation
def turned(_: Any, word: Any, bits: Any) -> Any:
    """``word`` turned to the right by so many bits."""

    def build(builder: Any, x: Any, by: Any) -> Any:
        name = "i64" if x.type == _ONE else f"v{SIDE_BY_SIDE}i64"
        by = by if x.type == _ONE else everywhere(_WORDS, builder, by)
        kind = ir.FunctionType(x.type, [x.type] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fshr.{name}")
        return builder.call(function, (x, x, by))

    return made(word(word, types.uint64), build)
