"""Hashes of units: each is a sum of what its nodes add, so that it follows a change in one addition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.hlo.flat_graph import flat_lists
from disco_hlo.search.arrays.rng import mix

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


@compiled
def lone_digest(x: Any, is_result: Any) -> Any:
    """``DIGEST`` of a unit that is one node, and returns it or has no result."""
    return NOTHING + owned_share(x) + (result_share(x) if is_result else 0)


def kernel_digests(
    kernels: Collection[tuple[Sequence[int], Sequence[int], Sequence[int]]],
) -> NDArray[np.int64]:
    """``[kernels, 2]``: the hashes of what units compute that own and duplicate the nodes of the first two lists, and
    of what they return: the third list."""
    lists = (flat_lists([kernel[part] for kernel in kernels]) for part in range(3))
    found: NDArray[np.int64] = _digests_of(*(array for one in lists for array in one))
    return found


@compiled
def _digests_of(owned_at: Any, owned: Any, copy_at: Any, copies: Any, result_at: Any, results: Any) -> Any:
    found = np.zeros((owned_at.size - 1, 2), np.int64)
    for i in range(owned_at.size - 1):
        found[i, 0] = NOTHING
        for x in owned[owned_at[i] : owned_at[i + 1]]:
            found[i, 0] += owned_share(x)
        for x in copies[copy_at[i] : copy_at[i + 1]]:
            found[i, 0] += copy_share(x)
        for x in results[result_at[i] : result_at[i + 1]]:
            found[i, 1] += result_share(x)
    return found


@inner
def special_slot(g: Any, computed: Any) -> Any:
    """Where ``Step.special`` has a kernel that computes this, -1 where it has none."""
    slot = computed & g.special_mask
    while g.special[3 * slot] != computed:  # ends: half of the table is empty
        if g.special[3 * slot] == 0:
            return -1
        slot = (slot + 1) & g.special_mask
    return slot
