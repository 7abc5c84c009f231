"""Numbers that look random and can be had for any places of an array, without those before.

They are read from one table, shifted and with bits flipped for each array: a permutation of four million numbers, and
beside each number some tossed coins. Host and devices read it alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

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
        drawn: entries of the table for them, shifted and flipped; of numpy, or in a program of JAX.
    """

    def __init__(self, drawn: Any) -> None:
        self._drawn = drawn

    @classmethod
    def at(cls, places: NDArray[np.int64], key: Sequence[int]) -> Scrambled:
        """On the host, at some places, ascending, of the array with this key."""
        found = np.empty(places.shape, np.uint32)
        if not places.size:
            return cls(found)
        first, last = int(places[0]) >> _BITS, int(places[-1]) >> _BITS
        edges = np.searchsorted(places, np.arange(first, last + 2) << _BITS)
        for block, start, stop in zip(range(first, last + 1), edges[:-1], edges[1:], strict=True):
            shift, flipped = _turn(key, block)
            drawn = _drawn(places[start:stop], int(shift))
            np.bitwise_xor(drawn, flipped, out=found[start:stop])
        return cls(found)

    @classmethod
    def of_all(cls, table: Any, turns: Any, count: int) -> Scrambled:
        """In a program of JAX, at all places of an array with so many elements.

        Args:
            table: what :func:`table` gives.
            turns: of the array's key, what :func:`turns` gives.
        """
        import jax

        places = jax.lax.iota(np.uint32, count)
        block = places >> np.uint32(_BITS)
        shift, flipped = (turns[:, one].at[block].get(mode="promise_in_bounds") for one in range(2))
        here = (places + shift) & np.uint32(_WITHIN)
        return cls(table.at[here].get(mode="promise_in_bounds") ^ flipped)

    def numbers(self) -> Any:
        """f32 from 0 to below 1, all different within each block of four million places; exact, so that what is
        computed of them with one rounding is different, too."""
        numbers = (self._drawn & np.uint32(_WITHIN)).astype(np.float32)
        return (numbers + np.float32(0.5)) * np.float32(1 / _BLOCK)

    def coin(self, number: Any) -> Any:
        """Heads or tails for each place; one of :data:`COINS`, by a u32."""
        return (self._drawn >> (np.uint32(_BITS) + number % np.uint32(COINS))) & np.uint32(1) != 0


def turns(key: Sequence[int], count: int) -> NDArray[np.uint32]:
    """By how much each block of an array with so many elements is shifted in the table, and which bits are flipped:
    ``[block, 2]``."""
    blocks = range((count + _WITHIN) >> _BITS)
    return np.array([_turn(key, block) for block in blocks], np.uint32).reshape(-1, 2)


def _turn(key: Sequence[int], block: int) -> NDArray[np.uint32]:
    turn = np.random.default_rng([*key, block]).integers(0, 1 << 32, 2, dtype=np.uint32)
    turn[0] &= _WITHIN
    return turn


def _drawn(places: NDArray[np.int64], shift: int) -> NDArray[np.uint32]:
    """What the table has for some places of one block."""
    first, count = (int(places[0]) + shift) & _WITHIN, places.size
    if int(places[-1]) - int(places[0]) == count - 1:  # neighbours, which most are
        values = table()
        start = values[first : first + count]
        return start if start.size == count else np.concatenate([start, values[: count - start.size]])
    here = places + shift
    here &= _WITHIN
    return table()[here]


@functools.cache
def table() -> NDArray[np.uint32]:
    """The table, 16 MiB."""
    random = np.random.default_rng(0)
    coins = random.integers(0, 1 << COINS, _BLOCK, dtype=np.uint32) << np.uint32(_BITS)
    made: NDArray[np.uint32] = random.permutation(np.arange(_BLOCK, dtype=np.uint32)) | coins
    return made
