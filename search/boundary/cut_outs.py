"""Who reads a gradient and cannot find it inside a shared bucket, so that a kernel must cut it out (``UNCUT_AT``).

``simulator.build`` decides it for strategies. To a state it comes down to the kernels that stand as they came with a
start (Triton's read what they were made for), to the entry root, and to ops that no kernel holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from disco_hlo.hlo.graph import Graph, Kind, flat_graph, grouped
from disco_hlo.plan.units import UnitGraph
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.digest import kernel_digests
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.boundary.state import Signature, signature
from disco_hlo.simulator.build import cuts_gradient

Uncut = tuple[int, int, int]
"""An all-reduce, the head of a unit that does not find it in its bucket, and the digest of that unit."""
_WHATEVER_UNIT = 0
_ROOT = -1


def with_uncut(
    graph: Graph, step: Step, starts: Sequence[UnitGraph], digests: Mapping[Signature, int]
) -> Step:
    """``step`` with ``UNCUT_AT`` and ``UNCUT`` filled in; ``digests`` are those of the groups of ``starts``."""
    found = _uncut_by_others(graph, step, {*digests.values()})
    for units in starts:
        found |= _uncut_by_given(graph, units, digests)
    uncut = np.array(sorted(found), np.int64).reshape(-1, 3)
    kernels = uncut[uncut[:, 2] != _WHATEVER_UNIT]
    pairs = np.concatenate([uncut[:, 1:], kernels[:, ::2]])
    nodes = np.concatenate([uncut[:, 0], kernels[:, 1]])
    begin, pairs = grouped(nodes, pairs, len(graph))
    step.node[at.UNCUT_AT] = step.edge.size + 2 * begin
    step.node[at.FLAGS, nodes] |= at.UNCUT
    return step._replace(edge=np.concatenate([step.edge, pairs.ravel()]))


def _uncut_by_given(graph: Graph, units: UnitGraph, digests: Mapping[Signature, int]) -> set[Uncut]:
    """What the kernels of a start do not find in a bucket."""
    groups = units.strategy.groups
    asked = (units.reader < len(groups)) & (flat_graph(graph).kind[units.source] == Kind.ALL_REDUCE)
    found: set[Uncut] = set()
    for number, gradient in zip(units.reader[asked].tolist(), units.source[asked].tolist(), strict=True):
        group = groups[number]
        if not cuts_gradient(graph, group, gradient):
            found.add((gradient, group.nodes[0], digests[signature(group)]))
    return found


def _uncut_by_others(graph: Graph, step: Step, given_digests: set[int]) -> set[Uncut]:
    """What the entry root, other transfers, and ops by themselves do not find in a bucket."""
    flags, begin = step.node[at.FLAGS], step.node[at.READERS_AT]
    found: set[Uncut] = set()
    for gradient in graph.all_reduces:
        if flags[gradient] & at.RETURNED:
            found.add((gradient, _ROOT, _WHATEVER_UNIT))
        for x in step.edge[begin[gradient] : begin[gradient + 1]].tolist():
            if flags[x] & at.ALL_REDUCE:
                found.add((gradient, x, _WHATEVER_UNIT))
            elif not flags[x] & at.FUSIBLE:
                is_result = flags[x] & at.RETURNED or begin[x + 1] > begin[x]
                digest = int(kernel_digests([((x,), (), (x,) if is_result else ())]).sum())
                if digest not in given_digests and not cuts_gradient(graph, x, gradient):
                    found.add((gradient, x, digest))
    return found
