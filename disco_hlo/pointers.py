"""Pointers as values of compiled code.

A numba function that takes an array takes nine machine words and counts references to it, which costs more than what
many inner functions do. So arrays are handed down as pointers, made once at the entry of what Python calls.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

Int = int | np.int64
Ints = NDArray[np.int64]


class Row(Protocol):
    """64-bit integers by their places: an array, or a pointer to one."""

    def __getitem__(self, place: int, /) -> int:
        """What stands there."""

    def __setitem__(self, place: int, value: Int, /) -> None:
        """Write it."""


@intrinsic
def pointer_to(context: Any, address: Any) -> Any:
    """The 64-bit integers at an address."""
    del context, address

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def address_of(context: Any, pointer: Any) -> Any:
    """The address a pointer holds."""
    del context

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], context.get_value_type(signature.return_type))

    return types.int64(pointer), generate
