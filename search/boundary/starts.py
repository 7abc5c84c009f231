"""What a search begins with: the graph as arrays, and the strategies it starts from as states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.search.arrays.board import MAXIMUM_MEMBERS, State, new_scratch
from disco_hlo.search.arrays.digest import kernel_digests
from disco_hlo.search.arrays.step import Step, build_step
from disco_hlo.search.boundary.cut_outs import with_uncut
from disco_hlo.search.boundary.state import Given, from_strategy, given, with_owners
from disco_hlo.search.rules.legality import LARGE_KERNELS
from disco_hlo.search.rules.results import count_results


@dataclass(frozen=True)
class Starts:
    """One graph with the strategies to start from."""

    step: Step
    kept: Given
    states: tuple[State, ...]
    """One for each strategy, not priced yet."""


def prepare(graph: Graph, strategies: Sequence[Strategy]) -> Starts:
    """Arrays and states for a search that starts from ``strategies``.

    Raises:
        IllegalStrategyError: a strategy does not fit the graph.
    """
    strategies = [with_owners(graph, strategy) for strategy in strategies]
    step, kept = build_step(graph), given(graph, strategies)
    states = tuple(from_strategy(graph, step, strategy) for strategy in strategies)
    scratch = new_scratch(step, logs=False)
    for state in states:
        count_results(step, state, scratch)
    hashes = kernel_digests([(*known, kept.results[known]) for known in kept.groups])
    tiled = [group.kind == "triton" for group in kept.groups.values()]
    rows = dict(zip(hashes[:, 0].tolist(), zip(hashes[:, 1].tolist(), tiled, strict=True), strict=True))
    digests = dict(zip(kept.groups, hashes.sum(axis=1).tolist(), strict=True))
    large = {len(owned) for owned, _ in kept.groups if len(owned) > MAXIMUM_MEMBERS}
    limits = np.array([*step.limits[:LARGE_KERNELS], len(large), *sorted(large)], np.int64)
    step = with_uncut(graph, step, [unit_graph(graph, strategy) for strategy in strategies], digests)
    return Starts(step._replace(special=_hashed(rows), limits=limits), kept, states)


def _hashed(rows: dict[int, tuple[int, bool]]) -> NDArray[np.int64]:
    slots = 1
    while slots < 2 * len(rows):
        slots *= 2
    table = np.zeros((slots, 3), np.int64)
    for digest, (results, only) in rows.items():
        slot = digest & (slots - 1)
        while table[slot, 0]:
            slot = (slot + 1) & (slots - 1)
        table[slot] = digest, results, only
    return table
