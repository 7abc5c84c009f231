"""Hashes of units: each is a sum of what its nodes add, so that it follows a change in one addition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import inner
from disco_hlo.hlo.graph import flat_lists
from disco_hlo.search.arrays.rng import mix, mixed
from disco_hlo.search.arrays.views import GraphView

_OWNED: Final = 1
_COPY: Final = 2
_RESULT: Final = 3
NOTHING: Final = 1
"""The hash of what a unit without any node computes."""


@inner
def _share(x: int, role: int) -> Any:
    return np.int64(mix(np.uint64(8 * x + role)))


@inner
def owned_share(x: int) -> Any:
    """What owning ``x`` adds to the hash of what a unit computes (row ``COMPUTED``)."""
    return _share(x, _OWNED)


@inner
def copy_share(x: int) -> Any:
    """What recomputing ``x`` adds to it."""
    return _share(x, _COPY)


@inner
def result_share(x: int) -> Any:
    """What returning ``x`` adds to the hash of what a unit returns (row ``RETURNED_SUM``)."""
    return _share(x, _RESULT)


def kernel_digests(
    kernels: Collection[tuple[Sequence[int], Sequence[int], Sequence[int]]],
) -> NDArray[np.int64]:
    """``[kernels, 2]``: the hashes of what units compute that own and duplicate the nodes of the first two lists, and
    of what they return: the third list."""
    owned, copied, returned = (
        _sums([kernel[part] for kernel in kernels], role)
        for part, role in enumerate((_OWNED, _COPY, _RESULT))
    )
    return np.stack([NOTHING + owned + copied, returned], axis=1)


def _sums(lists: Sequence[Sequence[int]], role: int) -> NDArray[np.int64]:
    """What the nodes of each list add to a hash together."""
    begin, nodes = flat_lists(lists)
    until = np.concatenate([np.zeros(1, np.int64), np.cumsum(mixed(8 * nodes + role))])
    found: NDArray[np.int64] = until[begin[1:]] - until[begin[:-1]]
    return found


@inner
def special_slot(g: GraphView, computed: int) -> Any:
    """Where ``Step.special`` has a kernel that computes this, -1 where it has none."""
    slot = computed & g.special_mask
    while g.special[3 * slot] != computed:  # ends: half of the table is empty
        if g.special[3 * slot] == 0:
            return -1
        slot = (slot + 1) & g.special_mask
    return slot
