"""What a search begins with: the graph as arrays, and the strategies it starts from as states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.flat_graph import flat_graph
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.search.arrays.board import MAXIMUM_MEMBERS, Scratch, State, new_scratch
from disco_hlo.search.arrays.step import Step, build_step
from disco_hlo.search.boundary.cut_outs import Uncut, uncut_by_given, with_uncut
from disco_hlo.search.boundary.entries import digests_of
from disco_hlo.search.boundary.state import Given, Signature, from_strategy, given, signatures
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
    memberships = [signatures(graph, strategy) for strategy in strategies]
    step, kept = build_step(graph), given(graph, strategies, memberships)
    states = tuple(from_strategy(graph, step, *pair) for pair in zip(strategies, memberships, strict=True))
    scratch = new_scratch(step, logs=False)
    for state in states:
        count_results(step, state, scratch)
    rows: dict[int, tuple[int, bool]] = {}
    large: set[int] = set()
    uncut: set[Uncut] = set()
    standing: set[int] = set()
    for strategy, members, state in zip(strategies, memberships, states, strict=True):
        large |= {len(owned) for owned, _ in members if len(owned) > MAXIMUM_MEMBERS}
        found = _given_kernels(graph, step, scratch, kept, strategy, members, state)
        for computed, returned, is_triton in found.values():
            rows.setdefault(computed, (returned, is_triton))
        hashes = np.array([row[:2] for row in found.values()], np.int64).reshape(-1, 2)
        digests = dict(zip(found, hashes.sum(axis=1).tolist(), strict=True))
        uncut |= uncut_by_given(graph, kept, unit_graph(graph, strategy), members, digests)
        standing.update(digests.values())
    limits = np.array([*step.limits[:LARGE_KERNELS], len(large), *sorted(large)], np.int64)
    step = with_uncut(graph, step, uncut, standing)
    return Starts(step._replace(special=_hashed(rows), limits=limits), kept, states)


def _given_kernels(
    graph: Graph,
    step: Step,
    scratch: Scratch,
    kept: Given,
    strategy: Strategy,
    memberships: Sequence[Signature],
    state: State,
) -> dict[int, tuple[int, int, bool]]:
    """The kernels of a start, by their places, as ``Step.special`` takes them, if what they return is what the state
    thinks."""
    returned_by = unit_graph(graph, strategy).results_of_groups
    shown_by = flat_graph(graph).shown.tolist()
    found: dict[int, tuple[int, int, bool]] = {}
    heads = np.array([owned[0] if owned else 0 for owned, _ in memberships], np.int64)
    digests = digests_of(step, state, scratch, heads).tolist()
    for number, signature in enumerate(memberships):
        group = kept.groups.get(signature)
        if group is None or not signature[0]:
            continue
        if returned_by[number] != kept.results[signature]:
            continue
        shown = {shown_by[x] for x in returned_by[number]}
        members, results, returned = digests[number]
        if shown.issubset(signature[0]) and len(shown) == returned:
            found[number] = members, results, group.kind == "triton"
    return found


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
