"""From op groups to kernels, and from kernels to digests: what stands between a search and the network."""

from __future__ import annotations

import numpy as np
from disco_hlo.estimator.encoding import Batch
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner

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


@compiled
def digests(batch: Batch) -> NDArray[np.uint64]:
    """``[kernels, 2]``: 128 bits of each kernel's features; equal structure, equal digest."""
    kernels = batch.estimate_ns.size
    found = np.empty((kernels, 2), np.uint64)
    node, edge, kernel = batch.node.view(np.uint32), batch.edge.view(np.uint32), batch.kernel.view(np.uint32)
    for k in range(kernels):
        start, end = batch.node_start[k], batch.node_start[k + 1]
        first, last = batch.edge_start[start], batch.edge_start[end]
        a, b = np.uint64(end - start), np.uint64(last - first)
        for value in kernel[k]:
            a, b = _mixed(a, b, np.uint64(value))
        for i in range(start, end):
            a, b = _mixed(a, b, np.uint64(batch.op[i]))
            a, b = _mixed(a, b, np.uint64(batch.edge_start[i] - first))
            for value in node[i]:
                a, b = _mixed(a, b, np.uint64(value))
        for i in range(first, last):
            a, b = _mixed(a, b, np.uint64(batch.neighbour[i] - start))
            for value in edge[i]:
                a, b = _mixed(a, b, np.uint64(value))
        found[k, 0] = a ^ (a >> np.uint64(29))
        found[k, 1] = b ^ (b >> np.uint64(31))
    return found


@inner
def _mixed(a: np.uint64, b: np.uint64, value: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Two multiplicative hashes side by side."""
    a = (a ^ value) * np.uint64(0x9E3779B97F4A7C15)
    b = (b + value + np.uint64(1)) * np.uint64(0xD1342543DE82EF95)
    return a ^ (a >> np.uint64(32)), b ^ (b >> np.uint64(29))
