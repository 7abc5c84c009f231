"""Hashes of units: each is a sum of what its nodes add, so that it follows a change in one addition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from disco_hlo.search.rng import mix

from disco_hlo.compiled import compiled, inner

_OWNED: Final = 1
_COPY: Final = 2
_RESULT: Final = 3
NOTHING: Final = 1
"""The hash of what a unit without any node computes."""


@compiled
def _share(x: Any, role: Any) -> Any:
    return np.int64(mix(np.uint64(8 * x + role)))


@inner
def owned_share(x: Any) -> Any:
    """What owning ``x`` adds to the hash of what a unit computes (row ``COMPUTED``)."""
    return _share(x, _OWNED)


@inner
def copy_share(x: Any) -> Any:
    """What recomputing ``x`` adds to it."""
    return _share(x, _COPY)


@inner
def result_share(x: Any) -> Any:
    """What returning ``x`` adds to the hash of what a unit returns (row ``RETURNED_SUM``)."""
    return _share(x, _RESULT)


def signature_digest(owned: Iterable[int], copies: Iterable[int]) -> int:
    """The hash of what a unit that owns and duplicates these nodes computes."""
    return int(_digest_of(np.array([*owned], np.int64), np.array([*copies], np.int64)))


@compiled
def _digest_of(owned: Any, copies: Any) -> Any:
    total = np.int64(NOTHING)
    for x in owned:
        total += owned_share(x)
    for x in copies:
        total += copy_share(x)
    return total


@inner
def special_slot(g: Any, computed: Any) -> Any:
    """Where ``Step.special`` has a kernel that computes this, -1 where it has none."""
    slot = computed & g.special_mask
    while g.special[3 * slot] != computed:
        if g.special[3 * slot] == 0:
            return -1
        slot = (slot + 1) & g.special_mask
    return slot
