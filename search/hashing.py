"""SplitMix64 in compiled code: a hash of a word, and random numbers alike on every machine; and a hash table."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Ints, Row, compiled, inner

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


class Table(NamedTuple):
    """Key 0 stands for an empty slot; a key of 0 is kept as 1."""

    key: NDArray[np.int64]
    """``[slots]``, a power of two."""
    value: NDArray[np.int64]
    """``[slots, columns]``"""
    used: NDArray[np.int64]
    """``[1]``: number of keys."""


def new_table(columns: int, slots: int = 1 << 4) -> Table:
    """An empty table. It begins small, so that the first few keys compile what makes it larger."""
    return Table(np.zeros(slots, np.int64), np.zeros((slots, columns), np.int64), np.zeros(1, np.int64))


def with_room(table: Table, wanted: int) -> Table:
    """The table itself, or a larger copy, so that ``wanted`` more keys keep it at most half full."""
    slots = table.key.size
    while 2 * (int(table.used[0]) + wanted) > slots:
        slots *= 2
    if slots == table.key.size:
        return table
    larger = new_table(table.value.shape[1], slots)
    known = table.key != 0
    learn(larger, table.key[known], table.value[known])
    return larger


@compiled
def learn(table: Table, keys: Ints, values: Ints) -> None:
    """Keep ``values[i]`` under ``keys[i]``. The caller sees to the room (``with_room``)."""
    for i in range(keys.size):
        slot = claim(table, keys[i])
        for column in range(values.shape[1]):
            table.value[slot, column] = values[i, column]


@inner
def find(table: Table, key: int) -> Any:
    """The slot that holds ``key``, or -1 - the slot where it belongs."""
    key = key if key != 0 else 1
    mask = table.key.size - 1
    slot = (key ^ (key >> 29)) & mask
    for _ in range(mask):
        if table.key[slot] == key:
            return slot
        if table.key[slot] == 0:
            return -1 - slot
        slot = (slot + 1) & mask
    return slot if table.key[slot] == key else -1 - slot  # of a full table the last slot is taken over


@inner
def claim(table: Table, key: int) -> Any:
    """The slot for ``key``, made if it was not there. The caller sees to the room (``with_room``)."""
    slot = find(table, key)
    if slot < 0:
        slot = -1 - slot
        table.key[slot] = key if key != 0 else 1
        table.used[0] += 1
    return slot
