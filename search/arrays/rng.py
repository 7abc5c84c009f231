"""Random numbers that are the same on every machine: SplitMix64, its state an array of one word."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Row, inner

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)


Generator = NDArray[np.uint64]
"""``[1]``, advanced by every draw."""


def seeded(seed: int) -> Generator:
    """A generator that begins with a seed."""
    return np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64)


@inner
def mix(word: np.uint64) -> Any:
    """A well-spread 64-bit hash of a 64-bit word."""
    word = (word ^ (word >> _30)) * _MIX_1
    word = (word ^ (word >> _27)) * _MIX_2
    return word ^ (word >> _31)


@inner
def draw(generator: Row, bound: int) -> Any:
    """An integer from 0 to ``bound`` - 1, uniform; ``bound`` from 1 to 2**31.

    ``generator`` is the array, or a pointer to its word (``disco_hlo.compiled``), which costs no counting
    of references.
    """
    word = np.uint64(generator[0]) + _GAMMA
    generator[0] = np.int64(word)
    return np.int64(((mix(word) >> _32) * np.uint64(bound)) >> _32)


def mixed(words: NDArray[np.int64] | NDArray[np.uint64]) -> NDArray[np.int64]:
    """:func:`mix` of many words, as signed ones."""
    on_arrays: Any = mix
    mixed_words: NDArray[np.int64] = on_arrays.py_func(words.astype(np.uint64)).view(np.int64)
    return mixed_words
