"""A hash table for compiled code: 64-bit keys to rows of 64-bit values, open addressing."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Ints, compiled, inner


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
