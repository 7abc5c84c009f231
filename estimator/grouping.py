"""From op groups to kernels: who is in them, and what leaves them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled

Ids = NDArray[np.int32]
Starts = NDArray[np.int64]


@compiled
def members_and_results(
    owned: Ids,
    owned_start: Starts,
    copied: Ids,
    copied_start: Starts,
    users: Ids,
    user_start: Starts,
    root: int,
) -> tuple[Ids, Starts, Ids, Starts]:
    """(members, where each group's begin, results, where each group's begin) of op groups, each ascending.

    The results of a group are the nodes it owns that the entry returns or any op outside the group reads.
    """
    groups = owned_start.size - 1
    inside = np.full(user_start.size, -1, np.int32)
    members = np.empty(owned.size + copied.size, np.int32)
    results = np.empty(owned.size, np.int32)
    member_start = np.zeros(groups + 1, np.int64)
    result_start = np.zeros(groups + 1, np.int64)
    filled = returned = 0
    for group in range(groups):
        for node in owned[owned_start[group] : owned_start[group + 1]]:
            members[filled] = node
            filled += 1
        for node in copied[copied_start[group] : copied_start[group + 1]]:
            members[filled] = node
            filled += 1
        member_start[group + 1] = filled
        own = members[member_start[group] : filled]
        own.sort()
        for node in own:
            inside[node] = group
        for node in owned[owned_start[group] : owned_start[group + 1]]:
            leaves = node == root
            for user in users[user_start[node] : user_start[node + 1]]:
                leaves = leaves or inside[user] != group
            if leaves:
                results[returned] = node
                returned += 1
        result_start[group + 1] = returned
    return members, member_start, results[:returned], result_start
