"""Numbers that look random and can be had for any places of an array, without those before.

They are read from one table, shifted and with bits flipped for each array: a permutation of four million numbers, and
beside each number some tossed coins.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BITS = 22
_BLOCK = 1 << _BITS
_WITHIN = _BLOCK - 1
COINS = 32 - _BITS
"""So many coins are tossed for each place."""


class Scrambled:
    """What stands at some places of an array.

    Args:
        places: ascending.
        key: of the array.
    """

    def __init__(self, places: NDArray[np.int64], key: Sequence[int]) -> None:
        self._drawn = np.empty(places.shape, np.uint32)
        if not places.size:
            return
        first, last = int(places[0]) >> _BITS, int(places[-1]) >> _BITS
        edges = np.searchsorted(places, np.arange(first, last + 2) << _BITS)
        for block, start, stop in zip(range(first, last + 1), edges[:-1], edges[1:], strict=True):
            shift, flipped = np.random.default_rng([*key, block]).integers(0, 1 << 32, 2, dtype=np.uint32)
            drawn = _drawn(places[start:stop], int(shift) & _WITHIN)
            np.bitwise_xor(drawn, flipped, out=self._drawn[start:stop])

    def numbers(self) -> NDArray[np.float32]:
        """From 0 to below 1, all different within each block of four million places; exact, so that what is computed of
        them with one rounding is different, too."""
        numbers = (self._drawn & np.uint32(_WITHIN)).astype(np.float32)
        numbers += np.float32(0.5)
        numbers *= np.float32(1 / _BLOCK)
        return numbers

    def coin(self, number: int) -> NDArray[np.bool_]:
        """Heads or tails for each place; one of :data:`COINS`."""
        tossed: NDArray[np.bool_] = (self._drawn & np.uint32(1 << (_BITS + number % COINS))) != 0
        return tossed


def _drawn(places: NDArray[np.int64], shift: int) -> NDArray[np.uint32]:
    """What the table has for some places of one block."""
    first, count = (int(places[0]) + shift) & _WITHIN, places.size
    if int(places[-1]) - int(places[0]) == count - 1:  # neighbours, which most are
        table = _table()
        start = table[first : first + count]
        return start if start.size == count else np.concatenate([start, table[: count - start.size]])
    here = places + shift
    here &= _WITHIN
    return _table()[here]


@functools.cache
def _table() -> NDArray[np.uint32]:
    random = np.random.default_rng(0)
    coins = random.integers(0, 1 << COINS, _BLOCK, dtype=np.uint32) << np.uint32(_BITS)
    table: NDArray[np.uint32] = random.permutation(np.arange(_BLOCK, dtype=np.uint32)) | coins
    return table
